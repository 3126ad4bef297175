"""First steps without a UI: the known servers, the check of one with a key, and writing down a choice."""
