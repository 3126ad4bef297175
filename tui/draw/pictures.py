"""The pictures of the dashboard, from the daemon's documents. Pure; each has a line that says the same in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from textual.content import Content

from disco_daemon.client.amounts import amount_of, dollars, figure
from disco_daemon.client.side_health import sides_of

from ..data.model import Json, Money, RequestRow
from ..data.scale import seconds
from .charts import Axes, Curve, bar, plot, sparkline

DEVICE, SERVER = "$success", "$primary"  # styles of the two sides
STYLES = {"device": DEVICE, "server": SERVER}
NEVER = "x"
LEAST_BAR = 6  # characters
DAYS = 14


# --- what was learned ---------------------------------------------------------------------------------------------


def server_words(state: Json) -> str:
    """Say the server's TTFT in one line."""
    if "server" not in state["endpoints"]:
        return "no server is configured"
    known = state["learned"]["server_ttft"]
    times = known["quantiles_s"]
    seen = f"{known['n']} samples, {100 * known['censored_share']:.0f} % censored"
    if not known["n"]:
        return f"server TTFT not seen yet: the prior says {seconds(times['p50'])}, P99 {seconds(times['p99'])}"
    return f"server TTFT {seconds(times['p50'])}, P99 {seconds(times['p99'])}; {seen}"


def device_words(state: Json) -> str:
    """Say the device's TTFT in one line."""
    if "device" not in state["endpoints"]:
        return "no device takes part"
    known = state["learned"]["device_ttft"]
    return f"device {seconds(known['c_s'])} + {1000 * known['k_s_per_token']:.2f} ms a token ({known['n']})"


def link_words(state: Json) -> str:
    """Say how the link to the partner of a split device is, or a fleet, in one line; "" for a whole device."""
    if fleet := state["endpoints"].get("device", {}).get("fleet"):
        n, layers, more = fleet["hosts"], fleet["layers_away"], fleet["replicas"]
        replicas = f", {more} replica{'s' * (more != 1)}" if more else ""
        return f"fleet {fleet['state']}: {layers} layers at {n} host{'s' * (n != 1)}{replicas}"
    split = state.get("split")
    if not split:
        return ""
    rtt, given = split.get("rtt_ms"), split.get("tokens_per_round_trip")
    trips = [f"{rtt:.0f} ms"] * (rtt is not None) + [f"{given:.1f} tok a trip"] * (given is not None)
    down = [] if split["state"] == "up" else [split["state"]]
    return f"{split['partner']}: " + ", ".join([*down, split["mode"], *trips])


def device_s(state: Json, tokens: float) -> float:
    """Return the device's TTFT for a prompt of `tokens`, by its fitted line, s."""
    known = state["learned"]["device_ttft"]
    return float(known["c_s"] + known["k_s_per_token"] * tokens)


def server_ttft(state: Json, width: int, height: int) -> Content:
    """Draw the distribution of the server's TTFT (`s`) and the device's TTFT (`d`)."""
    times = state["learned"]["server_ttft"]["quantiles_s"]
    points = sorted((float(t), float(name[1:]) / 100) for name, t in times.items())
    mean = state["learned"]["prompts"]["mean"]
    device = device_s(state, mean)
    most = max(points[-1][0], device)
    curves = [Curve([(0.0, 0.0), *points, (most, max(y for _, y in points))], "s", SERVER)]
    if "device" in state["endpoints"]:
        curves.append(Curve([(device, i / 20) for i in range(21)], "d", DEVICE, joined=False))
    axes = Axes((0.0, most), (0.0, 1.0), ("0", f"{seconds(most)}"), ("0 %", "100 %"))
    return plot(curves if "server" in state["endpoints"] else curves[1:], axes, width, height)


ALONE = "w(l): nobody is held back where one side answers alone"


def starts_words(plan: Json) -> str:
    """Say what w(l) means."""
    side = plan["learned"]["constrained"]
    return f"w(l): how long the {side} is held back (w), by prompt length"


def starts(plan: Json, width: int, height: int) -> Content:
    """Draw w(l) of the scarcer side (`w`; `x`: not started), and the device's TTFT (`d`)."""
    rows, side = plan["picture"], plan["learned"]["constrained"]
    style = STYLES[side]
    waits = [(row["tokens"], row[f"{side}_s"]) for row in rows]
    device = [(n, device_s(plan, n)) for n, _ in waits]
    top = max([w for _, w in waits if w is not None] + [s for _, s in device]) or 1.0
    curves = [
        Curve(device, "d", DEVICE if side != "device" else ""),
        Curve([(n, w) for n, w in waits if w is not None], "w", style, joined=False),
        Curve([(n, top) for n, w in waits if w is None], NEVER, style, joined=False),
    ]
    axes = Axes(
        (waits[0][0], waits[-1][0]), (0.0, top), (f"{waits[0][0]}", f"{waits[-1][0]} tokens"), ("0", seconds(top)),
        log_x=True,
    )  # fmt: skip
    return plot(curves, axes, width, height)


# --- what happened ------------------------------------------------------------------------------------------------


def wins(requests: Sequence[RequestRow], width: int, *, plain: bool = False) -> Content:
    """Draw how many of the recent requests each side won, how many moved and how many failed."""
    n = len(requests)
    counts = [
        ("device", sum(r.winner == "device" for r in requests), DEVICE),
        ("server", sum(r.winner == "server" for r in requests), SERVER),
        ("moved", sum(r.handoffs > 0 for r in requests), "$warning"),
        ("errors", sum(r.error is not None for r in requests), "$error"),
    ]
    if not n:
        return Content("no requests yet")
    lines = [_bar(name, count / n, f"{count:4} {100 * count / n:3.0f} %", width, style, plain=plain)
             for name, count, style in counts]  # fmt: skip
    return Content("\n").join(lines)


def _bar(name: str, share: float, figures: str, width: int, style: str, *, plain: bool) -> Content:
    room = max(LEAST_BAR, width - 8 - len(figures) - 1)
    return Content.assemble(f"{name:<7} ", Content.styled(bar(share, room, plain=plain), style), f" {figures}")


CAP_NAMES = {"usd_per_day": "$ today", "usd_per_month": "$ month", "wh_per_day": "Wh day"}


def spend(money: Money, ledger: Sequence[Json], width: int, *, plain: bool = False) -> Content:
    """Draw the spending against the caps, and on each of the latest days."""
    lines: list[Content] = []
    for cap in money.caps:
        name = CAP_NAMES.get(cap.name, "battery")
        share = cap.spent / cap.limit if cap.limit > 0 else 1.0
        figures = f"{amount_of(cap.spent, cap.unit)} of {amount_of(cap.limit, cap.unit)}"
        lines.append(_bar(name, share, figures, width, "$warning" if share >= 1 else "$accent", plain=plain))
    if not money.caps:
        lines.append(Content("no cap is set"))
    today, month = dollars(money.usd_today), dollars(money.usd_this_month)
    lines.append(Content(f"{today}, {figure(money.wh_today)} Wh today; {month} this month"))
    if len(ledger) > 1:
        lines.append(Content(f"$ by day {sparkline([day['server_usd'] for day in reversed(ledger)], DAYS)}"))
    return Content("\n").join(lines)


def power(state: Json) -> Content:
    """Say what powers this machine, and what energy a token takes."""
    energy, money = state["energy"], Money.of(state["money"])
    per, watts = energy.get("per_token"), energy.get("watts")
    lines = [f"{money.source}; a kWh counts {dollars(money.effective)}"]
    if watts is not None:
        lines.append(f"computing draws {figure(watts)} W ({energy['source']})")
    if per is not None:
        read, write = 1000 * per["prefill_j_per_token"], 1000 * per["decode_j_per_token"]
        known = "measured" if per["windows"] else "assumed"
        lines.append(f"{figure(read)} mJ to read a token, {figure(write)} to write ({known})")
    return Content("\n".join(lines))


def summary(state: Json) -> str:
    """Sum up the state in the line on top of the dashboard."""
    ill = [f"{side} {one.words}" for side, one in sides_of(state).items() if not one.is_well or one.words == "loading"]
    scarce = state["money"].get("scarcer")
    limited = "" if scarce is None else f", {scarce} is scarce, b = {state['learned']['budget']:g}"
    said = f"{state['in_flight']} in flight, {state['served']} served; {state['policy']}{limited}"
    return "; ".join([said, *ill])


def cells(request: RequestRow) -> list[str]:
    """Return a request as the cells of the table."""
    who = request.error or request.winner or "-"
    moved = f" +{request.handoffs}" if request.handoffs else ""
    qoe = "-" if request.qoe is None else f"{request.qoe:.2f}"
    figures: list[Any] = [request.prompt_tokens, request.tokens]
    return [who + moved, seconds(request.ttft_s), *map(str, figures), qoe, dollars(request.server_usd)]


# Name and width of each cell, characters.
COLUMNS = (("winner", 14), ("TTFT", 7), ("prompt", 6), ("answer", 6), ("QoE", 4), ("cost", 10))
