"""How often an honest answer is taken for a loop, and what looking for loops costs a token.

    python -m benchmarks.repetition [FILES-OR-FOLDERS ...] [--answers FOLDER] [--half tune|held-out] [--show] [--json]

Honest texts are files cut into answers of 200 to 16,000 characters (some 4,000 tokens): Python, C and other sources,
documents, licences, JSON, CSV and lists of the running Python and of all packages beside it, or of what is named; and
made of them: base64 and hex dumps of their bytes, base64 of bytes that are nearly all zero, arrays and tables of
numbers, verses with a chorus. Whatever is stopped there is a false stop. A hash of the text says which half an answer
belongs to: the bounds of `disco_daemon.delivery.repetition` were chosen by looking at `tune` alone.

`--answers`: recorded answers of models, the `model_outputs.json` of a checkout of tatsu-lab/alpaca_eval (Apache-2.0),
split by their instruction. Models do get into loops there: how many were stopped, and of these how many left the loop
again by themselves, which is where a false stop has to be looked for; `--show` prints them.

The upper bound is that of Clopper and Pearson, one-sided, at 95 %.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
import random
import site
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disco_daemon.bench.command import print_figures
from disco_daemon.delivery.repetition import Repetition

SUFFIXES = {
    "code": (".py", ".pyi", ".c", ".h", ".cpp", ".hpp", ".js", ".css", ".sh", ".tcss", ".cmake", ".metal", ".cu"),
    "documents": (".md", ".rst", ".txt", ".html", ".scm"),
    "data": (".json", ".csv", ".toml", ".xml", ".yaml", ".yml", ".svg", ".tsv", ".ini"),
}
SHORTEST, LONGEST = 200, 16_000  # characters of an answer
MAX_FILE = 2_000_000  # bytes of a file that are read
MADE = 4  # one file of so many is made into other texts, too
LEFT = 200  # characters after a stop that do not belong to the loop, which the answer has left then
TOKEN = 4  # characters of the pieces that the cost is measured with


@dataclass(frozen=True, slots=True)
class Stop:
    """An answer that was stopped after `at` of its characters."""

    kind: str
    name: str
    text: str
    at: int

    @property
    def left_itself(self) -> bool:
        """Whether the answer got out of the loop: what follows at its end was not said shortly before the stop."""
        said, end = self.text[max(0, self.at - 8192) : self.at], self.text[-LEFT:]
        return len(self.text) - self.at >= LEFT and not any(end[i : i + 24] in said for i in range(0, LEFT - 24, 8))


def stop_of(text: str) -> int | None:
    """Return after how many characters an answer is stopped."""
    return Repetition().add(text)


def is_held_out(key: str) -> bool:
    """Whether an answer is for the report, and not for tuning."""
    return bool(hashlib.sha256(key.encode()).digest()[-1] & 1)


def files(places: Iterable[Path]) -> Iterator[tuple[str, str, str]]:
    """Return the kind, name and text of each file below these places, of a kind that an answer may be of."""
    kinds = {suffix: kind for kind, suffixes in SUFFIXES.items() for suffix in suffixes}
    for place in places:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            kind = kinds.get(path.suffix, "documents" if path.name.startswith(("LICEN", "README", "COPYING")) else "")
            if kind and path.is_file() and path.stat().st_size <= MAX_FILE:
                text = path.read_bytes().decode(errors="replace").replace("\r\n", "\n")
                yield kind, path.name, text


def answers(kind: str, name: str, text: str) -> Iterator[tuple[str, str]]:
    """Cut a text into answers of many lengths; of a file also make dumps, tables and songs."""
    draw = random.Random(name + str(len(text)))
    at = 0
    while at < len(text):
        n = round(SHORTEST * (LONGEST / SHORTEST) ** draw.random())
        yield kind, text[at : at + n]
        at += n
    if draw.randrange(MADE) == 0 and len(text) > SHORTEST:
        yield from made(text, draw)


def made(text: str, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Make texts that repeat themselves honestly out of another."""
    raw = text.encode()[: draw.randrange(200, 6000)]
    sparse = bytes(b if draw.random() < 0.02 else 0 for b in raw[:1500])
    for data in (raw, draw.randbytes(len(raw)), sparse):
        yield "base64", base64.b64encode(data).decode()
        yield "base64", base64.encodebytes(data).decode()
        rows = (data[i : i + 16] for i in range(0, len(data), 16))
        yield "dumps", "\n".join(f"{i * 16:08x}  {row.hex(' '):47}  |{row!r}|" for i, row in enumerate(rows))
        yield "dumps", "{" + ", ".join(f"0x{b:02x}" for b in data[:512]) + "}"
    small = [draw.choice((0, 0, 0, 1, draw.randrange(1000))) for _ in range(400)]
    yield "tables", json.dumps(small)
    yield "tables", json.dumps([draw.choice((None, False, "", 0.0)) for _ in range(200)], indent=1)
    width = draw.randrange(2, 12)
    rules = ["|" + "   |" * width, "|" + "---|" * width] + ["|" + "   |" * width] * draw.randrange(12)
    yield "tables", "\n".join(rules)
    yield "tables", "\n".join(",".join(map(str, small[i : i + width])) for i in range(0, 400, width))
    lines = [line.strip() for line in text.splitlines() if 20 < len(line.strip()) < 60][:24]
    if len(lines) == 24:
        chorus = "\n".join(lines[:2] * 2)  # a line, another, and both again; sung twice after each verse
        yield (
            "verses",
            "\n\n".join(f"{chr(10).join(lines[i : i + 4])}\n\n{chorus}\n\n{chorus}" for i in range(4, 24, 4)),
        )
        yield "verses", f"{lines[4]}\n\n" + "na na na " * draw.randrange(4, 16) + f"\n\n{lines[5]}"


def recorded(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Return the model, instruction and answer of each recorded answer."""
    for path in sorted(folder.rglob("*model_outputs.json")):
        for row in json.loads(path.read_text()):
            if row.get("output"):
                yield path.parent.name, row["instruction"], row["output"]


def upper_bound(n_stopped: int, n: int) -> float:
    """Return the Clopper-Pearson upper bound of a share, at 95 %."""
    low, high = n_stopped / n, 1.0
    for _ in range(60):
        share = (low + high) / 2
        logs = (
            math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(share)
            + (n - k) * math.log1p(-share)
            for k in range(n_stopped + 1)
        )  # fmt: skip
        low, high = (share, high) if math.fsum(map(math.exp, logs)) > 0.05 else (low, share)
    return high


def cost_us(texts: list[str]) -> float:
    """Return the processor time that a token takes, us."""
    pieces = [[text[i : i + TOKEN] for i in range(0, len(text), TOKEN)] for text in texts]
    began = time.process_time()
    for each in pieces:
        add = Repetition().add
        for piece in each:
            if add(piece) is not None:
                break
    return (time.process_time() - began) / sum(map(len, pieces)) * 1e6


def measure(found: Iterable[tuple[str, str, str, str]], half: str) -> tuple[dict[str, int], list[Stop], list[str]]:
    """Return the number of answers of each kind, those that were stopped, and some of the texts."""
    n: dict[str, int] = defaultdict(int)
    stops: list[Stop] = []
    some: list[str] = []
    for kind, name, key, text in found:
        if is_held_out(key) is (half == "held-out"):
            n[kind] += 1
            if sum(n.values()) % 100 == 0 and len(some) < 500:
                some.append(text)
            if (at := stop_of(text)) is not None:
                stops.append(Stop(kind, name, text, at))
    return n, stops, some


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", type=Path)
    parser.add_argument("--answers", type=Path, metavar="FOLDER")
    parser.add_argument("--half", choices=("tune", "held-out"), default="held-out")
    parser.add_argument("--show", action="store_true", help="print what was stopped, and where")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.answers is not None:
        told = ((model, model, asked, text) for model, asked, text in recorded(args.answers))
        n, stops, some = measure(told, args.half)
    else:
        places = args.places or [Path(sysconfig.get_path("stdlib")), *map(Path, site.getsitepackages())]
        cut = (
            (made_kind, name, text, text)
            for kind, name, whole in files(places)
            for made_kind, text in answers(kind, name, whole)
        )
        n, stops, some = measure(cut, args.half)
    false = [stop for stop in stops if args.answers is None or stop.left_itself]
    if args.show:
        for stop in stops:
            end = repr(stop.text[max(0, stop.at - 160) : stop.at])
            print(stop.kind, stop.name, stop.at, len(stop.text), stop.left_itself, end)
    figures: dict[str, Any] = {
        "half": args.half,
        "answers": sum(n.values()),
        "by_kind": dict(n) if args.answers is None else {"models": len(n)},
        "stopped": len(stops),
        "to_look_at" if args.answers else "false_stops": len(false),
        "upper_bound": upper_bound(len(false), sum(n.values())),
        "us_a_token": round(cost_us(some), 3),
    }
    print_figures(figures, lambda told: "\n".join(f"{k}: {v}" for k, v in told.items()), as_json=args.json)


if __name__ == "__main__":
    main()
