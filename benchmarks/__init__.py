"""Measurements that need a checkout of the source: `python -m benchmarks.NAME --help`, from its top folder."""

from importlib.util import find_spec

if missing := [name for name in ("aiohttp", "numpy", "tomlkit") if find_spec(name) is None]:
    msg = f"{', '.join(missing)} is not installed for this Python: `make .venv/.stamp`, then use .venv/bin/python"
    raise SystemExit(msg)
