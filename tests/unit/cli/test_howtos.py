"""What the how-tos tell people to type is understood, the settings exist, and the links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from disco_daemon.cli.main import make_parser
from disco_daemon.config import layers as config
from disco_daemon.config.schema import keys
from tests.fixtures.documents import section

DOCS = Path(__file__).parent.parent.parent.parent / "docs"
PAGES = sorted({*DOCS.glob("howto/*.md")} - {DOCS / "howto/binary.md"})
# About the daemon and its two sides, and no program that asks it.
OF_THE_DAEMON = {
    "fleet.md", "keys.md", "machines.md", "money.md", "offline.md", "openai.md", "rules.md", "split.md",
    "two-machines.md", "vllm.md", "whatif.md",
}  # fmt: skip
TEXTS = {page.name: page.read_text("utf-8") for page in [*PAGES, DOCS / "reference/metrics.md"]}


def typed(text: str) -> list[list[str]]:
    """The words of each `disco …`, in blocks and in the text."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line.strip().removeprefix("~/disco/bin/") for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("disco ")]


def test_there_are_how_tos() -> None:
    assert {page.stem for page in PAGES} == {
        "agents",
        "copilot",
        "editors",
        "fleet",
        "home-assistant",
        "jetbrains",
        "keys",
        "money",
        "machines",
        "obsidian",
        "offline",
        "openai",
        "rules",
        "split",
        "two-machines",
        "vllm",
        "whatif",
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
    parser = make_parser()
    for words in typed(TEXTS[name]):
        try:
            args = parser.parse_args(words)
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


def options(text: str) -> set[str]:
    """The settings that a page names in a cell or sentence of its own."""
    return set(re.findall(r"`(\w+\.\w+)`", text)) & set(keys())


def examples(text: str) -> set[str]:
    """The settings that a page sets."""
    return {words[2] for words in typed(text) if words[:2] == ["config", "set"]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_has_an_example_there_or_on_a_how_to_that_is_linked(page: Path) -> None:
    text = TEXTS[page.name]
    linked = {path for path in re.findall(r"\]\(([\w-]+\.md)(?:#[\w-]+)?\)", text) if path in TEXTS}
    shown = set().union(*(examples(TEXTS[name]) for name in {page.name, *linked}))
    assert sorted(options(text) - shown) == []
    typed_flags = {word for words in typed(text) for word in words if word.startswith("--")}
    spoken = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    named = {
        flag for row in re.findall(r"^\| `(--[^|]*)\|", spoken, re.MULTILINE) for flag in re.findall(r"--[\w-]+", row)
    }
    assert sorted(named - typed_flags) == []


@cache
def advised() -> list[tuple[str, str, str]]:
    """The settings that the program itself says how to set, in its messages: where, key, value."""
    found = []
    for path in sorted(path for folder in ("disco_daemon", "tui") for path in (DOCS.parent / folder).rglob("*.py")):
        text = path.read_text("utf-8")
        # A message may be written in several strings; to parse every file takes seconds of each of the workers.
        if not re.search(r"disco\W+(f\W)?config\W+(f\W)?set\W", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                said = re.findall(r"disco config set ([\w.]+) ([\w.:/-]+)`", node.value)
                found += [(path.name, key.replace("caps.NAME", "caps.usd_per_day"), value) for key, value in said]
    return [(name, key, value) for name, key, value in found if not value.isupper()]  # FILE and its like are the user's


@pytest.mark.parametrize(("where", "key", "value"), advised())
def test_a_setting_that_the_program_advises_is_taken(where: str, key: str, value: str, tmp_path: Path) -> None:
    config.set_values(tmp_path / "config.toml", {key: value})


def test_the_program_advises_settings() -> None:
    assert len(advised()) >= 5
