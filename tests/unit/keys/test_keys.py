"""Keys with names: their form, their hashes, their file, their rates and their models."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from disco_daemon.errors import ConfigError
from disco_daemon.keys import key_file
from disco_daemon.keys.key_file import KeyFile
from disco_daemon.keys.keyring import MINUTE_S, Keyring, RateWindow
from disco_daemon.keys.named_key import KeyTerms, new_key, parts_of, terms_of

NOW = 1_790_000_000.0


def test_a_key_is_found_by_its_text_alone_and_no_other_text_is_it() -> None:
    ring = Keyring()
    (anna, text), (bert, other) = new_key("anna", KeyTerms(), NOW), new_key("bert", KeyTerms(), NOW)
    ring.use([anna, bert])
    assert ring.find(text) is anna
    assert ring.find(other) is bert
    parts = parts_of(text)
    assert parts is not None
    wrong = [
        f"disco-{parts[0]}-{other[-43:]}",
        text[:-1],
        text + "x",
        f" {text}",
        text.upper(),
        "",
        "sk-proj-1",
        "disco",
    ]
    assert [ring.find(one) for one in wrong] == [None] * len(wrong)
    assert ring.use([bert]) == [anna]
    assert ring.find(text) is None


def test_nothing_that_is_kept_or_told_of_a_key_has_its_secret() -> None:
    key, text = new_key("anna", KeyTerms(), NOW)
    secret = text[-43:]
    assert secret not in repr(key)
    assert secret not in str(key.document())
    assert key.digest != new_key("anna", KeyTerms(), NOW)[0].digest


@pytest.mark.parametrize("name", ["", "Anna", "../x", ".x", "x.", "a b", "a/b", "a" * 33, "ä", "-a", "a\n"])
def test_a_name_that_no_file_or_label_could_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no name for a key"):
        new_key(name, KeyTerms(), NOW)


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "config.toml")


def test_what_is_written_is_read_again_and_is_the_owners_alone(file: KeyFile) -> None:
    assert file.read() == ()
    terms = KeyTerms(usd_per_day=1.0, requests_per_minute=3, models=("gpt-*", "disco"), private=True)
    (key,), text = file.add("anna", terms, NOW)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    (read,) = file.read()
    assert read == key
    assert read.is_shown_by(text[-43:])
    (changed,) = file.change("anna", {"usd_per_day": None, "models": []})
    assert (changed.key_id, changed.terms) == (key.key_id, KeyTerms(requests_per_minute=3, private=True))
    assert file.revoke("anna") == file.read() == ()


def test_a_name_is_given_once_and_keys_are_bounded(file: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.add("anna", KeyTerms(), NOW)
    with pytest.raises(ConfigError, match="disco keys revoke anna"):
        file.add("anna", KeyTerms(), NOW)
    with pytest.raises(ConfigError, match="no key called 'ana': did you mean anna"):
        file.revoke("ana")
    monkeypatch.setattr(key_file, "MOST_KEYS", 1)
    with pytest.raises(ConfigError, match="ends one"):
        file.add("bert", KeyTerms(), NOW)
    assert [key.name for key in file.read()] == ["anna"]


def test_a_file_that_others_may_read_or_that_is_none_lets_nobody_in(file: KeyFile) -> None:
    file.add("anna", KeyTerms(), NOW)
    whole = file.path.read_text()
    file.path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        file.read()
    file.path.chmod(0o600)
    for text, why in (
        ("{", "is damaged"),
        (whole.replace('"anna"', '"../x"'), "no name for one"),
        (whole.replace('"version":1', '"version":2'), "newer disco"),
    ):
        file.path.write_text(text)
        with pytest.raises(ConfigError, match=why):
            file.read()


@pytest.mark.parametrize(
    "given", [{"usd_per_day": -1}, {"requests_per_minute": 0}, {"models": [""]}, {"usd_per_month": "much"}]
)
def test_terms_that_are_none_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        terms_of(given)


# --- what a key may -------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 200), max_size=60), st.integers(1, 5))
@example([196.9477895614069, 0.0], 1)  # whose minute is rounded up
def test_no_minute_has_more_requests_than_the_rate_and_who_waits_as_told_is_admitted(
    waits: list[float], limit: int
) -> None:
    window, now, admitted = RateWindow(), 0.0, list[float]()
    for wait in waits:
        now += wait / limit
        if told := window.admit(limit, now):
            assert 0 < told <= MINUTE_S
            now += told + 1e-6  # a client is told whole seconds
            assert window.admit(limit, now) == 0
        admitted.append(now)
    for i, at in enumerate(admitted):
        assert len([one for one in admitted[i:] if one < at + MINUTE_S]) <= limit


def test_patterns_say_which_models_may_be_asked_for() -> None:
    terms = KeyTerms(models=("gpt-*", "disco/device"))
    assert terms.allow("gpt-4o")
    assert terms.allow("mine", "disco/device"), "by what it stands for, too"
    assert not terms.allow("disco")
    assert KeyTerms().allow("anything")
