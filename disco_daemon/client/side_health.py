"""How the sides are, in a word each: for the status line, `disco status` and `disco doctor`. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Json = Mapping[str, Any]

# What a server's last failure means, by its reason; the key that mends it, where one does.
REASONS: dict[str, tuple[str, str]] = {
    "unauthorized": ("key refused", "F5"),
    "forbidden": ("not allowed", "F5"),
    "no_credit": ("out of credit", "F5"),
    "unreachable": ("unreachable", "F5"),
    "not_found": ("no such model", "F5"),
    "redirected": ("moved", "F5"),
    "insecure": ("no key in the clear", "F5"),
    "garbage": ("no OpenAI server", "F5"),
    "rate_limited": ("rate-limited", ""),
    "overloaded": ("overloaded", ""),
    "server_error": ("failing", ""),
    "timeout": ("no answer in time", ""),
    "stalled": ("went silent", ""),
    "cut": ("broke off", ""),
    "dropped": ("broke off", ""),
}
# An engine's state in a word, and whether the side is well.
STATES: dict[str, tuple[str, bool]] = {
    "ready": ("ready", True),
    "configured": ("ready", True),
    "unloaded": ("ready, not in memory", True),
    "loading": ("loading", True),
    "restarting": ("restarting", False),
    "stopped": ("stopped", False),
    "failed": ("failed", False),
    "off": ("off", False),
}
EVENTS = ("no answer in time", "went silent", "broke off")  # happen at a time, where the others last
LASTING = (
    "unauthorized",
    "forbidden",
    "no_credit",
    "unreachable",
    "not_found",
    "redirected",
)  # until somebody does something
_PACKING = re.compile(r"[-._](?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|MXFP4\w*)$", re.IGNORECASE)
_KIND = re.compile(r"[-_](?:instruct|chat|it)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SideHealth:
    """One side: its model, how it is in a few words, whether it is well, the key that mends it, and since when (s)."""

    model: str
    words: str
    is_well: bool = True
    key: str = ""
    since: float | None = None

    @property
    def lasting(self) -> str:
        """The words with the time of day at which it began."""
        if self.since is None:
            return self.words
        words, _, wait = self.words.partition(" for ")
        when = "at" if words in EVENTS else "since"
        began = f"{words} {when} {datetime.fromtimestamp(self.since).astimezone():%H:%M}"
        return f"{began}, for {wait} more" if wait else began


def without_experts(n_cpu_moe: int) -> str:
    """Return words behind the number of layers on a GPU: from how many of them experts are not there (-1 = all)."""
    return f", without the experts of {'all' if n_cpu_moe < 0 else n_cpu_moe}" if n_cpu_moe else ""


def short_model(name: str) -> str:
    """Return a model's name without folder, packing and kind: `SmolLM2-135M`."""
    short = name.rsplit("/", 1)[-1].removesuffix(".gguf")
    return _KIND.sub("", _PACKING.sub("", short)) or name


def reason_words(reason: object) -> str:
    """Say the reason of a failure, which a newer daemon may have invented."""
    return REASONS.get(str(reason), (str(reason).replace("_", " "), ""))[0]


def side_health(endpoint: Json, *, is_private: bool = False, is_capped: bool = False) -> SideHealth:
    """Return how a side is, from its part of the daemon's state.

    `is_private`: it is a server that is not asked, since nothing leaves this machine. `is_capped`: its spending limit
    is reached.
    """
    model = short_model(str(endpoint.get("model") or ""))
    failing, down_s = endpoint.get("failing"), float(endpoint.get("down_s") or 0.0)
    state = str(endpoint.get("state") or "")
    if is_private:
        return SideHealth(model, "not asked")
    if is_capped:
        return SideHealth(model, "capped", is_well=False, key="F3")
    if failing:
        words, key = reason_words(failing["reason"]), REASONS.get(failing["reason"], ("", ""))[1]
        wait = f" for {down_s:.0f} s" if down_s >= 1 else ""
        return SideHealth(model, words + wait, is_well=False, key=key, since=failing["since"])
    if down_s >= 1:
        n = int(endpoint.get("crashes") or 0)
        after = f" after {n} crash{'es' * (n != 1)}" if n else ""
        return SideHealth(model, f"left alone for {down_s:.0f} s{after}", is_well=False)
    if endpoint.get("tried") is False and state == "configured":
        return SideHealth(model, "untried")
    words, is_well = STATES.get(state, (state, False))
    return SideHealth(model, words, is_well=is_well, key="" if is_well or words == "restarting" else "F5")


def breaker_words(endpoint: Json, name: str = "the server") -> str:
    """Return why `name` is left alone, and until when, from its part of the daemon's state; else ""."""
    breaker = endpoint.get("breaker") or {}
    why, until_s = reason_words(breaker.get("why")), breaker.get("until_s")
    match breaker.get("state"):
        case "half_open":
            return f"half open ({why}): one request at a time tries {name}, the others go elsewhere"
        case "open" if until_s is None:
            return f"open ({why}): {name} is asked again when its settings change, or after `disco config reload`"
        case "open":
            until = datetime.fromtimestamp(float(until_s or 0.0)).astimezone()
            return f"open ({why}): {name} is left alone until {until:%H:%M:%S}"
    return ""


def fallback_words(record: Json) -> str:
    """Return why this machine wrote an answer that a server was to write, from the answer's `disco` object; else ""."""
    server, tokens = (record.get("endpoints") or {}).get("server") or {}, record.get("tokens") or {}
    if not tokens.get("device"):
        return ""
    if server.get("error"):
        does = "went on" if tokens.get("server") else "answered"
        return f"the server: {reason_words(server['error'])}; this machine {does}"
    is_stand_in = (record.get("stand_in") or {}).get("side") == "device" and record.get("reason") == "only"
    return "the server could not be asked for this; this machine's stand-in answered" if is_stand_in else ""


def sides_of(state: Json) -> dict[str, SideHealth]:
    """Return the health of the sides in a daemon's state, the device first."""
    caps = (state.get("money") or {}).get("caps") or {}

    def is_capped(kind: str) -> bool:
        used = [cap for name, cap in caps.items() if name.startswith(kind) and cap.get("limit") is not None]
        return any(cap["spent"] + cap["reserved"] >= cap["limit"] for cap in used)

    endpoints, found = state.get("endpoints") or {}, {}
    if "device" in endpoints:
        found["device"] = side_health(endpoints["device"], is_capped=is_capped("wh"))
    if "server" in endpoints:
        is_private = bool(state.get("private"))
        found["server"] = side_health(endpoints["server"], is_private=is_private, is_capped=is_capped("usd"))
    return found


def waiting_for(state: Json | None, model: str) -> list[tuple[str, str, bool]]:
    """Return which sides an answer waits for, what each does, and whether it does so (else why not).

    `model` is the route that was asked for. A stand-in stands by while the better side is well.
    """
    found, grades = {} if state is None else sides_of(state), (state or {}).get("grades") or {}
    asked = {
        side: health
        for side, health in found.items()
        if health.words != "not asked" and (not model.startswith("disco/") or model == f"disco/{side}")
    }
    stand_in = grades.get("stand_in") if grades.get("unequal") != "race" else None
    rows = []
    for side, health in asked.items():
        if side == stand_in and any(other.is_well for name, other in asked.items() if name != side):
            rows.append((side, "stands by", False))
            continue
        does = "asked" if side == "server" else "loading" if health.words == "loading" else "reading"
        rows.append((side, does if health.is_well else health.words, health.is_well))
    return rows
