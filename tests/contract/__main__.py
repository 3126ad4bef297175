"""The API against its own description: `make contract`.

    python -m tests.contract [--cases 2000] [--seed 1]

Starts a daemon with the embedded model as its device and a scripted server, and asks it what schemathesis makes of its
/openapi.json. A 500, a status or a shape of an answer that the document does not name, and a malformed request that is
taken are failures: then it ends with 1. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.fixtures.daemon import running
from tests.fixtures.installing import install_python
from tests.fixtures.upstream import Upstream

HERE = Path(__file__).parent
VENV = HERE.parent.parent / ".venv-contract"
KEY = "key-of-the-contract"
PATIENCE_S = 3600.0


async def asked(cases: int, seed: int) -> int:
    """Run the cases; return the status that they end with."""
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, dict[str, Any]] = {"api": {"key": KEY}, "policy": {"shadow": False}}
        async with (
            Upstream(tokens=8) as server,
            running(Path(folder) / "d", server=server.url, settings=settings) as daemon,
        ):
            await daemon.device_ready()
            env = os.environ | {
                "DISCO_URL": daemon.url, "DISCO_KEY": KEY, "DISCO_SERVER": server.url,
                "DISCO_CASES": str(cases), "DISCO_SEED": str(seed), "HOME": folder,
            }  # fmt: skip
            process = await asyncio.create_subprocess_exec(
                str(VENV / "bin/python"), str(HERE / "cases.py"), env=env, cwd=folder
            )
            try:
                async with asyncio.timeout(PATIENCE_S):
                    status = await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            if "Traceback" in daemon.log:
                print(daemon.log[-4000:], file=sys.stderr)
                return 1
            return status


def main() -> int:
    """Install, and ask."""
    parser = argparse.ArgumentParser(prog="python -m tests.contract")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if why := install_python(HERE / "requirements.lock", VENV):
        print(json.dumps({"skipped": why}))
        return 0
    return asyncio.run(asked(args.cases, args.seed))


if __name__ == "__main__":
    sys.exit(main())
