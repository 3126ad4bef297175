"""A conversation made shorter: what was said before the last question goes out as a summary that a model has written.

`disco chat` and the terminal UI share it. The messages stay where they are, so all of it can be undone. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .side_health import sides_of

Json = Mapping[str, Any]

SUMMARY_TOKENS = 1024  # at most; what thinks before it writes needs some of them for that
FILLED = 0.75  # of a context: from here on it is offered, while the messages still fit for the summary to be written
TOO_LONG = "context_length_exceeded"  # the code of a refusal that a shorter conversation mends
INSTRUCTION = (
    "Summarise our conversation up to here, so that you could go on without it: what was asked and what was answered, "
    "with the facts, names, numbers, code and decisions that may matter later. Use at most 200 words, in the language "
    "of the conversation. Write nothing but the summary."
)
HEADING = "Summary of the conversation so far:"


def with_summary(system: str, summary: str) -> str:
    """Return a system prompt that says what was said before: not every model knows two of them, or a third speaker."""
    said = f"{HEADING}\n{summary.strip()}" if summary.strip() else ""
    return "\n\n".join(part for part in (system, said) if part)


def route_of_summary(state: Json | None, model: str, n_tokens: int) -> str:
    """Return whom to ask for a summary of `n_tokens` (0 = unknown): this machine, as it is cheap, else `model`.

    A stand-in that writes worse than the server is not asked, nor is one whose context may be too small.
    """
    device = ((state or {}).get("endpoints") or {}).get("device") or {}
    if state is None or model != "disco" or not device:
        return model
    is_lower = (state.get("grades") or {}).get("stand_in") == "device" or bool(state.get("stand_in"))
    fits = 0 < n_tokens < int(device.get("n_ctx") or 0) - SUMMARY_TOKENS
    return "disco/device" if fits and not is_lower and sides_of(state)["device"].is_well else model


def used_tokens(record: Json | None) -> int:
    """Return how many tokens a conversation has with the answer whose `disco` object this is; 0 where nobody knows."""
    known = record or {}
    return int(known.get("prompt_tokens") or 0) + sum(map(int, (known.get("tokens") or {}).values()))


def filled(state: Json | None, model: str, n_tokens: int) -> tuple[int, int] | None:
    """Return tokens and context, where a conversation fills most of the smallest context that may answer; else None."""
    endpoints = (state or {}).get("endpoints") or {}
    asked = [end for side, end in endpoints.items() if not model.startswith("disco/") or model == f"disco/{side}"]
    contexts = [end.get("n_ctx") or (end.get("capabilities") or {}).get("context_length") for end in asked]
    smallest = min((int(n) for n in contexts if n), default=0)
    return (n_tokens, smallest) if smallest and n_tokens > FILLED * smallest else None
