"""The terminal UI: a client of the daemon's HTTP API."""
