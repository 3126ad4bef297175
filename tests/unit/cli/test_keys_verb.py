"""`disco keys`: what its options read, and that nothing which says nothing opens everything."""

from __future__ import annotations

import argparse

import pytest

from disco_daemon.cli import keys


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    keys.add_parser(parser.add_subparsers())
    return parser.parse_args(["keys", *words])


@pytest.mark.parametrize("action", ["add", "change"])
@pytest.mark.parametrize("option", ["--usd-per-day", "--usd-per-month", "--requests-per-minute", "--models"])
@pytest.mark.parametrize("text", ["", " ", ",", " , ,"])
def test_a_limit_that_says_nothing_is_refused(
    action: str, option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a script's variable that is not set: such a key would be one without that limit."""
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parsed(action, "bot", option, text)
    capsys.readouterr()


@pytest.mark.parametrize("action", ["add", "change"])
def test_the_word_none_alone_takes_a_limit_away(action: str) -> None:
    assert parsed(action, "bot", "--models", "none").models == []
    assert parsed(action, "bot", "--models", "gpt-*, none,").models == ["gpt-*", "none"]
    for option in keys.LIMITS:
        args = parsed(action, "bot", f"--{option.replace('_', '-')}", "none")
        assert keys._given(args)[option] is None
