"""What first steps write: a key that is nobody else's, settings with their comments, and all of it or nothing."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.config import layers as config
from disco_daemon.errors import ConfigError
from disco_daemon.models import default as models
from disco_daemon.onboarding import saving
from disco_daemon.onboarding.desk import Desk
from disco_daemon.onboarding.providers import key_path
from disco_daemon.onboarding.saving import Choice, local_model, save, shadowed
from tests.fixtures.provider import SECRET

URL = "https://llm.example.com/v1"
COMMENTED = """\
# My settings.
[server]  # the remote one
base_url = "https://api.example.com/v1"  # not OpenAI
model = "m"
input_usd_per_mtok = 1.5
continuation = "prefix"

[policy]
budget = 0.25  # enough
"""


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "disco" / "config.toml", {})


def written(desk: Desk, text: str) -> None:
    desk.path.parent.mkdir(exist_ok=True)
    desk.path.write_text(text, "utf-8")


def everything(folder: Path) -> dict[str, str]:
    """All files below a folder, and what is in them."""
    return {str(p.relative_to(folder)): p.read_text("utf-8") for p in folder.rglob("*") if p.is_file()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def chosen(desk: Desk, url: str = URL, model: str = "big", key: str = SECRET, **more: Any) -> Choice:
    return Choice(url, model, desk.key(url, key), **more)


def test_a_server_is_there_after_the_next_start_with_its_key(desk: Desk) -> None:
    old = os.umask(0)  # the worst one: nothing is taken from anybody
    try:
        desk.save(chosen(desk))
    finally:
        os.umask(old)
    found = desk.config()
    assert (found.server.base_url, found.server.model) == (URL, "big")
    file = desk.path.parent / "keys" / "llm.example.com"
    assert found.server.api_key_file == str(file)
    modes = [mode(path) for path in (file, file.parent, desk.path, desk.path.parent)]
    assert modes == [0o600, 0o700, 0o600, 0o700]
    assert config.server_api_key(found, {}) == SECRET
    assert config.server_api_key(found, {"OPENAI_API_KEY": "another"}) == SECRET, "the one that was given counts"
    assert SECRET not in desk.path.read_text("utf-8")
    assert sorted(everything(desk.path.parent)) == ["config.toml", "keys/llm.example.com"], "nothing is left behind"


def test_comments_stay_and_what_was_for_the_server_before_goes(desk: Desk) -> None:
    written(desk, COMMENTED)
    desk.save(chosen(desk))
    text = desk.path.read_text("utf-8")
    for line in ("# My settings.", "# the remote one", "# not OpenAI", "# enough"):
        assert line in text
    found = desk.config()
    assert found.server.base_url == URL
    assert found.server.input_usd_per_mtok is None, "the price was another model's"
    assert found.server.continuation == "auto"
    assert found.policy.budget == 0.25


def test_another_model_of_the_same_server_keeps_its_way_to_continue_and_its_key(desk: Desk) -> None:
    written(desk, COMMENTED)
    url = "https://api.example.com/v1"
    desk.save(chosen(desk, url, "m"))
    assert desk.config().server.input_usd_per_mtok == 1.5, "nothing changed but the key"
    desk.save(chosen(desk, url, "m2", key=""))
    found = desk.config()
    assert (found.server.model, found.server.continuation) == ("m2", "prefix")
    assert found.server.input_usd_per_mtok is None
    assert config.server_api_key(found, {}) == SECRET


@pytest.mark.parametrize(
    "wrong",
    [
        Choice("nowhere", "m"),
        Choice(URL, ""),  # a daemon could not start with that
        Choice("ftp://x/v1", "m"),
    ],
)
def test_what_is_wrong_changes_nothing(desk: Desk, wrong: Choice) -> None:
    written(desk, COMMENTED)
    before = everything(desk.path.parent)
    choice = Choice(wrong.base_url, wrong.model, desk.key(URL, SECRET))
    with pytest.raises(ConfigError):
        desk.save(choice)
    assert everything(desk.path.parent) == before


@pytest.mark.parametrize("before", [None, "sk-the-key-before\n"])
def test_a_disk_that_fails_at_the_settings_takes_the_key_back(
    desk: Desk, before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(desk, COMMENTED)
    if before is not None:
        config.write_private(key_path(desk.path.parent, URL), before)
    found = everything(desk.path.parent)

    def full(path: Path, changes: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "set_values", full)
    with pytest.raises(ConfigError, match="No space left"):
        desk.save(chosen(desk))
    assert everything(desk.path.parent) == found


def test_a_key_that_cannot_be_written_changes_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    written(desk, COMMENTED)
    before = everything(desk.path.parent)

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_private", full)
    with pytest.raises(ConfigError, match="No space left") as raised:
        desk.save(chosen(desk))
    assert SECRET not in str(raised.value)
    assert everything(desk.path.parent) == before


def test_a_config_that_cannot_be_read_is_left_alone(desk: Desk) -> None:
    written(desk, "[server\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        save(desk.path, Choice(URL, "m"))
    assert everything(desk.path.parent) == {"config.toml": "[server\n"}


def test_a_folder_that_others_could_look_into_is_closed(desk: Desk) -> None:
    folder = desk.path.parent / "keys"
    folder.mkdir(parents=True, mode=0o755)
    desk.save(chosen(desk))
    assert mode(folder) == 0o700


def test_a_server_can_be_taken_away_and_its_key_stays_for_another_time(desk: Desk) -> None:
    desk.save(chosen(desk))
    desk.save(Choice(""))
    found = desk.config()
    assert (found.server.base_url, found.server.model, found.server.api_key_file) == ("", "", "")
    assert found.server.api_key_env == "OPENAI_API_KEY"
    assert desk.key(URL).value == SECRET


# --- keys that are there ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "name"),
    [
        (URL, "llm.example.com"),
        ("http://127.0.0.1:8080/v1", "127.0.0.1_8080"),
        ("http://[::1]:80/v1", "__1"),
        ("https://LLM.example.com:443/v1", "llm.example.com"),
        ("https://../v1", "server"),
        ("https://.hidden/v1", "hidden"),
    ],
)
def test_a_key_s_file_is_named_after_its_host_and_stays_in_its_folder(url: str, name: str, tmp_path: Path) -> None:
    assert key_path(tmp_path, url) == tmp_path / "keys" / name


def test_a_key_goes_only_where_it_belongs(desk: Desk) -> None:
    env = {"OPENAI_API_KEY": "of-openai", "GROQ_API_KEY": "of-groq"}
    desk = Desk(desk.path, env)
    desk.save(chosen(desk))
    assert desk.key(URL).value == SECRET
    assert desk.key("https://api.openai.com/v1").value == "of-openai"
    groq = desk.key("https://api.groq.com/openai/v1")
    assert (groq.value, groq.source) == ("of-groq", "$GROQ_API_KEY")
    assert groq.settings["server.api_key_env"] == "GROQ_API_KEY"
    for elsewhere in ("https://llm.example.org/v1", "https://llm.example.com:8443/v1", "http://llm.example.com/v1"):
        assert desk.key(elsewhere).value == "", elsewhere
    assert desk.has_key(URL).endswith("llm.example.com")
    assert SECRET not in repr(desk.key(URL)) + repr(chosen(desk))


def test_the_key_of_a_variable_is_used_by_its_name_and_written_nowhere(desk: Desk) -> None:
    desk = Desk(desk.path, {"GROQ_API_KEY": "of-groq"})
    url = desk.address("Groq")
    desk.save(Choice(url, "m", desk.key(url)))
    found = desk.config()
    assert (found.server.api_key_env, found.server.api_key_file) == ("GROQ_API_KEY", "")
    assert config.server_api_key(found, desk.env) == "of-groq"
    assert sorted(everything(desk.path.parent)) == ["config.toml"]


def test_a_key_that_others_can_read_is_not_used(desk: Desk) -> None:
    desk.save(chosen(desk))
    desk.save(Choice(""))
    key_path(desk.path.parent, URL).chmod(0o644)
    assert desk.has_key(URL) == ""
    with pytest.raises(ConfigError, match="chmod 600"):
        desk.key(URL)


# --- the servers that are known ---------------------------------------------------------------------------------------


def test_providers_have_a_name_an_address_and_a_place_for_keys(desk: Desk) -> None:
    known = desk.providers()
    assert [p.name for p in known] == [
        "anthropic", "cohere", "deepseek", "google", "groq", "mistral", "openai", "openrouter", "together",
    ]  # fmt: skip
    for provider in known:
        assert provider.title
        assert provider.base_url.startswith("https://")
        assert provider.key_url.startswith("https://")
        assert provider.key_env.endswith("_API_KEY")


def test_a_list_of_one_s_own_is_a_provider_too(desk: Desk) -> None:
    folder = desk.path.parent / "servers"
    folder.mkdir(parents=True)
    (folder / "house.toml").write_text('base_url = "http://10.0.0.7/v1"\n[models."m"]\ninput = 1\noutput = 2\n')
    assert desk.address("HOUSE") == "http://10.0.0.7/v1"
    assert desk.address(URL) == URL
    with pytest.raises(ConfigError, match="openrouter"):
        desk.address("nobody")


def test_variables_that_go_before_what_was_written_are_named() -> None:
    changes = {"server.base_url": "x", "server.model": "m"}
    assert shadowed(changes, {"DISCO_SERVER_MODEL": "m2", "DISCO_API_PORT": "1"}) == ["DISCO_SERVER_MODEL"]


# --- the local model --------------------------------------------------------------------------------------------------


def test_a_local_model_by_name_by_path_and_the_default(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISCO_MODELS_DIR", str(tmp_path))
    for name in (models.DEFAULT_MODEL, "other.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert local_model("default") == local_model(models.DEFAULT_MODEL) == ""
    assert local_model("other") == local_model("other.gguf") == str(tmp_path / "other.gguf")
    (tmp_path / "text").write_bytes(b"text")
    for wrong in ("text", "none.gguf"):
        with pytest.raises(ConfigError, match=r"one of default, other\.gguf"):
            local_model(str(tmp_path / wrong))
    written(desk, "[device]\nenabled = false\n")
    desk.save(Choice(local=local_model("other")))
    assert (desk.config().device.model, desk.config().device.enabled) == (str(tmp_path / "other.gguf"), True)
    assert desk.config().server.base_url == ""
