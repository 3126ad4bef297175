"""A model and its context: a thin, typed skin over llama.cpp's C API, and longer than other files for what that has."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import llama_cpp
import msgspec
import numpy as np

from ...models.kept_numbers import GOING_BACK, kept_numbers
from ...models.own_guesses import why_no_guesses
from ...types import LayerRange, Likelihood, ToolUse
from ...types.thought_marks import ThoughtLimit
from ..json_schema.reading import GrammarError
from ..wire import Generate, Load
from . import gpu
from .adapters import AdapterError, Adapters
from .build_features import changes, skip_s
from .context import context_params
from .embedder import EmbeddingContext, EmbeddingError, reads_whole
from .grammar import grammar_of
from .hidden import FloatRows, HiddenRows
from .library import kernels, show_errors, usable_threads
from .likelihood import likeliest, log_probabilities
from .memory import (
    F16,
    LEAST_CTX,
    N_BATCH,
    N_SPARE_SEQS,
    Q8_0,
    SNAPSHOTS,
    KeptBytes,
    Need,
    available_bytes,
    context_sizes,
    fitting,
    kept_of,
    kv_type_for,
    model_bytes,
    open_cells,
    open_context,
    too_large,
    window_sizes,
    work_bytes,
)
from .metadata import Metadata
from .mtp import OwnLayer, is_there, layer_bytes
from .numa import use_nodes
from .refusals import FormatError, ModelError, PromptError, ToolsError
from .rounding import use_extra_buffers, whole_header
from .rows import Row, Rows
from .sampler import Sampler
from .sequences import CARRIED, Sequences
from .vocabulary import Vocabulary

# What a model is thought to take before anything is measured; the first iteration sets the scale of both.
READ_BPS = 10e9  # bytes/s of weights, for a token alone: two channels of DDR4, half used
PREFILL_SHARE = 0.2  # of that time, for a token of a prompt: between 0.08 and 0.4 on the processors that were measured
PREFILL_ROWS = 32  # from here on a batch is bound by arithmetic, as a prefill is, and not by memory

# Whose state in llama.cpp is no thing apart from the cells; with a sliding window it is not, either.
ENTANGLED = ("deepseek4", "glm5-next", "qwen4exp")
# Whose answers go one after the other: of a batch with several texts llama.cpp writes the states to wrong places, and
# reads tokens of one as those of another (src/models/plamo2.cpp, `kv_head * n_seqs`, and the order of `zx`).
ONE_AT_A_TIME = ("plamo2",)

_Made = TypeVar("_Made")


class AbortFlag:
    """Stops a running llama_decode from another thread.

    The callback is libc's `strlen` on a two-byte buffer: false while the first byte is zero, true once it is set. A C
    function needs no GIL, so a prefill is neither slowed by polling nor kept waiting by a busy Python thread.
    """

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(2)
        libc = ctypes.CDLL(None)  # this process's own; to look for the library would start a compiler
        self.callback = ctypes.cast(libc.strlen, llama_cpp.ggml_abort_callback)
        self.data = ctypes.cast(self._buffer, ctypes.c_void_p)

    def set(self) -> None:
        """Abort the decode in flight, if there is one."""
        self._buffer[0] = b"\x01"

    def clear(self) -> None:
        """Allow decoding again."""
        self._buffer[0] = b"\x00"


class Weights(NamedTuple):
    """A loaded llama_model, whether a layer of its own guesses, and when its loading began, s of `perf_counter`."""

    model: Any
    guesses: bool
    began: float


class Llama(Sequences):
    """One model, or a range of its layers, and one context with up to `n_seqs` sequences in a unified KV cache.

    A range which is not the last one gives hidden rows in place of logits: `hidden_out` has those of the latest decode,
    n x n_embd; of all others n x 0. One which is not the first takes such rows. A layer of the model's own may guess.
    """

    own_layer: OwnLayer | None = None
    _n_snapshots_wanted = 0
    layer_failure = ""  # why it guesses nothing, where there is one that could

    def __init__(self, load: Load, abort: AbortFlag, *, warm: bool = True, weights: Weights | None = None) -> None:
        """Load the model, unless its `weights` are, and measure it unless `warm` is off: then `warm_up` does.

        Raises ModelError.
        """
        weights = weights or load_weights(load)
        self._model, self._has_own = weights.model, weights.guesses
        try:
            self._open(load, abort)
            if warm:
                self.warm_up()
        except BaseException:  # whoever tries again, with less of it on the GPU, needs the memory
            self._free()
            raise
        self.load_s = time.perf_counter() - weights.began

    def _open(self, load: Load, abort: AbortFlag) -> None:
        """Read what the model is, and make its contexts. Raises ModelError."""
        self.n_cpu_moe = load.n_cpu_moe or 0
        if reads_whole(Metadata(self._model)):  # llama.cpp has no KV cache for it, and asserts one
            raise ModelError(f"{load.model_path} reads texts whole: it makes vectors of them, and answers nothing")
        self.vocabulary = Vocabulary(self._model, load.chat_template)
        self.adapters = Adapters(self._model, load.adapters, show_errors)
        self.exact = load.exact
        # A state that was carried through a text cannot be cut, nor shared up to somewhere: `Cells` keeps copies of it.
        self.divisible = not (
            llama_cpp.llama_model_is_recurrent(self._model) or llama_cpp.llama_model_is_hybrid(self._model)
        )
        self.n_gpu_layers = load.n_gpu_layers or 0
        header = Metadata(self._model)
        has_window = llama_cpp.llama_model_n_swa(self._model) > 0
        self.resumes = not has_window and header.text("general.architecture") not in ENTANGLED
        self.file_type = header.text("general.file_type")
        n_heads = llama_cpp.llama_model_n_layer(self._model) * llama_cpp.llama_model_n_head(self._model)
        # What a row loses on a cell that is not its own; on a GPU it is nothing.
        self.skip_s = 0.0 if load.n_gpu_layers else skip_s(kernels(), n_heads, load.n_threads)
        self.layers = LayerRange(*load.layers) if load.layers else None
        self.n_embd = int(llama_cpp.llama_model_n_embd(self._model))
        self.n_embd_out = int(llama_cpp.llama_model_n_embd_out(self._model))  # of a vector of a text
        takes_rows = self.layers is not None and not self.layers.is_first
        self._rows = Rows(N_BATCH, self.n_embd if takes_rows else 0)
        self._hidden: HiddenRows | None = None
        if self.layers is not None and not self.layers.is_last:
            self._hidden = HiddenRows(header.text("general.architecture"), self.layers.n_layers, self.n_embd)
        self.took_s = 0.0  # of the latest decode
        self.has_logits = self._hidden is None or load.exit is not None
        self.hidden_out: FloatRows = np.empty((0, self.n_embd), np.float32)
        self._abort = abort  # keeps callback and buffer alive as long as the context
        self._n_ctx, self.n_cells = self._fit(load)
        self.bound_texts(self._n_ctx)
        self._begin(load)
        token_s = llama_cpp.llama_model_size(self._model) / READ_BPS
        self.prefill_tps = 0.0  # not measured yet
        self.latency_prior = self._prior(token_s, PREFILL_SHARE * token_s)

    def close(self) -> None:
        """Free model and contexts; nothing else may be called afterwards."""
        self._free()

    def renew(self, load: Load) -> None:
        """Compute as `load` says from now on, with as many cells; all sequences are gone.

        Raises ModelError: then it can only be closed.
        """
        self._free_contexts()
        self._begin(load)

    def _free(self) -> None:
        self._free_contexts()
        llama_cpp.llama_model_free(self._model)

    def _free_contexts(self) -> None:
        """Free those that there are, none of them twice."""
        if self.own_layer is not None:
            self.own_layer.close()
            self.own_layer = None
        llama_cpp.llama_free(self._ctx)
        self._ctx = None

    def _begin(self, load: Load) -> None:
        load = self._with_kv(load)
        params = context_params(load, Metadata(self._model))
        params.n_ctx = self.n_cells
        params.n_batch = N_BATCH
        params.n_ubatch = min(N_BATCH, load.n_ubatch or N_BATCH)
        params.n_seq_max = self.n_seqs + N_SPARE_SEQS
        params.n_rs_seq = self._n_snapshots_wanted
        if self.windowed:
            params.swa_full = False
            window = llama_cpp.llama_model_n_swa(self._model)
            params.n_seq_max, self._n_window_cells = window_sizes(window, self.n_seqs, params.n_ubatch)
        if self._hidden is not None:
            params.n_ubatch = N_BATCH  # llama.cpp shows the rows of one micro-batch
            self._hidden.prepare(params)
        self.n_threads, self.n_threads_batch = load.n_threads, load.n_threads_batch or load.n_threads
        params.abort_callback = self._abort.callback
        params.abort_callback_data = self._abort.data
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            msg = f"llama.cpp cannot make a context of {self.n_cells} tokens: lower device.n_ctx, or free some memory"
            raise ModelError(msg)
        self._attach(context)
        if self._hidden is not None:
            self._hidden.begin(context)
        self._n_computing = load.n_threads
        self._load = load
        if self._has_own:
            own = context_params(load, Metadata(self._model))
            own.abort_callback, own.abort_callback_data = self._abort.callback, self._abort.data
            self.layer_failure = ""
            try:
                self.own_layer = OwnLayer(self._model, context, own, self.n_cells)
            except MemoryError as e:  # its answers are the same without, and take longer
                self.layer_failure = f"{e}: lower device.n_ctx, or free some memory"

    def _fit(self, load: Load) -> tuple[int, int]:
        """Return the sizes, and decide how the KV cache keeps a number where `load` leaves that open.

        Raises ModelError.
        """
        kind = self.windowed, self.divisible, self.resumes, self.n_seqs
        found = dict[str, tuple[int, int]]()

        def fits(kv_type: str) -> bool:
            found.clear()  # a model is of the kind that was found last
            self.windowed, self.divisible, self.resumes, self.n_seqs = kind
            found[kv_type] = self._sizes(self._with_kv(load, kv_type))
            return found[kv_type][0] == load.n_ctx

        def may_fit(kv_type: str) -> bool:
            try:
                return fits(kv_type)
            except ModelError:
                return False

        self.kv_type = F16 if load.kv_type == "auto" else load.kv_type
        if load.kv_type == "auto" and load.n_ctx and Metadata(self._model).fits_q8_0:
            self.kv_type = kv_type_for(may_fit)
        if self.kv_type not in found:
            fits(self.kv_type)
        return found[self.kv_type]

    def _with_kv(self, load: Load, kv_type: str = "") -> Load:
        """Return `load` with this type of keys and values, or the one in use; bytes need flash attention."""
        kv_type = kv_type or self.kv_type
        if load.kv_type != "auto":
            return load
        flash = None if kv_type == Q8_0 else load.flash_attn
        return msgspec.structs.replace(load, kv_type=kv_type, flash_attn=flash)

    def _sizes(self, load: Load) -> tuple[int, int]:
        """Return the tokens of an answer, and of the KV cache: those wanted, or as memory allows. Raises ModelError."""
        self.bytes_per_token = self._cell_bytes(load)
        available = available_bytes()
        work = work_bytes(N_BATCH, self.vocabulary.n_tokens, llama_cpp.llama_model_n_embd(self._model))
        if self._has_own:  # its cells are in those of the header, which counts its layer
            work += layer_bytes(self.vocabulary.n_tokens, llama_cpp.llama_model_n_embd(self._model))
        scores = 0 if load.flash_attn is not False else 4 * N_BATCH * llama_cpp.llama_model_n_head(self._model)
        kept = KeptBytes(self.bytes_per_token)
        if not self.divisible and self.resumes:
            state, cell = self._weigh_state(load)
            kept = KeptBytes(cell, state=state, goes_back=self._may_go_back(load))
        elif self._may_be_windowed(load):
            window_cell, cell = self._weigh_state(load)
            if cell > 1:  # else llama.cpp makes no cells for windows alone, whatever the header says of one
                kept = KeptBytes(cell, int(llama_cpp.llama_model_n_swa(self._model)), window_cell)

        def fit(cell: int, fixed: int) -> tuple[int, int]:
            return self._fitting(load, Need(cell + scores, work + fixed), available)

        for_states = min(available, gpu.free_bytes()) if load.n_gpu_layers else available
        sizes = context_sizes(kept, fit, for_states, min(N_BATCH, load.n_ubatch or N_BATCH))
        self.n_seqs, self.bytes_per_token = sizes.n_seqs, kept.cell + kept.window_cell
        self._n_snapshots_wanted = sizes.n_snapshots
        if Metadata(self._model).text("general.architecture") in ONE_AT_A_TIME:
            self.n_seqs = 1
        if sizes.windowed:
            self.windowed, self.divisible, self.resumes, self.bytes_per_token = True, False, True, kept.cell
        return sizes.n_ctx, sizes.n_cells

    def _may_go_back(self, load: Load) -> bool:
        """Whether llama.cpp is to keep snapshots of states, for guesses that turn out wrong: tried on processors."""
        small = min(N_BATCH, load.n_ubatch or N_BATCH) <= max(SNAPSHOTS)  # a batch's last rows have to be in one part
        architecture = Metadata(self._model).text("general.architecture")
        return architecture in GOING_BACK and load.speculate and not (load.n_gpu_layers or load.layers or small)

    def _may_be_windowed(self, load: Load) -> bool:
        """Whether its layers with a window can have cells for that alone.

        Where another machine has layers, or verifies, a text is cut anywhere, and of a range nothing is copied.
        """
        header = Metadata(self._model)
        return (
            self.divisible
            and not (load.layers or load.ranges)
            and load.exit is None
            and llama_cpp.llama_model_n_swa(self._model) > 0
            and header.text("general.architecture") not in ENTANGLED
            and header.text(f"{header.text('general.architecture')}.attention.causal") != "false"
        )

    def _cell_bytes(self, load: Load) -> int:
        """Return the bytes of a token in the KV cache, by the header; llama.cpp keeps no list of heads by layer."""
        header = Metadata(self._model)
        if header.number("attention.head_count") or load.layers:
            return header.kv_bytes(load.kv_type)
        try:
            kept = kept_of(kept_numbers(whole_header(load.model_path).keys), load.kv_type)
        except (OSError, ValueError):
            return header.kv_bytes(load.kv_type)
        return kept.cell + kept.window_cell

    def _fitting(self, load: Load, need: Need, available: int) -> tuple[int, int]:
        n_ctx, n_cells = load.n_ctx, load.n_cells
        if not n_ctx:
            # Weights that are the file's pages count as available. On a GPU they are loaded by now.
            trained, on_gpu = llama_cpp.llama_model_n_ctx_train(self._model), load.n_gpu_layers or 0
            free = available if on_gpu else available - llama_cpp.llama_model_size(self._model)
            n_ctx = open_context(trained, n_cells, need, free)
            if on_gpu:
                n_layers = llama_cpp.llama_model_n_layer(self._model)
                share = 1.0 if on_gpu < 0 else min(1.0, on_gpu / n_layers)
                there = Need(max(1, int(need.per_token * share)), need.work)
                n_ctx = open_context(n_ctx, n_cells, there, gpu.free_bytes())
                n_cells = n_cells or n_ctx  # what more cells would take is not known to be there
            n_cells = n_cells or open_cells(n_ctx)
        try:
            return fitting(n_ctx, n_cells, need, available)
        except MemoryError as e:
            raise ModelError(str(e)) from e

    def _weigh_state(self, load: Load) -> tuple[int, int]:
        """Return the bytes of a state, or of a token in a window, and of a cell, as llama.cpp makes them.

        Raises ModelError.
        """
        params = context_params(load, Metadata(self._model))
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = LEAST_CTX, 1, 1, 1
        params.swa_full = False
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise ModelError("llama.cpp cannot make a context of one sequence: free some memory")
        sizes = []
        try:
            for position in (0, 1):
                if llama_cpp.llama_decode(context, self._rows.fill([(0, position, 0, False)])) != 0:
                    raise ModelError("llama.cpp cannot compute a token with this model")
                sizes.append([llama_cpp.llama_state_seq_get_size_ext(context, 0, flags) for flags in (CARRIED, 0)])
        finally:
            llama_cpp.llama_free(context)
        (state, whole), (state_of_two, whole_of_two) = sizes
        carried = state_of_two - state
        return carried or state, max(1, whole_of_two - whole - carried)

    def salt(self, adapter: str) -> int:
        """Return an adapter's salt for `adapters.prefix_key`. Raises PromptError if it is missing."""
        try:
            return self.adapters.salt(adapter, self.vocabulary.n_tokens)
        except AdapterError as e:
            raise PromptError(str(e)) from e

    def adapt(self, adapter: str) -> None:
        """Apply this adapter to all that is decoded from now on; "" for none."""
        self.adapters.apply(self._ctx, adapter)

    def bound_texts(self, n_ctx: int) -> None:
        """Let no text have more than `n_ctx` tokens from now on, nor more than there are settings and memory for."""
        self.n_ctx = self.vocabulary.n_ctx = min(self._n_ctx, n_ctx)

    def embedding_context(self, n_ctx: int) -> EmbeddingContext:
        """Open a context over the same weights for embeddings of up to `n_ctx` tokens. Raises EmbeddingError."""
        if self.layers is not None:
            raise EmbeddingError("The device has some of the model's layers only: embeddings need all of them.")
        # As for exact answers: a text's vector does not depend on how the text was cut in pieces.
        exactly = msgspec.structs.replace(self._load, exact=True, kv_type=F16, flash_attn=None)
        params = context_params(exactly, Metadata(self._model))
        params.n_ctx, params.n_threads_batch = n_ctx, usable_threads(self.n_threads_batch)
        params.abort_callback, params.abort_callback_data = self._abort.callback, self._abort.data
        return EmbeddingContext(self._model, params, self.vocabulary.n_tokens)

    # --- computing -----------------------------------------------------------------------------------------------

    def decode(self, rows: Sequence[Row], hidden: FloatRows | None = None) -> int:
        """Run one batch of (token, position, sequence, wants_logits) rows; return llama_decode's return value.

        0 done, NO_KV_SLOT, ABORTED, negative: broken. `hidden` has the rows, n x n_embd, for a range that takes them.
        """
        began = time.perf_counter()
        n_threads = self.n_threads_batch if len(rows) >= PREFILL_ROWS else self.n_threads
        if n_threads != self._n_computing:
            llama_cpp.llama_set_n_threads(self._ctx, usable_threads(n_threads), usable_threads(n_threads))
            self._n_computing = n_threads
        if self.windowed:
            self._reserve_window(len(rows))
            self._window_head += len(rows)
        # With a row wanted, a range without logits would compute the whole head, for nothing.
        rc = llama_cpp.llama_decode(self._ctx, self._rows.fill(rows, hidden, with_logits=self.has_logits))
        if rc == 0:
            llama_cpp.llama_synchronize(self._ctx)
        if self._hidden is not None:
            self.hidden_out = self._hidden.take(self._ctx, len(rows) if rc == 0 else 0)
        else:
            self.hidden_out = np.empty((len(rows), 0), np.float32)
        if self.n_snapshots:
            self._note_snapshots({seq for _, _, seq, _ in rows} if rc == 0 else set(), len(rows))
        if self.own_layer is not None and rc == 0:
            self.own_layer.follow(rows)
        self.took_s = time.perf_counter() - began
        return int(rc)

    def forget(self, seq: int) -> None:
        """Take all that it has from a sequence; its own layer's, too."""
        super().forget(seq)
        if self.own_layer is not None:
            self.own_layer.forget(seq)

    def clear(self) -> None:
        """Free all cells of all sequences; its own layer's, too."""
        super().clear()
        if self.own_layer is not None:
            self.own_layer.clear()

    def share_range(self, source: int, seq: int, start: int, end: int) -> None:
        """Let a sequence have another's cells at the positions from `start` to `end`; its own layer's, too."""
        super().share_range(source, seq, start, end)
        if self.own_layer is not None and start == 0:
            self.own_layer.share(source, seq, end)

    def logits(self, row: int) -> FloatRows:
        """Return the logits of batch row `row`, [n_vocab]; they are valid until the next decode."""
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._ctx, row), (self.vocabulary.n_tokens,))

    def likelihood(self, row: int, token: int, n_top: int, among: Sequence[int] = (), n_known: int = 0) -> Likelihood:
        """Return the log-probability of a token that was drawn from batch row `row`, and the `n_top` likeliest.

        Of those `among` it was drawn from, if these have ids; of their bytes the first `n_known` are text already.
        """
        ids = np.asarray(among) if among else np.arange(self.vocabulary.n_tokens)
        found = log_probabilities(self.logits(row)[ids] if among else self.logits(row))
        piece = self.vocabulary.piece
        top = tuple((piece(int(ids[i]))[n_known:], float(found[i])) for i in likeliest(found, n_top))
        return Likelihood(piece(token)[n_known:], float(found[ids == token][0]), top)

    def sampler(
        self,
        request: Generate,
        answer: Sequence[int] = (),
        grammar: str = "",
        prompt: Sequence[int] = (),
        limit: ThoughtLimit | None = None,
    ) -> Sampler:
        """Make a sampler chain in C for an answer that has the tokens `answer` already; `grammar` is from `grammar`.

        The `prompt` matters where repetitions of it count. The `limit` of a thought is the request's, unless it is
        given, as by another machine. Raises FormatError.
        """
        vocabulary, draws = self.vocabulary, request.drawing
        return Sampler(
            request,
            vocabulary.n_tokens,
            answer,
            vocab=vocabulary.handle,
            grammar=grammar,
            prompt=prompt if draws.repeats else (),
            ends=vocabulary.end_tokens if draws.goes_on else (),
            window=self.n_ctx,
            mark=vocabulary.opening_mark(request, prompt),
            budget=vocabulary.thought_budget(limit or vocabulary.thought_limit(request, prompt)),
            initials=vocabulary.initials if grammar else None,
        )

    def grammar(self, request: Generate) -> str:
        """Return the grammar of the response format or of calls, tried out; empty if there is none.

        Raises FormatError.
        """
        if request.tools is not None:
            return self._grammar_of_tools(request, request.tools)
        if not request.response_format:
            return ""
        if request.answer_so_far or request.hold:
            raise FormatError("An answer with a response format cannot go on from text that is given.")
        try:
            return self._tried(request, grammar_of(request.response_format))
        except GrammarError as e:
            raise FormatError(str(e)) from e

    def _grammar_of_tools(self, request: Generate, use: ToolUse) -> str:
        if use.forced and (request.answer_so_far or request.hold):
            raise ToolsError("An answer that has to be a call cannot go on from text that is given.")
        return self._tried(request, self.vocabulary.calling.grammar(use))

    def _tried(self, request: Generate, grammar: str) -> str:
        vocabulary = self.vocabulary
        initials = vocabulary.initials  # made here, in the intake's thread
        Sampler(request, vocabulary.n_tokens, vocab=vocabulary.handle, grammar=grammar, initials=initials).close()
        return grammar

    def sample(self, sampler: Sampler, row: int, among: Sequence[int] = ()) -> int:
        """Draw the next token from the logits of batch row `row`; if `among` has ids, one of those."""
        meter = sampler.meter
        began = time.thread_time()  # of the processor: on a busy machine a harmless grammar waits, too
        token = self._draw(sampler, row, among)
        if meter is not None:
            meter.add(time.thread_time() - began)
        if sampler.meter is None:
            sampler.watch(token)
            sampler.count(token)
        return token

    def _draw(self, sampler: Sampler, row: int, among: Sequence[int]) -> int:
        sampler.begin_draw()
        if (forced := sampler.forced) is not None and not among:
            sampler.accept(forced)
            return forced
        if sampler.greedy and not among:  # the chain would make a table of the whole vocabulary to find the same
            return int(self.logits(row).argmax())
        if among or sampler.meter is not None:
            return sampler.draw(self.logits(row), among)
        return int(llama_cpp.llama_sampler_sample(sampler.chain, self._ctx, row))

    def warm_up(self) -> bool:
        """Compute a few tokens, so that the first request meets warm caches, and measure: `prefill_tps`, token/s.

        The KV cache must be empty, and is so afterwards. Return False if it was aborted: then nothing is measured.
        """
        try:
            return self._warm_up()
        finally:
            self.clear()

    def _warm_up(self) -> bool:
        n = min(32, self.n_ctx // 2)
        tokens = (self.vocabulary.tokenize("The quick brown fox jumps over the lazy dog. " * 8) * n)[:n]
        rows = [(token, i, 0, False) for i, token in enumerate(tokens)]
        hidden = np.random.default_rng(0).standard_normal((n, self.n_embd), np.float32)
        if self.decode(rows, hidden) != 0:
            return False
        self.forget(0)
        started = time.perf_counter()
        if self.decode(rows, hidden) != 0:
            return False
        elapsed = time.perf_counter() - started
        if self.decode([(tokens[0], n, 0, True)], hidden[:1]) != 0:
            return False
        token_s = time.perf_counter() - started - elapsed
        self.prefill_tps = n / elapsed
        self.latency_prior = self._prior(token_s, elapsed / n)
        return True

    def _prior(self, token_s: float, prefill_s: float) -> tuple[float, float, float, float]:
        """Return where learning begins, from the time of a token alone and of one among many of a prompt, s.

        Reading the weights once makes up most of a token, and context hardly any at first.
        """
        return 0.8 * token_s, 0.2 * token_s, prefill_s, 0.1 * token_s / self.n_ctx


def _guesses_itself(load: Load) -> bool:
    """Whether a layer of the model's own is to guess: not beside a draft model, nor where layers are elsewhere."""
    if not load.speculate or load.draft_path or load.layers or load.ranges or load.exit is not None or not is_there():
        return False
    try:
        return why_no_guesses(whole_header(load.model_path)) == ""
    except (OSError, ValueError):  # llama.cpp says better what is wrong with a file
        return False


def _too_large(path: str) -> str | None:
    """Explain why there is no room for the model, or no whole model; None if it can be loaded."""
    try:
        return too_large(model_bytes(path), available_bytes())
    except OSError as e:
        return f"{e.filename} cannot be read: {e.strerror}"


def quiet() -> None:
    """Start llama.cpp; of what it tells only errors are shown, on stderr."""
    llama_cpp.llama_backend_init()


def build() -> str:
    """Return version, instruction sets and our changes of llama.cpp: the bits of its results depend on them."""
    features = llama_cpp.llama_print_system_info().decode("utf-8", "replace")
    return f"{llama_cpp.__version__} {features} {changes(kernels())}".rstrip()


def load_weights(load: Load) -> Weights:
    """Load a model's weights. Raises ModelError."""
    began = time.perf_counter()
    quiet()
    if not load.layers:  # a fleet's processes and those of a split share a machine as they are told
        use_nodes(max(load.n_threads, load.n_threads_batch))
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = load.n_gpu_layers or 0
    if load.main_gpu >= 0:
        params.split_mode, params.main_gpu = llama_cpp.LLAMA_SPLIT_MODE_NONE, load.main_gpu
    if (kept := gpu.overrides(load.n_cpu_moe or 0)) is not None:
        params.tensor_buft_overrides = ctypes.addressof(kept)
    params.use_extra_bufts = use_extra_buffers(load)
    params.load_mtp = guesses = _guesses_itself(load)
    if not load.n_gpu_layers and (why := _too_large(load.model_path)):
        raise ModelError(f"{load.model_path}: {why}")
    model = llama_cpp.llama_model_load_from_file(os.fsencode(load.model_path), params)
    if not model:
        msg = f"llama.cpp cannot load {load.model_path}: not a GGUF model it knows, or not enough memory"
        raise ModelError(msg)
    return Weights(model, guesses, began)


def load_model(load: Load, abort: AbortFlag, *, warm: bool = True) -> Llama:
    """Load the model, with as much of it on the GPU as fits where `load` leaves that open. Raises ModelError.

    It is measured unless `warm` is off.
    """
    return fitting_load(load, lambda placed: Llama(placed, abort, warm=warm))


def fitting_load(load: Load, make: Callable[[Load], _Made]) -> _Made:
    """Return what `make` makes with as much on the GPU as fits, where `load` leaves that open. Raises ModelError."""
    placed = gpu.placed(load)
    while True:
        numbers = {
            "n_gpu_layers": placed.n_gpu_layers, "n_cpu_moe": placed.n_cpu_moe, "main_gpu": placed.main_gpu,
        }  # fmt: skip
        try:
            return make(msgspec.structs.replace(load, **numbers))
        except ModelError:
            smaller = placed.smaller(load.n_gpu_layers, load.n_cpu_moe)
            if smaller is None:
                raise
            placed = smaller


def requantize(source: str, target: str, n_threads: int) -> None:
    """Write `source` again with Q8_0 weights: larger, and much faster to prefill on a CPU. Raises ModelError."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    params.allow_requantize = True
    params.nthread = n_threads
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)) != 0:
        raise ModelError(f"llama.cpp cannot requantise {source}")
