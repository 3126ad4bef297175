"""Several servers at one daemon: what a person sees when they fail, and what it costs to have many."""
