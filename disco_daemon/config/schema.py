"""The settings: every one is documented below its line. `config` reads and writes them.

It is longer than other files, and may grow: all settings are one table, in one place.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_Positive = Annotated[float, Meta(gt=0)]
_NonNegative = Annotated[float, Meta(ge=0)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Grade = Annotated[float, Meta(ge=0, le=100)]
_HostName = Annotated[str, Meta(pattern=r"^(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])\Z", max_length=255)]
# A whole origin, or a scheme for all that have it; not one that any web page, or any browser's extension, has.
_Origin = Annotated[
    str,
    Meta(pattern=r"^(?!(?:https?|wss?|[a-z-]*extension)://$)[a-z][a-z0-9+.-]*://[^/\s,*]*\Z", max_length=255),
]
_Alias = Annotated[str, Meta(pattern=r"^(?!disco(/|$))\S+\Z", max_length=255)]  # the daemon's own names stay its own

# `types.capabilities` has what they are.
_Capability = Literal["tools", "forced_tools", "json_schema", "images", "logprobs", "n", "fim"]


class Api(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[api] Where the daemon listens."""

    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs `api.key`, or a key with a name."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 4747
    """Port; 0 picks a free one."""
    ollama_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """A second port, for programs that have Ollama's 11434 built in; 0 = none. If it is taken, the log says so."""
    key: str = ""
    """If set, clients must send it as their API key; over TCP it opens the controls, too (docs/reference/doors.md)."""
    control_key: str = ""
    """If set, this key opens the controls over TCP, and `api.key`, which is pasted into editors, does not."""
    any_user: bool = False
    """Let every user of this machine ask, without a key; otherwise others need `api.key`."""
    hosts: tuple[_HostName, ...] = ()
    """More names by which clients on this machine may call it, such as `host.docker.internal`; with commas between."""
    origins: tuple[_Origin, ...] = ("app://", "file://", "tauri://", "vscode-file://", "vscode-webview://")
    """Origins of pages that may ask, such as `https://chat.example`; a scheme such as `app://` stands for all that have
    it, as desktop apps do; a file (`file://`) has to show `api.key`. A list of your own takes this one's place
    (docs/reference/doors.md#pages-and-desktop-apps)."""
    aliases: dict[_Alias, Annotated[str, Meta(min_length=1, max_length=512)]] = {}
    """More names of models, and what each stands for: `{"claude-*" = "disco", "gpt-4o" = "disco/server"}`. A `*` is any
    characters. They go before an endpoint's own names (docs/reference/api.md#names)."""
    receive_timeout_s: _Positive = 30.0
    """A connection ends when a request's header or its body, or the next request, has not come for this long, s."""
    drain_s: _NonNegative = 30.0
    """After a SIGTERM running answers may go on for this long, s; then their streams end with an error that says so."""


class AdapterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[device.adapters.NAME] A LoRA adapter: path of a GGUF file, and how strongly it is applied (1 = as trained)."""

    path: str
    scale: Annotated[float, Meta(ge=-100, le=100)] = 1.0


_AdapterName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]


class DeviceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[device] This machine's own model."""

    enabled: bool = True
    """Whether the device takes part."""
    model: str = ""
    """Path of a GGUF file; empty = the default model. With `device.base_url`: the model's name there."""
    base_url: str = ""
    """A local OpenAI-compatible server (llama-server, Ollama, LM Studio) to use as the device instead."""
    n_ctx: Annotated[int, Meta(ge=0)] = 0
    """Context length in tokens of one answer with its prompt; 0 = as much as fits, up to what the model was trained for
    (in a split or a fleet 4,096). Less if memory is short."""
    n_cells: Annotated[int, Meta(ge=0)] = 0
    """Tokens in the KV cache: all running answers, and prompts kept for reuse; 0 = twice `device.n_ctx` if memory
    allows, and where that is 0, one answer of full length, at least two of 4,096."""
    spill_gib: _NonNegative = 0.0
    """Disk for idle conversations, GiB: they go on after a restart without being read again. The files are yours alone,
    in the cache folder (`disco/kv`), and hold the conversations, but no `private` ones; 0 = none, and those there are
    removed."""
    spill_after_s: _NonNegative = 120.0
    """A conversation goes to disk when nobody has used it for this long, s; also for want of room in memory, and at the
    end."""
    keep_alive_s: _NonNegative = 0.0
    """Unload the model when nobody has asked it anything for this long, s, and load it again with the next request; a
    server is asked at once meanwhile. What it knew of conversations goes, unless `device.spill_gib`; 0 = never."""
    scheduler: Literal["andes", "andes-paper", "fcfs", "round-robin"] = "andes"
    """Which answers run when not all can: `andes` (those whose readers gain most, begun ones first), `andes-paper` (the
    same where any begun answer may stand still), `fcfs` (first come, first served), `round-robin`."""
    n_threads: Annotated[int, Meta(ge=0)] = 0
    """CPU threads; 0 = as tuned, or else one fewer than the cores, at least 1. Slower cores beside fast ones count as
    far as they help, hardware threads of a core once. More than a node of memory has (NUMA) are spread over all."""
    n_threads_batch: Annotated[int, Meta(ge=0)] = 0
    """CPU threads that read prompts; 0 = `device.n_threads` if you set that, or else as tuned."""
    n_ubatch: Annotated[int, Meta(ge=0, le=512)] = 0
    """Tokens of a prompt that are computed at a time (micro-batch); 0 = as tuned, or else 512."""
    flash_attn: Literal["auto", "on", "off"] = "auto"
    """Flash attention: on, off, or auto: on, unless rounding is fast and it was measured to be slower here."""
    kv_type: Literal["auto", "f16", "q8_0"] = "auto"
    """How the KV cache keeps a number: `f16` (16 bits), `q8_0` (half the memory; answers may differ a little from those
    of 16 bits), or auto: `f16`, unless all of a `device.n_ctx` that you set fits only with `q8_0`."""
    autotune: bool = True
    """Measure once, while the daemon is idle, which of these are fastest here, for the next start; `disco tune` does it
    at once. Not if you set `device.n_threads`."""
    rounding: Literal["auto", "exact", "fast"] = "auto"
    """`exact`: an answer taken over from elsewhere goes on to the bit as if it had never been interrupted; `fast`:
    prompts are read 15 % faster (512 tokens; three to four times as fast with IQ, Q2_K and Q3_K weights, and with all
    K weights on a processor without AVX2), and greedy answers may part after a handoff; `auto`: exact if there is a
    server, and no such weights."""
    n_gpu_layers: Annotated[int, Meta(ge=-1)] | Literal["auto"] = "auto"
    """Layers to put on a GPU, if llama.cpp was built for one: auto (as many as its memory holds; none if
    `device.rounding` is `exact`, which only the CPU is), a number, -1 = all."""
    n_cpu_moe: Annotated[int, Meta(ge=-1)] | Literal["auto"] = "auto"
    """Of a mixture of experts with layers on a GPU, from how many layers, counted from the first, the experts stay with
    the processor: auto (as few as the GPU's memory asks for), a number, -1 = all."""
    adapters: Annotated[dict[_AdapterName, str | AdapterSettings], Meta(max_length=32)] = {}
    """LoRA adapters: a table of NAME = "path of a GGUF file", or NAME = {path, scale}; each is the model
    `disco/device:NAME`."""
    chat_template: str = ""
    """A Jinja file in place of the model's own chat template; empty = the model's own."""
    speculation: Literal["auto", "off"] = "auto"
    """`auto`: guess the next tokens from the text (quotes, edits), or by a layer that some models have for that (MTP),
    and compute several at once where that pays, without changing the answer; `off`."""
    draft_model: str = ""
    """A small GGUF file of the same family as `device.model`, which guesses, too (and its own layer then does not);
    empty = none."""
    watts: _NonNegative = 0.0
    """Power that computing draws, W, where no sensor can be read; 0 = guessed from the cores. `disco doctor` shows what
    is used."""
    usd_per_kwh: _NonNegative = 0.30
    """Exchange rate λ: what a kWh of this machine's energy is worth on mains, $. On battery it is worth more, the more
    so the less there is left (docs/explain/money.md#the-exchange-rate)."""
    grade: _Grade | None = None
    """How good its model is, 0 to 100 as in MMLU-Pro; null = as known of it (`policy.unequal`)."""
    models_gib: _NonNegative = 0.0
    """Memory that this model and those of `[[models]]` may have together, GiB; 0 = 85 % of it. Who needs room gets it
    from those that are least expected to be asked for, never from one that answers."""

    @property
    def divided_n_ctx(self) -> int:
        """The context length of a model over several processes, tokens: their memory is planned before they load."""
        return self.n_ctx or 4096

    @property
    def divided_kv_type(self) -> str:
        """The type of its keys and values: several processes and machines agree on 16 bits unless it is set."""
        return "f16" if self.kv_type == "auto" else self.kv_type


_ModelName = Annotated[str, Meta(pattern=r"^(?!(?:device|server)$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[[models]] One more model of this machine, `disco/NAME`: loaded when it is asked for, kept by expected use."""

    name: _ModelName
    """What requests call it behind `disco/`."""
    model: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Path of a GGUF file, or the name of a model or repository as `disco models list` has it."""
    n_ctx: Annotated[int, Meta(ge=256)] = 4096
    """Context length in tokens of one answer with its prompt."""
    use: Annotated[str, Meta(max_length=200)] = ""
    """What it is for, in your words: lists of models show it."""


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[server] The remote OpenAI-compatible API."""

    base_url: str = ""
    """Base address of the API, such as `https://api.openai.com/v1`; empty = no server."""
    model: str = ""
    """The model's name there."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the API key; empty = none, only the file counts."""
    api_key_file: str = ""
    """A file with the API key, yours and readable by you only (chmod 600); used when the variable is not set."""
    key_origin: str = ""
    """The origin that the key is for, such as `https://api.openai.com`: it goes nowhere else. `disco setup` writes it;
    empty = a daemon's first start with a key binds it to the server that is configured then, and writes that here."""
    insecure: bool = False
    """Let the key travel over plain `http://` to a host that is not private (loopback, RFC 1918, 100.64/10, link-local,
    ULA); without it such a server is off."""
    continuation: str = "auto"
    """How it continues a partial answer: auto (known hosts, or found out by a probe), token_ids, text,
    continue_final_message, prefix, assistant, instruct (asks in words, and trims the overlap), none
    (docs/reference/continuations.md)."""
    probe: bool = True
    """Find out what it can do: at the start by what it tells of its model (a list of models, no tokens); and with
    `continuation` `auto` once how it continues answers, after its first one (some 200 tokens)."""
    stream_usage: bool = True
    """Ask for token counts at the end of a stream; turn off for servers that refuse `stream_options`."""
    context_length: Annotated[int, Meta(ge=0)] = 0
    """Tokens of prompt and answer together; 0 = as it or lists tell (docs/reference/api.md#what-each-side-can-do)."""
    capabilities: dict[_Capability, bool] = {}
    """What it can do, by name: tools, forced_tools, json_schema, images, logprobs, n, fim, each true or false. Of what
    is not named, what it tells counts, or else it is asked until it refuses."""
    first_token_timeout_s: _Positive = 20.0
    """Give up on the server after this long without a first token, or a sign of life, s."""
    thinking_timeout_s: _Positive = 600.0
    """Give up on one with signs of life, but no token, after so many s, or sooner (docs/reference/api.md#streams)."""
    token_timeout_s: _Positive = 15.0
    """Give up on the server after this long between two tokens, s."""
    input_usd_per_mtok: _NonNegative | None = None
    """Price of 10⁶ input tokens, $; null = as listed (docs/explain/money.md#what-servers-charge), 0 on own ones."""
    output_usd_per_mtok: _NonNegative | None = None
    """Price of a million output tokens, $; null = as in the price lists."""
    grade: _Grade | None = None
    """How good its model is, 0 to 100 as in MMLU-Pro; null = as published, or as its catalogue tells."""


# `server` is what `[server]` is called among several, and the other two are the daemon's and the device's own names.
_ServerName = Annotated[str, Meta(pattern=r"^(?!(?:disco|device|server)$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
_ServedModel = Annotated[str, Meta(min_length=1, max_length=512)]


class NamedServer(ServerSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """[[servers]] One more server: any of its models by `NAME/MODEL`, and its own `model` also for `disco`.

    What `[server]` has it has, too, and `[server]` is one of them, called `server`. Settings that are said of a model
    are said of `model`, or of all where that is empty.
    """

    name: _ServerName
    """What requests call it in front of `/`."""
    base_url: Annotated[str, Meta(min_length=1)]
    """Base address of the API, such as `https://openrouter.ai/api/v1`."""
    model: str = ""
    """The model that it answers `disco` and `disco/server` with; empty = none: it is asked by name only."""
    api_key_env: str = ""
    """Name of the environment variable that holds its API key; empty = none, only the file counts."""
    key_origin: str = ""
    """The origin that its key is for: it goes nowhere else; empty = that of its `base_url`."""
    models: Annotated[tuple[_ServedModel, ...], Meta(max_length=1000)] = ()
    """Its models that may be asked for, by their names there; empty = all that its list tells, and what you name."""
    map: Annotated[dict[_Alias, _ServedModel], Meta(max_length=1000)] = {}
    """Names that clients use, and its own for them: `{"gpt-4o" = "openai/gpt-4o"}`. Such a name is asked for here and
    at the other servers that have it in theirs."""


class PolicySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[policy] When each side starts."""

    set: Literal["fast", "balanced", "best", "frugal", "private"] = "balanced"
    """A ready-made set of settings and rules (docs/howto/rules.md#ready-made-sets). What you set yourself goes before
    it, but for `policy.private`, which is on where either says so."""
    name: str = "optimal"
    """{policies}: docs/explain/policy.md."""  # the table in dispatch/policies.py; `make docs` writes it here
    budget: _Share = 0.5
    """Budget ratio b: the share of all prompt tokens that the scarcer side may process, 0 to 1. The device is booked
    with what it computes, not with what it has in its KV cache; the server with the whole prompt, whenever asked.
    Beyond it only what a side that is silent for longer than ever leaves undone; that is booked, and saved again."""
    scarcer: str = "auto"
    """Whose use the budget limits: device, server, or auto (whichever costs more per token)."""
    alpha: _Share = 0.05
    """Share of the requests whose tail `paper` protects first."""
    kappa: _NonNegative = 0.058
    """Weight of the slowest 1 % in `optimal`: s of mean that a second of them is worth."""
    usd_per_hour_waited: Annotated[float, Meta(gt=0, le=1e6)] = 30.0  # with more, no price counts beside a millisecond
    """What an hour of waiting is worth, $, where one of several servers is chosen by its speed and its price: with less
    rather a cheaper one is asked, with more rather a sooner one. 30 is about what an hour of work costs in the EU."""
    unequal: Literal["stand-in", "first-words", "race"] = "stand-in"
    """What a side may do whose model is far worse than the other one's: answer only where that one is silent, fails or
    must not be asked (`stand-in`), show the first words besides, where the other one can go on with them
    (`first-words`), or `race` as an equal: docs/explain/policy.md#sides-of-unequal-quality."""
    shadow: bool = True
    """Let a server that lost the race show its first token: about one token's cost, and its time is known."""
    hedge: _Share = 0.08
    """Share of the prompt tokens that the server may be sent a second time, where `optimal` expects a first token at
    least 1 % sooner of it; 0 = never: docs/explain/policy.md#a-second-request. Both requests are billed. Of several
    servers it is also the share of the requests for which another one is asked as well, 0.05 at most."""
    private: bool = False
    """Never leave this machine: every request is as a `private` one (docs/reference/api.md#one-request), and the server
    is asked nothing, not even by a probe; a request that asks for the server gets a 403."""
    delay_s: _NonNegative = 0.3
    """Head start of the server in `delay`, s."""


class DeliverySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[delivery] How tokens are released if the client does not say."""

    mode: str = "reserve"
    """reserve (at once, but for a few tokens held back while a handoff is possible), paced (at most as fast as they are
    read; `disco chat --delivery paced` asks for it), or off (at once): docs/explain/handoff.md."""
    pace_tps: _Positive = 4.8
    """The reader's pace, token/s: 4.8 is reading, 3.3 listening."""
    expected_ttft_s: _Positive = 1.0
    """The time to first token that readers expect, s; for the quality of experience."""
    stop_repetition: bool = True
    """End an answer that says the same again and again, as its length limit would: nobody pays for more of it, and it
    moves to no other side. `disco.stop_repetition` says so for one request."""


class HandoffSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[handoff] When a running answer moves to the other side."""

    for_cost: bool = True
    """Move an answer when that saves more than it costs; a side that fails is replaced in any case."""
    pause: bool = True
    """Stop the source of a move, and with it a server's bill, while a reader at their pace has enough text in stock to
    wait for the other side; should that not come, the source is asked again. Only with the delivery paced, and a server
    that is known to go on exactly (docs/explain/handoff.md#a-source-that-rests); else the source goes on."""
    stall_s: _Positive = 2.0
    """Begin a handoff when the source has been silent for this long in mid-answer, s."""


class CapSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[caps] Where spending ends; null = no cap. A side whose cap is reached gives way to the other one."""

    usd_per_day: _NonNegative | None = None
    """What servers may bill a day, $; null = no cap. A side whose cap is reached gives way to the other one."""
    usd_per_month: _NonNegative | None = None
    """What servers may bill a calendar month, $."""
    wh_per_day: _NonNegative | None = None
    """What this machine may spend on answers a day, Wh."""
    battery_floor: _Share | None = None
    """The charge below which the device makes no answers on battery, 0 to 1; near it energy is dearer."""


class HistorySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[history] How past requests are recorded."""

    path: str = ""
    """SQLite file; empty = in the data folder."""
    max_rows: Annotated[int, Meta(ge=1)] = 20_000
    """Requests to keep; the oldest go first."""
    keep_text: bool = False
    """Whether prompts and answers are stored too; of `private` requests they never are."""


class SplitSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[split] This machine's model over two machines: the lower layers here, the rest at a partner."""

    enabled: bool = False
    """Whether the device is split; joining a partner turns it on."""
    partner: str = ""
    """Address of the partner, HOST:PORT; joining writes it."""
    mode: Literal["exact", "confident", "alone"] = "exact"
    """Who decides a token: `exact` (the partner: answers are the whole model's), `confident` (this machine's early exit
    where it is sure, which takes a good one) or `alone` (the exit; nothing goes to the partner)."""
    theta: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """In `confident`: how sure an exit must be of a token to decide it, above 0, up to 1 (it never is)."""
    alone: Literal["go-on", "stop"] = "go-on"
    """What becomes of an answer when the partner has gone and no server may take over: this machine goes on alone, or
    the answer ends with an error. Without an early exit or a small model it always ends."""
    private_alone: bool = False
    """Whether a `private` request is answered by this machine alone, by its early exit or small model: nothing of it
    goes to the partner. Else, or without either, it is refused."""
    cut: Annotated[int, Meta(ge=0)] | None = None
    """Number of layers on this machine; null = not joined yet, which writes it. `disco split plan` compares cuts. 0 =
    none: a small model drafts here (`disco machines join --draft`), and the partner has the whole large one."""
    draft_model: str = ""
    """With cut 0: the file of the small model that drafts, of the same vocabulary; empty = `device.model`."""
    codec: Literal["auto", "f32", "bf16", "int8"] = "auto"
    """How rows travel: `f32` changes no bit; `bf16` has half of the bytes and `int8` less than a third, and answers may
    differ. `auto` is `f32`, or `bf16` where `device.rounding` is `fast` and the partner was measured to be slow to
    reach."""


class PartnerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[partner] This machine computes the upper layers of its model for other machines."""

    enabled: bool = False
    """Whether it does; pairing turns it on. Nothing listens before a machine is paired, or is expected."""
    listen: _HostName = "0.0.0.0"  # noqa: S104 - the other machine has to reach it; each has a certificate
    """Address to listen on for them, at `peer.port`; all of them have a certificate, also on loopback."""
    max_sessions: Annotated[int, Meta(ge=1, le=64)] = 8
    """Answers of all machines together that may be open at a time; another one is told `overloaded`."""
    memory: _NonNegative = 0.0
    """Memory for the KV cache of the upper layers, GiB; 0 = for `device.n_cells` tokens."""
    train_exits: bool = False
    """Train the early exit that machines which joined lack, at the lowest priority, while this machine is idle and on
    mains; `disco exits train` does it at once. Those machines get it when they join again."""


class PeerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[peer] The link between machines that compute one model."""

    port: Annotated[int, Meta(ge=1, le=65535)] = 4748
    """Port for machines that are paired."""


class FleetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[fleet] Inner layers of this machine's model in processes of their own, its hosts (docs/explain/fleet.md)."""

    enabled: bool = False
    """Whether hosts compute inner layers; first and last layer, embedding, head and vocabulary stay in the engine."""
    hosts: Annotated[int, Meta(ge=0, le=15)] = 1
    """Host processes of this machine. Those of machines that have joined come behind them."""
    cuts: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(max_length=16)] = ()
    """Numbers of layers behind which the model is cut, such as 7, 15, 22 for two hosts: the first one has what is
    between the first two cuts, and so on; empty = so that all are equally busy. `disco fleet plan` shows what that
    gives."""
    keep_home: bool = False
    """Whether the engine keeps a copy of all layers, with memory for it: where a host is lost and cannot be replaced,
    it computes them itself, and answers go on."""
    listen: _HostName = "0.0.0.0"  # noqa: S104 - the other machines have to reach it; each has a certificate
    """Address to listen on for machines of the fleet, at `peer.port`, while one has joined or has a code."""
    ray: Annotated[str, Meta(pattern=r"^(auto|off|\S+:\d+)\Z")] = "off"
    """Ray, which starts what lends hosts on other machines again: `auto` where it is installed, `off`, or HOST:PORT of
    a cluster's head. It listens on all addresses; its token, which runs programs on all nodes, is plain on the wire."""
    mode: Literal["auto", "manual"] = "manual"
    """`manual`: layers lie where `fleet.cuts` says, unless a host is drained or may have less, and come back then;
    `auto`: they move, are replicated and evicted while it answers, as `fleet.policy` decides. `disco fleet pause` stops
    that for a while."""
    policy: Literal["measured"] = "measured"
    """How `auto` decides: by what layers were measured to take."""
    memory_gib: Annotated[float, Meta(ge=0)] = 0.0
    """What a host may have of the memory, GiB; what it has beyond that moves away. 0 = as `fleet.memory_share` says."""
    memory_share: Annotated[float, Meta(gt=0, le=1)] = 0.85
    """Of the memory, for all programs together: a step that would take more is not taken."""
    cpu_share: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Of the processors, for all programs together: no step counts on more."""
    only_idle: bool = False
    """Whether hosts compute only while nobody works at this machine; where that is not known, somebody does."""
    only_mains: bool = False
    """Whether hosts compute only while this machine is on mains."""
    slo_qoe: Annotated[float, Meta(ge=0, le=1)] = 0.9
    """QoE below which an answer counts as late; so does one whose first token comes after
    `delivery.expected_ttft_s`."""
    vacancy: Annotated[float, Meta(gt=0, lt=1)] = 0.3
    """Share of a host that is unused, above which it may get more layers."""
    violation: Annotated[float, Meta(gt=0, lt=1)] = 0.1
    """Share of late answers, of the last 30 s, above which a fleet gives way."""


_Names = str | tuple[str, ...]


class RuleSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[[rules]] Who may answer which requests: of all rules, read top down, the first that fits a request decides."""

    use: Annotated[str, Meta(min_length=1, max_length=512)]
    """Who may answer: `device`, `server`, `prefer-device`, `prefer-server` (the other one helps where it fails),
    `better` (so begins the better model), `race` (both begin at once), `plan` (as the policy plans), `private`, or a
    model's name such as `disco/NAME`."""
    name: Annotated[str, Meta(max_length=64)] = ""
    """What answers and errors call it; empty = its place in the file."""
    tools: bool | None = None
    """Whether tools may be called."""
    images: bool | None = None
    """Whether there are pictures in it."""
    schema: bool | None = None
    """Whether the answer is to be data, by a schema, a grammar or a choice of texts."""
    code: bool | None = None
    """Whether there is program code in what the user says."""
    thinking: bool | None = None
    """Whether thoughts are asked for."""
    prompt_at_least: Annotated[int, Meta(ge=0)] | None = None
    """Tokens of the prompt, at least."""
    prompt_at_most: Annotated[int, Meta(ge=0)] | None = None
    """Tokens of the prompt, at most."""
    language: _Names = ()
    """Language of the latest question by its code, such as `de`; one of a list."""
    model: _Names = ()
    """The model's name as the request has it; `*` is any characters; one of a list."""
    user: _Names = ()
    """The request's `user`, likewise."""
    headers: Annotated[dict[Annotated[str, Meta(max_length=100)], str], Meta(max_length=8)] = {}
    """Headers of the HTTP request, and what each is to be like: `{"X-Team" = "sales*"}`."""
    hours: str = ""
    """A time of day, such as `22:00-06:00`, on this machine's clock."""
    days: tuple[Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"], ...] = ()
    """Days of the week."""
    battery_below: _Share | None = None
    """The charge of the battery that this machine runs on, below, 0 to 1; never so on mains."""
    cap_above: _Share | None = None
    """The share of any of `[caps]` that is used, 0 to 1, at least."""
    device_chance_below: _Share | None = None
    """The learned chance that an answer by this machine will do, below, 0 to 1 (docs/howto/rules.md#a-learned-chance);
    never so while too little is known."""
    min_parameters: _Positive | None = None
    """Only a side whose model has so many parameters, in billions, may answer."""
    min_grade: _Grade | None = None
    """Only a side whose model has this grade may answer (docs/reference/grades.md); an unknown one has not."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings."""

    api: Api = Api()
    device: DeviceSettings = DeviceSettings()
    server: ServerSettings = ServerSettings()
    policy: PolicySettings = PolicySettings()
    delivery: DeliverySettings = DeliverySettings()
    handoff: HandoffSettings = HandoffSettings()
    caps: CapSettings = CapSettings()
    history: HistorySettings = HistorySettings()
    split: SplitSettings = SplitSettings()
    partner: PartnerSettings = PartnerSettings()
    peer: PeerSettings = PeerSettings()
    fleet: FleetSettings = FleetSettings()
    models: Annotated[tuple[ModelSettings, ...], Meta(max_length=32)] = ()
    servers: Annotated[tuple[NamedServer, ...], Meta(max_length=32)] = ()
    rules: Annotated[tuple[RuleSettings, ...], Meta(max_length=100)] = ()


# The parts of the settings that are lists of tables, and have no keys of their own.
MODELS, SERVERS, RULES = "models", "servers", "rules"
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "api": Api,
    "device": DeviceSettings,
    "server": ServerSettings,
    "policy": PolicySettings,
    "delivery": DeliverySettings,
    "handoff": HandoffSettings,
    "caps": CapSettings,
    "history": HistorySettings,
    "split": SplitSettings,
    "partner": PartnerSettings,
    "peer": PeerSettings,
    "fleet": FleetSettings,
}
SECRET_KEYS = frozenset({"api.key", "api.control_key"})
TABLES = frozenset({"api.aliases", "device.adapters", "server.capabilities"})
LISTS = frozenset({"api.hosts", "api.origins", "fleet.cuts"})  # as a text: with commas between
# What a running daemon takes up at once, from the next request on.
LIVE = frozenset(
    {
        "device.grade", "device.usd_per_kwh", "server.grade", "policy.alpha", "policy.budget", "policy.hedge",
        "policy.kappa", "policy.private", "policy.set", "policy.unequal",
        "policy.usd_per_hour_waited",
        "policy.scarcer", "caps.usd_per_day", "caps.usd_per_month", "caps.wh_per_day", "caps.battery_floor",
        "delivery.mode", "delivery.pace_tps", "delivery.expected_ttft_s", "delivery.stop_repetition", "handoff.pause",
        "handoff.stall_s", "split.alone", "split.mode", "split.private_alone", "split.theta", "fleet.mode",
        "fleet.policy", "fleet.memory_gib", "fleet.memory_share", "fleet.cpu_share", "fleet.only_idle",
        "fleet.only_mains", "fleet.slo_qoe", "fleet.vacancy", "fleet.violation",
    }
)  # fmt: skip


# What was said of one server or one model, by the setting that names it: a choice of another one takes it back to its
# default. What is not here is the user's or this machine's, and stays. A server's model is one of that server.
SAID_OF: dict[str, frozenset[str]] = {
    "server.base_url": frozenset({"server.continuation", "server.insecure", "server.stream_usage"}),
    "server.model": frozenset(
        {
            "server.capabilities", "server.context_length", "server.grade", "server.input_usd_per_mtok",
            "server.output_usd_per_mtok",
        }
    ),
    "device.model": frozenset(
        {
            "device.adapters", "device.chat_template", "device.draft_model", "device.grade", "device.n_cpu_moe",
            "device.n_gpu_layers", "fleet.cuts",
        }
    ),
}  # fmt: skip
# Of these a number above 0 counts layers of one model; 0 (none) and -1 (all) are said of the machine.
LAYER_COUNTS = frozenset({"device.n_cpu_moe", "device.n_gpu_layers"})

FOR_LIFE = ("api.", "history.")  # settings that hold for the life of a daemon's process
# What the partner's side of a running daemon follows at a reload; no answer of its own is touched.
HOSTING = ("partner.", "peer.", "fleet.listen", "fleet.ray")


@cache
def keys() -> tuple[str, ...]:
    """Return all settings as `section.name`; a reload asks for them four hundred times."""
    return tuple(f"{section}.{name}" for section, cls in SECTIONS.items() for name in cls.__struct_fields__)
