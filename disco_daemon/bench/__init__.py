"""Measurements of this machine and of what the daemon adds."""
