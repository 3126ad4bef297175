"""The models as the Codex command line reads them: in `models` of /v1/models, each with what it has to know. Pure.

Without such an entry Codex takes a model for one with a context of 272,000 tokens and never shortens a conversation in
time; and a list without `models` is an error in its log. Its fields are those of Codex 0.169, which needs all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...plain import ANY

# What Codex tells such a model to be: an entry must say it. Codex's own text has 4,000 tokens, a small model's context.
INSTRUCTIONS = """\
You are a coding agent. You work in the user's terminal, in the folder and with the tools that you are given, until the
task is done. Read a file before you change it, change as little as the task needs, and keep to the style that is there.
Run the program or its tests to check your work. Never claim what you have not seen, and do not ask for what you can
find out. Follow the rules of AGENTS.md files. Before a tool call say in one short sentence what you are about to do;
at the end say briefly what you did and what is left."""
OUTPUT_TOKENS = 2_500  # of a command's output, the most that Codex shows the model at once; its own default is 10,000


def codex_models(cards: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of models that answer and have a name, by their documents; the first is offered first."""
    named = (card for card in cards if ANY not in card["id"] and (card.get("capabilities") or {}).get("chat", True))
    return [_entry(card, priority) for priority, card in enumerate(named)]


def _entry(card: dict[str, Any], priority: int) -> dict[str, Any]:
    context = {"context_window": card["context_length"]} if "context_length" in card else {}
    return context | {
        "slug": card["id"],
        "display_name": card["id"],
        "description": None,
        "supported_reasoning_levels": [],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": priority,
        "availability_nux": None,
        "upgrade": None,
        "base_instructions": INSTRUCTIONS,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "tokens", "limit": OUTPUT_TOKENS},
        "supports_parallel_tool_calls": True,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }
