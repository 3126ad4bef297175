"""How answers that repeat themselves are told from those that only look like it."""
