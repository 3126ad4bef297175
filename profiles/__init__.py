"""Data only: TTFT traces and, later, devices, servers and readers, each with source and date."""
