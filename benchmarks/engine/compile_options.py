"""llama.cpp's CPU kernels as this project compiles them (native/llama_cpp.cmake), beside as they come.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xf llama_cpp_python-0.3.36.tar.gz
    python benchmarks/engine/compile_options.py --source llama_cpp_python-0.3.36 [--model FILE] [--repeats 5]

Both are compiled (a minute; wants cmake), and measured in turns with one thread, each in a process of its own: token/s
of a prompt of 512 tokens, ms of an iteration of 1, 4, 8 and 16 answers with 64 and with 800 tokens each. Printed are
medians, how many times as fast ours is, and whether all logits are the same to the bit; the last line is JSON. Both are
exact (`--fast`: neither is), and have weights as they are in the file (`--repack`: laid out for this processor; where
that is AMX, llama.cpp crashes as GCC up to 12.3 compiles it). The source has to be of the version that is installed:
only its kernels are replaced.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from importlib.util import find_spec
from pathlib import Path

from disco_daemon.engine import wire
from disco_daemon.engine.llama.model import AbortFlag, Llama, build
from disco_daemon.models.default import default_model_path
from disco_daemon.system.control_groups import n_processors

HOOK = Path(__file__).parents[2] / "native" / "llama_cpp.cmake"
OURS, PLAIN = "ours", "plain"
PROMPT, CONTEXTS, N_ROWS, LIMIT_S = 512, (64, 800), (1, 4, 8, 16), 900.0
CHUNK = 512  # tokens of a prompt at a time
Figures = dict[str, float]


def measure(model: Path, repeats: int, *, exact: bool, repack: bool) -> Figures:
    """Measure the installed kernels: `prefill` token/s, and ms of an iteration by answers and tokens of each, "8 x 64".

    `logits` is a checksum of the last rows'.
    """
    n_cells = max(N_ROWS) * (max(CONTEXTS) + 4 * repeats * len(N_ROWS))
    llama = Llama(
        wire.Load(
            model_path=str(model), n_ctx=8192, n_threads=1, n_gpu_layers=0, n_cells=n_cells, exact=exact, repack=repack
        ),
        AbortFlag(),
    )
    checksum = 0

    def decode_s(rows: list[tuple[int, int, int, bool]]) -> float:
        began = time.perf_counter()
        if rc := llama.decode(rows):
            msg = f"llama_decode returned {rc}"
            raise RuntimeError(msg)
        return time.perf_counter() - began

    prompts = []
    for i in range(repeats):
        llama.clear()
        prompts.append(decode_s([(100 + (i + j) * 7 % 3000, j, 0, j == PROMPT - 1) for j in range(PROMPT)]))
    figures = {"prefill": PROMPT / statistics.median(prompts)}
    for context in CONTEXTS:
        llama.clear()
        lengths: list[int] = []
        for n in N_ROWS:
            for seq, start in itertools.product(range(len(lengths), n), range(0, context, CHUNK)):
                decode_s([(100 + 3 * j + seq, j, seq, False) for j in range(start, min(start + CHUNK, context))])
            lengths += [context] * (n - len(lengths))
            times = []
            for i in range(4 * repeats):
                times.append(decode_s([(200 + i + seq, length, seq, True) for seq, length in enumerate(lengths)]))
                lengths = [length + 1 for length in lengths]
            figures[f"{n} x {context}"] = 1e3 * statistics.median(times)
            for row in range(n):
                checksum = zlib.crc32(llama.logits(row).tobytes(), checksum)
    figures["logits"] = checksum
    llama.close()
    return figures


def package(folder: Path, source: Path, options: list[str]) -> Path:
    """A copy of the installed bindings with kernels compiled with `options`; the folder to import it from."""
    cmake = shutil.which("cmake") or sys.exit("cmake is wanted: pip install cmake")
    steps = (
        [cmake, "-S", str(source), "-B", str(folder / "build"), "-DCMAKE_BUILD_TYPE=Release", *options],
        [cmake, "--build", str(folder / "build"), "--target", "ggml-cpu", "--parallel", str(n_processors())],
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(step)} failed:\n{done.stderr[-2000:]}")
    spec = find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, folder / "package" / "llama_cpp")
    made = next(path for path in (folder / "build").rglob("libggml-cpu.*") if path.suffix in (".so", ".dylib"))
    for old in (folder / "package").rglob("libggml-cpu.*"):
        shutil.copyfile(made, old)
    return folder / "package"


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="the unpacked sources of the llama-cpp-python that is installed")
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fast", action="store_true", help="answers need not be exact")
    parser.add_argument("--repack", action="store_true", help="weights laid out for this processor")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = arguments.model or default_model_path()
    if arguments.measure:
        print(json.dumps(measure(model, arguments.repeats, exact=not arguments.fast, repack=arguments.repack)))
        return
    if arguments.source is None:
        parser.error("--source is wanted")
    found: dict[str, list[Figures]] = {PLAIN: [], OURS: []}
    hook = f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={HOOK}"
    command = [sys.executable, "-P", __file__, "--measure", "--model", str(model), "--repeats", str(arguments.repeats)]
    command += [f"--{name}" for name in ("fast", "repack") if getattr(arguments, name)]
    with tempfile.TemporaryDirectory() as name:
        packages = {
            kind: package(Path(name) / kind, arguments.source, options)
            for kind, options in ((PLAIN, []), (OURS, [hook]))
        }
        for turn in range(arguments.repeats):
            for kind in (PLAIN, OURS) if turn % 2 == 0 else (OURS, PLAIN):
                path = os.pathsep.join([str(packages[kind]), str(HOOK.parents[1])])
                env = os.environ | {"PYTHONPATH": path}
                out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=True)
                found[kind].append(json.loads(out.stdout.splitlines()[-1]))
    ratios: dict[str, float] = {}
    for key in found[OURS][0]:
        if key == "logits":
            continue
        plain, ours = (statistics.median(figures[key] for figures in found[kind]) for kind in (PLAIN, OURS))
        ratios[key] = ours / plain if key == "prefill" else plain / ours
        what, unit = ("prompt", "token/s") if key == "prefill" else (f"answers {key}", "ms")
        print(f"{what:>16}: plain {plain:7.2f} {unit}, ours {ours:7.2f} {unit}, {ratios[key]:.3f} times as fast")
    same = len({figures["logits"] for kind in found.values() for figures in kind}) == 1
    print(f"both compute the same to the bit: {same}")
    print(json.dumps({"ratio": ratios, "same_bits": same, "raw": found, "model": model.name, "build": build()}))


if __name__ == "__main__":
    main()
