"""The entry point of the single binary: runs one of its parts as a process, or the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from importlib import import_module
from pathlib import Path

from ..system.program import PART, PARTS

# OpenSSL looks in the places of the machine that built it; these are Debian's and Arch's, Fedora's, openSUSE's,
# Alpine's and macOS'.
BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
OWN_BUNDLE = Path(__file__).parents[2] / "certifi" / "cacert.pem"  # the last resort, as old as this binary


def main() -> int:
    """Run a part or the command line; return the exit code."""
    prepare(os.environ)
    if sys.argv[1:2] == [PART]:
        return _part(sys.argv[2:])
    from .main import main as disco

    return disco()


def prepare(environ: MutableMapping[str, str], bundles: tuple[str, ...] = BUNDLES) -> None:
    """Remove the boot loader's variables from the environment, and set where this system's certificates are.

    The boot loader's libraries are for this process, which has its search path by now. A program of the system that
    finds them instead of its own may fail; our own processes have their search path set anew.
    """
    for name in [name for name in environ if name.startswith("_PYI_")]:
        del environ[name]
    environ.pop("LD_LIBRARY_PATH", None)
    if (original := environ.pop("LD_LIBRARY_PATH_ORIG", None)) is not None:
        environ["LD_LIBRARY_PATH"] = original
    if "SSL_CERT_FILE" not in environ and "SSL_CERT_DIR" not in environ:
        found = next((path for path in bundles if os.path.exists(path)), str(OWN_BUNDLE))  # noqa: PTH110 - each start
        environ["SSL_CERT_FILE"] = found


def _part(words: list[str]) -> int:
    """Run a module as `python -m` does."""
    if not words or words[0] not in PARTS:
        print(f"disco: {PART} is for the parts of this program", file=sys.stderr)
        return 2
    sys.argv[:] = words
    return int(import_module(words[0]).main() or 0)
