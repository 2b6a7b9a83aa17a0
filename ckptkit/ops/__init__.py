"""Operations: one file a verb of the command line, each returning a frozen result. They move no byte themselves."""
