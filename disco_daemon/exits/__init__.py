"""Exits: what the rows after some layers say about the whole model's next token. Pure numpy, no llama.cpp."""
