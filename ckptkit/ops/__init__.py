"""Operations: one file a question, each returning a frozen result. They order the verbs and move no byte."""
