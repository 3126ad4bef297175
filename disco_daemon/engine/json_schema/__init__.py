"""JSON Schema as a grammar: what a schema allows, never more. Pure, and without llama.cpp."""
