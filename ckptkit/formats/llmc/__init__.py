"""Read the `.bin` files of llm.c: a header, and the tensors of a GPT-2 one after another."""
