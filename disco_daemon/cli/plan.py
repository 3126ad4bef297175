"""`disco plan`: show the daemon's plan for a prompt of some length, and its reasons."""

from __future__ import annotations

import argparse
import json
from typing import Any
from urllib.parse import urlencode

from ..plain import count_of, one_line
from .terminal import make_console

MAX_LINE = 1000  # characters of what is said of one server
HEIGHT = 12  # lines of the picture


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("plan", help="show what would be done now, and why", description=__doc__)
    parser.add_argument("--tokens", type=int, default=120, help="prompt length (default: %(default)s)")
    parser.add_argument("--waited", type=float, default=0.0, metavar="S", help="the server was asked S seconds ago")
    parser.add_argument(
        "--is", dest="kinds", action="append", default=[], metavar="KIND",
        help="what it is, for your rules: tools, images, schema, code, thinking or numbers; may be given again",
    )  # fmt: skip
    parser.add_argument("--language", metavar="CODE", help="the language of its question, such as de")
    parser.add_argument("--model", metavar="NAME", help="the model that it asks for (default: disco)")
    parser.add_argument("--user", metavar="NAME", help="its `user`")
    parser.add_argument(
        "--header", action="append", default=[], metavar="NAME:VALUE", help="a header of it; may be given again"
    )
    parser.add_argument("--url", help="daemon to ask (default from the configuration)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask the daemon, and print its plan."""
    from ..client import once as client
    from ..config.layers import load

    root, key = client.daemon_at(args.url, load())
    said = {"tokens": args.tokens, "waited": args.waited, "is": args.kinds, "header": args.header}
    said |= {name: value for name in ("language", "model", "user") if (value := getattr(args, name)) is not None}
    explained = client.get(root, f"/disco/v1/plan?{urlencode(said, doseq=True)}", key)
    if args.json:
        print(json.dumps(explained))
    else:
        _show(explained)
    return 0


def _show(explained: dict[str, Any]) -> None:

    console = make_console(highlight=False)
    for line in _reasons(explained):
        console.print(line)
    console.print()
    console.print(_picture(explained), markup=False)


def _reasons(explained: dict[str, Any]) -> list[str]:
    """Return the plan in words, and the figures it rests on."""
    known, plan = explained["learned"], explained["plan"]
    server, device, paced = known["server_ttft"], known["device_ttft"], known["realised"]
    costs = explained["costs_usd_per_token"]
    quantiles = ", ".join(f"{name} {value:.2f}" for name, value in server["quantiles_s"].items())
    prices = ", ".join(f"{name.replace('_', ' ')} {1e6 * usd:.3g}" for name, usd in costs.items())
    censored = f"{100 * server['censored_share']:.0f} %"
    answers, k_ms = f"{100 * server['availability']:.0f} %", 1e3 * device["k_s_per_token"]
    context = f"context {explained['context'] + 1} of {explained['contexts']} (1 = quick lately)"
    ratio = "nothing yet" if paced["ratio"] is None else f"{paced['ratio']:.3f}, last 200: {paced['last_200']:.3f}"
    servers = [
        f"server    TTFT s: {quantiles}",
        f"          {count_of(server['n'], 'sample')}, {censored} without a first token, answers {answers}, {context}",
    ]
    if not server["n"]:
        servers = [f"server    not seen yet; expected: TTFT s: {quantiles}"]
    return [
        f"[bold]{explained['tokens']} tokens: {_sentence(plan)}[/bold]",
        f"regime    {known['constrained']}-constrained; exchange rate {explained['usd_per_kwh']:g} $/kWh",
        f"          $ per million tokens: {prices}",
        *servers,
        *_servers(explained.get("servers") or []),
        f"device    T_d = {explained['device_ttft_s']:.3f} s here; c {device['c_s']:.3f} s + {k_ms:.2f} ms a token",
        f"          {count_of(device['n'], 'sample')}",
        f"budget    b = {known['budget']:g}, handed out now {known['handed_out']:g}, used {ratio}",
        f"policy    {known['policy']}",
        *_rule(explained),
        *_chance(explained.get("device_chance")),
        *_grades(explained.get("grades")),
        f"hedge     {_hedge(plan.get('hedge_s'), known.get('hedge'))}",
    ]


def _servers(found: list[dict[str, Any]]) -> list[str]:
    """Say which of several servers is asked first, why, and what the others would have been, best first."""
    from rich.markup import escape

    from ..client.amounts import dollars
    from ..client.side_health import breaker_words

    lines = []
    for one in found:
        middle = one["ttft_p50_s"]
        ttft = "not known yet" if middle is None else f"{middle:.2f} s, {one['ttft_p99_s']:.2f} s in 1 of 100"
        price = "price unknown" if one["usd"] is None else dollars(one["usd"])
        name = f"{one['name']}/{one['model']}{' is asked' if one['asked'] else ''}"
        why = breaker_words(one, "it") or one["why"]
        lines.append(escape(one_line(f"{name}: first token {ttft}; {price}; {why}", MAX_LINE)))
    return [f"{'' if i else 'servers':10}{line}" for i, line in enumerate(lines)]


def _grades(grades: dict[str, Any] | None) -> list[str]:
    """Say which side is a stand-in, and what becomes of it; an older daemon knows of no grades."""
    return [] if grades is None else [f"grades    {grades['why']} policy.unequal is {grades['unequal']}."]


def _rule(explained: dict[str, Any]) -> list[str]:
    """Say which of the user's rules would decide; nothing where there are none."""
    if "rule" not in explained:
        return []
    if (rule := explained["rule"]) is None:
        return ["rule      none of your rules fits: as the policy plans"]
    of_set = f" of the set {rule['of_set']}" if rule["of_set"] else ""
    nobody = "" if rule["nobody"] is None else f"; {rule['nobody']}"
    return [f"rule      '{rule['name']}'{of_set} decides: {rule['use']}{nobody}"]


def _chance(known: dict[str, Any] | None) -> list[str]:
    """Say what was learned of this machine's answers; nothing where no rule asks for that."""
    if known is None:
        return []
    rests_on = f"of {count_of(known['answers'], 'answer')} {known['failed']} would not do"
    if known["chance"] is None:
        return [f"chance    not known yet that this machine's answer will do: {rests_on}"]
    return [f"chance    {known['chance']:.2f} that this machine's answer will do: {rests_on}"]


def _hedge(after_s: float | None, known: dict[str, Any] | None) -> str:
    """Say when the server would be asked a second time, and how much of that was used."""
    when = "no second request" if after_s is None else f"a second request after {after_s:.3f} s of the server's silence"
    if known is None:  # an older daemon
        return when
    used = f"{100 * known['used']:.1f} % of the prompt tokens were sent twice, {100 * known['share']:g} % may be"
    return f"{when}; {used}"


def _sentence(plan: dict[str, float | None]) -> str:
    parts = []
    for side in ("server", "device"):
        delay = plan[f"{side}_s"]
        when = "not used" if delay is None else "starts at once" if delay == 0 else f"starts after {delay:.3f} s"
        parts.append(f"{side} {when}")
    return ", ".join(parts)


def _picture(explained: dict[str, Any]) -> str:
    """Return a plot of w(l): how long the constrained side is held back, by prompt length."""
    rows = explained["picture"]
    side = explained["learned"]["constrained"]
    waits = [row[f"{side}_s"] for row in rows]
    top = max((w for w in waits if w is not None), default=0.0) or 1.0
    levels = [HEIGHT if w is None else round(w / top * (HEIGHT - 1)) for w in waits]
    lines = []
    for height in range(HEIGHT, -1, -1):
        label = "never" if height == HEIGHT else f"{top * height / (HEIGHT - 1):5.2f}"
        lines.append(f"{label} |" + "".join("*" if level == height else " " for level in levels))
    first, middle, last = rows[0]["tokens"], rows[len(rows) // 2]["tokens"], rows[-1]["tokens"]
    axis = f"{first:<{len(rows) // 2}}{middle:<{max(1, len(rows) - len(rows) // 2 - len(str(last)))}}{last}"
    title = f"w(l), s: how long the {side} is held back, by prompt length l in tokens"
    return "\n".join([title, *lines, "      +" + "-" * len(rows), "       " + axis])
