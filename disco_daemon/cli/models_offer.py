"""`disco models recommend`, and the choice among offered models that other verbs ask for at a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .terminal import progress

if TYPE_CHECKING:
    from ..machines.model_offers import Recommendation
    from ..models.quants import Pin


def recommended() -> Recommendation:
    """Return the models that suit this machine now. Takes some seconds where its speed was never measured."""
    import asyncio

    from ..config.layers import config_path, load
    from ..machines.model_offers import recommendation
    from ..models.offered import offered_models

    return asyncio.run(recommendation(load(), offered_models(config_path().parent)))


def recommend(args: argparse.Namespace) -> int:
    """Print the models that suit this machine."""
    found = recommended()
    if args.json:
        print(json.dumps(found.to_json()))
    else:
        show(found.to_json(), print)
        if found.models:
            print(f"`disco models pull {found.models[0].model.name} --use` fetches the first one and uses it.")
    return 0 if found.models else 1


def show(found: dict[str, Any], say: Callable[[str], None]) -> None:
    """Say which models suit a machine, by numbers, and how much the figures are worth."""
    from ..client.offers import ABOUT, offer_lines, size_words

    if not (models := found["models"]):
        free = size_words(found["machine"]["free_bytes"])
        say(
            found["problem"]
            or f"No model of the list fits into the memory that is free ({free}): close other programs."
        )
        return
    say(f"Models that fit into the {size_words(found['machine']['free_bytes'])} of memory that are free:")
    for number, line in enumerate(offer_lines(models), 1):
        say(f"{number:3}  {line}")
    say(ABOUT if found["machine"]["measured"] else "Speeds are not known: nothing was measured here yet.")


def ask_which(found: dict[str, Any], ask: Callable[[str], str], say: Callable[[str], None]) -> dict[str, Any] | None:
    """Ask which offered model to fetch; None for none, which Enter means: it takes a yes."""
    models: list[dict[str, Any]] = found["models"]
    while models:
        answer = ask(f"Fetch one and use it? 1 to {len(models)}, Enter for none: ").strip().casefold()
        if answer in ("", "n", "no", "none", "0"):
            return None
        wanted = "1" if answer in ("y", "yes") else answer
        if wanted.isdecimal() and 1 <= int(wanted) <= len(models):
            return models[int(wanted) - 1]
        say("A number of the list, or Enter.")
    return None


def asked_at_terminal() -> tuple[str, Pin] | None:
    """Show what suits this machine, and ask at a terminal; return what to pull and its pin, None for nothing."""
    found = recommended().to_json()
    show(found, progress)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        if found["models"]:
            progress(f"`disco models pull {found['models'][0]['id']} --use` fetches the first one and uses it")
        return None
    chosen = ask_which(found, input, progress)
    return None if chosen is None else chosen_spec(chosen)


def chosen_spec(chosen: dict[str, Any]) -> tuple[str, Pin]:
    """Return what to pull for a model of `recommend`, and its pin."""
    from ..models.quants import Pin

    return f"{chosen['repo']}:{chosen['file']}", Pin(chosen["revision"] or "", chosen["sha256"] or "")


def spec_of(wanted: str) -> tuple[str, Pin]:
    """Return what to pull for a name of the list, else what was given, and its pin; what was given has none.

    Raises ConfigError for an unknown name.
    """
    from ..config.layers import config_path
    from ..models.offered import find, offered_models
    from ..models.quants import NO_PIN

    if "/" in wanted:
        return wanted, NO_PIN
    model = find(wanted, offered_models(config_path().parent))
    progress(f"{model.title}, {model.n_bytes / 1e9:.1f} GB, licence: {model.licence}")
    return model.spec, model.pin
