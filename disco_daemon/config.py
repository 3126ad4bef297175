"""Layered settings: config.toml < DISCO_* variables < flags. Every setting is documented below its line."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import platformdirs
import tomlkit
from msgspec import Meta
from tomlkit.exceptions import TOMLKitError

from .errors import ConfigError
from .net import hostname, is_http_url, is_loopback, without_credentials

# As endpoints.continuation tells them apart; that room is for the daemon, and this one for every command.
CONTINUATIONS = (
    "auto", "token_ids", "text", "continue_final_message", "prefix", "assistant", "instruct", "none"
)  # fmt: skip
_Positive = Annotated[float, Meta(gt=0)]
_NonNegative = Annotated[float, Meta(ge=0)]
_Share = Annotated[float, Meta(ge=0, le=1)]


class Api(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[api] Where the daemon listens."""

    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs `api.key`."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 4747
    """Port; 0 picks a free one."""
    key: str = ""
    """If set, clients must send it as their API key."""


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[device.adapters.NAME] A LoRA adapter: path of a GGUF file, and how strongly it is applied (1 = as trained)."""

    path: str
    scale: Annotated[float, Meta(ge=-100, le=100)] = 1.0


_AdapterName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class DeviceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[device] This machine's own model."""

    enabled: bool = True
    """Whether the device takes part."""
    model: str = ""
    """Path of a GGUF file; empty = the embedded default model. With `base_url`: the model's name there."""
    base_url: str = ""
    """A local OpenAI-compatible server (llama-server, Ollama, LM Studio) to use as the device instead."""
    n_ctx: Annotated[int, Meta(ge=0)] = 4096
    """Context length in tokens of one answer with its prompt; 0 = as the model was trained. Less if memory is short."""
    n_cells: Annotated[int, Meta(ge=0)] = 0
    """Tokens in the KV cache: all running answers, and prompts kept for reuse; 0 = twice n_ctx if memory allows."""
    spill_gib: _NonNegative = 0.0
    """Disk for idle conversations, GiB: they go on after a restart without being read again. The files, yours alone in
    the cache folder, hold the conversations, but no `private` ones. 0 = none, and those there are removed."""
    spill_after_s: _NonNegative = 120.0
    """A conversation goes to disk when nobody has used it for this long, s; or for want of room, or at the end."""
    scheduler: Literal["andes", "fcfs", "round-robin"] = "andes"
    """Who runs when not all can: andes (whose reader gains most), fcfs (first come, first served), round-robin."""
    n_threads: Annotated[int, Meta(ge=0)] = 0
    """CPU threads; 0 = as tuned, or else one fewer than the cores, at least 1."""
    n_threads_batch: Annotated[int, Meta(ge=0)] = 0
    """CPU threads that read prompts; 0 = `n_threads` if you set that, or else as tuned."""
    n_ubatch: Annotated[int, Meta(ge=0, le=512)] = 0
    """Tokens of a prompt that are computed at a time (micro-batch); 0 = as tuned, or else 512."""
    flash_attn: Literal["auto", "on", "off"] = "auto"
    """Flash attention; auto: on, unless rounding is fast and it was measured to be slower here."""
    kv_type: Literal["auto", "q8_0"] = "auto"
    """How the KV cache keeps a number: auto (16 bits), or q8_0 (half the memory; answers may differ a little)."""
    autotune: bool = True
    """Measure once, while the daemon is idle, which of these are fastest here, for the next start; `disco tune` does it
    at once. Not if you set `n_threads`."""
    rounding: Literal["auto", "exact", "fast"] = "auto"
    """exact: an answer taken over from elsewhere goes on as if it had never been interrupted, to the bit; fast: prompts
    are read 15 % faster (512 tokens), and greedy answers may part after a handoff. auto: exact if there is a server."""
    n_gpu_layers: Annotated[int, Meta(ge=-1)] | Literal["auto"] = "auto"
    """Layers to put on a GPU, if llama.cpp was built for one: auto (as many as its memory holds; none if `rounding` is
    exact, which only the CPU is), a number, -1 = all."""
    adapters: Annotated[dict[_AdapterName, str | Adapter], Meta(max_length=32)] = {}
    """LoRA adapters, NAME = "path of a GGUF file" or {path, scale}; each is the model disco/device:NAME."""
    chat_template: str = ""
    """A Jinja file in place of the model's own chat template; empty = the model's own."""
    speculation: Literal["auto", "off"] = "auto"
    """auto: guess the next tokens from the text (quotes, edits) and compute several at once where that pays; off. The
    answers are the same."""
    draft_model: str = ""
    """A small GGUF file of the same family as `model`, which guesses, too; empty = none."""
    watts: _NonNegative = 15.0
    """Power that computing draws, W; with `usd_per_kwh` it gives the cost of device tokens."""
    usd_per_kwh: _NonNegative = 0.30
    """Exchange rate: what a kWh of this machine's energy is worth, $."""


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[server] The remote OpenAI-compatible API."""

    base_url: str = ""
    """Such as https://api.openai.com/v1; empty = no server."""
    model: str = ""
    """The model's name there."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the API key."""
    api_key_file: str = ""
    """A file with the API key, readable by you only (chmod 600); used when the variable is not set."""
    continuation: str = "auto"
    """How it continues a partial answer: auto (known hosts, or found out by a probe), token_ids, text,
    continue_final_message, prefix, assistant, instruct (asks in words, and trims the overlap), none."""
    probe: bool = True
    """With `auto`: find out once how an unknown server continues answers, after its first one; some 200 tokens."""
    stream_usage: bool = True
    """Ask for token counts at the end of a stream; turn off for servers that refuse `stream_options`."""
    first_token_timeout_s: _Positive = 20.0
    """Give up on the server after this long without a first token, s."""
    token_timeout_s: _Positive = 15.0
    """Give up on the server after this long between two tokens, s."""
    input_usd_per_mtok: _NonNegative = 0.15
    """Price of a million input tokens, $."""
    output_usd_per_mtok: _NonNegative = 0.60
    """Price of a million output tokens, $."""


class PolicySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[policy] Who starts when."""

    name: str = "optimal"
    """optimal (learns both sides), paper (DiSCo), stochastic, stochastic-concurrent, race (both at once), all-device,
    all-server, or delay (server first, the device after `delay_s`)."""
    budget: _Share = 0.5
    """Budget ratio b: the share of all prompt tokens that the scarcer side may process, 0 to 1."""
    scarcer: str = "auto"
    """Whose use the budget limits: device, server, or auto (whichever costs more per token)."""
    alpha: _Share = 0.05
    """Share of the requests whose tail `paper` protects first."""
    kappa: _NonNegative = 0.058
    """Weight of the slowest 1 % in `optimal`: s of mean that a second of them is worth."""
    shadow: bool = True
    """Let a server that lost the race show its first token: about one token's cost, and its TTFT is known."""
    delay_s: _NonNegative = 0.3
    """Head start of the server in `delay`, s."""


class DeliverySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[delivery] How tokens are released where the client does not say."""

    mode: str = "reserve"
    """reserve (at once, but for a few tokens held back while a handoff is possible), paced (at most as fast as they
    are read; `disco chat` asks for it), or off (at once)."""
    pace_tps: _Positive = 4.8
    """The reader's pace, token/s: 4.8 is reading, 3.3 listening."""
    expected_ttft_s: _Positive = 1.0
    """The TTFT that readers expect, s; for the quality of experience."""


class HandoffSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[handoff] When a running answer moves to the other side."""

    for_cost: bool = True
    """Move an answer when that saves more than it costs; a side that fails is replaced in any case."""
    stall_s: _Positive = 2.0
    """Begin a handoff when the source has been silent for this long in mid-answer, s."""


class HistorySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[history] What is remembered of past requests."""

    path: str = ""
    """SQLite file; empty = in the data folder."""
    max_rows: Annotated[int, Meta(ge=1)] = 20_000
    """Requests to keep; the oldest go first."""
    keep_text: bool = False
    """Whether prompts and answers are stored too."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings."""

    api: Api = Api()
    device: DeviceSettings = DeviceSettings()
    server: ServerSettings = ServerSettings()
    policy: PolicySettings = PolicySettings()
    delivery: DeliverySettings = DeliverySettings()
    handoff: HandoffSettings = HandoffSettings()
    history: HistorySettings = HistorySettings()


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "api": Api,
    "device": DeviceSettings,
    "server": ServerSettings,
    "policy": PolicySettings,
    "delivery": DeliverySettings,
    "handoff": HandoffSettings,
    "history": HistorySettings,
}
SECRET_KEYS = frozenset({"api.key"})
TABLES = frozenset({"device.adapters"})


def keys() -> list[str]:
    """All settings as `section.name`."""
    return [f"{section}.{name}" for section, cls in SECTIONS.items() for name in cls.__struct_fields__]


def config_path() -> Path:
    """Where config.toml is: $DISCO_CONFIG, or the platform's config folder."""
    override = os.environ.get("DISCO_CONFIG")
    return Path(override) if override else platformdirs.user_config_path("disco") / "config.toml"


def data_path() -> Path:
    """Where history and models live."""
    return platformdirs.user_data_path("disco")


def cache_path() -> Path:
    """Where what can be computed again lives."""
    return platformdirs.user_cache_path("disco")


def load(
    path: Path | None = None, env: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> Config:
    """Read all layers. `flags` maps `section.name` to a value. Raises ConfigError that names key and mend."""
    path = path or config_path()
    values = _read_file(path)
    for key, text in _from_env(os.environ if env is None else env).items():
        _put(values, key, text)
    for key, value in (flags or {}).items():
        if value is not None:
            _put(values, key, value)
    return _convert(values, path)


def set_value(path: Path, key: str, text: str) -> Config:
    """Write one setting into config.toml, keeping comments; nothing is written if it would be wrong."""
    _require_known(key)
    values = _read_file(path)
    _put(values, key, text)
    config = _convert(values, path)
    document = tomlkit.parse(path.read_text("utf-8")) if path.exists() else tomlkit.document()
    section, name = key.split(".")
    if section not in document:
        document[section] = tomlkit.table()
    document[section][name] = get_value(config, key)
    _write_private(path, tomlkit.dumps(document))
    return config


def get_value(config: Config, key: str) -> Any:
    """One setting. Raises ConfigError for an unknown key."""
    _require_known(key)
    section, name = key.split(".")
    return msgspec.to_builtins(getattr(getattr(config, section), name))


def as_dict(config: Config) -> dict[str, Any]:
    """All settings for showing; secrets are masked."""
    shown: dict[str, Any] = msgspec.to_builtins(config)
    for key in SECRET_KEYS:
        section, name = key.split(".")
        if shown[section][name]:
            shown[section][name] = "********"
    for section in ("server", "device"):
        shown[section]["base_url"] = without_credentials(shown[section]["base_url"])
    return shown


def server_api_key(config: Config, env: Mapping[str, str] | None = None) -> str:
    """The server's API key from the environment or the 0600 file, "" if there is none. Raises ConfigError."""
    env = os.environ if env is None else env
    if key := env.get(config.server.api_key_env, ""):
        return key
    if not config.server.api_key_file:
        return ""
    path = Path(config.server.api_key_file).expanduser()
    try:
        mode = path.stat().st_mode
        text = path.read_text("utf-8").strip()
    except OSError as e:
        msg = f"server.api_key_file {path} cannot be read: {e.strerror}"
        raise ConfigError(msg) from e
    except UnicodeDecodeError as e:
        msg = f"server.api_key_file {path} is no text file"
        raise ConfigError(msg) from e
    if stat.S_IMODE(mode) & 0o077:
        msg = f"server.api_key_file {path} is readable by others: run `chmod 600 {path}`"
        raise ConfigError(msg)
    return text


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, TOMLKitError) as e:
        msg = f"{path} is not valid TOML: {e}"
        raise ConfigError(msg) from e
    except OSError as e:
        msg = f"{path} cannot be read: {e.strerror}"
        raise ConfigError(msg) from e


def _from_env(env: Mapping[str, str]) -> dict[str, str]:
    """DISCO_SERVER_BASE_URL -> server.base_url. Names that fit no section (DISCO_CONFIG …) are not settings."""
    known = {f"DISCO_{key.replace('.', '_').upper()}": key for key in keys()}
    sections = tuple(f"DISCO_{section.upper()}_" for section in SECTIONS)
    wrong = sorted(name for name in env if name.startswith(sections) and name not in known)
    if wrong:
        msg = f"unknown variable {wrong[0]}; settings are {', '.join(sorted(known))}"
        raise ConfigError(msg)
    return {key: env[name] for name, key in known.items() if name in env}


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    section, name = key.split(".")
    target = values.setdefault(section, {})
    if not isinstance(target, dict):
        msg = f"[{section}] must be a table"
        raise ConfigError(msg)
    if isinstance(value, str):
        cls = SECTIONS[section]
        kind = next(f.type for f in msgspec.structs.fields(cls) if f.name == name)
        try:
            if key in TABLES:
                value = tomllib.loads(f"value = {value}")["value"]
            value = msgspec.convert(value, kind, strict=False)
        except tomllib.TOMLDecodeError as e:
            msg = f"{key} must be a TOML table such as {{name = 'value'}}: {e} (got {value!r})"
            raise ConfigError(msg) from e
        except msgspec.ValidationError as e:
            msg = f"{key}: {e} (got {value!r})"
            raise ConfigError(msg) from e
    target[name] = value


def _convert(values: dict[str, Any], path: Path) -> Config:
    try:
        config = msgspec.convert(values, Config)
    except msgspec.ValidationError as e:
        msg = f"{path}: {e}; `disco config get` lists all settings"
        raise ConfigError(msg) from e
    _check(config)
    return config


def _check(config: Config) -> None:
    """Rules across settings."""
    from .scheduling.names import POLICIES

    choices = {
        "policy.name": (config.policy.name, POLICIES),
        "policy.scarcer": (config.policy.scarcer, ("auto", "device", "server")),
        "server.continuation": (config.server.continuation, CONTINUATIONS),
        "delivery.mode": (config.delivery.mode, ("reserve", "paced", "off")),
    }
    for key, (value, allowed) in choices.items():
        if value not in allowed:
            msg = f"{key} = {value!r}: choose one of {', '.join(allowed)}"
            raise ConfigError(msg)
    if config.device.flash_attn == "off" and (config.device.rounding == "exact" or config.device.kv_type != "auto"):
        msg = "device.flash_attn = 'off' does not go with device.rounding = 'exact', nor with a device.kv_type"
        raise ConfigError(msg)
    for key, url in (("server.base_url", config.server.base_url), ("device.base_url", config.device.base_url)):
        if url and not is_http_url(url):
            msg = f"{key} = {url!r} is not a URL such as https://api.openai.com/v1"
            raise ConfigError(msg)


def require_complete(config: Config) -> None:
    """What must be set together before a daemon can run. Raises ConfigError."""
    if config.device.base_url and not is_loopback(hostname(config.device.base_url)):
        msg = "device.base_url must be on this machine (127.0.0.1 or localhost): private requests go there"
        raise ConfigError(msg)
    if config.device.base_url and config.device.adapters:
        msg = "device.adapters are for this machine's own engine: with device.base_url that server has its own"
        raise ConfigError(msg)
    if config.server.base_url and not config.server.model:
        msg = "server.base_url is set but server.model is not: `disco config set server.model NAME`"
        raise ConfigError(msg)
    if config.device.base_url and not config.device.model:
        msg = "device.base_url is set but device.model is not: `disco config set device.model NAME`"
        raise ConfigError(msg)


def _require_known(key: str) -> None:
    if key not in keys():
        msg = f"unknown setting {key!r}; settings are {', '.join(keys())}"
        raise ConfigError(msg)


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = path.resolve()  # a config.toml that is a link into somebody's dotfiles stays one
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)  # of an interrupted write, with whatever permissions
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)
