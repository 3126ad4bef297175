"""Hosts: processes that compute inner layers of a model for an engine, which keeps its ends, the *home*."""
