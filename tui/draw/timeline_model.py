"""The timeline of one answer: when each side started, which was first, where the answer moved, its delivery. Pure.

It is made of the answer's `disco` object, its row of the history and the daemon's trace, or any of them: the row knows
how long the answer took, the object knows each attempt, the trace knows both and the time of each token. The daemon
keeps traces of its latest answers only. Without one, the delivery is a straight line from the first token to the end of
the stream, and the legend says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from textual.content import Content

from disco_daemon.client.amounts import dollars, figure
from disco_daemon.client.side_health import reason_words

from ..data.model import Json
from ..data.scale import seconds
from . import token_timeline
from .charts import Axes, Curve, plot
from .pictures import STYLES
from .token_timeline import TokenTimes

NAME_WIDTH = 10
WAITS, WORKS, SPEAKS, LOST = " ", "-", "=", "x"
LEGEND = "- waits for its first token   = writes   x stopped before it   | answered too late"
DELIVERY = "tokens over time: * shown  + generated  . as read  H handoff"
STRAIGHT = "tokens over time: * shown (a straight line: there is no trace of it)  . as read  H handoff"
LEVEL = "tokens in the buffer over time: # generated, not shown yet"


@dataclass(frozen=True, slots=True)
class TimelineAttempt:
    """One start of one side; times in s from the request on. `first_s` None: no first token came by `until_s`.

    `hedge` says what came of a second request to a silent server: won, lost or failed.
    """

    name: str
    start_s: float
    first_s: float | None
    until_s: float
    tokens: int
    error: str | None = None
    hedge: str | None = None

    @property
    def side(self) -> str:
        """`device` or `server`, also for a second start (`device#2`)."""
        return self.name.partition("#")[0]


@dataclass(frozen=True, slots=True)
class TimelineMove:
    """A handoff at token `at`; `dropped` says why it did not happen, if so, and `rest` whether its source rested."""

    at: int
    source: str
    target: str
    reason: str
    took_s: float
    dropped: str | None
    rest: str = ""


@dataclass(frozen=True, slots=True)
class TimelineModel:
    """The course of one answer. Times in s from the request on; `plan` has None for a side that was not used."""

    request_id: str
    winner: str | None
    ttft_s: float | None
    end_s: float
    exact_end: bool
    tokens: int
    plan: tuple[tuple[str, float | None], ...]
    attempts: tuple[TimelineAttempt, ...]
    moves: tuple[TimelineMove, ...] = ()
    error: str | None = None
    figures: tuple[str, ...] = field(default=())
    grades: str = ""  # why one side was a stand-in
    trace: TokenTimes | None = None

    @classmethod
    def of(cls, disco: Json | None, row: Json | None, trace: Json | None = None) -> TimelineModel:
        """Make it of any of the three. Raises ValueError for none."""
        if disco is None and row is None and trace is None:
            raise ValueError("a timeline needs an answer's object, its row or its trace")
        if trace is not None:
            disco, row = trace["disco"], trace
        if disco is None:
            return _of_row(row or {})
        record = dict(disco)
        attempts = tuple(_attempt(name, a) for name, a in record["endpoints"].items())
        reading = record.get("reading") or {}
        known_end = None if row is None else row["duration_s"]
        latest = max([a.until_s for a in attempts] + [record["ttft_s"] or 0.0])
        written = sum(record["tokens"].values()) * (reading.get("tbt_p50_s") or 0.0)
        end = known_end if known_end is not None else max(latest, (record["ttft_s"] or 0.0) + written)
        return cls(
            request_id=record["request_id"],
            winner=record["winner"],
            ttft_s=record["ttft_s"],
            end_s=max(end, 1e-3),
            exact_end=known_end is not None,
            tokens=sum(record["tokens"].values()),
            plan=tuple((side, record["plan"][f"{side}_s"]) for side in STYLES),
            attempts=attempts,
            moves=tuple(map(_move, record["moves"])),
            error=None if row is None else row["error"],
            figures=_figures(record, reading),
            grades=(record.get("stand_in") or {}).get("why", ""),
            trace=None if trace is None else TokenTimes.of(trace),
        )


def _attempt(name: str, a: Json) -> TimelineAttempt:
    until = a["started_s"] + a["ttft_s"]
    return TimelineAttempt(
        name,
        a["started_s"],
        None if a["censored"] else until,
        until,
        a.get("completion_tokens", 0),
        a["error"],
        a.get("hedge"),
    )


def _move(move: Json) -> TimelineMove:
    rest = ""
    if move.get("paused"):  # rows of older versions do not say
        rest = f"; the {move['source']} rested" + (" and was asked again" if move["asked_again"] else "")
    return TimelineMove(
        move["at"], move["source"], move["target"], move["reason"], move["took_s"], move["dropped"], rest
    )


def _of_row(row: Json) -> TimelineModel:
    """Make it of the history alone: the plan, the winner's first token, the end."""
    plan = tuple((side, row[f"plan_{side}_s"]) for side in STYLES)
    ttft, end = row["ttft_s"], max(row["duration_s"], 1e-3)
    attempts = tuple(
        TimelineAttempt(side, start, ttft if side == row["winner"] else None, ttft if ttft is not None else end,
                row[f"{side}_tokens"], row["error"])
        for side, start in plan
        if start is not None and start <= (end if ttft is None else ttft)
    )  # fmt: skip
    tokens = {side: row[f"{side}_tokens"] for side in STYLES}
    record = {"tokens": tokens, "server_usd": row["server_usd"], "energy_j": row["energy_j"], "qoe": row["qoe"],
              "stopped": row.get("stopped")}  # fmt: skip
    reading = {name: row.get(name) for name in ("tbt_p50_s", "tbt_p99_s", "largest_gap_s", "stalled")}
    return TimelineModel(
        row["request_id"], row["winner"], ttft, end, True, sum(tokens.values()), plan, attempts,
        tuple(map(_move, row["moves"])), row["error"], _figures(record, reading),
    )  # fmt: skip


def _figures(record: Json, reading: Json) -> tuple[str, ...]:
    """Say cost, energy and delivery in words."""
    tokens = ", ".join(f"{side} {n}" for side, n in record["tokens"].items())
    lines = [f"tokens: {tokens}; {dollars(record['server_usd'])}, {figure(record['energy_j'])} J"]
    if record.get("qoe") is not None and reading.get("tbt_p50_s") is not None:
        gaps = f"between tokens {seconds(reading['tbt_p50_s'])}, P99 {seconds(reading['tbt_p99_s'])}"
        stalled = f"{reading['stalled']} late"
        largest = seconds(reading["largest_gap_s"])
        lines.append(f"QoE {record['qoe']:.2f}; {gaps}, the longest {largest}; {stalled}")
    if record.get("stopped"):
        lines.append("stopped: it was repeating itself")
    return (*lines, *_split(record.get("split")))


def _split(split: Json | None) -> list[str]:
    """Say what the partner of a split device did for the answer, and what went over the link."""
    if not split:
        return []
    trips, right, drafted = split["round_trips"], split["accepted"], split["drafted"]
    each = f", {(right + trips) / trips:.2g} tokens each" if trips else ""
    up, down = split["bytes"]["up"] / 1e3, split["bytes"]["down"] / 1e3
    busy = f", busy for {seconds(split['partner_s'])}" if split.get("partner_s") is not None else ""
    bits = "" if split.get("same_bits") else ", other bits than the whole model's"
    alone = "" if split.get("alone_from") is None else f"; from token {split['alone_from']} on this machine was alone"
    how = f"{split['mode']}, {split['quality']}{alone}"
    return [
        f"two machines ({how}): {trips} round trips{each}; {right} of {drafted} drafts right",
        f"partner: {split['n_rows']} rows{busy}; {up:.4g} KB up as {split['codec']}{bits}, {down:.4g} KB down",
    ]


# --- in words -----------------------------------------------------------------------------------------------------


def words(model: TimelineModel) -> list[str]:
    """Return the timeline as sentences, for `--plain` and screen readers."""
    lines = [f"plan: {', '.join(_plan_text(side, start) for side, start in model.plan)}"]
    lines += [f"grades: {model.grades}"] if model.grades else []
    for a in model.attempts:
        first = f"first token at {seconds(a.first_s)}" if a.first_s is not None else (
            f"no first token by {seconds(a.until_s)}")  # fmt: skip
        error = f", {reason_words(a.error)}" if a.error else ""
        began, came = ("asked again", f"; the second request {a.hedge}") if a.hedge else ("started", "")
        lines.append(f"{a.name}: {began} at {seconds(a.start_s)}, {first}, wrote {a.tokens} tokens{error}{came}")
    lines += [_move_text(move) for move in model.moves]
    if model.ttft_s is None:
        lines.append(f"no answer{f': {model.error}' if model.error else ''}")
    else:
        sure = "" if model.exact_end else "about "
        lines.append(f"you saw the first token at {seconds(model.ttft_s)}, the last at {sure}{seconds(model.end_s)}")
    return [*lines, *(token_timeline.words(model.trace) if model.trace is not None else []), *model.figures]


def _plan_text(side: str, start: float | None) -> str:
    when = "not used" if start is None else "at once" if start == 0 else f"after {seconds(start)}"
    return f"{side} {when}"


def _move_text(move: TimelineMove) -> str:
    if move.dropped is not None:
        way = f"handoff {move.source} to {move.target} ({move.reason})"
        return f"{way} begun at token {move.at}, dropped: {move.dropped}{move.rest}"
    way = f"handoff {move.source} to {move.target} at token {move.at} ({move.reason})"
    return f"{way}, took {seconds(move.took_s)}{move.rest}"


# --- as a picture -------------------------------------------------------------------------------------------------


def lanes(model: TimelineModel, width: int) -> Content:
    """Draw a lane for each attempt: `-` before its first token, `=` while it writes, `x` if stopped before that."""
    room = max(10, width - NAME_WIDTH)
    lines = [_lane(a, model, room) for a in model.attempts]
    axis = "0" + seconds(model.end_s).rjust(room - 1)
    return Content("\n").join([*lines, Content(" " * NAME_WIDTH + axis)])


def _lane(a: TimelineAttempt, model: TimelineModel, room: int) -> Content:
    start, turn = (_column(t, model, room) for t in (a.start_s, a.until_s))
    lane = WAITS * start + WORKS * (turn - start)
    if a.first_s is None:
        lane += LOST
    elif a.tokens:
        lane += SPEAKS * max(1, _column(_spoke_until(a, model), model, room) - turn)
    else:
        lane += "|"
    return Content.assemble(f"{a.name:<{NAME_WIDTH}}", Content.styled(lane[:room], STYLES.get(a.side, "")))


def _spoke_until(a: TimelineAttempt, model: TimelineModel) -> float:
    """Return when the words of an attempt end for the reader: at a handoff, or with the answer."""
    took_over = [t for t, m in _seams(model) if m.source == a.side and t >= a.until_s]
    return min(took_over, default=model.end_s)


def _seams(model: TimelineModel) -> list[tuple[float, TimelineMove]]:
    """Return when each completed handoff joined, s: at the target's first token, else on the straight line."""
    return [(_joined_s(model, move), move) for move in model.moves if move.dropped is None]


def _joined_s(model: TimelineModel, move: TimelineMove) -> float:
    if model.trace is not None and move.at < len(model.trace.put_s):
        return model.trace.put_s[move.at]
    first = model.ttft_s or 0.0
    joined = [a.first_s for a in model.attempts if a.side == move.target and a.first_s is not None]
    straight = first + (model.end_s - first) * move.at / max(1, model.tokens)
    return min((t for t in joined if t > first), default=straight)


def _column(time: float, model: TimelineModel, room: int) -> int:
    return round(min(1.0, max(0.0, time / model.end_s)) * (room - 1))


def delivery(model: TimelineModel, pace_tps: float, expected_s: float, width: int, height: int) -> Content | None:
    """Draw tokens over time: shown (`*`) and generated (`+`, by side) against as read (`.`); `H` is a handoff.

    Returns None without a token. A trace brings its own pace and expected TTFT; without it a straight line stands for
    what was shown.
    """
    n = _tokens(model)
    if model.ttft_s is None or n < 1:
        return None
    pace_tps, expected_s = _wish(model, pace_tps, expected_s)
    until_s = _until_s(model, pace_tps, expected_s)
    due = Curve([(0.0, 0.0), (expected_s, 0.0), (expected_s + (n - 1) / pace_tps, float(n))], ".", "")
    seams = [(_shown_s(model, move, joined), float(move.at)) for joined, move in _seams(model)]
    curves = [due, *_generated_curves(model, seams, until_s, width), Curve(seams, "H", "$warning", joined=False)]
    axes = Axes((0.0, until_s), (0.0, float(n)), ("0", seconds(until_s)), ("0", f"{n} tokens"))
    return plot(curves, axes, width, height)


def level(model: TimelineModel, pace_tps: float, expected_s: float, width: int, height: int) -> Content | None:
    """Draw the tokens in the buffer over time (`#`), on the same axis; None if unknown, or if nothing was held."""
    held = token_timeline.fullest(model.trace)[1] if model.trace is not None else 0
    if model.trace is None or not held:
        return None
    until_s = _until_s(model, *_wish(model, pace_tps, expected_s))
    points = [(t, tokens) for t, tokens in token_timeline.peaks(model.trace, until_s, width) if tokens]
    most = f"{held} tokens".rjust(len(f"{_tokens(model)} tokens"))  # so that both pictures begin in the same column
    axes = Axes((0.0, until_s), (0.0, float(held)), ("0", seconds(until_s)), ("0", most))
    return plot([Curve(points, "#", "$accent", joined=False, filled=True)], axes, width, height)


def _tokens(model: TimelineModel) -> int:
    """Return the tokens of the answer, with those generated but never shown, if known."""
    return model.tokens if model.trace is None else max(model.tokens, model.trace.n_put)


def _wish(model: TimelineModel, pace_tps: float, expected_s: float) -> tuple[float, float]:
    """Return pace and expected TTFT as they were for this answer, else as given."""
    return (pace_tps, expected_s) if model.trace is None else (model.trace.pace_tps, model.trace.expected_s)


def _until_s(model: TimelineModel, pace_tps: float, expected_s: float) -> float:
    """Return the end of the time axis: that of the answer, or of its reading."""
    return max(model.end_s, model.ttft_s or 0.0, expected_s + (_tokens(model) - 1) / pace_tps)


def _shown_s(model: TimelineModel, move: TimelineMove, joined_s: float) -> float:
    """Return when the target's first token was shown, s."""
    shown = () if model.trace is None else model.trace.shown_s
    return shown[move.at] if move.at < len(shown) else joined_s


def _generated_curves(
    model: TimelineModel, seams: Sequence[tuple[float, float]], until_s: float, width: int
) -> list[Curve]:
    """Return the curves of what each side generated, and on top of them what was shown."""
    trace = model.trace
    if trace is None:
        first = model.ttft_s or 0.0
        straight = [(first, 1.0), *seams, (max(model.end_s, first), float(model.tokens))]
        return [Curve(straight, "*", "$accent")]
    makers = [(0, model.winner or ""), *((move.at, move.target) for _, move in _seams(model))]
    ends = [*(at for at, _ in makers[1:]), len(trace.put_s)]
    curves = [
        Curve(token_timeline.count_curve(trace.put_s[at:end], until_s, width, before=at), "+", STYLES.get(side, ""))
        for (at, side), end in zip(makers, ends, strict=True)
    ]
    return [*curves, Curve(token_timeline.count_curve(trace.shown_s, until_s, width), "*", "$accent")]
