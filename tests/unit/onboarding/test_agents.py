"""What each agent is given, against what a user's shell and files say already."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from disco_daemon.cli import launch
from disco_daemon.config.schema import keys
from disco_daemon.onboarding.agents import AGENTS, Agent, AgentRun, AgentTarget

ADDRESS = "http://127.0.0.1:4747"
MODEL = "disco/device"
TARGET = AgentTarget(ADDRESS, 'pa"ss\\wörd', MODEL, 8192, "/disco/launch", {"models": [{"slug": MODEL}]})
ELSEWHERE = "https://elsewhere.example"
# Variables by which a user sends each program elsewhere, or has it name another model or key, as they are exported.
THEIRS = {
    "codex": (),
    "claude": (
        "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_MODEL", "ANTHROPIC_UNIX_SOCKET",
        "ANTHROPIC_CUSTOM_HEADERS", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL",
        "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY", "CLAUDE_CODE_USE_MANTLE",
    ),
    "opencode": ("OPENCODE_CONFIG_CONTENT",),
    "aider": ("OPENAI_API_BASE", "OPENAI_BASE_URL", "OPENAI_API_KEY", "AIDER_OPENAI_API_KEY"),
    "continue": (),
    "zed": (),
    "open-webui": ("OPENAI_API_BASE_URL", "OPENAI_API_BASE_URLS", "OPENAI_API_KEY", "OPENAI_API_KEYS"),
}  # fmt: skip


def runs() -> Iterator[tuple[Agent, AgentRun]]:
    assert set(THEIRS) == set(AGENTS)
    for agent in AGENTS.values():
        yield agent, agent.run(TARGET)


def flags(run: AgentRun, name: str) -> list[str]:
    return [value for flag, value in zip(run.arguments, run.arguments[1:], strict=False) if flag == name]


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)
    else:
        yield str(value)


def test_nothing_of_the_shell_sends_an_agent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for agent, run in runs():
        with monkeypatch.context() as shell:
            for name in THEIRS[agent.name]:
                shell.setenv(name, ELSEWHERE)
            left = launch._environment(run)
        assert [name for name, value in left.items() if value == ELSEWHERE] == [], agent.name


def test_no_agent_gets_a_variable_that_is_a_setting_of_disco_nor_the_key_for_controls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(launch.CONTROL_KEY, "the-owner's")
    settings = {f"DISCO_{key.replace('.', '_').upper()}" for key in keys()}
    assert launch.CONTROL_KEY in settings
    for agent, run in runs():
        assert settings.isdisjoint(run.env), agent.name
        assert "the-owner's" not in launch._environment(run).values(), agent.name


def test_the_key_is_no_argument_that_others_on_the_machine_can_read() -> None:
    for agent, run in runs():
        assert not any(TARGET.key in word or json.dumps(TARGET.key) in word for word in run.arguments), agent.name


def test_what_is_shown_is_made_without_the_key() -> None:
    for agent in AGENTS.values():
        shown = agent.run(replace(TARGET, key=launch.HIDDEN))
        words = [*shown.arguments, *map(str, shown.env.values()), *strings(list(shown.files.values()))]
        assert any(launch.HIDDEN in word for word in words), agent.name
        assert "ss\\" not in "".join(words), agent.name


def test_settings_of_claude_code_do_not_go_over_what_is_set() -> None:
    run = AGENTS["claude"].run(TARGET)
    [path] = flags(run, "--settings")
    assert path == f"{TARGET.folder}/settings.json"
    over = run.files["settings.json"]["env"]
    theirs = dict.fromkeys(THEIRS["claude"], ELSEWHERE)
    found = theirs | over  # the command line's settings go over the user's and the project's
    assert found["ANTHROPIC_BASE_URL"] == ADDRESS
    assert found["ANTHROPIC_AUTH_TOKEN"] == TARGET.key
    assert ELSEWHERE not in found.values()
    assert not any(value for name, value in found.items() if name.startswith("CLAUDE_CODE_USE_"))


def test_a_subcommand_of_codex_hears_of_the_model_as_well() -> None:
    run = AGENTS["codex"].run(TARGET)
    assert set(run.arguments[::2]) == {"-c"}, "all else stays with the program before a subcommand"
    told = dict(word.partition("=")[::2] for word in flags(run, "-c"))
    assert json.loads(told["model"]) == json.loads(told["review_model"]) == MODEL
    assert json.loads(told["model_providers.disco.env_key"]) in run.env
    assert "profile" not in told, "which Codex takes no longer"


def test_a_dotenv_and_settings_of_aider_do_not_go_over_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    run = AGENTS["aider"].run(TARGET)
    monkeypatch.setattr(os, "environ", launch._environment(run))
    dotenv = {"OPENAI_API_BASE": ELSEWHERE, "OPENAI_BASE_URL": ELSEWHERE, "OPENAI_API_KEY": "theirs"}
    found = os.environ | dotenv  # then, in the order of aider/main.py:
    found |= dict([flags(run, "--set-env")[0].split("=", 1)])
    found["OPENAI_API_KEY"] = found["AIDER_OPENAI_API_KEY"]
    found["OPENAI_API_BASE"] = flags(run, "--openai-api-base")[0]
    assert found["OPENAI_BASE_URL"] == found["OPENAI_API_BASE"] == TARGET.v1
    assert found["OPENAI_API_KEY"] == TARGET.key
    assert {*flags(run, "--model"), *flags(run, "--weak-model"), *flags(run, "--editor-model")} == {f"openai/{MODEL}"}


def test_no_proxy_gets_what_is_asked_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "a.example, b.example")
    monkeypatch.setenv("no_proxy", "b.example,c.example")
    card = {"id": MODEL}
    for agent in AGENTS.values():
        setup, _ = launch._setup(agent, card, {"models": []}, ADDRESS, "")
        for name in ("NO_PROXY", "no_proxy"):
            assert setup.env[name] == "a.example,b.example,c.example,127.0.0.1", agent.name
            if agent.name == "claude":  # whose settings may have a proxy
                assert setup.files["settings.json"]["env"][name] == setup.env[name]
        setup, _ = launch._setup(agent, card, {"models": []}, "http://desk.example:4747", "")
        assert not {"NO_PROXY", "no_proxy"} & set(setup.env), "whether another machine is asked through one is theirs"


def test_settings_of_opencode_leave_no_other_provider_and_no_other_model() -> None:
    found = json.loads(AGENTS["opencode"].run(TARGET).env["OPENCODE_CONFIG_CONTENT"] or "")
    assert found["enabled_providers"] == list(found["provider"]) == ["disco"]
    assert found["disabled_providers"] == []
    models = [found["model"], found["small_model"], *(agent["model"] for agent in found["agent"].values())]
    assert set(models) == {f"disco/{MODEL}"}
