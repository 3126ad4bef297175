"""`disco eval --history --rules` and `--set`: where the user's own requests would have gone, and what that costs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.cli.main import main
from disco_daemon.dispatch.make import make_policy
from disco_daemon.dispatch.rules import Rule, Standing
from disco_daemon.errors import ConfigError
from disco_daemon.simulate.recorded import Recorded
from disco_daemon.simulate.whatif import WhatIf, WhatIfSetting, WhatIfTerms
from disco_daemon.simulate.whatif_rules import Router, RuleList, RulesFindings, play
from disco_daemon.store.recorded_outcomes import outcomes
from disco_daemon.types import BOTH, Grade, Outcome, Relation, Side, relation
from tests.unit.simulate.test_whatif import PRICES, history, store

NOW, TERMS = WhatIfSetting(0.3, 0.5), WhatIfTerms(PRICES)
LONG = 150  # tokens


def rule(name: str, use: str, **when: Any) -> Rule:
    return Rule.of({"use": use, **when}, name)


def router(between: Relation | None = None, sides: frozenset[Side] = BOTH) -> Router:
    models = {"smol": Side.DEVICE, "gpt": Side.SERVER}
    return Router(sides, lambda _: Standing(between or Relation()), models.get)


def played(*lists: RuleList, past: list[Outcome] | None = None, by: Router | None = None) -> RulesFindings:
    return play(past or history(), lambda _: TERMS, make_policy("optimal"), NOW, lists, by or router())


def routes(found: RulesFindings, i: int = 0) -> dict[tuple[str, str], int]:
    return found.lists[i].routes


def test_each_request_goes_where_the_first_rule_that_fits_sends_it_and_costs_what_that_side_costs() -> None:
    past = history()
    n_long = sum(o.prompt_tokens >= LONG for o in past)
    by_length = RuleList("length", (rule("long", "server", prompt_at_least=LONG), rule("rest", "device")))
    found = played(
        RuleList("none", ()), by_length, RuleList("all", (rule("s", "server"),)), RuleList("none", (), private=True)
    )
    assert routes(found) == {("no rule", "as planned"): 300}
    assert routes(found, 1) == {("rest", "this machine"): 300 - n_long, ("long", "a server"): n_long}
    none, length, server, device = (one.point for one in found.lists)
    plain = WhatIf(Recorded.of(past), TERMS, make_policy("optimal")).predict(NOW.usd_per_kwh, NOW.budget)
    assert none == plain  # without rules it is the replay that there was
    recorded = Recorded.of(past)
    long = recorded.prompt >= LONG
    usd = recorded.prompt[long].sum() * 0.15e-6 + recorded.output[long].sum() * 0.60e-6
    assert length.server_usd == pytest.approx(usd)
    assert length.device_won == pytest.approx(1 - n_long / 300)
    assert (server.device_won, server.device_wh) == (0.0, 0.0)
    assert (device.device_won, device.server_usd) == (1.0, 0.0)
    assert server.mean_ttft_s == pytest.approx(recorded.server_s.mean())
    assert found.was["mean_ttft_s"] == pytest.approx(sum(o.ttft_s or 0 for o in past) / 300)


def test_a_race_starts_both_sides_whatever_the_budget() -> None:
    found = played(RuleList("race", (rule("both", "race"),)))
    assert routes(found) == {("both", "both at once"): 300}
    recorded = Recorded.of(history())
    best = [min(*pair) for pair in zip(recorded.phone.ttft_s(recorded.fresh), recorded.server_s, strict=True)]
    assert found.lists[0].point.mean_ttft_s == pytest.approx(sum(best) / 300)


def test_grades_decide_who_is_better_and_floors_leave_nobody() -> None:
    small, large = Grade(20.0, parameters=1.0), Grade(80.0, parameters=70.0)
    by = router(relation(small, large))
    better = RuleList("better", (rule("good", "better"),))
    floor = RuleList("floor", (rule("good", "plan", min_grade=60.0),))
    found = played(better, floor, RuleList("none", ()), by=by)
    assert routes(found) == {("good", "a server first"): 300}
    assert routes(found, 1) == {("good", "a server"): 300}
    assert routes(found, 2) == {("no rule", "a server first"): 300}  # a stand-in is not preferred, rule or not
    with pytest.raises(ConfigError, match=r"only 0 can be played .* 300 by 'good' \(refused\)"):
        played(RuleList("floor", (rule("good", "plan", min_grade=99.0),)), by=by)


def test_what_the_history_does_not_keep_is_counted_and_left_out_of_the_figures() -> None:
    rules = (rule("tools", "server", tools=True, prompt_at_least=LONG), rule("rest", "device"))
    past = history()
    n_long = sum(o.prompt_tokens >= LONG for o in past)
    found = played(RuleList("none", ()), RuleList("tools", rules))
    # Where its other condition does not hold, it is known not to fit.
    assert routes(found, 1) == {("rest", "this machine"): 300 - n_long, ("tools", "not known"): n_long}
    assert found.played.sum() == 300 - n_long
    assert found.lists[1].point.device_won == 1.0
    assert any("'not known': the rule may fit or not" in note for note in found.notes)
    kinds = [replace(o, kind="tools,code" if i % 2 else "code") for i, o in enumerate(past)]
    known = Counter(o.prompt_tokens >= LONG and i % 2 == 1 for i, o in enumerate(past))
    found = played(RuleList("tools", rules), past=kinds)
    assert routes(found) == {("rest", "this machine"): known[False], ("tools", "a server"): known[True]}
    with pytest.raises(ConfigError, match="only 0 can be played under all these rules, and 20 are needed: 300 by 'is'"):
        played(RuleList("headers", (rule("is", "device", headers={"X-Team": "legal*"}),)))


def test_hours_and_days_are_those_of_the_user_and_names_are_those_asked_for() -> None:
    noon = datetime(2026, 11, 23, 12, 0).timestamp()  # noqa: DTZ001 - a Monday of the user
    past = [replace(o, created=noon + 3600 * 12 * i) for i, o in enumerate(history(40))]
    found = played(RuleList("noon", (rule("noon", "device", hours="11:00-13:00"), rule("rest", "server"))), past=past)
    assert routes(found) == {("noon", "this machine"): 20, ("rest", "a server"): 20}
    found = played(RuleList("week", (rule("week", "device", days=["mon", "tue"]), rule("rest", "server"))), past=past)
    assert routes(found)["week", "this machine"] == 3 + 4 + 4  # from that Monday noon on, for 20 days
    named = [replace(o, model="mine") if i < 10 else o for i, o in enumerate(past)]
    found = played(RuleList("model", (rule("mine", "server", model="MI*"),)), past=named)
    assert routes(found) == {("no rule", "as planned"): 30, ("mine", "a server"): 10}


def test_what_the_client_said_stays_and_private_stays_here() -> None:
    past = history(60)
    past = [
        *(replace(o, model="disco/device") for o in past[:10]),
        *(replace(o, private=True) for o in past[10:20]),
        *(replace(o, model="gpt") for o in past[20:30]),
        *(replace(o, model="disco/coder") for o in past[30:35]),
        *past[35:],
    ]
    found = played(RuleList("all", (rule("s", "prefer-server"),)), past=past)
    assert routes(found) == {
        ("s", "a server first"): 25, ("s", "this machine"): 20, ("s", "a server"): 10, ("no rule", "disco/coder"): 5,
    }  # fmt: skip
    assert found.played.sum() == 55
    found = played(RuleList("none", ()), RuleList("private", (), private=True), past=past)
    assert routes(found, 1)["private", "refused"] == 10
    assert found.played.sum() == 45
    alone = played(RuleList("all", (rule("s", "plan"),)), past=past, by=router(sides=frozenset({Side.SERVER})))
    assert routes(alone)["s", "a server"] == 35


def test_a_named_model_goes_to_its_side_and_one_without_times_is_only_counted() -> None:
    rules = (rule("a", "gpt", prompt_at_least=LONG), rule("b", "smol"))
    past = history()
    n_long = sum(o.prompt_tokens >= LONG for o in past)
    found = played(RuleList("models", rules))
    assert routes(found) == {("b", "smol"): 300 - n_long, ("a", "gpt"): n_long}
    assert found.lists[0].point.device_won == pytest.approx(1 - n_long / 300)
    found = played(RuleList("models", (rule("a", "disco/coder", prompt_at_least=LONG),)))
    assert routes(found)["a", "disco/coder"] == n_long
    assert found.played.sum() == 300 - n_long


# --- the command, on a real store -----------------------------------------------------------------------------------

RULES = f"""
[[rules]]
name = "long"
prompt_at_least = {LONG}
use = "server"

[[rules]]
name = "rest"
use = "device"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "config.toml").write_text(
        f'[server]\nbase_url = "https://api.openai.com/v1"\nmodel = "gpt-4o-mini"\n'
        f'[history]\npath = "{tmp_path / "h.sqlite"}"\n[[rules]]\nname = "mine"\nmodel = "mine"\nuse = "server"\n',
        "utf-8",
    )
    monkeypatch.setenv("DISCO_CONFIG", str(tmp_path / "config.toml"))
    past = history(120)
    store(
        tmp_path / "h.sqlite",
        [replace(past[0], private=True), *past[1:60], *(replace(o, kind="code") for o in past[60:])],
    )
    (tmp_path / "other.toml").write_text(RULES, "utf-8")
    return tmp_path


def test_the_command_sets_a_file_and_sets_beside_the_rules_in_force(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "--history", "--rules", str(home / "other.toml"), "--set", "fast,best,frugal,private"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    lists = {one["name"]: one for one in told["lists"]}
    assert list(lists) == ["in force", "other.toml", "set fast", "set best", "set frugal", "set private"]
    assert (told["requests"], told["played"]) == (120, 120)
    past = outcomes(home / "h.sqlite")
    n_long = sum(o.prompt_tokens >= LONG for o in past[1:])  # the private one may not leave, whatever a rule says
    to = {name: {(r["rule"], r["to"]): r["requests"] for r in one["routes"]} for name, one in lists.items()}
    assert to["other.toml"]["long", "a server"] == n_long
    assert to["set fast"]["both at once", "both at once"] == 119
    assert to["set best"]["the better model", "a server first"] == 119
    assert to["set frugal"]["this machine first", "this machine first"] == 119
    assert to["set private"] == {("no rule", "this machine"): 120}
    assert lists["set private"]["usd_per_day"] == 0.0
    assert lists["set frugal"]["usd_per_day"] == 0.0
    assert lists["set fast"]["mean_ttft_s"] <= min(one["mean_ttft_s"] for one in told["lists"])
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "decided by" in said
    assert "Simulated: where 120 requests would have gone." in said


def test_a_policy_that_is_a_choice_of_a_side_is_played_whatever_the_grades(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (home / "config.toml").open("a") as file:
        file.write('[policy]\nname = "all-device"\n')
    assert main(["eval", "--history", "--set", "fast", "--json"]) == 0
    in_force, fast = json.loads(capsys.readouterr().out)["lists"]
    assert [one["to"] for one in in_force["routes"]] == ["as planned", "this machine"]
    assert in_force["device_won"] == 1.0
    assert fast["routes"][0]["to"] == "both at once"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "fastest"], "no set is called 'fastest'"),
        (["--rules", "nowhere.toml"], "--rules: nowhere.toml cannot be read"),
        (["--rules", "{home}/h.sqlite"], "--rules: "),
        (["--rules", "{home}/no.toml"], "no.toml is no TOML"),
        (["--set", ""], "no set is called ''"),
        (["--rules", "{home}/config.toml"], ""),
        (["--rules", "{home}/empty.toml"], "has no [[rules]]"),
        (["--rules", "{home}/wrong.toml"], "wrong.toml, line 2: rule '1'"),
        (["--rules", "{home}/other.toml", "--servers"], "--servers and --rules are questions of their own"),
        (["--set", "fast", "--budgets", "0.5"], "--set plays the settings in force"),
    ],
)
def test_the_command_says_what_is_wrong(
    home: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    (home / "no.toml").write_text("[[rules]", "utf-8")
    (home / "empty.toml").write_text("rules = 3\n", "utf-8")
    (home / "wrong.toml").write_text('[[rules]]\nuse = "nobody-has-this"\n', "utf-8")
    assert main(["eval", "--history", *(word.format(home=home) for word in words)]) == (1 if said else 0)
    assert said in capsys.readouterr().err


def test_what_a_request_was_and_whether_it_was_private_come_back(home: Path) -> None:
    found = outcomes(home / "h.sqlite")
    assert [o.private for o in found] == [True] + 119 * [False]
    assert [o.kind for o in found] == 60 * [None] + 60 * ["code"]


def test_of_several_servers_the_bill_has_the_price_of_the_one_that_was_asked_last(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    past = [
        replace(o, attempts=tuple(replace(a, server="cloud") if a.side is Side.SERVER else a for a in o.attempts))
        for o in history(120)
    ]
    store(home / "several.sqlite", past)
    servers = "".join(
        f'[[servers]]\nname = "{name}"\nmodel = "gpt"\nbase_url = "http://127.0.0.1:9/{name}/v1"\n'
        f"input_usd_per_mtok = {usd}\noutput_usd_per_mtok = {4 * usd}\n"
        for name, usd in (("free", 0.0), ("cloud", 1.0))
    )
    (home / "config.toml").write_text(f'[history]\npath = "{home / "several.sqlite"}"\n{servers}', "utf-8")
    assert main(["eval", "--history", "--budgets", "0.5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    prompt, answer, _ = Recorded.of(past).facts.bill
    assert told["recorded"]["server_usd"] == pytest.approx((prompt + 4 * answer) / 1e6)
