"""The model files on this machine: where they are, what they are, and how more of them get here."""
