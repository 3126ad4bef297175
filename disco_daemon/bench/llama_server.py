"""llama.cpp's own llama-server, out of the wheel `xllamacpp`: a server that nobody here wrote.

`python -m disco_daemon.bench.llama_server MODEL` listens on a free port of 127.0.0.1, prints `{"url": …}`, and serves
until the end of its stdin.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from .child import BenchError

N_CTX = 2048  # tokens
N_PARALLEL = 2  # answers at a time


def argv(model: Path) -> list[str]:
    """The command that starts it. Raises BenchError where the wheel is not installed."""
    if find_spec("xllamacpp") is None:
        raise BenchError("llama-server is not installed: pip install xllamacpp")
    return [sys.executable, "-P", "-m", "disco_daemon.bench.llama_server", str(model)]


def main(arguments: Sequence[str]) -> None:
    """Serve."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = arguments[0]
    params.n_ctx, params.n_parallel, params.port = N_CTX, N_PARALLEL, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = False
    server = xllamacpp.Server(params)  # its HTTP server runs in threads of its own
    print(json.dumps({"url": f"{server.listening_address}/v1"}), flush=True)
    while os.read(0, 4096):  # until the parent closes stdin
        pass
    del server


if __name__ == "__main__":
    main(sys.argv[1:])
