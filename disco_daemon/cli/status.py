"""`disco status`: show the state of the running daemon, and why an endpoint failed."""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import textwrap
from typing import Any

from ..plain import count_of, one_line

MAX_CELL = 1000  # characters of a name, or of a failure


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("status", help="show the running daemon", description=__doc__)
    parser.add_argument("--url", help="daemon to ask (default from the configuration)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask the daemon, and print its state."""
    from ..client import once as client
    from ..config.layers import load

    root, key = client.daemon_at(args.url, load())
    state = client.get(root, "/disco/v1/state", key)
    if args.json:
        print(json.dumps(state))
    else:
        _show(state)
    return 0


def _show(state: dict[str, Any]) -> None:
    """Print the state as plain text: to load a library for tables would take a third of this command's time."""
    print(
        f"disco {state['version']} at {state['url']}, up {state['uptime_s']:.0f} s, policy {state['policy']}"
        f"{', nothing leaves this machine (policy.private)' if state.get('private') else ''}, "
        f"{count_of(state['served'], 'answer')} given, {state['in_flight']} running"
    )
    device = state["endpoints"].get("device", {})
    server = state["endpoints"].get("server", {})
    parts = (
        _stand_in(state), _endpoints(state, shutil.get_terminal_size().columns), _breakers(state), _servers(state),
        _grades(state),
        _refused(server),
        _split(state), _fleet(device), _engine(device), _adapters(device), _models(state), _speed(state),
        _estimators(state["learned"], state["endpoints"]), _money(state["money"]), _energy(state["energy"]),
        _keys(state), _history(state),
    )  # fmt: skip
    for line in itertools.chain(*parts):
        print(line)


def _stand_in(state: dict[str, Any]) -> list[str]:
    """Print that the model that ships answers, and how far the fetch of a real one is."""
    from ..client.offers import fetch_words, stand_in_words

    words, fetch = stand_in_words(state), state.get("fetch")
    lines = [f"{words} `disco models recommend` shows real ones; F5 in `disco tui` gets one."] if words else []
    return lines + ([one_line(fetch_words(fetch), MAX_CELL)] if fetch and fetch["state"] != "done" else [])


def _endpoints(state: dict[str, Any], width: int) -> list[str]:
    """Print a table of the endpoints; the last failure, which a server may have worded, is folded to the terminal.

    A failure after which a server has answered is none any more.
    """
    from ..client.side_health import sides_of

    health = sides_of(state)
    rows = [("endpoint", "model", "state", "last failure")]
    for side, e in state["endpoints"].items():
        is_over = e.get("tried") and not e.get("failing")
        rows.append((side, e["model"], health[side].lasting, (not is_over and e["last_error"]) or "-"))
    shown = [[one_line(str(cell), MAX_CELL) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)][:-1]
    lines = []
    for *cells, failure in shown:
        head = "".join(f"{cell:<{n}}  " for cell, n in zip(cells, widths, strict=True))
        folded = textwrap.wrap(failure, max(20, width - len(head))) or ["-"]
        lines += [head + folded[0], *(" " * len(head) + more for more in folded[1:])]
    return lines


def _breakers(state: dict[str, Any]) -> list[str]:
    """Print why a server is left alone, and until when; nothing where none is. Of several, `_servers` says it."""
    from ..client.side_health import breaker_words

    alone = {side: e for side, e in state["endpoints"].items() if side != "server" or len(state.get("servers", ())) < 2}
    found = (breaker_words(endpoint, f"the {side}") for side, endpoint in alone.items())
    return [f"{'' if i else 'breaker':13}{words}" for i, words in enumerate(filter(None, found))]


def _servers(state: dict[str, Any]) -> list[str]:
    """Print what is known of each of several servers; nothing where there is one."""
    from ..client.amounts import dollars
    from ..client.side_health import breaker_words

    found = state.get("servers") or []
    if len(found) < 2:
        return []
    lines = []
    for one in found:
        name = f"{one['name']}/{one['model']}"
        middle, last = one["ttft_p50_s"], one["ttft_p99_s"]
        ttft = "not known yet" if middle is None else f"{middle:.2f} s, {last:.2f} s in 1 of 100"
        hedges = f", {count_of(one['hedges'], 'second request')}" if one["hedges"] else ""
        asked = f"{100 * one['share']:.0f} % of the requests{hedges}, {dollars(one['usd_today'])} today"
        why = breaker_words(one, "it") or (one["state"] == "off" and "off") or ""
        lines.append(one_line(f"{name}: first token {ttft}; {asked}{'; ' if why else ''}{why}", MAX_CELL))
    return [f"{'' if i else 'servers':13}{line}" for i, line in enumerate(lines)]


def _keys(state: dict[str, Any]) -> list[str]:
    """Print what each key with a name has spent, and may; nothing where there is none, or a stranger asks."""
    from ..client.key_words import may_words, reached_words, spent_words

    lines = []
    for key in state.get("keys") or ():
        said = filter(None, (spent_words(key), reached_words(key), may_words(key)))
        lines.append(one_line(f"{key['name']}: {'; '.join(said)}", MAX_CELL))
    return [f"{'' if i else 'keys':13}{line}" for i, line in enumerate(lines)]


def _grades(state: dict[str, Any]) -> list[str]:
    """Print which side is a stand-in, and why; nothing where there is one side."""
    grades = state.get("grades")
    return [f"grades       {grades['why']}"] if grades and len(state["endpoints"]) > 1 else []


def _refused(server: dict[str, Any]) -> list[str]:
    """Print what the server has refused, which it is not asked for; nothing where it has refused nothing."""
    lines: list[str] = []
    for one in server.get("refused") or ():
        what, said = one["what"].replace("_", " "), one_line(one["said"], MAX_CELL)
        again = f"asked again in {one['for_s'] / 3600:.1f} h, or after `disco config reload`"
        lines.append(f"{'' if lines else 'refused':13}{what}: {said} ({again})")
    return lines


def _split(state: dict[str, Any]) -> list[str]:
    """Print the link to the partner of a split device; nothing for a whole one."""
    from .split import lines_of

    return lines_of(state["split"]) if state.get("split") else []


def _fleet(device: dict[str, Any]) -> list[str]:
    """Print the hosts of a fleet; nothing for a whole device."""
    fleet = device.get("fleet")
    if not fleet:
        return []
    n, layers, more = fleet["hosts"], fleet["layers_away"], fleet["replicas"]
    replicas = f", {more} replica{'s' * (more != 1)}" if more else ""
    return [f"fleet        {fleet['state']}: {layers} layers at {n} host{'s' * (n != 1)}{replicas}"]


def _engine(device: dict[str, Any]) -> list[str]:
    """Print the engine's answers and the use of its KV cache; nothing before its first answer."""
    stats = device.get("engine")
    if not stats:
        return []
    used, cells, mib = stats["cells_used"], device["n_cells"], device["bytes_per_token"] / 2**20
    held = f"{used} of {cells} tokens ({100 * used / cells:.0f} %, {used * mib:.0f} of {cells * mib:.0f} MiB)"
    held += f", {device['n_ctx']} an answer's at most"
    held += f", a number as {device['kv_type']}" if device.get("kv_type", "f16") != "f16" else ""
    swapped = f"{stats['swapped']} swapped out ({stats['saved_bytes'] / 2**20:.0f} MiB)"
    running = f"{stats['running']} running, {stats['paused']} paused, {swapped}, {stats['waiting']} waiting"
    guessed = f"; {stats['accepted']} of {stats['drafted']} guessed tokens right" if stats.get("drafted") else ""
    return [
        f"answers      {running}; {stats['preemptions']} preemptions",
        f"KV cache     {held}; {stats['cached_tokens']} tokens reused, {stats['prompt_tokens']} prefilled",
        f"iteration    {1e3 * stats['iteration_s']:.1f} ms, {100 * stats['python_share']:.1f} % of it Python{guessed}",
        *_disk(stats),
    ]


def _disk(stats: dict[str, Any]) -> list[str]:
    """Print the idle conversations on disk, and why no more are written."""
    n, error = stats.get("disk_texts", 0), stats.get("disk_error", "")
    lines = [f"{count_of(n, 'conversation')}, {stats.get('disk_bytes', 0) / 2**20:.0f} MiB"] * bool(n) + [error] * bool(
        error
    )
    return ["on disk      " + "; ".join(lines)] if lines else []


def _adapters(device: dict[str, Any]) -> list[str]:
    """Print the names of the device's LoRA adapters, and why some are missing."""
    adapters = device.get("adapters") or {}
    there = ", ".join(f"disco/device:{name}" for name, why in adapters.items() if not why)
    lines = [there] * bool(there) + [f"not {name}: {why}" for name, why in adapters.items() if why]
    return [f"{'' if i else 'adapters':13}{line}" for i, line in enumerate(lines)]


def _models(state: dict[str, Any]) -> list[str]:
    """Print the models beside the device's; nothing where there are none."""
    lines = [
        f"disco/{m['name']}: {m['state']}"
        + (f", {m['memory_bytes'] / 2**30:.1f} GiB" if m["memory_bytes"] else "")
        + f", {m['expected_per_hour']:.1f} requests an hour expected"
        for m in state.get("models") or ()
    ]
    return [f"{'' if i else 'models':13}{line}" for i, line in enumerate(lines)]


def _speed(state: dict[str, Any]) -> list[str]:
    """Print the model's layers on a GPU and the state of the tune; nothing where there is neither."""
    from ..client.side_health import without_experts

    device = state["endpoints"].get("device", {})
    tune = {
        "waiting": "for an idle moment, to measure what is fastest here (`disco tune` does it at once)",
        "measuring": "what is fastest here, until somebody asks something",
        "done": "what was measured holds from the next start on",
        "failed": "the model could not be measured; the log says why",
    }.get(state.get("tune") or "")
    layers = device.get("n_gpu_layers")
    moe = without_experts(device.get("n_cpu_moe") or 0)
    lines = [f"GPU          {'all' if layers < 0 else layers} layers{moe}"] if layers else []
    return lines + ([f"tune         {tune}"] if tune else [])


def _money(money: dict[str, Any]) -> list[str]:
    """Print the exchange rate and its effect, the price of a server if there is one, spending and caps."""
    from ..client.amounts import amount_of, dollars, figure

    price, power, gone = money["server_price"], money["power"], money["spent"]
    now = money["effective_usd_per_kwh"]
    why = "" if power["on_mains"] else f" (battery at {100 * (power['charge'] or 0):.0f} %)"
    hot = ", throttled by heat" if power["throttled"] else ""
    lines = [f"a kWh        is worth {dollars(now)} now{why}{hot}, {dollars(money['usd_per_kwh'])} set"]
    spent = f"{figure(gone['wh_today'])} Wh here today"
    if price is not None:
        limit = money["threshold_usd_per_kwh"]
        lines[0] += f"; {money['scarcer']} is scarce" + (
            "" if limit is None else f", which changes at {dollars(limit)}"
        )
        put, out = price["input_usd_per_mtok"], price["output_usd_per_mtok"]
        known = "" if price["known"] else " (not known: the dearest of all counts, see `disco doctor`)"
        lines.append(f"server price ${put:g} in, ${out:g} out, a million tokens{known}")
        spent = (
            f"{dollars(gone['usd_today'])} today, {dollars(gone['usd_this_month'])} this month to the server; {spent}"
        )
    lines.append(f"spent        {spent}")
    for name, cap in money["caps"].items():
        used, limit, held = (amount_of(cap[of] or 0.0, cap["unit"]) for of in ("spent", "limit", "reserved"))
        lines.append(f"cap          {name}: {used} of {limit}, {held} held for what runs")
    return lines


def _history(state: dict[str, Any]) -> list[str]:
    """Print why requests go unrecorded; nothing while they are recorded."""
    error = state["history"].get("error")
    return [f"history      none: {error}"] if error else []


def _energy(energy: dict[str, Any]) -> list[str]:
    """Print the source of this machine's energy figures, and the energy of a token."""
    per = energy["per_token"]
    if per is None:
        return []
    measured = f"measured over {per['windows']} windows" if per["windows"] else "assumed, not measured"
    error = "" if per["relative_error"] is None else f", ±{100 * per['relative_error']:.0f} %"
    prefill, decode = 1e3 * per["prefill_j_per_token"], 1e3 * per["decode_j_per_token"]
    source = f"{per['source']}, {measured}{error}"
    return [f"energy       {prefill:.3g} mJ a prompt token, {decode:.3g} an answer's ({source})"]


def _estimators(known: dict[str, Any], sides: dict[str, Any]) -> list[str]:
    """Print the estimators, with sample counts and the share of censored ones; of a side that is not there, nothing."""
    server, device, paced = known["server_ttft"], known["device_ttft"], known["realised"]
    quantiles = server["quantiles_s"]
    ratio = "" if paced["ratio"] is None else f", used {paced['ratio']:.3f} of {paced['requests']} requests' tokens"
    censored, answers = 100 * server["censored_share"], 100 * server["availability"]
    ttft = ", ".join(f"{name} {quantiles[name]:.2f} s" for name in ("p50", "p95", "p99"))
    prompts, outputs = known["prompts"], known["outputs"]
    c_ms, k_ms = 1e3 * device["c_s"], 1e3 * device["k_s_per_token"]
    limited = f"{known['constrained']} limited to {known['budget']:g}"
    lines = [f"server TTFT  {_seen(ttft, server['n'])}"] if "server" in sides else []
    if lines and server["n"]:
        changed = count_of(server["shifts"], "time")
        lines[0] += f", {censored:.0f} % of them ended before a first token"
        lines.append(f"             answers {answers:.0f} % of the requests; its speed changed {changed}")
    if "device" in sides:
        lines.append("device TTFT  " + _seen(f"{c_ms:.0f} ms + {k_ms:.2f} ms a token", device["n"]))
    return [
        *lines,
        "prompts      " + _seen(f"{prompts['mean']:.0f} tokens", prompts["n"]),
        "answers      " + _seen(f"{outputs['mean']:.0f} tokens", outputs["n"]),
        f"budget       {limited}, handed out now {known['handed_out']:.3f}{ratio}",
        *_hedges(known.get("hedge")),
    ]


def _seen(figure: str, n: int) -> str:
    """Say a figure with its `n` samples, or that it is no more than expected."""
    return f"{figure}; {count_of(n, 'sample')}" if n else f"not seen yet; expected: {figure}"


def _hedges(hedge: dict[str, Any] | None) -> list[str]:
    """Print when the server is asked a second time, and how often it was; nothing where that never is."""
    if not hedge or not (hedge["share"] and (hedge["used"] or hedge["after_s"])):
        return []
    after_s = hedge["after_s"]
    when = "no second request now" if after_s is None else f"a second request after {after_s:.2f} s of silence"
    return [f"hedge        {when}; {100 * hedge['used']:.1f} % of the prompt tokens sent twice"]
