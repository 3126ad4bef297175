"""llama.cpp's own llama-server, out of the wheel `xllamacpp`: a server of others.

`python -m benchmarks.llama_server MODEL [OPTIONS]` listens on a free port of 127.0.0.1, prints `{"url": …}`,
and serves until the end of its stdin. OPTIONS is a JSON object with the fields of `Options`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from disco_daemon.bench.child import BenchError
from disco_daemon.system.program import command

PACKAGE = "xllamacpp"
ENGINE_NICE = 5  # as engine.early has it


@dataclass(frozen=True, slots=True)
class Options:
    """The server's options; everything else is llama.cpp's default.

    `n_ctx` tokens are divided among the `n_parallel` slots (answers at a time), unless `kv_unified` lets each slot use
    what the others leave. `n_batch` tokens at most go to one llama_decode, `n_ubatch` of them are computed at once.
    `cache_ram_mib` bounds the prompts kept in memory outside of the KV cache, MiB. `nice` is added to its niceness: as
    our engine's, so that whatever else runs on the machine takes from both alike.
    """

    n_ctx: int = 2048
    n_parallel: int = 2
    n_threads: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    kv_unified: bool = False
    cache_ram_mib: int = 8192
    nice: int = ENGINE_NICE


def require() -> None:
    """Raise BenchError where the wheel is not installed."""
    if find_spec(PACKAGE) is None:
        msg = (
            f"llama-server is not installed: pip install {PACKAGE}, or all that this checkout needs: make .venv/.stamp"
        )
        raise BenchError(msg)


def argv(model: Path, options: Options | None = None) -> list[str]:
    """Return the command that starts it. Raises BenchError where the wheel is not installed."""
    require()
    return command("benchmarks.llama_server", str(model), json.dumps(asdict(options or Options())))


def peer() -> dict[str, str]:
    """Name and version, as a measurement says whom it was held against."""
    return {"name": f"llama-server ({PACKAGE})", "version": version(PACKAGE)}


def main(arguments: Sequence[str]) -> None:
    """Serve."""
    import xllamacpp

    options = Options(**json.loads(arguments[1])) if len(arguments) > 1 else Options()
    os.nice(options.nice)
    params = xllamacpp.CommonParams()
    params.model.path = arguments[0]
    params.n_ctx, params.n_parallel, params.port = options.n_ctx, options.n_parallel, 0
    params.n_batch, params.n_ubatch = options.n_batch, options.n_ubatch
    params.kv_unified, params.cache_ram_mib = options.kv_unified, options.cache_ram_mib
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.n_threads
    params.warmup = False
    server = xllamacpp.Server(params)  # its HTTP server runs in threads of its own
    print(json.dumps({"url": f"{server.listening_address}/v1"}), flush=True)
    while os.read(0, 4096):  # until the parent closes stdin
        pass
    del server


if __name__ == "__main__":
    main(sys.argv[1:])
