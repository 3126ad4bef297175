"""What first steps write: a key that is nobody else's, settings with their comments, and all of it or nothing."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.config import layers as config
from disco_daemon.config.schema import LAYER_COUNTS, SAID_OF, Config, keys
from disco_daemon.config.server_entry import write_entry
from disco_daemon.config.servers import alone
from disco_daemon.errors import ConfigError
from disco_daemon.models import default as models
from disco_daemon.onboarding import saving
from disco_daemon.onboarding.providers import key_path
from disco_daemon.onboarding.saving import Choice, local_model, overriding_variables, save
from disco_daemon.onboarding.setup import Onboarding
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
def setup(tmp_path: Path) -> Onboarding:
    return Onboarding(tmp_path / "disco" / "config.toml", {})


def written(setup: Onboarding, text: str) -> None:
    setup.path.parent.mkdir(exist_ok=True)
    setup.path.write_text(text, "utf-8")


def everything(folder: Path) -> dict[str, str]:
    """All files below a folder, and what is in them."""
    return {str(p.relative_to(folder)): p.read_text("utf-8") for p in folder.rglob("*") if p.is_file()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def chosen(setup: Onboarding, url: str = URL, model: str = "big", key: str = SECRET, **more: Any) -> Choice:
    return Choice(url, model, setup.key(url, key), **more)


def test_a_server_is_there_after_the_next_start_with_its_key(setup: Onboarding) -> None:
    old = os.umask(0)  # the worst one: nothing is taken from anybody
    try:
        setup.save(chosen(setup))
    finally:
        os.umask(old)
    found = setup.config()
    assert (found.server.base_url, found.server.model) == (URL, "big")
    file = setup.path.parent / "keys" / "llm.example.com"
    assert found.server.api_key_file == str(file)
    modes = [mode(path) for path in (file, file.parent, setup.path, setup.path.parent)]
    assert modes == [0o600, 0o700, 0o600, 0o700]
    assert config.server_api_key(found, {}) == SECRET
    assert config.server_api_key(found, {"OPENAI_API_KEY": "another"}) == SECRET, "the one that was given counts"
    assert SECRET not in setup.path.read_text("utf-8")
    assert sorted(everything(setup.path.parent)) == ["config.toml", "keys/llm.example.com"], "nothing is left behind"


def test_comments_stay_and_what_was_for_the_server_before_goes(setup: Onboarding) -> None:
    written(setup, COMMENTED)
    setup.save(chosen(setup))
    text = setup.path.read_text("utf-8")
    for line in ("# My settings.", "# the remote one", "# not OpenAI", "# enough"):
        assert line in text
    found = setup.config()
    assert found.server.base_url == URL
    assert found.server.input_usd_per_mtok is None, "the price was another model's"
    assert found.server.continuation == "auto"
    assert found.policy.budget == 0.25


def test_another_model_of_the_same_server_keeps_its_way_to_continue_and_its_key(setup: Onboarding) -> None:
    written(setup, COMMENTED)
    url = "https://api.example.com/v1"
    setup.save(chosen(setup, url, "m"))
    assert setup.config().server.input_usd_per_mtok == 1.5, "nothing changed but the key"
    setup.save(chosen(setup, url, "m2", key=""))
    found = setup.config()
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
def test_what_is_wrong_changes_nothing(setup: Onboarding, wrong: Choice) -> None:
    written(setup, COMMENTED)
    before = everything(setup.path.parent)
    choice = Choice(wrong.base_url, wrong.model, setup.key(URL, SECRET))
    with pytest.raises(ConfigError):
        setup.save(choice)
    assert everything(setup.path.parent) == before


@pytest.mark.parametrize("before", [None, "sk-the-key-before\n"])
def test_a_disk_that_fails_at_the_settings_takes_the_key_back(
    setup: Onboarding, before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(setup, COMMENTED)
    if before is not None:
        config.write_private(key_path(setup.path.parent, URL), before)
    found = everything(setup.path.parent)

    def full(path: Path, changes: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_values", full)
    with pytest.raises(ConfigError, match="No space left"):
        setup.save(chosen(setup))
    assert everything(setup.path.parent) == found


def test_a_key_that_cannot_be_written_changes_nothing(setup: Onboarding, monkeypatch: pytest.MonkeyPatch) -> None:
    written(setup, COMMENTED)
    before = everything(setup.path.parent)

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_private", full)
    with pytest.raises(ConfigError, match="No space left") as raised:
        setup.save(chosen(setup))
    assert SECRET not in str(raised.value)
    assert everything(setup.path.parent) == before


def test_a_config_that_cannot_be_read_is_left_alone(setup: Onboarding) -> None:
    written(setup, "[server\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        save(setup.path, Choice(URL, "m"), {})
    assert everything(setup.path.parent) == {"config.toml": "[server\n"}


def test_what_another_program_sets_while_a_choice_is_worked_out_waits_until_that_is_written(
    setup: Onboarding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one of two who save loses: what changes is worked out from settings that are others by then."""
    written(setup, COMMENTED)
    monkeypatch.setattr(config, "LOCK_S", 0.0)
    for step in ("_changes", "require_complete", "_write_key", "write_values"):
        done, refused = getattr(saving, step), list[str]()

        def meanwhile(*args: Any, done: Any = done, refused: list[str] = refused) -> Any:
            with pytest.raises(ConfigError, match="is being changed by another program"):
                config.set_values(setup.path, {"server.insecure": True})
            refused.append("once")
            return done(*args)

        with monkeypatch.context() as patch:
            patch.setattr(saving, step, meanwhile)
            setup.save(chosen(setup, key=f"{SECRET}-{step}"))
        assert refused, step
    assert not setup.config().server.insecure
    config.set_values(setup.path, {"policy.budget": 0.5})
    assert setup.config().policy.budget == 0.5


# --- what was said of another one -------------------------------------------------------------------------------------

# The choice itself; and what a user decided, or what is so of this machine, whichever server or model answers.
CHOSEN = {
    "server.base_url", "server.model", "server.api_key_env", "server.api_key_file", "server.key_origin",
    "device.base_url", "device.model", "device.enabled",
}  # fmt: skip
STAYS = {
    "server.probe", "server.first_token_timeout_s", "server.thinking_timeout_s", "server.token_timeout_s",
    "device.n_ctx", "device.n_cells", "device.models_gib", "device.spill_gib", "device.spill_after_s",
    "device.keep_alive_s", "device.scheduler", "device.n_threads", "device.n_threads_batch", "device.n_ubatch",
    "device.flash_attn", "device.kv_type", "device.autotune", "device.rounding", "device.speculation", "device.watts",
    "device.usd_per_kwh",
}  # fmt: skip
VALUES: dict[str, Any] = {
    "server.continuation": "prefix", "server.insecure": True, "server.stream_usage": False,
    "server.capabilities": {"tools": False}, "server.context_length": 4096, "server.grade": 10.0,
    "server.input_usd_per_mtok": 1.5, "server.output_usd_per_mtok": 3.0,
    "device.adapters": {"mine": "/a.gguf"}, "device.chat_template": "/t.jinja", "device.draft_model": "/d.gguf",
    "device.grade": 30.0, "device.n_cpu_moe": 4, "device.n_gpu_layers": 20, "fleet.cuts": [7, 15],
}  # fmt: skip
OLD: dict[str, Any] = {
    "server.base_url": "https://api.example.com/v1", "server.model": "m", "server.probe": False, "device.n_ctx": 1000,
    "device.model": "/old.gguf",
}  # fmt: skip


def test_the_same_server_and_model_spelled_otherwise_keep_what_was_said_of_them(setup: Onboarding) -> None:
    setup.path.parent.mkdir()
    config.set_values(setup.path, OLD | VALUES | {"device.model": "~/old.gguf"})
    local = str(Path("~/old.gguf").expanduser())
    saved = setup.save(Choice(f"{OLD['server.base_url']}/", OLD["server.model"], local=local))
    assert saved.notes() == []
    assert {key: config.get_value(setup.config(), key) for key in VALUES} == VALUES


def test_what_is_set_before_there_is_a_server_is_of_the_first_one(setup: Onboarding) -> None:
    written(setup, "[server]\ngrade = 80.0\n")
    assert setup.save(Choice(URL, "m")).notes() == []
    assert setup.config().server.grade == 80.0


def test_of_each_setting_of_a_side_it_is_said_whether_it_goes_with_a_server_or_a_model() -> None:
    """A new setting belongs into `SAID_OF`, or, where it is right for any server and model, into `STAYS` here."""
    goes = [*SAID_OF["server.base_url"], *SAID_OF["server.model"], *SAID_OF["device.model"]]
    of_sides = {key for key in keys() if key.startswith(("server.", "device."))}
    assert sorted([*goes, *CHOSEN, *STAYS]) == sorted({*of_sides, "fleet.cuts"}), "each once"
    assert set(VALUES) == set(goes)


@pytest.mark.parametrize(
    ("choice", "named", "of"),
    [
        (Choice(URL, "m"), ("server.base_url", "server.model"), "server"),
        (Choice(""), ("server.base_url", "server.model"), "server"),
        (Choice(OLD["server.base_url"], "gpt-4o"), ("server.model",), "model"),
        (Choice(OLD["server.base_url"], "m", local=OLD["device.model"]), (), ""),
        (Choice(local="/new.gguf"), ("device.model",), "model"),
        (Choice(local=""), ("device.model",), "model"),
    ],
)
def test_what_was_said_of_another_server_or_model_is_taken_out_and_that_is_said(
    setup: Onboarding, choice: Choice, named: tuple[str, ...], of: str
) -> None:
    setup.path.parent.mkdir()
    config.set_values(setup.path, OLD | VALUES)
    goes = {key for name in named for key in SAID_OF[name]}
    saved = setup.save(choice)
    found, default = setup.config(), Config()
    for key, value in VALUES.items():
        assert config.get_value(found, key) == (config.get_value(default, key) if key in goes else value), key
    assert (found.server.probe, found.device.n_ctx) == (False, 1000), "what the user decided"
    notes = saved.notes()
    assert len(notes) == len(goes)
    if "server.grade" in goes:
        assert f"server.grade = 10.0 was for the {of} before, and is taken out." in notes
    if "device.adapters" in goes:
        assert 'device.adapters = {"mine": "/a.gguf"} was for the model before, and is taken out.' in notes


@pytest.mark.parametrize("key", sorted(LAYER_COUNTS))
@pytest.mark.parametrize("number", [0, -1])
def test_no_layers_and_all_layers_are_said_of_the_machine(setup: Onboarding, key: str, number: int) -> None:
    setup.path.parent.mkdir()
    config.set_values(setup.path, OLD | {key: number})
    assert setup.save(Choice(local="/new.gguf")).notes() == []
    assert config.get_value(setup.config(), key) == number


def test_a_consent_to_plain_http_counts_for_the_server_that_is_checked_next_and_for_no_later_one(
    setup: Onboarding,
) -> None:
    setup.path.parent.mkdir()
    config.set_values(setup.path, OLD | {"server.insecure": True})
    setup.save(Choice("http://llm.example.com/v1", "m"))
    assert setup.config().server.insecure
    setup.save(Choice(URL, "m"))
    assert not setup.config().server.insecure


def test_a_model_of_this_machine_takes_the_place_of_a_local_server_s(setup: Onboarding) -> None:
    setup.path.parent.mkdir()
    theirs = {"device.base_url": "http://127.0.0.1:11434/v1", "device.model": "llama3.1:8b", "device.enabled": False}
    config.set_values(setup.path, theirs)
    saved = setup.save(Choice(local="/models/Qwen3-4B.gguf"))
    device = setup.config().device
    assert (device.base_url, device.model, device.enabled) == ("", "/models/Qwen3-4B.gguf", True)
    assert saved.notes() == [
        "device.base_url = http://127.0.0.1:11434/v1 is taken out: this machine's own model answers.",
        "The device takes part again.",
    ]
    setup.take_back(saved)
    assert setup.config() == config.with_values(Config(), theirs)


def test_a_local_server_of_a_variable_is_not_asked_for_a_file(setup: Onboarding) -> None:
    setup = Onboarding(setup.path, {"DISCO_DEVICE_BASE_URL": "http://127.0.0.1:11434/v1"})
    for do in (setup.plan, setup.save):
        with pytest.raises(ConfigError, match="DISCO_DEVICE_BASE_URL is set, so that server's model answers: unset it"):
            do(Choice(local="/new.gguf"))
    assert not setup.path.exists()
    setup.save(Choice(URL, "m"))


def test_a_plan_is_what_will_be_saved_and_writes_nothing(setup: Onboarding) -> None:
    written(setup, COMMENTED)
    before = everything(setup.path.parent)
    planned = setup.plan(chosen(setup))
    assert everything(setup.path.parent) == before
    assert setup.save(chosen(setup)) == planned


def test_what_is_taken_back_is_all_of_it_but_not_what_somebody_has_set_since(setup: Onboarding) -> None:
    setup.path.parent.mkdir()
    config.set_values(setup.path, OLD | VALUES)
    before = setup.config()
    saved = setup.save(Choice(local="/new.gguf"))
    config.set_values(setup.path, {"device.grade": 70.0})
    setup.take_back(saved)
    assert setup.config() == config.with_values(before, {"device.grade": 70.0})
    saved = setup.save(Choice(local="/new.gguf"))
    setup.save(Choice(local="/newer.gguf"))
    chosen_since = setup.config()
    assert setup.take_back(saved).changes == {}
    assert setup.config() == chosen_since


# --- the model before this one ----------------------------------------------------------------------------------------

RECORD = "model-before.json"
SAID = {key: VALUES[key] for key in SAID_OF["device.model"]}
OTHERWISE: dict[str, Any] = {
    "device.adapters": {"theirs": "/b.gguf"}, "device.chat_template": "/b.jinja", "device.draft_model": "/e.gguf",
    "device.grade": 70.0, "device.n_cpu_moe": 8, "device.n_gpu_layers": 5, "fleet.cuts": [3, 9],
}  # fmt: skip


def local_files(setup: Onboarding, names: str = "ab") -> list[str]:
    """Models beside config.toml."""
    setup.path.parent.mkdir()
    paths = [setup.path.with_name(f"{name}.gguf") for name in names]
    for path in paths:
        path.write_bytes(b"GGUF")
    return [str(path) for path in paths]


def said(setup: Onboarding) -> dict[str, Any]:
    found = setup.config()
    return {key: config.get_value(found, key) for key in sorted(SAID_OF["device.model"])}


@pytest.mark.parametrize("of_a", [{}, SAID])
@pytest.mark.parametrize("of_b", [{}, OTHERWISE])
def test_the_model_before_comes_back_with_what_was_said_of_it_and_of_no_other(
    setup: Onboarding, of_a: dict[str, Any], of_b: dict[str, Any]
) -> None:
    a, b = local_files(setup)
    assert set(OTHERWISE) == set(SAID), "all that is said of a model is tried"
    default = {key: config.get_value(Config(), key) for key in SAID}
    config.set_values(setup.path, {"device.model": a} | of_a)
    setup.save(Choice(local=b))
    config.set_values(setup.path, {"policy.budget": 0.5} | of_b)
    for model, its, notes in ((a, of_a, max(len(of_a), len(of_b))), (b, of_b, max(len(of_a), len(of_b)))):
        saved = setup.use_previous()
        assert setup.config().device.model == model
        assert said(setup) == default | its
        assert len(saved.notes()) == notes
    assert setup.config().policy.budget == 0.5, "nothing but the model goes back"


@pytest.mark.parametrize("number", [0, -1])
def test_counts_of_layers_that_are_said_of_the_machine_stay_on_the_way_back_but_for_the_model_s_own(
    setup: Onboarding, number: int
) -> None:
    a, b = local_files(setup)
    config.set_values(setup.path, {"device.model": a, "device.n_cpu_moe": number})
    setup.save(Choice(local=b))
    config.set_values(setup.path, {"device.n_gpu_layers": number, "device.n_cpu_moe": 7})
    setup.use_previous()
    device = setup.config().device
    assert (device.n_gpu_layers, device.n_cpu_moe) == (number, number)


def test_a_model_that_is_taken_back_leaves_the_way_to_the_one_before(
    setup: Onboarding, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = local_files(setup, "abc")
    monkeypatch.chdir(setup.path.parent)
    config.set_values(setup.path, {"device.model": a, "device.grade": 3.0})
    setup.take_back(setup.save(Choice(local=b)))
    with pytest.raises(ConfigError, match="no model before this one is known"):
        setup.use_previous()
    setup.save(Choice(local=b))
    setup.take_back(setup.save(Choice(local=c)))
    assert setup.config().device.model == b
    setup.save(Choice(local="b.gguf"))  # the same one, spelled otherwise
    setup.use_previous()
    assert (setup.config().device.model, setup.config().device.grade) == (a, 3.0)


def test_a_device_that_was_off_before_is_not_switched_off_by_the_way_back(setup: Onboarding) -> None:
    a, b = local_files(setup)
    config.set_values(setup.path, {"device.model": a, "device.enabled": False})
    assert setup.save(Choice(local=b)).notes() == ["The device takes part again."]
    assert setup.use_previous().notes() == []
    config.set_values(setup.path, {"device.enabled": False})
    assert setup.use_previous().notes() == ["The device takes part again."]
    assert (setup.config().device.model, setup.config().device.enabled) == (b, True)


@pytest.mark.parametrize("name", ["llama3.1:8b", "b.gguf"])
def test_a_server_of_this_machine_is_a_model_before_too(
    setup: Onboarding, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _, b = local_files(setup)
    monkeypatch.chdir(setup.path.parent)  # the file of that name is no other model's, but the server is another one
    url = "http://127.0.0.1:11434/v1"
    config.set_values(setup.path, {"device.base_url": url, "device.model": name, "device.grade": 3.0})
    setup.save(Choice(local=b))
    assert setup.use_previous().notes() == [
        f"device.base_url = {url} answers again.", "device.grade = 3.0 was said of this model, and is back.",
    ]  # fmt: skip
    device = setup.config().device
    assert (device.base_url, device.model, device.grade) == (url, name, 3.0)
    assert setup.use_previous().notes() == [
        f"device.base_url = {url} is taken out: this machine's own model answers.",
        "device.grade = 3.0 was for the model before, and is taken out.",
    ]
    assert (setup.config().device.base_url, setup.config().device.model) == ("", b)


@pytest.mark.parametrize("name", ["DISCO_DEVICE_BASE_URL", "DISCO_DEVICE_MODEL"])
def test_the_model_before_is_not_gone_back_to_while_a_variable_names_another(setup: Onboarding, name: str) -> None:
    a, b = local_files(setup)
    for model in (a, b):
        setup.save(Choice(local=model))
    before = everything(setup.path.parent)
    with pytest.raises(ConfigError, match=f"the variable {name} is set"):
        Onboarding(setup.path, {name: "x"}).use_previous()
    assert everything(setup.path.parent) == before


@pytest.mark.parametrize("go", ["save", "use_previous"])
@pytest.mark.parametrize("broken", ["config.toml", RECORD])
@pytest.mark.parametrize("key", ["", SECRET])
def test_a_disk_that_fails_at_any_file_of_a_choice_changes_none(
    setup: Onboarding, monkeypatch: pytest.MonkeyPatch, go: str, broken: str, key: str
) -> None:
    a, b, c = local_files(setup, "abc")
    for model in (a, b):
        setup.save(Choice(local=model))
    before, write = everything(setup.path.parent), config.write_private

    def full(path: Path, text: str) -> None:
        if path.name == broken:
            raise OSError(28, "No space left on device")
        write(path, text)

    with monkeypatch.context() as patch:
        for module in (saving, config):
            patch.setattr(module, "write_private", full)
        with pytest.raises(ConfigError, match=f"{broken} cannot be written: No space left"):
            setup.save(chosen(setup, key=key, local=c)) if go == "save" else setup.use_previous()
        assert everything(setup.path.parent) == before
    setup.use_previous()
    assert setup.config().device.model == a


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"changes": {}, "before": []}', '{"changes": {"device.model": "B"}, "before": {}}']
)
def test_a_spoilt_record_says_that_no_model_before_is_known_and_is_written_anew(setup: Onboarding, text: str) -> None:
    a, b = local_files(setup)
    setup.save(Choice(local=a))
    setup.path.with_name(RECORD).write_text(text, "utf-8")
    with pytest.raises(ConfigError, match="no model before this one is known"):
        setup.use_previous()
    setup.save(Choice(local=b))
    setup.use_previous()
    assert setup.config().device.model == a


def test_a_record_with_a_value_that_is_none_changes_nothing(setup: Onboarding) -> None:
    a, b = local_files(setup)
    record = {"changes": {"device.model": b}, "before": {"device.model": a, "device.grade": "good"}}
    config.set_values(setup.path, {"device.model": b})
    setup.path.with_name(RECORD).write_text(json.dumps(record), "utf-8")
    before = everything(setup.path.parent)
    with pytest.raises(ConfigError, match="grade"):
        setup.use_previous()
    assert everything(setup.path.parent) == before


def test_a_folder_that_others_could_look_into_is_closed(setup: Onboarding) -> None:
    folder = setup.path.parent / "keys"
    folder.mkdir(parents=True, mode=0o755)
    setup.save(chosen(setup))
    assert mode(folder) == 0o700


def test_a_server_can_be_taken_away_and_its_key_stays_for_another_time(setup: Onboarding) -> None:
    setup.save(chosen(setup))
    setup.save(Choice(""))
    found = setup.config()
    assert (found.server.base_url, found.server.model, found.server.api_key_file) == ("", "", "")
    assert found.server.api_key_env == "OPENAI_API_KEY"
    assert setup.key(URL).value == SECRET


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


def test_a_key_goes_only_where_it_belongs(setup: Onboarding) -> None:
    env = {"OPENAI_API_KEY": "of-openai", "GROQ_API_KEY": "of-groq"}
    setup = Onboarding(setup.path, env)
    setup.save(chosen(setup))
    assert setup.key(URL).value == SECRET
    assert setup.key("https://api.openai.com/v1").value == "of-openai"
    groq = setup.key("https://api.groq.com/openai/v1")
    assert (groq.value, groq.source) == ("of-groq", "$GROQ_API_KEY")
    assert groq.settings["server.api_key_env"] == "GROQ_API_KEY"
    for elsewhere in ("https://llm.example.org/v1", "https://llm.example.com:8443/v1", "http://llm.example.com/v1"):
        assert setup.key(elsewhere).value == "", elsewhere
    assert setup.has_key(URL).endswith("llm.example.com")
    assert SECRET not in repr(setup.key(URL)) + repr(chosen(setup))


def test_the_key_of_a_variable_is_used_by_its_name_and_written_nowhere(setup: Onboarding) -> None:
    setup = Onboarding(setup.path, {"GROQ_API_KEY": "of-groq"})
    url = setup.address("Groq")
    setup.save(Choice(url, "m", setup.key(url)))
    found = setup.config()
    assert (found.server.api_key_env, found.server.api_key_file) == ("GROQ_API_KEY", "")
    assert config.server_api_key(found, setup.env) == "of-groq"
    assert sorted(everything(setup.path.parent)) == ["config.toml"]


def test_a_key_that_others_can_read_is_not_used(setup: Onboarding) -> None:
    setup.save(chosen(setup))
    setup.save(Choice(""))
    key_path(setup.path.parent, URL).chmod(0o644)
    assert setup.has_key(URL) == ""
    with pytest.raises(ConfigError, match="chmod 600"):
        setup.key(URL)


# --- the servers that are known ---------------------------------------------------------------------------------------


def test_providers_have_a_name_an_address_and_a_place_for_keys(setup: Onboarding) -> None:
    known = setup.providers()
    assert [p.name for p in known] == [
        "anthropic", "cohere", "deepseek", "google", "groq", "mistral", "openai", "openrouter", "together",
    ]  # fmt: skip
    for provider in known:
        assert provider.title
        assert provider.base_url.startswith("https://")
        assert provider.key_url.startswith("https://")
        assert provider.key_env.endswith("_API_KEY")


def test_a_list_of_one_s_own_is_a_provider_too(setup: Onboarding) -> None:
    folder = setup.path.parent / "servers"
    folder.mkdir(parents=True)
    (folder / "house.toml").write_text('base_url = "http://10.0.0.7/v1"\n[models."m"]\ninput = 1\noutput = 2\n')
    assert setup.address("HOUSE") == "http://10.0.0.7/v1"
    assert setup.address(URL) == URL
    with pytest.raises(ConfigError, match="openrouter"):
        setup.address("nobody")


def test_variables_that_go_before_what_was_written_are_named() -> None:
    changes = {"server.base_url": "x", "server.model": "m"}
    assert overriding_variables(changes, {"DISCO_SERVER_MODEL": "m2", "DISCO_API_PORT": "1"}) == ["DISCO_SERVER_MODEL"]


# --- the local model --------------------------------------------------------------------------------------------------


def test_a_local_model_by_name_by_path_and_the_default(
    setup: Onboarding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    written(setup, "[device]\nenabled = false\n")
    setup.save(Choice(local=local_model("other")))
    assert (setup.config().device.model, setup.config().device.enabled) == (str(tmp_path / "other.gguf"), True)
    assert setup.config().server.base_url == ""


# --- one more server --------------------------------------------------------------------------------------------------

BY_HAND = """\
# Mine.
[server]
base_url = "https://api.example.com/v1"
model = "m"

[[servers]]  # the box below the desk
name = "box"
base_url = "http://10.0.0.2:8080/v1"
model = "large"
models = ["large", "small"]  # no others
input_usd_per_mtok = 0.5
map = { "gpt-4o" = "large" }

[policy]
budget = 0.25  # enough

[[servers]]
name = "spare"  # rarely
base_url = "http://10.0.0.3/v1"
"""
INLINE = """\
servers = [
  { name = "box", base_url = "http://10.0.0.2:8080/v1", model = "large" },  # the box
]
[policy]
budget = 0.25  # enough
"""


def beside(setup: Onboarding, name: str, url: str = URL, model: str = "big", key: str = SECRET) -> Choice:
    return Choice(url, model, setup.key(url, key, name), name=name)


@pytest.mark.parametrize("text", ["", COMMENTED, BY_HAND, INLINE])
def test_one_more_server_loses_nothing_that_was_written_by_hand(setup: Onboarding, text: str) -> None:
    if text:
        written(setup, text)
    before = setup.config()
    saved = save(setup.path, beside(setup, "more"), {})
    assert saved.changes == {"servers.more": {"base_url": URL, "model": "big"}}
    after = setup.config()
    assert after.servers[:-1] == before.servers
    assert (after.server, after.policy) == (before.server, before.policy)
    more = after.servers[-1]
    assert (more.name, more.base_url, more.model) == ("more", URL, "big")
    assert config.server_api_key(alone(after, more), {}) == SECRET
    assert mode(Path(more.api_key_file)) == 0o600
    now = setup.path.read_text("utf-8")
    assert [line for line in text.splitlines() if "#" in line and line not in now] == []
    save(setup.path, Choice("", name="more"), {})
    assert setup.config() == before


def test_two_servers_of_one_address_have_keys_of_their_own(setup: Onboarding) -> None:
    save(setup.path, chosen(setup), {})
    save(setup.path, beside(setup, "team", key="another"), {})
    found = setup.config()
    assert config.server_api_key(found, {}) == SECRET
    assert config.server_api_key(alone(found, found.servers[0]), {}) == "another"
    save(setup.path, beside(setup, "again", key=""), {})
    assert config.server_api_key(alone(setup.config(), setup.config().servers[1]), {}) == SECRET, (
        "the one for that address"
    )
    elsewhere = setup.key("https://other.example.com/v1", "", "else")
    assert elsewhere.value == "", "a key goes to its own address alone"


def test_another_model_of_a_server_takes_back_what_was_said_of_the_one_before(setup: Onboarding) -> None:
    written(setup, BY_HAND)
    saved = save(setup.path, beside(setup, "box", "http://10.0.0.2:8080/v1", "new", key=""), {})
    box = setup.config().servers[0]
    assert (box.model, box.models, box.input_usd_per_mtok) == ("new", ("large", "small", "new"), None)
    assert box.map == {"gpt-4o": "large"}
    assert saved.notes() == ["input_usd_per_mtok = 0.5 of [[servers]] box is taken out."]
    assert "# the box below the desk" in setup.path.read_text("utf-8")


@pytest.mark.parametrize(
    ("choice", "word"),
    [(Choice(URL, "m", name="server"), "no name"), (Choice(URL, "m", name="a/b"), "no name"),
     (Choice("", name="nobody"), "there: box, spare"), (Choice("nonsense", "m", name="x"), "not a URL")],
)  # fmt: skip
def test_what_is_no_further_server_changes_nothing(setup: Onboarding, choice: Choice, word: str) -> None:
    written(setup, BY_HAND)
    with pytest.raises(ConfigError, match=word):
        save(setup.path, choice, {})
    assert setup.path.read_text("utf-8") == BY_HAND


def test_a_name_for_one_more_server_is_free_and_says_which_it_is(setup: Onboarding) -> None:
    written(setup, BY_HAND)
    assert setup.free_name("https://openrouter.ai/api/v1") == "openrouter"
    assert setup.free_name("http://box:1/v1") == "box-2"
    assert setup.free_name("http://127.0.0.1:1/v1") == "127.0.0.1"


HAND_WRITTEN = """# mine
[policy]
# said of it
usd_per_hour_waited = 0.5  # mine

# the box
[[servers]] # in the cellar
name = "box"
base_url = "http://127.0.0.1:1/v1"  # its port
model = "small"

# to be kept:
# [[servers]]
# name = "spare"

[[servers]]
name = "other"
base_url = "http://127.0.0.1:2/v1"
model = "small"
[servers.map]
gpt = "small"
# the end
"""


@pytest.mark.parametrize("name", ["box", "other"])
def test_what_stands_beside_an_entry_stays_where_it_goes(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(HAND_WRITTEN)
    write_entry(path, name, None)
    said = path.read_text().splitlines()
    assert [line for line in HAND_WRITTEN.splitlines() if line.startswith("#")] == [li for li in said if li[:1] == "#"]
    assert [one.name for one in config.load(path, env={}).servers] == [{"box": "other", "other": "box"}[name]]
    write_entry(path, config.load(path, env={}).servers[0].name, None)
    assert config.load(path, env={}).servers == ()
    assert "# to be kept:" in path.read_text()


def test_a_new_value_of_an_entry_stands_before_what_is_commented_out_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(HAND_WRITTEN)
    write_entry(path, "box", {"grade": 30.0})
    assert path.read_text() == HAND_WRITTEN.replace('model = "small"\n', 'model = "small"\ngrade = 30.0\n', 1)


def test_a_new_setting_stands_before_what_is_commented_out_behind_its_section(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    behind = "\n# to be kept:\n# [[servers]]\n# name = 'spare'\n"
    path.write_text(f"[policy]\nusd_per_hour_waited = 0.5\n{behind}")
    config.set_values(path, {"policy.private": True})
    assert path.read_text() == f"[policy]\nusd_per_hour_waited = 0.5\nprivate = true\n{behind}"


@pytest.mark.parametrize("text", ['model = """\n[[servers]]\n"""\n', "", 'models = [\n  "a",\n]\n'])
def test_what_looks_like_the_head_of_an_entry_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    entry = '[[servers]]\nname = "{}"\nbase_url = "http://127.0.0.1:1/v1"\n'
    path.write_text(entry.format("a") + text + entry.format("b") + text)
    write_entry(path, "a", None)
    assert [one.name for one in config.load(path, env={}).servers] == ["b"]
