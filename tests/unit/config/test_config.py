from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disco_daemon.config import layers as config
from disco_daemon.config.schema import Api, Config, DeviceSettings, ServerSettings, keys
from disco_daemon.config.servers import servers_of
from disco_daemon.errors import ConfigError

COMMENTED = """\
# My settings.
[server]  # the remote one
base_url = "https://api.example.com/v1"  # not OpenAI
model = "m"

[api]
port = 5000
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "disco" / "config.toml"


def wrote(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def load(path: Path, text: str = "", env: dict[str, str] | None = None, flags: dict[str, Any] | None = None) -> Config:
    return config.load(wrote(path, text), env or {}, flags)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- layers -------------------------------------------------------------------------------------------------------


def test_without_any_layer_the_defaults_hold(path: Path) -> None:
    assert config.load(path, {}) == Config()


def test_variables_win_over_the_file_and_flags_over_both(path: Path) -> None:
    text, env, flags = "[api]\nport = 1", {"DISCO_API_PORT": "2"}, {"api.port": 3}
    assert load(path, text).api.port == 1
    assert load(path, text, env).api.port == 2
    assert load(path, text, env, flags).api.port == 3
    assert load(path, text, env, {"api.port": None}).api.port == 2, "a flag that is not given changes nothing"


def test_layers_mix_setting_by_setting(path: Path) -> None:
    found = load(
        path, '[server]\nmodel = "file"', {"DISCO_SERVER_BASE_URL": "http://env/v1"}, {"server.api_key_env": "KEY"}
    )
    assert (found.server.model, found.server.base_url, found.server.api_key_env) == ("file", "http://env/v1", "KEY")


def test_variables_are_read_as_the_settings_type(path: Path) -> None:
    env = {
        "DISCO_DEVICE_ENABLED": "false",
        "DISCO_POLICY_DELAY_S": "1",
        "DISCO_API_KEY": "123",
        "DISCO_DEVICE_N_CTX": "8",
    }
    found = load(path, "", env)
    assert (found.device.enabled, found.policy.delay_s, found.api.key, found.device.n_ctx) == (False, 1.0, "123", 8)


def test_variables_that_are_no_settings_are_left_alone(path: Path) -> None:
    assert load(path, "", {"DISCO_CONFIG": "x", "DISCO_MODELS_DIR": "y", "PATH": "z"}) == Config()


def test_the_file_may_be_named_by_a_variable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISCO_CONFIG", str(wrote(path, "[api]\nport = 9")))
    assert config.config_path() == path
    assert config.load(env={}).api.port == 9


@pytest.mark.parametrize(
    ("text", "key", "mend"),
    [
        ("[servr]", "servr", "disco config get"),
        ("[server]\nbaseurl = ''", "server has no 'baseurl': did you mean base_url?", "disco config get"),
        ('[api]\nport = "x"', "api.port", "must be a whole number, not a text"),
        ("[api]\nport = 70000", "api.port", "must be a whole number of at most 65535"),
        ("api = 3", "api must be a table", "whole number"),
        ("[device]\nn_ctx = -1", "device.n_ctx", "of at least 0"),
        ("[policy]\ndelay_s = nan", "policy.delay_s", "a number of at least 0"),
        ('[policy]\nname = "fast"', "policy.name", "it is one of optimal"),
        ('[server]\ncontinuation = "yes"', "server.continuation", "it is one of auto"),
        ('[server]\nbase_url = "api.example.com"', "server.base_url", "such as https://"),
        ('[server]\nbase_url = "ftp://example.com"', "server.base_url", "such as https://"),
        ('[server]\nbase_url = "http://"', "server.base_url", "such as https://"),
        ('[server]\nbase_url = "http://[::1"', "server.base_url", "such as https://"),
        ('[server]\nbase_url = "http://example.com:99999"', "server.base_url", "such as https://"),
        ('[device]\nbase_url = "localhost:11434"', "device.base_url", "such as https://"),
        ("[fleet]\npolicy = 'paper'", "fleet.policy", "must be one of measured, not 'paper'"),
        ("[device]\nrounding = 'exac'", "device.rounding", "one of auto, exact, fast, not 'exac'; did you mean exact?"),
        ("[device]\nn_gpu_layers = 'all'", "device.n_gpu_layers", "one of auto, a whole number, not 'all'"),
        ("[caps]\nusd_per_day = 'x'", "caps.usd_per_day", "must be a number or null, not a text"),
        ("[server.capabilities]\ntool = true", "server.capabilities", "did you mean tools?"),
        ("[device.adapters.a]\nscale = 2", "device.adapters", "lacks 'path'"),
        ("[api]\nhosts = ['A B']", "api.hosts[0]", "the form that it must have"),
        ("[api", "config.toml", "not valid TOML"),
        ("[api]\nport = 1\nport = 2", "config.toml", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_key_and_mend(path: Path, text: str, key: str, mend: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(path, text)
    assert key in str(caught.value)
    assert mend in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"config\.toml cannot be read"):
        config.load(path, {})
    other = path / "latin.toml"
    other.write_bytes(b'[api]\nkey = "\xff"')
    with pytest.raises(ConfigError, match=r"latin\.toml is not valid TOML"):
        config.load(other, {})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("DISCO_SERVER_URL", "http://x", "unknown variable DISCO_SERVER_URL: did you mean DISCO_SERVER_BASE_URL"),
        ("DISCO_API_PORT", "many", "api.port"),
        ("DISCO_API_PORT", "70000", "api.port must be a whole number of at most 65535, not '70000'"),
        ("DISCO_DEVICE_ENABLED", "yes", "device.enabled must be true or false, not 'yes'"),
        ("DISCO_POLICY_DELAY_S", "-1", "policy.delay_s must be a number of at least 0, not '-1'"),
        ("DISCO_POLICY_NAME", "fast", "policy.name"),
    ],
)
def test_a_wrong_variable_is_refused_with_key_and_mend(path: Path, name: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(path, "", {name: value})
    assert says in str(caught.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(key=st.sampled_from(keys()), text=st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_any_text_for_any_setting_is_taken_or_refused(path: Path, key: str, text: str) -> None:
    says = ""
    try:
        config.load(path, {f"DISCO_{key.replace('.', '_').upper()}": text})
    except ConfigError as e:
        says = str(e)
    assert not says or key in says


# --- the file's schema --------------------------------------------------------------------------------------------

STORED = Path(__file__).parents[2] / "fixtures" / "recorded" / "config"


@pytest.mark.parametrize("number", range(1, config.NEWEST + 1))
def test_a_stored_file_of_every_schema_is_read(number: int, path: Path) -> None:
    found = load(path, (STORED / f"schema-{number}.toml").read_text("utf-8"))
    assert (found.server.model, found.policy.budget, found.device.usd_per_kwh) == ("gpt-4o-mini", 0.4, 2.5)
    assert found.caps.usd_per_day == 3.0
    assert "poet" in found.device.adapters


def test_a_file_without_a_number_is_of_schema_1_and_keeps_its_comments(path: Path) -> None:
    text = "# Mine.\n[api]\nport = 5000  # before\n"
    assert load(path, text).api.port == 5000
    config.set_values(path, {"api.host": "::1"})
    written = path.read_text("utf-8")
    assert written.startswith("# Mine.\n")
    assert "schema" not in written
    assert "# before" in written
    assert (config.load(path, {}).api.port, config.load(path, {}).api.host) == (5000, "::1")


def test_a_file_of_our_own_says_its_schema_and_a_newer_one_is_left_alone(path: Path) -> None:
    config.set_values(path, {"api.port": "5000"})
    assert path.read_text("utf-8").startswith(f"schema = {config.NEWEST}\n")
    newer = f"schema = {config.NEWEST + 1}\n[api]\nport = 5000\n"
    with pytest.raises(ConfigError, match="newer version"):
        load(path, newer)
    with pytest.raises(ConfigError, match="newer version"):
        config.set_values(path, {"api.port": "1"})
    assert path.read_text("utf-8") == newer
    for wrong in ('"x"', "true", "0"):
        with pytest.raises(ConfigError, match="remove that line"):
            load(path, f"schema = {wrong}\n")


# --- writing ------------------------------------------------------------------------------------------------------


def test_setting_a_value_keeps_comments_and_the_rest(path: Path) -> None:
    config.set_values(wrote(path, COMMENTED), {"server.model": "n"})
    assert path.read_text("utf-8") == COMMENTED.replace('"m"', '"n"')


def test_a_setting_is_written_for_the_owners_eyes_only(path: Path) -> None:
    config.set_values(path, {"api.key": "secret"})
    assert mode(path) == 0o600
    assert mode(path.parent) == 0o700
    path.chmod(0o644)
    config.set_values(path, {"api.port": "1"})
    assert mode(path) == 0o600
    assert os.listdir(path.parent) == ["config.toml"]  # noqa: PTH208


def test_a_leftover_of_an_interrupted_write_gives_nothing_away(path: Path) -> None:
    wrote(path.with_name("config.toml.new"), "").chmod(0o644)
    config.set_values(path, {"api.key": "secret"})
    assert mode(path) == 0o600


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("api.port", "x"),
        ("api.prt", "1"),
        ("port", "1"),
        ("policy.name", "fast"),
        ("server.base_url", "nowhere"),
        ("", ""),
    ],
)
def test_a_wrong_setting_is_not_written(path: Path, key: str, text: str) -> None:
    wrote(path, COMMENTED)
    with pytest.raises(ConfigError):
        config.set_values(path, {key: text})
    assert path.read_text("utf-8") == COMMENTED
    assert os.listdir(path.parent) == ["config.toml"]  # noqa: PTH208


def test_a_wrong_file_is_not_made_worse(path: Path) -> None:
    wrote(path, "[api\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        config.set_values(path, {"api.port": "1"})
    assert path.read_text("utf-8") == "[api\n"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_that_is_set_is_read_back(path: Path, text: str) -> None:
    assert config.set_values(path, {"api.key": text}).api.key == text
    assert config.load(path, {}).api.key == text


@pytest.mark.parametrize(("key", "text", "value"), [("device.enabled", "false", False), ("policy.delay_s", "2", 2.0)])
def test_a_setting_comes_back_with_its_type(path: Path, key: str, text: str, value: object) -> None:
    config.set_values(path, {key: text})
    assert config.get_value(config.load(path, {}), key) == value


def test_an_unknown_setting_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'api.prt': did you mean api\.port.*config get"):
        config.get_value(Config(), "api.prt")


# --- secrets and completeness -------------------------------------------------------------------------------------


def test_secrets_are_not_shown() -> None:
    shown = config.as_dict(Config(api=Api(key="secret", port=1)))
    assert shown["api"]["key"] == "********"
    assert shown["api"].items() >= {"host": "127.0.0.1", "port": 1, "drain_s": 30.0}.items()
    assert "secret" not in str(shown)
    assert config.as_dict(Config())["api"]["key"] == "", "that there is no key is no secret"


def with_key_file(path: Path) -> Config:
    return Config(server=ServerSettings(api_key_env="KEY", api_key_file=str(path)))


def test_the_servers_key_comes_from_the_variable_else_from_the_private_file(path: Path) -> None:
    wrote(path, "from-file\n").chmod(0o600)
    found = with_key_file(path)
    assert config.server_api_key(found, {"KEY": "from-env"}) == "from-env"
    assert config.server_api_key(found, {}) == "from-file"
    assert config.server_api_key(found, {"KEY": ""}) == "from-file"
    assert config.server_api_key(Config(), {}) == ""


@pytest.mark.parametrize("wider", [0o640, 0o604, 0o644, 0o660])
def test_a_key_file_that_others_can_read_is_refused_with_the_mend(path: Path, wider: int) -> None:
    wrote(path, "key").chmod(wider)
    with pytest.raises(ConfigError, match="chmod 600"):
        config.server_api_key(with_key_file(path), {})


def test_a_key_file_that_is_missing_or_no_text_is_refused_by_name(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.api_key_file .* cannot be read"):
        config.server_api_key(with_key_file(path), {})
    wrote(path, "").write_bytes(b"\xff\xfe")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"server\.api_key_file"):
        config.server_api_key(with_key_file(path), {})


def test_a_base_url_needs_a_model() -> None:
    config.require_complete(Config())
    url = "http://localhost:1/v1"
    with pytest.raises(ConfigError, match=r"disco config set server\.model NAME"):
        config.require_complete(Config(server=ServerSettings(base_url=url)))
    with pytest.raises(ConfigError, match=r"disco config set device\.model NAME"):
        config.require_complete(Config(device=DeviceSettings(base_url=url)))
    config.require_complete(Config(server=ServerSettings(base_url=url, model="m")))


def test_what_stays_here_needs_somebody_here(path: Path) -> None:
    for layers in (
        {"text": "[policy]\nprivate = true\n[device]\nenabled = false"},
        {"text": "[policy]\nprivate = true", "flags": {"device.enabled": False}},
        {"env": {"DISCO_POLICY_PRIVATE": "true", "DISCO_DEVICE_ENABLED": "false"}},
    ):
        with pytest.raises(ConfigError, match=r"policy\.private .* device\.enabled = true"):
            load(path, **layers)
    assert load(path, "[policy]\nprivate = true").policy.private
    wrote(path, "[device]\nenabled = false\n")
    with pytest.raises(ConfigError, match=r"policy\.private"):
        config.set_values(path, {"policy.private": "true"})
    wrote(path, "[device]\nenabled = false\n[policy]\nprivate = true\n")
    assert not config.set_values(path, {"policy.private": "false"}).policy.private, "the mend can be written"


def test_what_a_caller_will_not_have_is_not_written(path: Path) -> None:
    def refuse(found: Config) -> None:
        msg = f"{found.api.port} is taken"
        raise ConfigError(msg)

    wrote(path, COMMENTED)
    with pytest.raises(ConfigError, match="1 is taken"):
        config.set_values(path, {"api.port": "1"}, refuse)
    assert path.read_text("utf-8") == COMMENTED


def test_lists_are_written_and_read_with_commas_between(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    found = config.set_values(path, {"api.hosts": "host.docker.internal, box", "api.origins": ["https://chat.example"]})
    assert config.get_value(found, "api.hosts") == ["host.docker.internal", "box"]
    assert config.load(path, env={}) == found
    assert config.load(path, env={"DISCO_API_HOSTS": "[other]"}).api.hosts == ("other",)
    assert config.load(path, env={"DISCO_API_HOSTS": ""}).api.hosts == ()
    apps = config.load(path, env={"DISCO_API_ORIGINS": "app://, chrome-extension://abc"}).api.origins
    assert apps == ("app://", "chrome-extension://abc")


@pytest.mark.parametrize(
    "changes",
    [{"api.hosts": "http://box"}, {"api.hosts": "evil@box"}, {"api.origins": "null"}, {"api.origins": "*"},
     {"api.origins": "https://chat.example/"}, {"api.origins": "chat.example"}, {"api.origins": "https://"},
     {"api.origins": "http://"}, {"api.origins": "wss://"}, {"api.origins": "chrome-extension://"},
     {"api.origins": "moz-extension://"}, {"api.origins": "://"}],
)  # fmt: skip
def test_a_name_or_an_origin_that_is_none_is_refused(changes: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        config.set_values(tmp_path / "config.toml", changes)


# --- whose the key is -------------------------------------------------------------------------------------------------

A, B = "https://a.example.com", "https://b.example.com"


def keyed(**server: Any) -> Config:
    return Config(server=ServerSettings(**({"base_url": f"{A}/v1", "api_key_env": "KEY"} | server)))


@pytest.mark.parametrize("url", [f"{A}/v1", f"{A}:443/other", "https://A.example.com/v1", "https://a.example.com./v1"])
def test_a_key_goes_to_its_origin_however_that_is_written(url: str) -> None:
    assert config.server_api_key(keyed(base_url=url, key_origin=A), {"KEY": "k"}) == "k"
    assert config.server_api_key(keyed(base_url=url, key_origin=url), {"KEY": "k"}) == "k"
    assert config.key_for(keyed(), url, {"KEY": "k"}) == "k"


@pytest.mark.parametrize(
    "url", [B, f"{A}:8443/v1", "http://a.example.com/v1", "https://a.example.com@b.example.com/v1"]
)
def test_a_key_of_another_origin_is_refused_with_the_mend(url: str) -> None:
    wrong = keyed(base_url=url, key_origin=A)
    with pytest.raises(config.KeyRefusedError) as raised:
        config.server_api_key(wrong, {"KEY": "hush-hush"})
    for word in ("disco setup", "server.key_origin", A):
        assert word in str(raised.value)
    assert "hush-hush" not in str(raised.value)
    assert config.server_api_key(wrong, {}) == "", "without a key there is nothing to keep"
    assert config.key_for(keyed(), url, {"KEY": "k"}) == "", "nor does setup give it away"


@pytest.mark.parametrize(
    ("host", "clear"),
    [
        ("127.0.0.1", True), ("10.1.2.3", True), ("172.31.0.1", True), ("192.168.1.7", True), ("100.64.0.1", True),
        ("169.254.1.1", True), ("[fd00::1]", True), ("[fe80::1]", True), ("[::1]", True), ("[::ffff:10.0.0.1]", True),
        ("8.8.8.8", False), ("172.32.0.1", False), ("100.128.0.1", False), ("198.51.100.7", False),
        ("[2606:4700::1]", False), ("[::ffff:8.8.8.8]", False), ("vllm", True), ("llm.example.com", True),
    ],
)  # fmt: skip
def test_a_key_goes_by_plain_http_to_private_addresses_only(host: str, clear: bool) -> None:
    """A name is looked up when somebody connects: `endpoints.plainhttp`."""
    plain = keyed(base_url=f"http://{host}:8000/v1")
    if clear:
        assert config.server_api_key(plain, {"KEY": "k"}) == "k"
    else:
        with pytest.raises(config.KeyRefusedError, match=r"in the clear.*server\.insecure true"):
            config.server_api_key(plain, {"KEY": "k"})
    assert config.server_api_key(keyed(base_url=f"http://{host}:8000/v1", insecure=True), {"KEY": "k"}) == "k"
    assert config.server_api_key(keyed(base_url=f"https://{host}:8000/v1"), {"KEY": "k"}) == "k"


def test_an_origin_that_is_none_is_refused(path: Path) -> None:
    for wrong in ("nowhere", "a.example.com", "ftp://a.example.com"):
        with pytest.raises(ConfigError, match=r"server\.key_origin"):
            load(path, f'[server]\nkey_origin = "{wrong}"')
    assert load(path, env={"DISCO_SERVER_KEY_ORIGIN": A}).server.key_origin == A


@pytest.mark.parametrize("special", ["pipe", "/dev/zero", "folder"])
def test_settings_and_keys_that_are_no_files_are_an_error_at_once(path: Path, special: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    named = path.parent / "special"
    if special == "pipe":
        os.mkfifo(named, 0o600)
    elif special == "folder":
        named.mkdir()
    else:
        named.symlink_to(special)
    with pytest.raises(ConfigError, match="not a regular file"):
        config.server_api_key(with_key_file(named), {})
    with pytest.raises(ConfigError, match="not a regular file"):
        config.load(named, {})


def test_writing_settings_removes_nothing_that_lies_beside_them(path: Path) -> None:
    wrote(path, "[policy]\nbudget = 0.25\n")
    copy = path.with_name("config.toml.new")
    copy.write_text("mine")
    config.set_values(path, {"policy.budget": 0.5})
    assert copy.read_text() == "mine"
    assert sorted(p.name for p in path.parent.iterdir()) == ["config.toml", "config.toml.new"]


def test_setting_another_server_says_that_the_key_is_not_its(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from disco_daemon.cli.main import main

    monkeypatch.setenv("DISCO_CONFIG", str(path))
    monkeypatch.setenv("OPENAI_API_KEY", "hush-hush")
    wrote(path, f'[server]\nbase_url = "{A}/v1"\nmodel = "m"\nkey_origin = "{A}"\n')
    assert main(["config", "set", "server.base_url", f"{B}/v1"]) == 0
    said = capsys.readouterr().err
    assert "the server will be off" in said
    assert f"disco config set server.key_origin {B}" in said
    assert "hush-hush" not in said
    assert main(["config", "set", "server.key_origin", B]) == 0
    assert capsys.readouterr().err == ""
    assert main(["config", "set", "server.base_url", ""]) == 0
    assert capsys.readouterr().err == "", "a server that was taken away needs no key"


@pytest.mark.parametrize(
    ("key", "value", "by_reload"),
    [("api.aliases", '{"gpt-4o" = "disco"}', False), ("history.path", "off", False), ("device.n_ctx", "2048", True)],
)
def test_setting_says_what_a_running_daemon_needs_for_it(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    value: str,
    by_reload: bool,
) -> None:
    from disco_daemon.cli.main import main

    monkeypatch.setenv("DISCO_CONFIG", str(path))
    assert main(["config", "set", key, value]) == 0
    said = capsys.readouterr().out
    assert "at its next start" in said
    assert ("disco config reload" in said) == by_reload


def test_two_that_write_settings_at_once_lose_none(tmp_path: Path) -> None:
    """Processes in turn, as threads have file handles, and so locks, of their own as well."""
    path = tmp_path / "config.toml"
    keys = ["caps.usd_per_day", "caps.usd_per_month", "caps.wh_per_day", "delivery.pace_tps", "device.usd_per_kwh"]

    def write(n: int, key: str) -> None:
        config.set_values(path, {key: float(n)})

    for n in range(1, 9):
        with ThreadPoolExecutor(len(keys)) as pool:
            for done in [pool.submit(write, n, key) for key in keys]:
                done.result()
        found = config.load(path, {})
        assert [config.get_value(found, key) for key in keys] == [float(n)] * len(keys)


MODEL = '[[models]]\nname = "{name}"\nmodel = "a.gguf"\n'


def test_models_are_read_as_a_list_of_tables_and_outlive_a_written_setting(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(MODEL.format(name="coder") + 'use = "edits"\n' + MODEL.format(name="chat") + "n_ctx = 8192\n")
    config.set_values(path, {"policy.budget": 0.25})
    models = config.load(path, env={}).models
    assert [(m.name, m.n_ctx, m.use) for m in models] == [("coder", 4096, "edits"), ("chat", 8192, "")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MODEL.format(name="a") * 2, "two models called a"), (MODEL.format(name="device"), "name"),
        (MODEL.format(name="server"), "name"), (MODEL.format(name="a:b"), "name"), (MODEL.format(name=""), "name"),
        ('[[models]]\nname = "a"\n', "model"), (MODEL.format(name="a") + "n_ctx = 1\n", "n_ctx"),
        (MODEL.format(name="a") + "temperature = 1\n", "temperature"), ('models = "a"\n', "models"),
    ],
)  # fmt: skip
def test_a_wrong_list_of_models_is_refused_with_its_key(path: Path, text: str, says: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        config.load(path, env={})


SERVERS = '[[servers]]\nname = "{name}"\nbase_url = "https://{name}.example/v1"\n'


def test_servers_are_read_as_a_list_of_tables_beside_the_one_that_stands_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(
        '[server]\nbase_url = "http://127.0.0.1:9/v1"\nmodel = "own"\n'
        + SERVERS.format(name="box") + 'model = "large"\ncontinuation = "text"\n'
        + SERVERS.format(name="router") + 'map = {"gpt-4o" = "openai/gpt-4o"}\ncapabilities = {tools = false}\n'
    )  # fmt: skip
    config.set_values(path, {"policy.budget": 0.25})
    loaded = config.load(path, env={})
    found = servers_of(loaded)
    assert list(found) == ["server", "box", "router"]
    assert [one.model for one in found.values()] == ["own", "large", ""]
    assert found["box"].continuation == "text"
    assert found["router"].capabilities == {"tools": False}
    assert loaded.servers[1].map == {"gpt-4o": "openai/gpt-4o"}
    assert [one["name"] for one in config.as_dict(loaded)["servers"]] == ["box", "router"]
    assert "servers" not in config.as_dict(Config())


def test_no_server_of_the_list_takes_a_key_that_nobody_has_named_for_it(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(SERVERS.format(name="box"))
    (one,) = config.load(path, env={}).servers
    assert (one.api_key_env, one.api_key_file) == ("", "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SERVERS.format(name="a") * 2, "two servers called a"), ('[[servers]]\nname = "a"\n', "base_url"),
        *((SERVERS.format(name=name), "not disco, device, server") for name in ("server", "device", "disco")),
        *((SERVERS.format(name=name), "1 to 64 letters, digits") for name in ("a/b", "", "é", "n" * 65)),
        ('[[servers]]\nname = "a"\nbase_url = "box"\n', "not a URL"),
        (SERVERS.format(name="a") + 'continuation = "magic"\n', "a: continuation = 'magic'"),
        (SERVERS.format(name="a") + 'key_origin = "box"\n', "no origin"),
        (SERVERS.format(name="a") + 'models = ["x"]\nmodel = "y"\n', "not among its models"),
        (SERVERS.format(name="a") + 'map = {"disco" = "x"}\n', "map"),
    ],
)  # fmt: skip
def test_a_wrong_list_of_servers_is_refused_with_its_key(path: Path, text: str, says: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        config.load(path, env={})


def test_no_name_ends_with_a_line_break() -> None:
    """`$` in a pattern matches before one, too."""
    for table in (
        {"models": [{"name": "a\n", "model": "a.gguf"}]}, {"device": {"adapters": {"a\n": {"path": "a.gguf"}}}},
        {"api": {"hosts": ["box\n"]}}, {"api": {"origins": ["app://x\n"]}}, {"api": {"aliases": {"a\n": "b"}}},
        {"servers": [{"name": "a\n", "base_url": "http://a"}]},
        {"fleet": {"listen": "box\n"}}, {"partner": {"listen": "box\n"}}, {"fleet": {"ray": "box:1\n"}},
    ):  # fmt: skip
        whole = msgspec.json.encode(table)
        with pytest.raises(msgspec.ValidationError, match="regex"):
            msgspec.json.decode(whole, type=Config)
        msgspec.json.decode(whole.replace(b"\\n", b""), type=Config)
