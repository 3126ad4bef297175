"""Days of requests for several models, as one person with a chat, an editor and scripts makes them."""

from __future__ import annotations

import random
from dataclasses import dataclass

HOUR_S, DAY_S = 3600.0, 86_400.0
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and when it is asked for: sessions an hour of the day, requests in one, and pauses between these, s.

    It also `follows` that share of the requests for another model.
    """

    name: str
    n_bytes: int
    load_s: float
    by_hour: tuple[float, ...]
    per_session: float
    pause_s: float
    follows: tuple[str, float] = ("", 0.0)


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a model at a time, s since the first midnight, and how long its answer takes, s."""

    at: float
    model: str
    takes_s: float


def hours(**spans: float) -> tuple[float, ...]:
    """Return 24 rates; each span, such as `h9_12=0.8`, sets the hours from 9 up to 12."""
    rates = [0.0] * 24
    for span, rate in spans.items():
        first, last = (int(part) for part in span.removeprefix("h").split("_"))
        rates[first:last] = [rate] * (last - first)
    return tuple(rates)


# Any two of the four fit into LIMIT, and no three.
LIMIT = int(11 * GIB)
CHAT, CODER = ("chat", int(4.7 * GIB), 6.0), ("coder", int(5.2 * GIB), 7.0)
VISION, TRANSLATOR = ("vision", int(5.5 * GIB), 8.0), ("translator", int(4.2 * GIB), 5.0)

DAYS: dict[str, tuple[Model, ...]] = {
    # Two models are in steady use, for many talk to them at once; two others are asked for now and then.
    "office": (
        Model(*CHAT, hours(h7_9=40.0, h9_19=70.0, h19_22=25.0), 1.6, 25.0),
        Model(*CODER, hours(h9_12=55.0, h12_13=25.0, h13_19=55.0), 1.8, 12.0),
        Model(*VISION, hours(h9_19=3.2), 1.2, 40.0),
        Model(*TRANSLATOR, hours(h8_19=3.2), 1.3, 30.0),
    ),
    # One person: long spells of each, which overlap little, so that what was used last is mostly used next.
    "person": (
        Model(*CHAT, hours(h7_9=2.0, h9_18=2.5, h18_23=5.0), 9.0, 50.0),
        Model(*CODER, hours(h9_12=4.0, h12_13=0.5, h13_18=3.6, h20_22=1.0), 36.0, 14.0),
        Model(*VISION, hours(h10_17=0.6, h19_22=1.2), 4.0, 45.0, ("chat", 0.02)),
        Model(*TRANSLATOR, hours(h0_5=1.0, h11_12=1.5, h16_18=1.5), 12.0, 12.0, ("coder", 0.01)),
    ),
    # All four are asked for alike: nobody can know which comes next.
    "alike": tuple(Model(*which, hours(h8_22=1.0), 2.0, 30.0) for which in (CHAT, CODER, VISION, TRANSLATOR)),
}


def requests(models: tuple[Model, ...], n_days: int, seed: int, per_day: float = 2000.0) -> list[Request]:
    """Return the requests of some days in order, `per_day` of them a day on average; each day is drawn anew."""
    draw = random.Random(seed)
    scale = per_day / sum(sum(m.by_hour) * m.per_session for m in models)
    found = list[Request]()
    for model in models:
        for hour in range(24 * n_days):
            rate = model.by_hour[hour % 24] * scale
            at = hour * HOUR_S
            while rate and (at := at + draw.expovariate(rate / HOUR_S)) < (hour + 1) * HOUR_S:
                found += _session(model, at, draw)
    for model in models:
        leader, share = model.follows
        for one in [r for r in found if r.model == leader and draw.random() < share]:
            found.append(Request(one.at + draw.uniform(5, 90), model.name, draw.uniform(2, 15)))
    return sorted(found, key=lambda r: r.at)


def _session(model: Model, at: float, draw: random.Random) -> list[Request]:
    found = list[Request]()
    while True:
        found.append(Request(at, model.name, draw.uniform(2, 20)))
        if draw.random() < 1 / model.per_session:
            return found
        at += draw.lognormvariate(0, 1.0) * model.pause_s
