"""The schema of everything that crosses the socket pair between daemon and engine.

Every message is a tagged struct, so an unknown or malformed one is an error at the door and never a surprise inside.
How they become bytes is in `framing`. The file is longer than others since it is the whole schema, in one piece.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..types import AS_USUAL, Drawing, Given, Likelihood, RawPrompt, SplitMode, ToolUse

PREFILL_CHUNK = 128  # tokens; a short prompt need not wait long for a long one's chunk
SINGLE_PROMPT_CHUNK = 512  # of a prompt that is alone, where that is faster; aborted when another request arrives
FULL = "context"  # the end of a sequence for which there is no room left: its context, or the KV cache, is full
FLIGHTS = 2  # that home has under way: one is computed at hosts while it draws the tokens of the other


class Message(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Base of all messages."""


# --- what a model is loaded with, and where its layers lie ---------------------------------------------------------


class AdapterFile(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter: a GGUF file, and how strongly it is applied (1 = as it was trained)."""

    name: str
    path: str
    scale: float = 1.0


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """The folder for idle conversations, those unused for `idle_s`, s: it may hold `max_bytes`."""

    folder: str
    max_bytes: int
    idle_s: float


class ExitCalibration(msgspec.Struct, frozen=True, kw_only=True):
    """How sure the exit in a range's file may be: coefficients and table of `exits.calibrate.Calibration`.

    Of the tokens that it was judged by, the share `coverage` may leave at theta 0.8.
    """

    coefficients: tuple[float, ...]
    scores: tuple[float, ...]
    shares: tuple[float, ...]
    coverage: float = 0.0


class RangeFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file of a model's layers from `first` up to `last` (exclusive) of `of`; `hosts` compute them, 0 is home.

    Where several do, `shares` says which share of the sequences each is to have; without it, all the same.
    """

    path: str
    first: int
    last: int
    of: int
    hosts: tuple[int, ...] = (0,)
    shares: tuple[float, ...] = ()


# --- a fleet's layers: daemon -> engine -----------------------------------------------------------------------------


class MoveLayers(Message, frozen=True, kw_only=True):
    """Let the layers lie as in `ranges`, whose files are there, while answers go on. Answered by LayersMoved.

    Home's own ranges, the first and the last one, are the present ones. One move is under way at a time.
    """

    id: str
    ranges: tuple[RangeFile, ...]


class BreakOffMove(Message, frozen=True, kw_only=True):
    """End the move that is under way, if there is one: layers lie as before. Its LayersMoved says why."""

    id: str
    reason: str


class LimitAnswers(Message, frozen=True, kw_only=True):
    """Let `n_answers` at most generate at a time; 0 = as many as there is room for. Not answered.

    With `offload` those that wait for that leave the KV cache for main memory.
    """

    id: str
    n_answers: int
    offload: bool = False


# --- a fleet's layers: engine -> daemon -----------------------------------------------------------------------------


class LayersMoved(Message, frozen=True, kw_only=True):
    """A move has ended, after `seconds` in all; `error` says why nothing was moved, and is empty where it was.

    Loading took `load_s`, s, and from then on copying `copy_s`, s, until hardly more than the latest tokens were left;
    `n_bytes` of the KV cache were copied. For `pause_s`, s, what was to depart was held.
    """

    id: str
    error: str = ""
    seconds: float = 0.0
    load_s: float = 0.0
    copy_s: float = 0.0
    pause_s: float = 0.0
    n_bytes: int = 0


class HostUsage(msgspec.Struct, frozen=True, kw_only=True):
    """A host by its number: rows that it computed since the engine began, for `busy_s`, s, and its lost processes.

    `confined` lists the rights that its present process has given up.
    """

    number: int
    rows: int
    busy_s: float
    lost: int
    confined: tuple[str, ...] = ()


class RunSample(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of a range of layers since the last Stats, `n` of them with `batch` rows each, which took `seconds` in all.

    `host` computed them, 0 is home.
    """

    host: int
    first: int
    last: int
    batch: int
    n: int
    seconds: float


class WaySample(msgspec.Struct, frozen=True, kw_only=True):
    """The quickest way of a flight with so many `rows` to a host and back since the last Stats, without its time there.

    An upper bound of what the way takes: home may have been busy when the rows came.
    """

    host: int
    rows: int
    seconds: float


class FleetUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What home and its hosts computed, and where the inner layers are: from, up to (exclusive), and at which hosts."""

    hosts: tuple[HostUsage, ...]
    samples: tuple[RunSample, ...]
    legs: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    ways: tuple[WaySample, ...] = ()


# --- daemon -> engine ---------------------------------------------------------------------------------------------


class Load(Message, frozen=True, kw_only=True):
    """Load a model, and how: the first message to every engine process, and the one record of what an engine is set to.

    An answer with its prompt may have `n_ctx` tokens (0 = as many as fit, up to what the model was trained for), all
    that are in the KV cache together `n_cells` (0 = as many as are sensible). `scheduler` names a token scheduler.
    `exact`: an answer
    that goes on from given text is rounded as if it had been generated here from the start, which costs prefill speed.
    `chat_template` is a Jinja text that stands in place of the model's own.
    `n_gpu_layers`: None = as many as fit, -1 = all; of the first `n_cpu_moe` experts stay with the processor (None = of
    as few as that asks for, -1 = of all). Of several GPUs all are used, or, with `one_gpu`, one that holds the whole
    model, if any does: the engine itself finds out which `main_gpu` that is.
    Batches of `llama.PREFILL_ROWS` rows and more are computed by `n_threads_batch` threads (0 = `n_threads`),
    `n_ubatch` rows at a time (0 = N_BATCH). `flash_attn`: None = as llama.cpp says. `kv_type` is f16 (two bytes a
    number), q8_0 (one, and a bit), or auto: f16, but q8_0
    where only so `n_ctx` fits.
    `adapters` are loaded with the model; those that cannot be are left out. `speculate`: next tokens may be guessed,
    and the guesses computed along where that pays; `draft_path` is a small model that guesses, too. `disk` is for
    cached prefixes. `repack`: llama.cpp may lay weights out anew for this processor (AMX, interleaved rows).
    `layers`: the file has only the layers from the first number up to the second (exclusive) of a model with as many as
    the third says; the others are at a partner, whom frames reach by a second inherited socket. With that socket, but
    without `layers`, the file is a small model, which drafts for a partner that has the large one. An answer whose
    partner has gone waits for it for `patience_s`, s, before it fails; of each machine whose partner this is,
    `max_answers` are served at a time. With `exit` the logits of the first range's file, or of the small model, draft
    tokens. Rows travel by `codec`.
    `ranges` are all of the model's in their order, where hosts have inner ones: sockets to those are asked for by the
    second inherited socket. `keep_home`: home has a copy of those, for a host that is lost and cannot be replaced.
    """

    model_path: str
    n_ctx: int
    n_threads: int
    n_gpu_layers: int | None = 0
    n_cpu_moe: int | None = None
    one_gpu: bool = False
    main_gpu: int = -1
    n_cells: int = 0
    scheduler: str = "andes"
    exact: bool = True
    adapters: tuple[AdapterFile, ...] = ()
    speculate: bool = True
    draft_path: str = ""
    n_threads_batch: int = 0
    n_ubatch: int = 0
    flash_attn: bool | None = None
    kv_type: str = "f16"
    chat_template: str = ""
    disk: Disk | None = None
    repack: bool = True
    layers: tuple[int, ...] = ()
    patience_s: float = 0.0
    max_answers: int = 16
    exit: ExitCalibration | None = None
    codec: str = "f32"
    ranges: tuple[RangeFile, ...] = ()
    keep_home: bool = False


class Count(Message, frozen=True, kw_only=True):
    """Ask for the length of a prompt; with `ids`, also for the token ids of it and of the answer so far.

    Only what the `adapter` of that name has computed counts as cached. Of `tools` the prompt tells the model.
    """

    id: str
    messages: list[dict[str, Any]]
    prompt: RawPrompt | None = None
    ids: bool = False
    answer: str = ""
    answer_ids: tuple[int, ...] = ()
    adapter: str = ""
    template_args: dict[str, Any] = {}
    tools: ToolUse | None = None


class Generate(Message, frozen=True, kw_only=True):
    """Prefill prompt and `answer_so_far`, then generate, unless `hold` asks to wait for an AppendText.

    The prompt is the rendered `messages`, or in their place a raw `prompt`: plain text, token ids, or a gap.
    `answer_ids` are the ids of `answer_so_far` where they are known; else its last token is healed. `max_tokens` counts
    from the end of `answer_so_far` on, appended tokens included. The reader takes `pace_tps` token/s (None: as fast as
    they come) and expects the first after `ttft_s`, s; `rest` is the ExpectedRest. `response_format` is a form as
    `types.needs.forms` has them; with `tools` it may, or has to, be calls. `drawing` says more of how tokens are drawn.
    `adapter` names the one that is applied, if any. `template_args` are for the chat template. Nothing computed for a
    `private` request goes to disk. Of a model over two machines `mode` says who decides a token: the partner (exact),
    the exit where it is as sure as `theta` (confident), or the exit (alone), and then nothing goes to the partner.
    `goes_on`: the exit alone goes on while the partner is gone. With each token its log-probability is told, and those
    of the `top_logprobs` likeliest in its place (None: neither). A thought is closed behind `thought_budget` tokens.
    """

    id: str
    messages: list[dict[str, Any]]
    answer_so_far: str = ""
    hold: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    drawing: Drawing = AS_USUAL
    prompt: RawPrompt | None = None
    answer_ids: tuple[int, ...] = ()
    pace_tps: float | None = None
    ttft_s: float | None = None
    rest: tuple[float, ...] = ()
    response_format: dict[str, Any] | None = None
    tools: ToolUse | None = None
    adapter: str = ""
    template_args: dict[str, Any] = {}
    private: bool = False
    mode: SplitMode = "exact"
    theta: float | None = None
    goes_on: bool = False
    top_logprobs: int | None = None
    thought_budget: int | None = None


class HoldAnswer(Message, frozen=True, kw_only=True):
    """Cut a sequence back to what it was given, keep the prefill of that, and wait for an AppendText."""

    id: str


class AppendText(Message, frozen=True, kw_only=True):
    """Add answer text that came from elsewhere, and its ids where known, to a held sequence; with `go` it generates."""

    id: str
    text: str
    go: bool
    ids: tuple[int, ...] = ()


class SetPace(Message, frozen=True, kw_only=True):
    """Let the reader take `pace_tps` token/s from now on (None: as fast as they come). Not answered."""

    id: str
    pace_tps: float | None


class Embed(Message, frozen=True, kw_only=True):
    """Ask for the vectors of texts, or of token ids. Answered by PrefillProgress, and Embedded or Failed.

    They have `dimensions` numbers (None: all). Where that is fewer than all it has to be `least_dimensions` or more
    (None: it cannot be fewer), and their mean is taken off first if they are to be `centred`. With a `query` a text's
    vector is two numbers: how a model that rates texts rates it, and the same from 0 to 1.
    """

    id: str
    inputs: tuple[Given, ...]
    dimensions: int | None = None
    least_dimensions: int | None = None
    centred: bool = False
    query: str | None = None


class CancelRequest(Message, frozen=True, kw_only=True):
    """Stop one sequence, in the middle of a prefill too. Answered by Done("cancelled")."""

    id: str


# --- engine -> daemon ---------------------------------------------------------------------------------------------


class Loaded(Message, frozen=True, kw_only=True):
    """The model is in memory. `load_s` in s, `prefill_tps` in token/s, measured on a short warm-up prefill.

    An engine can serve before that is measured: the speed is 0 then, and the message comes a second time with it.
    `n_ctx` and `n_cells` are as large as memory allowed; `bytes_per_token` of the KV cache. `adapters` has the reason
    why each is missing, empty if it is loaded. `n_gpu_layers` are on the GPU (-1 = all), without the experts of the
    first `n_cpu_moe`. `kv_type` is f16 or q8_0. `confined` lists the rights
    that the process has given up (`engine.confine`). `build` of llama.cpp decides its results' bits. `tool_format` is
    the name of the form in which the chat template has tools called; `fim`: it has tokens for filling in the middle.
    `own_layer`: a layer of the model's own guesses next tokens (MTP); `layer_failure`: why it does not, where it could.
    A model that makes vectors of texts, and no answers, has its `pooling` (`models.text_models`), and `n_ctx` for each
    text; so many tokens as `n_at_once` it computes before anything is said of them.
    """

    model: str
    n_ctx: int
    n_cells: int
    n_seqs: int
    bytes_per_token: int
    load_s: float
    prefill_tps: float
    adapters: dict[str, str] = {}
    n_gpu_layers: int = 0
    n_cpu_moe: int = 0
    kv_type: str = "f16"
    confined: list[str] = []
    build: str = ""
    tool_format: str = ""
    fim: bool = False
    own_layer: bool = False
    layer_failure: str = ""
    pooling: str = ""
    n_at_once: int = SINGLE_PROMPT_CHUNK


class LoadFailed(Message, frozen=True, kw_only=True):
    """The model cannot be loaded, and trying again without a change is of no use."""

    message: str


class Counted(Message, frozen=True, kw_only=True):
    """Prompt length in tokens, `n_cached` of them computed already; if asked for, `ids` and `text` with answer so far.

    There is no text for messages that spell control tokens: its reader would take them for control tokens.
    """

    id: str
    n_tokens: int
    ids: tuple[int, ...] = ()
    text: str = ""
    n_cached: int = 0


class PrefillProgress(Message, frozen=True, kw_only=True):
    """A prefill chunk or an order is done: `n_past` of `n_prompt` tokens are in the KV cache.

    `idle`: the sequence is held, and stays silent until an order, or room for it, comes. It has caught up if all but
    its last token are in the KV cache. `n_orders` of its HoldAnswer and AppendText messages are carried out. Of the
    prompt, `n_prefilled` tokens were computed for it, and `n_cached` were there.
    """

    id: str
    n_past: int
    n_prompt: int
    idle: bool = False
    n_orders: int = 0
    n_prefilled: int = 0
    n_cached: int = 0

    @property
    def caught_up(self) -> bool:
        """Whether a held sequence has nothing left to prefill."""
        return self.idle and self.n_past >= self.n_prompt - 1


class TextPiece(Message, frozen=True, kw_only=True):
    """Text of `n_tokens` further tokens, cut at whole code points; a `thought` is not part of the answer.

    `ids` of all tokens since the last piece with ids, if the text up to here is exactly theirs; else none. `alone`: by
    the exit of a first range, with nobody to judge it. `likelihoods` are of the tokens that begin in the text.
    """

    id: str
    text: str
    n_tokens: int
    ids: tuple[int, ...] = ()
    thought: bool = False
    alone: bool = False
    likelihoods: tuple[Likelihood, ...] = ()


class CallPiece(Message, frozen=True, kw_only=True):
    """A piece of the answer's call number `index`, from 0: its name, which begins it, or more text of its arguments."""

    id: str
    index: int
    name: str = ""
    arguments: str = ""
    n_tokens: int = 0


class PauseChange(Message, frozen=True, kw_only=True):
    """A sequence that has begun is `paused` for others, or runs again; sent when that changes."""

    id: str
    paused: bool


class Embedded(Message, frozen=True, kw_only=True):
    """The vectors of texts with `n_tokens` in all: little-endian float32 numbers, of length 1 but for ratings.

    They took `busy_s` to compute, s. A request that was cancelled has no vectors, and what was computed by then.
    """

    id: str
    vectors: tuple[bytes, ...]
    n_tokens: int
    busy_s: float


class SplitUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer over two machines took: rows computed by each of them, drafts judged and right, bytes sent.

    The partner was asked `round_trips` times, and computed for `partner_s`, s; for those of its rows that it did not
    judge, `prompt_rows`, it took about `partner_prompt_s`, s. The edge drew `n_left` tokens where its exit was sure,
    and `n_alone` by itself, ends of texts included; the first of the latter is the answer's token number `alone_from`,
    counted from 0.
    """

    edge_rows: int
    partner_rows: int
    round_trips: int
    drafted: int
    accepted: int
    bytes_up: int
    bytes_down: int
    partner_s: float
    prompt_rows: int = 0
    partner_prompt_s: float = 0.0
    n_left: int = 0
    n_alone: int = 0
    alone_from: int | None = None


class Done(Message, frozen=True, kw_only=True):
    """A sequence has ended: `stop`, `length` (its `max_tokens`), FULL or `cancelled`.

    Counts are of tokens really computed, `busy_s` is in s. `n_cached` prompt tokens were in the KV cache already.
    `split` tells the partner's part, where there is one; `stop` the stop string that ended it. `rearranged`: the
    model's template refuses the order of the messages, and turns were joined or filled in.
    """

    id: str
    reason: str
    n_prompt: int
    n_completion: int
    busy_s: float
    n_cached: int = 0
    split: SplitUsage | None = None
    stop: str | None = None
    rearranged: bool = False


class Failed(Message, frozen=True, kw_only=True):
    """A sequence cannot be served. `your_fault`: the request is to blame, its parameter `param` if that is known."""

    id: str
    reason: str
    message: str
    your_fault: bool
    param: str | None = None


class Alive(Message, frozen=True, kw_only=True):
    """The engine does not hang: it is still reading a long prompt, or waits for a host that gets on."""


class Stats(Message, frozen=True, kw_only=True):
    """The engine's stats: once a second while it computes, and when it comes to rest.

    Of the answers `running` generate or prefill, `paused` keep their cells, `swapped` are in main memory (`saved_bytes`
    in all), `waiting` have nothing computed yet. `cells_used` of the KV cache hold something, cached prefixes too. An
    iteration takes `iteration_s` at present, s; the share `python_share` of the time is not llama.cpp's. The other
    counters are of tokens, s and times since the start; `cached_tokens` did not have to be computed, and `chunks` were
    iterations with a part of a prompt beside running answers, `chunks_s` in all. Of the `drafted` tokens, which were
    guessed and computed along, `accepted` were right; `split` is what a partner did for ended answers, `fleet` what
    hosts did. `disk_texts` conversations are on disk, with `disk_bytes`; `disk_error` says why none can be.
    """

    running: int
    paused: int
    swapped: int
    waiting: int
    cells_used: int
    saved_bytes: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    busy_s: float
    python_share: float
    iteration_s: float
    iterations: int
    preemptions: int
    chunks: int = 0
    chunks_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    split: SplitUsage | None = None
    fleet: FleetUsage | None = None
    disk_texts: int = 0
    disk_bytes: int = 0
    disk_error: str = ""


ToAnswer = HoldAnswer | AppendText | SetPace | CancelRequest
ToFleet = MoveLayers | BreakOffMove | LimitAnswers
ToEngine = Load | Count | Generate | HoldAnswer | AppendText | SetPace | Embed | CancelRequest | ToFleet
Reply = Counted | PrefillProgress | TextPiece | CallPiece | PauseChange | Embedded | LayersMoved | Done | Failed
FromEngine = Loaded | LoadFailed | Reply | Stats | Alive

decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def refusal(request_id: str, error: Exception) -> Failed:
    """Make the refusal of a request that is itself to blame."""
    reason = getattr(error, "reason", "bad_messages")
    param = getattr(error, "param", None)
    return Failed(id=request_id, reason=reason, message=str(error), your_fault=True, param=param)
