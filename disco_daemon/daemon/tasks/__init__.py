"""The background tasks of a daemon."""
