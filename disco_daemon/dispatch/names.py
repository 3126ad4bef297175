"""The policies by name. Free of numpy: the configuration is checked wherever the command line starts."""

from __future__ import annotations

LEARNING = ("optimal", "paper", "stochastic", "stochastic-concurrent")
FIXED = ("race", "all-device", "all-server", "delay")
POLICIES = (*LEARNING, *FIXED)
