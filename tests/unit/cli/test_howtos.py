"""What the how-tos tell people to type is understood, the settings exist, and the links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from disco_daemon.cli.main import make_parser
from disco_daemon.config import layers as config
from disco_daemon.config.schema import keys
from tests.fixtures.documents import section

DOCS = Path(__file__).parent.parent.parent.parent / "docs"
PAGES = sorted({*DOCS.glob("howto/*.md")} - {DOCS / "howto/binary.md"})
# About the daemon and its two sides, and no program that asks it.
OF_THE_DAEMON = {"fleet.md", "offline.md", "openai.md", "split.md", "two-machines.md", "vllm.md"}
TEXTS = {page.name: page.read_text("utf-8") for page in [*PAGES, DOCS / "reference/metrics.md"]}


def typed(text: str) -> list[list[str]]:
    """The words of each `disco …`, in blocks and in the text."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line.strip().removeprefix("~/disco/bin/") for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("disco ")]


def test_there_are_how_tos() -> None:
    assert {page.stem for page in PAGES} == {
        "aider",
        "claude-code",
        "codex",
        "copilot",
        "editors",
        "fleet",
        "home-assistant",
        "jetbrains",
        "obsidian",
        "offline",
        "openai",
        "opencode",
        "split",
        "two-machines",
        "vllm",
    }


@pytest.mark.parametrize("name", sorted({page.name for page in PAGES} - OF_THE_DAEMON))
def test_a_page_on_a_program_says_what_it_needs_and_whether_it_sends_a_key(name: str) -> None:
    needs, keys_of_it = (section(TEXTS[name], title) for title in ("What it needs", "Keys, and other machines"))
    assert re.search(r"\btools\b", needs, re.IGNORECASE), "of the model"
    assert "**Room.**" in needs, "of its context"
    assert "device.n_ctx" in needs
    assert "another machine" in keys_of_it or "machine of its own" in keys_of_it
    assert re.search(r"\bsends?\b|\bsent\b", keys_of_it), "whether there is a key"
    assert "api.key" in keys_of_it


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_is_understood(name: str, tmp_path: Path) -> None:
    for words in typed(TEXTS[name]):
        try:
            args = make_parser().parse_args(words)
        except SystemExit as e:
            pytest.fail(f"`disco {shlex.join(words)}` ends with status {e.code}")
        if words[:2] == ["config", "set"]:
            config.set_values(tmp_path / "config.toml", {args.key: args.value})
    found = config.load(tmp_path / "config.toml", env={})
    config.require_complete(found)


@pytest.mark.parametrize("name", TEXTS)
def test_every_setting_that_is_named_exists(name: str) -> None:
    sections = {key.split(".")[0] for key in keys()}
    named = re.findall(r"`(\w+\.\w+)`", TEXTS[name])
    assert [key for key in named if key.split(".")[0] in sections and key not in keys()] == []


@pytest.mark.parametrize("name", TEXTS)
def test_no_page_names_a_place_of_one_machine(name: str) -> None:
    assert not re.search(r"/(home|root|work|tmp|Users|opt)/", TEXTS[name])
