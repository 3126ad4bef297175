"""Several models in the memory of one machine: how many requests find theirs not loaded, by who decides what stays."""
