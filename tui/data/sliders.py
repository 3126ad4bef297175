"""The sliders and fields of the control panel: their settings, their scales and their texts. Pure."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from disco_daemon.client.amounts import dollars, figure

from .model import Money, Prediction
from .scale import Scale, seconds

RATE_KEY, BUDGET_KEY, PACE_KEY = "device.usd_per_kwh", "policy.budget", "delivery.pace_tps"
PRIVATE_KEY, SET_KEY = "policy.private", "policy.set"

RATE_WORDS = "Exchange rate: what a kWh of this machine's energy is worth to you, $/kWh"
BUDGET_WORDS = "Budget b: the share of all prompt tokens that the scarcer side may process"
PACE_WORDS = "Reading pace, token/s: measures QoE; Alt+P in the chat fades words ahead of it"
CAP_WORDS = "Caps: a side that has reached one gives way to the other; empty = none"
PRIVATE_WORDS = "Never leave this machine: all answers are made here, no server is asked"
SET_WORDS = "Set: ready-made settings and rules; what you set yourself goes before it"
TOO_LITTLE = "What-if: too little history yet to say what another setting would do"
# Setting, name on the screen, and how many units of the field are one of the setting.
CAPS: tuple[tuple[str, str, float], ...] = (
    ("caps.usd_per_day", "$ a day", 1.0),
    ("caps.usd_per_month", "$ a month", 1.0),
    ("caps.wh_per_day", "Wh a day", 1.0),
    ("caps.battery_floor", "battery floor, %", 100.0),
)


@dataclass(frozen=True, slots=True)
class Tail:
    """The slider by which a policy protects the slowest requests; `name` is its setting in [policy]."""

    name: str
    scale: Scale
    words: str

    @property
    def key(self) -> str:
        """The key of the setting."""
        return f"policy.{self.name}"


# By policy. The marks are the defaults. A kappa of 0 can be set, too, but not on a logarithmic scale.
TAILS: Mapping[str, Tail] = {
    "paper": Tail(
        "alpha", Scale(0.0, 1.0, 100, marks=((0.05, "usual"),)),
        "Tail share α: the share of the requests kept fast first, out of the budget b",  # noqa: RUF001
    ),
    "optimal": Tail(
        "kappa", Scale(0.001, 10.0, 80, log=True, marks=((0.058, "usual"),)),
        "Tail weight κ: s of mean TTFT that a second of the slowest 1 % is worth",
    ),
}  # fmt: skip
# The setting of each slider, by the slider's id.
SLIDERS: Mapping[str, str] = {"rate": RATE_KEY, "budget": BUDGET_KEY} | {t.name: t.key for t in TAILS.values()}


def set_options() -> list[tuple[str, str]]:
    """Return the ready-made sets as choices: what each is, and its name."""
    text = (files("disco_daemon.profiles") / "policy_sets.toml").read_text("utf-8")
    return [(f"{name}: {one['about']}", name) for name, one in tomllib.loads(text).items()]


def no_tail(policy: str) -> str:
    """Return the text in place of the tail's slider if the policy has none."""
    return f"Tail: the policy {policy} has no knob for the slowest requests; paper has alpha, optimal kappa"


def field_id(key: str) -> str:
    """Return the id of a setting's field."""
    return key.replace(".", "-").replace("_", "-")


def number(text: str, unit: float) -> float | str | None:
    """Read a field in the setting's unit: a number from 0 on, None if empty, the text itself if it is no number."""
    if not text.strip():
        return None
    try:
        found = float(text)
    except ValueError:
        return text
    return found / unit if 0 <= found < math.inf else text


def regime(money: Money, counts: float, policy: Mapping[str, Any]) -> str:
    """Say which side is scarce at the rate `counts`, and where that changes; `policy` is the section of that name."""
    if policy.get("private"):
        return "nothing leaves, this machine answers all"
    if money.scarcer is None:
        return "there is no server: this machine answers all"
    if (set_to := policy.get("scarcer", "auto")) != "auto":
        return f"{set_to} is scarce, as you set it"
    if money.threshold is None:
        return f"{money.scarcer} is scarce at any rate"
    scarcer, other, way = ("device", "server", "up to") if counts > money.threshold else ("server", "device", "above")
    return f"{scarcer} is scarce, {other} {way} {dollars(money.threshold)}"


def stand_in_words(state: Mapping[str, Any]) -> str:
    """Say which side is a stand-in, and why; empty where both are equal, or one side is alone."""
    grades = state.get("grades") or {}
    return f"{grades['why']} policy.unequal: {grades['unequal']}." if grades.get("stand_in") else ""


def prediction_words(prediction: Prediction | None) -> str:
    """Say what the settings, as they stand, would have done to the requests on record."""
    if prediction is None:
        return TOO_LITTLE
    p = prediction
    return (
        f"What-if on your {p.requests} requests, {p.scarcer} scarce:\n"
        f"TTFT mean {seconds(p.mean_s)}, P99 {seconds(p.p99_s)}   "
        f"server {dollars(p.usd_per_day)}/day   this machine {figure(p.wh_per_day)} Wh/day"
    )


def slider_words(name: str, value: float) -> str:
    """Write a slider's value."""
    return f"{value:.2g}" if name == "kappa" else f"{value:.2f}"
