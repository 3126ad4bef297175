"""`python -m disco_tui`: the terminal UI for a daemon at an address; `disco tui` reads the configuration, too."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from platformdirs import user_data_path

from .app import run


def main(argv: list[str] | None = None) -> int:
    """Run it; the key comes from DISCO_API_KEY."""
    parser = argparse.ArgumentParser(prog="disco_tui", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:4747", help="the daemon's address")
    parser.add_argument("--plain", action="store_true", help="no frames, no animation, words in place of signs")
    parser.add_argument("--store", type=Path, help="where conversations are kept")
    parser.add_argument("--no-store", action="store_true", help="keep no conversations")
    args = parser.parse_args(argv)
    path = None if args.no_store else args.store or user_data_path("disco") / "conversations.sqlite"
    root = args.url.rstrip("/").removesuffix("/v1")
    return run(root, os.environ.get("DISCO_API_KEY", ""), path, plain=args.plain)


if __name__ == "__main__":
    sys.exit(main())
