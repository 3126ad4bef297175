"""`[[rules]]` and `policy.set` in config.toml: what is wrong is refused at its line, with what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from disco_daemon.config.layers import as_dict, load, set_values, with_values
from disco_daemon.config.policy_sets import NONE, keys_of_sets, policy_sets
from disco_daemon.config.rule_settings import effective_rules
from disco_daemon.config.schema import LIVE, Config, PolicySettings, RuleSettings, keys
from disco_daemon.dispatch.rules import DAYS, NAMES
from disco_daemon.errors import ConfigError

GOOD = """\
[server]
model = "big"

[[models]]
name = "coder"
model = "/m/coder.gguf"

[[rules]]
name = "pictures"
use = "server"
images = true

[[rules]]
use = "disco/coder"
code = true
language = ["de", "en"]
[rules.headers]
X-Team = "sales*"

[[rules]]
name = "the rest"
use = "better"
min_grade = 40
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, "utf-8")
    return path


def test_rules_are_read_top_down_and_keep_their_names(tmp_path: Path) -> None:
    config = load(write(tmp_path, GOOD), {})
    pictures, second, rest = effective_rules(config)
    assert [str(rule) for rule in (pictures, second, rest)] == ["rule 'pictures'", "rule '2'", "rule 'the rest'"]
    assert dict(second.when) == {"headers": {"X-Team": "sales*"}, "code": True, "language": ("de", "en")}
    assert (second.model, pictures.model) == ("disco/coder", "")
    assert as_dict(config)["rules"][0]["name"] == "pictures"
    assert with_values(config, {"policy.budget": 0.1}).rules == config.rules
    assert "rules" not in as_dict(Config())


def test_the_settings_of_a_rule_are_the_conditions_that_there_are() -> None:
    names = {field.name for field in msgspec.structs.fields(RuleSettings)}
    assert names - {"use", "name", "min_parameters", "min_grade"} == set(NAMES)
    assert get_args(get_args(get_type_hints(RuleSettings)["days"])[0]) == DAYS


@pytest.mark.parametrize(
    ("rule", "line", "says"),
    [
        ('use = "sever"', 3, r"rule 'x' use = 'sever' is nobody: did you mean .*server"),
        ('use = "disco/server"', 3, r"for a side say 'server'"),
        ('use = "disco/codr"', 3, r"is nobody: did you mean disco/coder"),
        ('use = "nobody/model"', 3, r"is nobody"),
        ("images = true", 1, r"rule 'x' lacks 'use': say who may answer, better, device"),
        ('use = "device"\nimage = true', 4, r"rule 'x' has no 'image': did you mean images"),
        ('use = "device"\nimages = "yes"', 4, r"rule 'x' images must be true or false or null, not a text"),
        ('use = "device"\nprompt_at_least = -1', 4, r"prompt_at_least must be a whole number of at least 0"),
        ('use = "device"\nlanguage = "german"', 4, r"language 'german': .*known are ar, de"),
        ('use = "device"\nhours = "late"', 4, r"hours = 'late': give a span such as '22:00-06:00'"),
        ('use = "device"\nhours = "06:00-06:00"', 4, r"is no time at all"),
        ('use = "device"\ndays = ["freitag"]', 4, r"days.0. must be one of fri, mon, .*did you mean fri"),
        ('use = "device"\nprompt_at_least = 9\nprompt_at_most = 8', 5, r"no prompt has at least 9 and at most 8"),
        ('use = "disco/coder"\nmin_grade = 8', 4, r"'disco/coder' is a model: leave out one"),
        ('use = "device"\nmodel = ["a", ""]', 4, r"model has an empty pattern"),
        ('use = "device"', 1, r"fits every request, so no rule below it is ever read: put it last"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused_at_its_line(tmp_path: Path, rule: str, line: int, says: str) -> None:
    last = '\n[[rules]]\nname = "last"\nuse = "race"\n'
    path = write(tmp_path, f'[[rules]]\nname = "x"\n{rule}\n{last}\n[[models]]\nname = "coder"\nmodel = "/m"\n')
    with pytest.raises(ConfigError, match=rf"config\.toml, line {line}: .*{says}"):
        load(path, {})


def test_two_rules_of_one_name_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, '[[rules]]\nname = "a"\nuse = "device"\ncode = true\n' * 2)
    with pytest.raises(ConfigError, match=r"line 6: .*another rule is called 'a' already"):
        load(path, {})


# --- sets -------------------------------------------------------------------------------------------------------------


def test_each_set_has_one_sentence_and_only_live_settings_of_those_there_are() -> None:
    assert tuple(policy_sets()) == get_args(get_type_hints(PolicySettings)["set"])
    for name, one in policy_sets().items():
        assert one.keys() <= {"about", "settings", "rules"}
        assert one["about"].endswith(".")
        assert one["about"].count(".") == 1
        assert (one.keys() == {"about"}) is (name == NONE)
        for rule in one.get("rules", ()):
            msgspec.convert(rule, RuleSettings)
    assert keys_of_sets() <= LIVE
    assert keys_of_sets() <= set(keys())


def test_a_set_lies_below_what_the_user_has_set_and_its_rules_behind_the_users(tmp_path: Path) -> None:
    assert load(write(tmp_path, '[policy]\nset = "frugal"\n'), {}).policy.hedge == 0
    assert load(write(tmp_path, '[policy]\nset = "frugal"\nhedge = 0.2\n'), {}).policy.hedge == 0.2
    assert load(tmp_path / "config.toml", {"DISCO_POLICY_HEDGE": "0.3"}).policy.hedge == 0.3
    own = '[policy]\nset = "best"\n[[rules]]\nname = "mine"\nuse = "device"\ncode = true\n'
    assert [rule.name for rule in effective_rules(load(write(tmp_path, own), {}))] == ["mine", "the better model"]
    assert effective_rules(load(write(tmp_path, ""), {})) == ()


def test_a_set_writes_nothing_but_its_name(tmp_path: Path) -> None:
    path = write(tmp_path, "[policy]\nkappa = 0.1\n")
    assert set_values(path, {"policy.set": "frugal"}).policy.hedge == 0
    assert path.read_text("utf-8") == '[policy]\nkappa = 0.1\nset = "frugal"\n'
    assert set_values(path, {"policy.set": "balanced"}).policy == PolicySettings(kappa=0.1)


def test_private_wins_whoever_says_it(tmp_path: Path) -> None:
    path = write(tmp_path, '[policy]\nprivate = false\nset = "private"\n')
    assert load(path, {}).policy.private
    assert load(path, {"DISCO_POLICY_PRIVATE": "false"}).policy.private
    changes: list[dict[str, Any]] = [{"policy.private": False}, {"policy.private": "false"}]
    for change in changes:
        with pytest.raises(ConfigError, match=r"policy.set = 'private' keeps every request on this machine: choose"):
            set_values(path, change)
    assert not set_values(path, {"policy.set": "balanced"}).policy.private
