"""Exports a conversation: as Markdown to read, as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

from disco_daemon.client.amounts import dollars, figure

from .store import Conversation, StoredTurn

FORMAT = 1  # of the JSON; a reader refuses formats it does not know
_SPEAKERS = {"user": "You", "assistant": "Answer", "summary": "Summary"}


def to_json(conversation: Conversation, turns: Sequence[StoredTurn]) -> str:
    """Return the whole conversation as JSON: `conversation` and `turns` with all their fields; times are Unix times."""
    found = {"format": FORMAT, "conversation": asdict(conversation), "turns": [_plain(turn) for turn in turns]}
    return json.dumps(found, ensure_ascii=False, indent=2) + "\n"


def to_markdown(conversation: Conversation, turns: Sequence[StoredTurn]) -> str:
    """Return title, system prompt and messages as Markdown; below each answer its sides and its figures."""
    parts = [f"# {conversation.title or 'Conversation'}", f"*{_date(conversation.created)} · {conversation.model}*"]
    if conversation.system:
        parts.append("\n".join(f"> {line}".rstrip() for line in f"System: {conversation.system}".splitlines()))
    for turn in turns:
        parts += [f"## {_SPEAKERS.get(turn.role, turn.role)}", turn.text]
        if turn.role != "user" and (note := _note(turn)):
            parts.append(f"*{note}*")
    return "\n\n".join(parts) + "\n"


def _plain(turn: StoredTurn) -> dict[str, Any]:
    return asdict(turn) | {"disco": None if turn.disco is None else dict(turn.disco)}


def _date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _note(turn: StoredTurn) -> str:
    """Sum up an answer in one line: its parts by endpoint, its figures, and whether it is incomplete."""
    ends = [*(at for at, _ in turn.sides[1:]), len(turn.text)]
    parts = [
        f"{side} {at + 1} to {end}" for (at, side), end in zip(turn.sides, ends, strict=False) if side and end > at
    ]
    found = [f"characters by {', '.join(parts)}"] if parts else []
    found += _figures(turn.disco or {})
    if turn.finish is None:
        found.append("cut off")
    elif turn.finish != "stop":
        found.append(f"stopped: {stopped}" if (stopped := (turn.disco or {}).get("stopped")) else turn.finish)
    return " · ".join(found)


def _figures(disco: Mapping[str, Any]) -> list[str]:
    shown: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("ttft_s", "first token after {:.2f} s".format),
        ("server_usd", dollars),
        ("energy_j", lambda joules: f"{figure(joules)} J"),
        ("qoe", "QoE {:.2f}".format),
    )
    found = [write(disco[key]) for key, write in shown if _is_number(disco.get(key))]
    handoffs = disco.get("handoffs")
    return found + ([f"{handoffs} handoff{'s' * (handoffs != 1)}"] if isinstance(handoffs, int) and handoffs else [])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def save(wanted: Path, text: str) -> Path:
    """Write a new file and return its path, with a number in its name where one exists. Raises OSError."""
    wanted = wanted.expanduser()
    for path in chain([wanted], (wanted.with_name(f"{wanted.stem}-{n}{wanted.suffix}") for n in count(2))):
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            continue
        return path
    raise AssertionError  # `count` never ends
