"""`disco models compare`: the same questions to each model, the answers side by side, and which one is better.

What a person prefers is kept without the texts: time, the models that answered, and the choice.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from ..plain import MAX_LINE, one_line, plain

if TYPE_CHECKING:
    from pathlib import Path

    from ..client.stream import Link

    Run = Callable[[Coroutine[Any, Any, Any]], Any]

KEPT = "compared.jsonl"  # in the data folder: a line for each choice
MAX_KEPT = 4 << 20  # bytes of that file which are read, some 30,000 choices
COLUMN = 36  # cells that an answer needs beside another one
ALIKE = "alike"
QUESTIONS = (
    "Explain in three sentences why the sky is blue.",
    "A train leaves at 14:35 and takes 2 hours and 50 minutes. When does it arrive? Show how you know.",
    "Rewrite politely, in one sentence: you never answer my mails and I am fed up.",
    "Write a Python function that returns the most common word of a text, and say what it does with ties.",
    "Name two arguments for and two against working from home.",
)


@dataclass(frozen=True, slots=True)
class ComparedAnswer:
    """One answer to `name`: the model that gave it, its text, the wait for its first token, what it cost, its id."""

    name: str
    model: str
    text: str
    ttft_s: float | None
    cost_usd: float
    request_id: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "names", metavar="MODEL", nargs="*", help="`device`, `server`, or a name of /v1/models; two or more"
    )
    parser.add_argument("--question", action="append", metavar="TEXT", help="ask this; may be repeated")
    parser.add_argument("--blind", action="store_true", help="in random order, named after your choice")
    parser.add_argument("--max-tokens", type=int, default=400, help="length of each answer, at most (default 400)")
    parser.add_argument("--results", action="store_true", help="only say what you have preferred so far")
    parser.add_argument("--url", help="daemon to ask (default from the configuration)")


def compare(args: argparse.Namespace) -> int:
    """Ask, show, and keep what is preferred. Raises DaemonError."""
    import asyncio

    from ..client import once as client
    from ..config.layers import data_path, load

    path = data_path() / KEPT
    if args.results:
        _print_results(kept(path), as_json=args.json)
        return 0
    names = [f"disco/{name}" if name in ("device", "server") else name for name in args.names]
    if len(set(names)) < 2 or len(set(names)) < len(names):
        print("disco models compare: name two different models or more, such as `device server`", file=sys.stderr)
        return 2
    root, key = client.daemon_at(args.url, load())
    with asyncio.Runner() as runner:
        return ask(args, names, root, key, path, runner.run)


def ask(args: argparse.Namespace, names: list[str], root: str, key: str, path: Path, run: Run) -> int:
    """Compare these models by a daemon; `run` runs what waits for it: a person is asked while no loop runs."""
    asked: list[dict[str, Any]] = []
    is_asking = sys.stdin.isatty() and not args.json
    known = run(_known(root, key))
    if unknown := [name for name in names if name not in known]:
        print(f"disco models compare: no model {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    for question in args.question or QUESTIONS:
        if not args.json:
            print(f"\n{question}", flush=True)
        order = random.SystemRandom().sample(names, len(names)) if args.blind else names
        answers = run(_answers(root, key, order, question, args.max_tokens))
        asked.append({"question": question, "answers": [asdict(answer) for answer in answers]})
        if args.json:
            continue
        _show(answers, is_blind=args.blind and is_asking)
        choice = _choice(len(answers)) if is_asking else None
        if is_asking and choice is None:
            break
        if choice is not None:
            better = ALIKE if choice == 0 else answers[choice - 1].model
            keep(path, [answer.model for answer in answers], better, time.time())
            _tell_outdone(answers, choice, root, key)
            if args.blind:
                print(", ".join(f"{i} was {_who(answer)}" for i, answer in enumerate(answers, 1)))
    if args.json:
        print(json.dumps({"asked": asked}))
    elif is_asking:
        _print_results(kept(path), as_json=False)
    return 0


async def _known(root: str, key: str) -> list[str]:
    from ..client.stream import Link

    async with Link(root, key) as link:
        return await link.models()


async def _answers(root: str, key: str, names: Sequence[str], question: str, max_tokens: int) -> list[ComparedAnswer]:
    from ..client.stream import Link

    async with Link(root, key) as link:
        return [await _answer(link, name, question, max_tokens) for name in names]


async def _answer(link: Link, name: str, question: str, max_tokens: int) -> ComparedAnswer:
    """Return one model's answer. Raises DaemonError."""
    from contextlib import aclosing

    text = ""
    record: Mapping[str, Any] = {}
    messages = [{"role": "user", "content": question}]
    async with aclosing(link.chat(messages, model=name, max_tokens=max_tokens, disco={"delivery": "off"})) as pieces:
        async for piece in pieces:
            text += piece.text
            record = piece.disco or record
    winner = (record.get("endpoints") or {}).get(str(record.get("winner"))) or {}
    return ComparedAnswer(
        name,
        one_line(str(winner.get("model") or name), MAX_LINE),
        plain(text).strip(),
        record.get("ttft_s"),
        float(record.get("cost_usd") or 0.0),
        str(record.get("request_id") or ""),
    )


def _tell_outdone(answers: Sequence[ComparedAnswer], choice: int, root: str, key: str) -> None:
    """Let the daemon know which answers another one was preferred to: it learns from that how often one does."""
    from ..client import once as client

    lost = [one for i, one in enumerate(answers, 1) if choice not in (0, i) and one.request_id]
    try:
        for one in lost:
            client.post(root, "/disco/v1/history/outdone", {"request_id": one.request_id}, key)
    except client.DaemonError as e:
        print(f"disco models compare: the daemon learns nothing from this choice: {e}", file=sys.stderr)


def _who(answer: ComparedAnswer) -> str:
    return answer.model if answer.model == answer.name else f"{answer.model} ({answer.name})"


def _show(answers: Sequence[ComparedAnswer], *, is_blind: bool) -> None:
    """Print the answers beside each other where there is room, else below each other."""
    from rich.table import Table
    from rich.text import Text

    from ..client.amounts import dollars
    from .terminal import make_console

    console = make_console()
    heads = [str(i) if is_blind else f"{i}: {_who(answer)}" for i, answer in enumerate(answers, 1)]
    if not is_blind:
        waits = [f"first after {a.ttft_s:.1f} s" if a.ttft_s is not None else "" for a in answers]
        heads = [
            ", ".join(filter(None, (h, w, dollars(a.cost_usd)))) for h, w, a in zip(heads, waits, answers, strict=True)
        ]
    if console.width >= COLUMN * len(answers):
        table = Table(expand=True)
        for head in heads:
            table.add_column(Text(head))
        table.add_row(*[Text(answer.text) for answer in answers])
        console.print(table)
        return
    for head, answer in zip(heads, answers, strict=True):
        print(f"--- {head}\n{answer.text}")


def _choice(n_answers: int) -> int | None:
    """Ask which answer is better: its number, 0 if they are alike; None for enough."""
    while True:
        try:
            said = input(f"Which is better? 1 to {n_answers}, 0 = alike, q = enough: ").strip().lower()
        except (EOFError, KeyboardInterrupt):
            print()
            return None
        if said in ("q", "quit"):
            return None
        if said.isdecimal() and int(said) <= n_answers:
            return int(said)


# --- what is kept -----------------------------------------------------------------------------------------------------


def keep(path: Path, models: Sequence[str], better: str, unix_s: float) -> None:
    """Add a choice among `models` to a file that only this user can read; `better` is one of them, or ALIKE."""
    import os

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    line = json.dumps({"at": round(unix_s), "models": list(models), "better": better}).encode() + b"\n"
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b") as file:
        if file.seek(0, os.SEEK_END):  # a line that a full disk has cut ends here
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)


def kept(path: Path) -> list[dict[str, Any]]:
    """Return the choices that are kept; a line that was cut by a full disk counts none. Raises ConfigError."""
    from contextlib import suppress

    from ..system.smallfile import read_text

    if not path.exists():
        return []
    found = []
    for line in read_text(path, max_bytes=MAX_KEPT).splitlines():
        with suppress(ValueError):
            if isinstance(choice := json.loads(line), dict) and isinstance(choice.get("models"), list):
                found.append(choice)
    return found


def tally(choices: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, int, int, int]]:
    """Return for each pair of models how often the first was preferred, the second, and neither.

    The one that was preferred more often comes first, pairs with most choices before others.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    for choice in choices:
        better = choice.get("better")
        for pair in combinations(sorted(set(map(str, choice["models"]))), 2):
            if better in (*pair, ALIKE):
                counts[(*pair, str(better))] += 1
    rows = []
    for a, b in sorted({(a, b) for a, b, _ in counts}):
        first, second, alike = counts[a, b, a], counts[a, b, b], counts[a, b, ALIKE]
        rows.append((a, b, first, second, alike) if first >= second else (b, a, second, first, alike))
    return sorted(rows, key=lambda row: -sum(row[2:]))


def _print_results(choices: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    rows = tally(choices)
    if as_json:
        names = ("model", "other", "preferred", "other_preferred", "alike")
        print(json.dumps({"preferences": [dict(zip(names, row, strict=True)) for row in rows]}))
    elif not rows:
        print("Nothing was compared yet: `disco models compare device server` asks you.")
    for model, other, first, second, alike in [] if as_json else rows:
        print(
            f"{model} rather than {other}: {first} of {first + second + alike}, {second} the other way, {alike} alike"
        )
