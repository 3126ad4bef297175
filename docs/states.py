"""The state diagram of one answer, made from the table that the daemon runs on.

`python docs/states.py` writes it into architecture.md; tests/test_architecture.py checks that it is the present one.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCUMENT = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- states:begin -->", "<!-- states:end -->"


def diagram() -> str:
    """The table as a Mermaid diagram; one arrow for each pair of states, with its events."""
    from disco_daemon.answer import TRANSITIONS, State

    lines = ["stateDiagram-v2", f"    [*] --> {State.PLANNED.name}"]
    for state in State:
        moves = TRANSITIONS[state]
        if all(targets == {state} for targets in moves.values()):  # final: whatever comes changes nothing
            lines.append(f"    {state.name} --> [*]")
            continue
        for target in State:
            events = [event.__name__ for event, targets in moves.items() if target in targets]
            if events:
                lines.append(f"    {state.name} --> {target.name}: {', '.join(events)}")
    return "```mermaid\n" + "\n".join(lines) + "\n```"


def split(text: str) -> tuple[str, str, str]:
    """A document as before, between and after the markers. Raises ValueError without exactly one pair of them."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        msg = f"expected one {BEGIN} and one {END}"
        raise ValueError(msg)
    before, rest = text.split(BEGIN)
    between, after = rest.split(END)
    return before + BEGIN, between, END + after


def main() -> None:
    """Rewrite the block."""
    sys.path.insert(0, str(DOCUMENT.parent.parent))  # this checkout's daemon, installed or not
    before, _, after = split(DOCUMENT.read_text("utf-8"))
    DOCUMENT.write_text(f"{before}\n{diagram()}\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
