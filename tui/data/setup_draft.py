"""The answers of the setup screen so far, and the texts made of them. No widget; no `repr` shows the key."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, count
from typing import Any
from urllib.parse import urlsplit

from disco_daemon.client.offers import ABOUT, columns, named_words, offer_lines, running_words

from .servers import price_cells, state_word

Json = Mapping[str, Any]
SHOWN = 200  # models in the list; typing makes it shorter
DIGITS = "123456789"
FIRST, SERVERS, BESIDE, INSTEAD = "server", "servers", "beside ", "instead"
TRY, CHANGE, REMOVE = "try", "change", "remove"  # what may be done with one that is there
OTHER, LOCAL, NONE, SERVICE = "other", "local", "none", "service"  # choices beside the servers that are known
PREVIOUS = "previous"  # the model before this one, as the daemon's API calls it
FETCH = "fetch "  # before a model that can be fetched, in the key of its choice and in its line


class Step(Enum):
    """The question on the screen."""

    WHO = "Setup: who shall answer beside this machine?"
    ADDRESS = "Setup: the server's address"
    PLACE = "Setup: beside the others?"
    SERVERS = "Setup: your servers"
    SERVER = "Setup: one of your servers"
    KEY = "Setup: the API key"
    MODEL = "Setup: the model"
    LOCAL = "Setup: this machine's model"
    FETCH = "Setup: a model for this machine"
    WAIT = "Setup: one moment"
    DONE = "Setup: done"


# The step to go back to, by the code of the problem; all other problems need another server.
STEP_OF = {"key": Step.KEY, "credit": Step.KEY, "model": Step.MODEL, "refused": Step.MODEL, "timeout": Step.MODEL,
           "server": Step.MODEL, "address": Step.ADDRESS, "network": Step.ADDRESS}  # fmt: skip


@dataclass(slots=True)
class SetupDraft:
    """A server that is being set up. `key_there` says where its key is, if it has one; `models` None: it lists none."""

    base_url: str = ""
    title: str = ""
    key_url: str = ""
    key_there: str = ""
    key: str = field(default="", repr=False)
    models: list[str] | None = None
    name: str = ""  # of one of several; "" is [server]
    model: str = ""  # of one that is there

    def take(self, provider: Json) -> None:
        """Fill in a server of the catalogue."""
        self.base_url, self.title = str(provider["base_url"]), str(provider["title"])
        self.key_url, self.key_there = str(provider["key_url"]), str(provider["key"])


def choices(known: Json, *, here: bool = False, stand_in: bool = False) -> list[tuple[str, str]]:
    """Return the servers to choose from, (key, line); the first nine have a digit. `here`: the daemon runs here.

    With `stand_in` the model that ships answers alone, and a real one comes first.
    """
    now = known["server"]
    rows = [(LOCAL, "m  A real model for this machine")] if stand_in else []
    for i, provider in enumerate(known["providers"]):
        digit = DIGITS[i] if i < len(DIGITS) else " "
        used = "  (in use)" if provider["base_url"] == now["base_url"] else "  (key there)" if provider["key"] else ""
        rows.append((f"p{i}", f"{digit}  {provider['title']:14} {provider['base_url']}{used}"))
    rows.append((OTHER, "0  Another address"))
    if names := [one["name"] for one in further(known)]:
        rows.append((SERVERS, f"v  Your servers (also {', '.join(names)}): try one, change it, take it away"))
    if not stand_in:
        rows.append((LOCAL, "m  Another model for this machine"))
    if now["base_url"]:
        rows.append((NONE, "n  No server: this machine only"))
    if here:
        rows.append((SERVICE, "s  Start disco at each login"))
    return rows


def further(known: Json) -> list[Json]:
    """Return the servers beside `[server]`; an older daemon knows of none."""
    return [one for one in known.get("servers") or () if one["name"] != FIRST]


def place_choices(known: Json, draft: SetupDraft) -> list[tuple[str, str]]:
    """Return where a new server may stand: beside those that are there, or in place of `[server]`; none: there is none.

    The name that it gets beside them is in the first key.
    """
    servers = known.get("servers") or ()
    if not servers:
        return []
    taken = {FIRST, "device", "disco", *(one["name"] for one in servers)}
    host = re.sub(r"[^A-Za-z0-9._-]", "-", urlsplit(draft.base_url).hostname or "").strip("-._")[:48] or "box"
    listed = (p.get("free_name") for p in known["providers"] if p["base_url"] == draft.base_url)
    more = (f"{host}-{i}" for i in count(2))
    name = next((one for one in listed if one), None) or next(one for one in chain([host], more) if one not in taken)
    now = known["server"]
    instead = f"In place of {now['model']} at {now['base_url']}" if now["base_url"] else "As the first one, [server]"
    return [(f"{BESIDE}{name}", f"Beside the others, as {name}"), (INSTEAD, instead)]


def server_choices(known: Json, state: Json, width: int | None = None) -> list[tuple[str, str]]:
    """Return the servers that are there, (its place in the list; line), with price and how each is.

    Their addresses are left out where a line would be wider than `width` cells.
    """
    seen = {(one["name"], one["model"]): one for one in state.get("servers") or ()}
    rows = []
    for one in known.get("servers") or ():
        now = seen.get((one["name"], one["model"]), {})
        price = "/".join(price_cells(now.get("price"))) if now else ""
        how = state_word(now) if now else "by name only"
        rows.append((one["name"], one["model"], price, how, one["base_url"]))
    lines = columns(rows)
    if width is not None and max(map(len, lines), default=0) > width:
        lines = columns([row[:-1] for row in rows])
    return [(str(i), line) for i, line in enumerate(lines)]


def fetch_choices(offers: Sequence[Json], width: int | None = None, here: Container[str] = ()) -> list[tuple[str, str]]:
    """Return the offered models that are not `here`: (FETCH and its name; line, short if it is wider than `width`)."""
    others = [one for one in offers if one["file"] not in here]
    return [(f"{FETCH}{one['id']}", line) for one, line in zip(others, offer_lines(others, width), strict=True)]


def local_choices(known: Json, offers: Sequence[Json] = (), width: int | None = None) -> list[tuple[str, str]]:
    """Return the models to fetch, those on this machine, and the way back: (FETCH and its name, or a model; line).

    Lines of those to fetch are short where they would be wider than `width` cells.
    """
    device = known["device"]
    room = None if width is None else width - len(FETCH)
    found = fetch_choices(offers, room, {model["name"] for model in device["models"]})
    rows = [(key, f"{FETCH}{line}") for key, line in found]
    for model in device["models"]:
        value = "" if model["default"] else str(model["path"])
        used = "  (in use)" if value == device["model"] else ""
        rows.append((value, f"use   {model['name']}  {model['size_bytes'] / 1e6:.0f} MB{used}"))
    if before := device.get("previous"):
        rows.append((PREVIOUS, f"p     {before}  the one before, with its settings"))
    return rows


def local_text(offers: Sequence[Json], state: Json, *, some: bool) -> str:
    """Return what to say above the models of this machine, of which there are `some`, by the daemon's state."""
    text = "GGUF files in the folder of models." if some else "There is none: `disco models fetch` gets one."
    if offers:
        text = f"Enter fetches a model under its licence, and uses it. {ABOUT}"
    return "\n".join(filter(None, (text, running_words(state), named_words(state))))


def fitting(models: Sequence[str], typed: str) -> list[str]:
    """Return the models that contain all typed words, in their order."""
    words = typed.casefold().split()
    return [name for name in models if all(word in name.casefold() for word in words)][:SHOWN]


def problem_of(checked: Json) -> str:
    """Return what is wrong and what to do, as a sentence; "" if nothing is wrong."""
    problem = checked["problem"]
    return f"{problem['text']}: {problem['mend']}." if problem else ""


def result_of(checked: Json) -> str:
    """Return the result of a check, as sentences."""
    said = [f"{checked['model']} answered after {checked['ttft_s']:.2f} s.", *checked["notes"]]
    return " ".join([*said, *_charge(checked["price"])])


def _charge(price: Json | None) -> list[str]:
    if price is None:
        return []
    costs = price["input_usd_per_mtok"], price["output_usd_per_mtok"]
    if price["known"] and not any(costs):
        return ["It bills nothing per token."]
    charge = "It charges" if price["known"] else "What it charges is not known, so it counts as"
    return [f"{charge} ${costs[0]:g} and ${costs[1]:g} per million input and output tokens."]
