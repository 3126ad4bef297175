"""First steps: which servers there are, whether one works with a key, and writing down what was chosen. No UI."""
