"""disco: a local-first daemon that lets this machine's model and a server race for each answer."""

__version__ = "0.1.0"
