"""The only module that imports llama_cpp: a thin, typed skin over llama.cpp's C API."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import time
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import llama_cpp
import numpy as np

from .grammar import GrammarError, grammar_of
from .memory import Need, available_bytes, fitting, too_large
from .template import ChatTemplate
from .wire import Count, Generate, Load

N_SEQS = 64  # sequences in one context: answers, and cached prefixes
N_BATCH = 512  # tokens per llama_decode; llama.cpp's own default micro-batch
DEFAULT_TEMPERATURE = 0.8  # this and the next as in llama.cpp: small models ramble at OpenAI's 1.0
DEFAULT_MIN_P = 0.05
ANCHOR = "\x01"  # text that merges with none behind it, in any vocabulary with byte tokens
_TRASH, _SCRATCH = N_SEQS, N_SEQS + 1  # of what is forgotten; of what is being moved
PENALTY_WINDOW = 1024  # tokens the frequency and presence penalties look back on
SKIP_S = 1e-9  # of each head of each layer, to pass by one cell; s
WORK_PER_ROW = 40  # numbers per row and embedding dimension in llama.cpp's work buffers, roughly
GGML_TYPE_BF16 = 30  # as in ggml.h; the bindings lack it
ABORTED = 2  # llama_decode's return value after the abort callback said stop
NO_KV_SLOT = 1


_NO_TEXT = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN | llama_cpp.LLAMA_TOKEN_ATTR_UNUSED
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


class PromptError(ValueError):
    """A raw prompt, or ids, that this model cannot take; the message is fit for a user."""


class ModelError(RuntimeError):
    """The model cannot be loaded or used; the message is fit for a user."""


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _data: object) -> None:
    if level >= 4:
        os.write(2, text)


class AbortFlag:
    """Stops a running llama_decode from another thread.

    The callback is libc's `strlen` on a two-byte buffer: false while the first byte is zero, true once it is set. A C
    function needs no GIL, so a prefill is neither slowed by polling nor kept waiting by a busy Python thread.
    """

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(2)
        libc = ctypes.CDLL(ctypes.util.find_library("c") or None)
        self.callback = ctypes.cast(libc.strlen, llama_cpp.ggml_abort_callback)
        self.data = ctypes.cast(self._buffer, ctypes.c_void_p)

    def set(self) -> None:
        """Abort the decode in flight, if there is one."""
        self._buffer[0] = b"\x01"

    def clear(self) -> None:
        """Allow decoding again."""
        self._buffer[0] = b"\x00"


class Llama:
    """One model and one context with up to N_SEQS sequences in a unified KV cache."""

    def __init__(self, load: Load, abort: AbortFlag) -> None:
        """Load the model. Raises ModelError."""
        started = time.perf_counter()
        llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = load.n_gpu_layers
        if load.n_gpu_layers == 0 and (why := too_large(os.stat(load.model_path).st_size, available_bytes())):  # noqa: PTH116
            msg = f"{load.model_path}: {why}"
            raise ModelError(msg)
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(load.model_path), params)
        if not self._model:
            msg = f"llama.cpp cannot load {load.model_path}: not a GGUF model it knows, or not enough memory"
            raise ModelError(msg)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.exact = load.exact
        # A state that was carried through a text cannot be cut, nor shared up to somewhere.
        self.divisible = not (
            llama_cpp.llama_model_is_recurrent(self._model) or llama_cpp.llama_model_is_hybrid(self._model)
        )
        self.bytes_per_token = self._bytes_per_token()
        n_heads = llama_cpp.llama_model_n_layer(self._model) * llama_cpp.llama_model_n_head(self._model)
        # What a row loses on a cell that is not its own; measured with the default model, on a GPU it is nothing.
        self.skip_s = 0.0 if load.n_gpu_layers else SKIP_S * n_heads / load.n_threads
        self.n_ctx, self.n_cells = self._sizes(load)
        self._ctx = self._new_context(load, abort)
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        self._rows = _Rows()
        self._abort = abort  # keeps callback and buffer alive as long as the context
        self._control = self._control_texts()
        bos, eos = self._special(llama_cpp.llama_vocab_bos), self._special(llama_cpp.llama_vocab_eos)
        source = llama_cpp.llama_model_chat_template(self._model, None)
        self._bos = bos
        self._template = ChatTemplate(source.decode() if source else None, bos, eos)
        self.prefill_tps, decode_s = self._warm_up()
        # Where learning begins: reading the weights once makes up most of a token, and context hardly any at first.
        self.latency_prior = (0.8 * decode_s, 0.2 * decode_s, 1.0 / self.prefill_tps, 0.1 * decode_s / self.n_ctx)
        self.load_s = time.perf_counter() - started

    def _new_context(self, load: Load, abort: AbortFlag) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self.n_cells
        params.n_batch = params.n_ubatch = N_BATCH
        params.n_seq_max = N_SEQS + 2
        params.kv_unified = True  # separate buffers abort on partial sequence copies (GGML_ASSERT)
        if load.exact and not load.n_gpu_layers:
            # With K and V of one type, flash attention on the CPU has three code paths, by rows, threads and place,
            # that round differently; with these two it has one: what is prefilled is bit for bit what was generated.
            params.type_k, params.type_v = GGML_TYPE_BF16, llama_cpp.GGML_TYPE_F16
        params.n_threads = params.n_threads_batch = load.n_threads
        params.abort_callback = abort.callback
        params.abort_callback_data = abort.data
        ctx = llama_cpp.llama_init_from_model(self._model, params)
        if not ctx:
            msg = f"llama.cpp cannot make a context of {self.n_cells} tokens: lower device.n_ctx, or free some memory"
            raise ModelError(msg)
        return ctx

    def _bytes_per_token(self) -> int:
        """What a token takes in the KV cache: a key and a value of two bytes a number, in every layer."""
        heads = llama_cpp.llama_model_n_head_kv(self._model)
        size = llama_cpp.llama_model_n_embd(self._model) // max(1, llama_cpp.llama_model_n_head(self._model))
        arch = self._meta("general.architecture")
        key, value = (int(self._meta(f"{arch}.attention.{part}_length") or size) for part in ("key", "value"))
        return int(llama_cpp.llama_model_n_layer(self._model) * heads * (key + value) * 2)

    def _meta(self, key: str) -> str:
        """An entry of the model file's metadata; empty if it has none."""
        buffer = ctypes.create_string_buffer(256)
        n = llama_cpp.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if n >= 0 else ""

    def _sizes(self, load: Load) -> tuple[int, int]:
        """Tokens of an answer, and of the KV cache: what is wanted, or what there is memory for. Raises ModelError."""
        n_ctx = load.n_ctx or llama_cpp.llama_model_n_ctx_train(self._model)
        need = Need(
            self.bytes_per_token,
            4 * N_BATCH * (self.n_vocab + WORK_PER_ROW * llama_cpp.llama_model_n_embd(self._model)),
        )
        try:
            return fitting(n_ctx, load.n_cells, need, available_bytes())
        except MemoryError as e:
            raise ModelError(str(e)) from e

    # --- text and tokens -----------------------------------------------------------------------------------------

    def prompt_tokens(self, request: Generate | Count) -> list[int]:
        """Token ids of the prompt, without the answer so far. Raises TemplateError, PromptError."""
        if request.prompt is not None:
            return self._raw_tokens(request.prompt)
        tokens: list[int] = []
        for index, (text, is_template) in enumerate(self._template.segments(request.messages, self._control)):
            add_bos = index == 0 and not (self._bos and text.startswith(self._bos))
            tokens += self.tokenize(text, add_special=add_bos, parse_special=is_template)
        return tokens

    def prompt_text(self, request: Count) -> str:
        """The rendered messages as text; none of a raw prompt, and none where a message spells a control token."""
        if request.prompt is not None:
            return ""
        parts = self._template.segments(request.messages, self._control)
        return parts[0][0] if len(parts) == 1 else ""

    def _raw_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        known = isinstance(prompt, str)
        tokens = self.tokenize(prompt, add_special=True) if isinstance(prompt, str) else self.checked(prompt)
        if not tokens:
            raise PromptError("The prompt is empty." if known else "The prompt has no token ids.")
        return tokens

    def checked(self, ids: Sequence[int]) -> list[int]:
        """The same ids, all of this vocabulary. Raises PromptError."""
        if ids and not (min(ids) >= 0 and max(ids) < self.n_vocab):
            msg = f"A token id is not in the model's vocabulary of {self.n_vocab} tokens."
            raise PromptError(msg)
        return list(ids)

    def answer_tokens(self, text: str, ids: Sequence[int] = ()) -> list[int]:
        """Token ids of answer text, which follows other text: `ids` if they are known. Raises PromptError."""
        if ids or not text:
            return self.checked(ids)
        if not self._adds_space:
            return self.tokenize(text)
        anchor, tokens = self.tokenize(ANCHOR), self.tokenize(ANCHOR + text)
        return tokens[len(anchor) :] if tokens[: len(anchor)] == anchor else self.tokenize(text)

    @cached_property
    def _adds_space(self) -> bool:
        """Whether the tokenizer puts a space in front of a text, as many SentencePiece vocabularies do."""
        return b"".join(map(self.piece, self.tokenize("a"))) == b" a"

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of `text`; `parse_special` lets control tokens be spelled out."""
        data = text.encode("utf-8", "surrogatepass")
        room = len(data) + 8
        buffer = (llama_cpp.llama_token * room)()
        n = llama_cpp.llama_tokenize(self._vocab, data, len(data), buffer, room, add_special, parse_special)
        if n < 0:
            buffer = (llama_cpp.llama_token * -n)()
            n = llama_cpp.llama_tokenize(self._vocab, data, len(data), buffer, -n, add_special, parse_special)
        return list(buffer[:n])

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of one token."""
        buffer = ctypes.create_string_buffer(64)
        n = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, 64, 0, special)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, -n, 0, special)
        return buffer.raw[:n]

    def extensions(self, token: int) -> list[int]:
        """Ids of all tokens whose bytes begin with this one's, itself among them; none if it is no plain text."""
        start, (pieces, ids) = self.piece(token), self._index
        if not start or not self._is_text(token):
            return []
        low = high = bisect_left(pieces, start)
        while high < len(pieces) and pieces[high].startswith(start):
            high += 1
        return ids[low:high]

    @cached_property
    def _index(self) -> tuple[list[bytes], list[int]]:
        """Bytes of all text tokens, sorted, and their ids. Built when first needed; takes 0.1 s for 50,000 tokens."""
        found = sorted((self.piece(t), t) for t in range(self.n_vocab) if self._is_text(t))
        return [piece for piece, _ in found], [t for _, t in found]

    def _is_text(self, token: int) -> bool:
        return not (llama_cpp.llama_vocab_get_attr(self._vocab, token) & _NO_TEXT or self.ends(token))

    def ends(self, token: int) -> bool:
        """Whether the token ends an answer."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    def _special(self, which: Any) -> str:
        token = which(self._vocab)
        return self.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    def _control_texts(self) -> list[str]:
        vocab, n = self._vocab, llama_cpp.llama_vocab_n_tokens(self._vocab)
        control = (t for t in range(n) if llama_cpp.llama_vocab_get_attr(vocab, t) & llama_cpp.LLAMA_TOKEN_ATTR_CONTROL)
        return [text for t in control if (text := self.piece(t, special=True).decode("utf-8", "replace"))]

    # --- computing -----------------------------------------------------------------------------------------------

    def decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> int:
        """Run one batch of (token, position, sequence, wants_logits) rows; llama_decode's return value.

        0 done, NO_KV_SLOT, ABORTED, negative: broken.
        """
        rc = llama_cpp.llama_decode(self._ctx, self._rows.filled(rows))
        if rc == 0:
            llama_cpp.llama_synchronize(self._ctx)
        return int(rc)

    def forget(self, seq: int, from_pos: int = 0) -> None:
        """Take the KV cells from position `from_pos` on from a sequence.

        They are not free until `clear`: llama.cpp would fill them next, and attention adds up in the order of the
        cells. A sequence whose cells are not in the order of their positions is rounded differently, which is enough
        to make a greedy answer another one.
        """
        llama_cpp.llama_memory_seq_cp(self._memory, seq, _TRASH, from_pos, -1)
        llama_cpp.llama_memory_seq_rm(self._memory, seq, from_pos, -1)

    def clear(self) -> None:
        """Free all cells of all sequences."""
        llama_cpp.llama_memory_clear(self._memory, False)

    def part(self, seq: int, start: int, end: int) -> bytes:
        """What the KV cache has of a sequence's positions from `start` to `end`."""
        llama_cpp.llama_memory_seq_cp(self._memory, seq, _SCRATCH, start, end)
        data = self.saved(_SCRATCH)
        llama_cpp.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
        return data

    def put(self, data: bytes, owners: Iterable[int], start: int, end: int) -> None:
        """Put what `part` gave into new cells, for several sequences. Raises ModelError if they are not to be had."""
        if not self.restore(_SCRATCH, data):
            raise ModelError("llama.cpp does not take back what it saved of its KV cache")
        for seq in owners:
            llama_cpp.llama_memory_seq_cp(self._memory, _SCRATCH, seq, start, end)
        llama_cpp.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)

    def share(self, source: int, seq: int, n: int) -> None:
        """Let a sequence without cells have the first `n` of another's; nothing is computed or copied."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, seq, 0, n)

    def saved(self, seq: int) -> bytes:
        """All that the KV cache has of a sequence."""
        size = llama_cpp.llama_state_seq_get_size(self._ctx, seq)
        buffer = (ctypes.c_uint8 * size)()
        n = llama_cpp.llama_state_seq_get_data(self._ctx, buffer, size, seq)
        return bytes(memoryview(buffer)[:n])

    def restore(self, seq: int, data: bytes) -> bool:
        """Put what `saved` gave into the KV cache again, as sequence `seq`; False if there is no room for it."""
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        return bool(llama_cpp.llama_state_seq_set_data(self._ctx, buffer, len(data), seq))

    def sampler(self, request: Generate, answer: Sequence[int] = (), grammar: str = "") -> Sampler:
        """A sampler chain in C for an answer that has the tokens `answer` already; `grammar` as `grammar` gave it."""
        return Sampler(request, self.n_vocab, answer, vocab=self._vocab, grammar=grammar)

    def grammar(self, request: Generate) -> str:
        """What the response format allows, tried out; empty if that is anything. Raises PromptError."""
        if not request.response_format:
            return ""
        if request.answer_so_far or request.hold:
            raise PromptError("An answer with a response format cannot go on from text that is given.")
        try:
            grammar = grammar_of(request.response_format)
            Sampler(request, self.n_vocab, vocab=self._vocab, grammar=grammar).close()
        except GrammarError as e:
            raise PromptError(str(e)) from e
        return grammar

    def sample(self, sampler: Sampler, row: int, among: Sequence[int] = ()) -> int:
        """Draw the next token from the logits of batch row `row`; if `among` has ids, one of those."""
        sampler.seed()
        if not (among or sampler.greedy):
            return int(llama_cpp.llama_sampler_sample(sampler.chain, self._ctx, row))
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._ctx, row), (self.n_vocab,))
        if not among:  # the chain would make a table of the whole vocabulary to find the same
            return int(logits.argmax())
        data = np.zeros(len(among), _CANDIDATE)
        data["id"], data["logit"] = among, logits[np.asarray(among)]
        candidates = llama_cpp.llama_token_data_array(
            data.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data)), len(among), -1, False
        )
        llama_cpp.llama_sampler_apply(sampler.chain, ctypes.byref(candidates))
        token = int(candidates.data[max(0, candidates.selected)].id)
        llama_cpp.llama_sampler_accept(sampler.chain, token)
        return token

    def _warm_up(self) -> tuple[float, float]:
        """Prefill a few tokens, so that the first request meets warm caches.

        Returns token/s, and what a single token takes, s.
        """
        n = min(32, self.n_ctx // 2)
        tokens = (self.tokenize("The quick brown fox jumps over the lazy dog. " * 8) * n)[:n]
        rows = [(token, i, 0, False) for i, token in enumerate(tokens)]
        self.decode(rows)
        self.forget(0)
        started = time.perf_counter()
        self.decode(rows)
        elapsed = time.perf_counter() - started
        self.decode([(tokens[0], n, 0, True)])
        single = time.perf_counter() - started - elapsed
        self.clear()
        return n / elapsed, single


class _Rows:
    """A llama_batch over numpy arrays: filled as a whole, not element by element."""

    def __init__(self) -> None:
        self._token, self._pos, self._n_seq, self._seq = (np.ones(N_BATCH, np.int32) for _ in range(4))
        self._logits = np.zeros(N_BATCH, np.int8)
        where = self._seq.ctypes.data + self._seq.itemsize * np.arange(N_BATCH, dtype=np.uintp)
        self._seq_of = where.astype(np.uintp)  # each row's list of sequences has one entry
        self._batch = llama_cpp.llama_batch(
            n_tokens=0,
            token=self._token.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token)),
            embd=None,
            pos=self._pos.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos)),
            n_seq_id=self._n_seq.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._seq_of.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(llama_cpp.llama_seq_id))),
            logits=self._logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def filled(self, rows: Sequence[tuple[int, int, int, bool]]) -> llama_cpp.llama_batch:
        """The batch of these (token, position, sequence, wants_logits) rows; valid until the next call."""
        n = len(rows)
        table = np.array(rows, np.int32)
        self._token[:n], self._pos[:n], self._seq[:n], self._logits[:n] = table.T
        self._batch.n_tokens = n
        return self._batch


class Sampler:
    """A llama.cpp sampler chain for one answer; freed with `close`.

    It goes on where an answer stands: the penalties know the tokens in `answer`, and with a seed the draw of the n-th
    token depends on the seed and n alone, so a continued answer draws what the unbroken one would have drawn.
    """

    def __init__(
        self, request: Generate, n_vocab: int, answer: Sequence[int] = (), *, vocab: Any = None, grammar: str = ""
    ) -> None:
        """Raises PromptError for a grammar that llama.cpp does not understand."""
        self._seed: int | None = None
        self._n_drawn = len(answer)
        self.greedy = False  # the largest logit, and nothing else
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        if grammar:
            constraint = llama_cpp.llama_sampler_init_grammar(vocab, grammar.encode(), b"root")
            if not constraint:
                llama_cpp.llama_sampler_free(chain)
                raise PromptError("llama.cpp does not understand the grammar of the response format.")
            llama_cpp.llama_sampler_chain_add(chain, constraint)
        frequency, presence = request.frequency_penalty or 0.0, request.presence_penalty or 0.0
        if frequency or presence:
            penalties = llama_cpp.llama_sampler_init_penalties(n_vocab, PENALTY_WINDOW, 1.0, frequency, presence)
            llama_cpp.llama_sampler_chain_add(chain, penalties)
        temperature = DEFAULT_TEMPERATURE if request.temperature is None else request.temperature
        if temperature <= 0:
            self.greedy = not (frequency or presence or grammar)
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
        else:
            if request.top_p is None:
                llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_min_p(DEFAULT_MIN_P, 1))
            elif request.top_p < 1:
                llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_top_p(request.top_p, 1))
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(temperature))
            self._seed = request.seed
            llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(llama_cpp.LLAMA_DEFAULT_SEED))
        self.chain = chain
        if frequency or presence:
            for token in answer[-PENALTY_WINDOW:]:
                llama_cpp.llama_sampler_accept(chain, token)

    def seed(self) -> None:
        """Make the next draw a function of the seed and of the token's number; without a seed, of chance."""
        if self._seed is not None:
            last = llama_cpp.llama_sampler_chain_n(self.chain) - 1
            llama_cpp.llama_sampler_free(llama_cpp.llama_sampler_chain_remove(self.chain, last))
            mixed = zlib.crc32(f"{self._seed} {self._n_drawn}".encode()) & 0x7FFFFFFF  # never LLAMA_DEFAULT_SEED
            llama_cpp.llama_sampler_chain_add(self.chain, llama_cpp.llama_sampler_init_dist(mixed))
        self._n_drawn += 1

    def close(self) -> None:
        """Free the chain; idempotent."""
        if self.chain is not None:
            llama_cpp.llama_sampler_free(self.chain)
            self.chain = None


def requantize(source: str, target: str, n_threads: int) -> None:
    """Write `source` again with Q8_0 weights: larger, and much faster to prefill on a CPU. Raises ModelError."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    params.allow_requantize = True
    params.nthread = n_threads
    llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)) != 0:
        msg = f"llama.cpp cannot requantise {source}"
        raise ModelError(msg)
