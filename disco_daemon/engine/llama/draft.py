"""A draft model: a small model of the same vocabulary, which guesses the next tokens of the large one."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp

from ..wire import Load
from .drafter import Drafter
from .library import usable_threads
from .memory import F16, Need, available_bytes, open_context, too_large
from .metadata import Metadata
from .model import AbortFlag, Llama
from .refusals import ModelError
from .rows import NO_KV_SLOT, Rows

N_TEXTS = 4  # texts that the draft model has in its KV cache
CATCH_UP = 128  # tokens of a text that it reads in one go, while running answers wait
MORE_TOKENS = 128  # by which vocabularies may differ: families pad theirs to different sizes; as in llama.cpp
FIRST_COMPARED = 5  # before it stand control tokens, which some model names differently; as in llama.cpp


class DraftModel(Drafter):
    """A small model in a context of its own, which continues texts.

    State: the texts that it has in its KV cache, by key, the one used longest ago first; each has a sequence.
    `token_s` is what a token takes, s, learned.
    """

    def __init__(self, load: Load, llama: Llama, abort: AbortFlag) -> None:
        """Load `load.draft_path`, for the model in `llama`. Raises ModelError, which says what to do."""
        self._path = load.draft_path
        self._model = self._load_model(load)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        if why := difference(llama.vocabulary.handle, vocab):
            msg = (
                f"device.draft_model {self._path} cannot guess for {load.model_path}: {why}. It has to be a small "
                "model of the same family; or unset it: `disco config set device.draft_model ''`"
            )
            raise ModelError(msg)
        trained = min(llama.n_ctx, llama_cpp.llama_model_n_ctx_train(self._model))
        need = Need(Metadata(self._model).kv_bytes(F16), 0)
        self._n_ctx = trained if load.n_ctx else open_context(trained, 0, need, available_bytes())
        n_vocab = int(llama_cpp.llama_vocab_n_tokens(vocab))
        super().__init__(self._context(load, abort), Rows(CATCH_UP), n_vocab, llama.vocabulary.n_tokens)
        self._abort = abort  # keeps callback and buffer alive as long as the context
        self._texts: dict[str, tuple[int, list[int]]] = {}
        self._free = list(range(N_TEXTS))
        self.token_s = self._warm_up()

    def _load_model(self, load: Load) -> Any:
        n_gpu_layers, params = load.n_gpu_layers, llama_cpp.llama_model_default_params()
        params.use_extra_bufts = load.repack
        # It is small: where there is a GPU, all of it fits.
        params.n_gpu_layers = -1 if n_gpu_layers is None else n_gpu_layers
        try:
            size = os.stat(self._path).st_size  # noqa: PTH116
        except OSError as e:
            raise ModelError(f"device.draft_model {self._path} cannot be read: {e.strerror}") from e
        if not (n_gpu_layers or llama_cpp.llama_supports_gpu_offload()) and (why := too_large(size, available_bytes())):
            raise ModelError(f"device.draft_model {self._path}: {why}")
        model = llama_cpp.llama_model_load_from_file(os.fsencode(self._path), params)
        if not model:
            msg = f"llama.cpp cannot load device.draft_model {self._path}: no GGUF model it knows, or not enough memory"
            raise ModelError(msg)
        if llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model):
            msg = f"device.draft_model {self._path} is a recurrent model: it cannot take back what was guessed wrong"
            raise ModelError(msg)
        return model

    def _context(self, load: Load, abort: AbortFlag) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self._n_ctx
        params.n_batch = params.n_ubatch = CATCH_UP
        params.n_seq_max = N_TEXTS
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = usable_threads(load.n_threads)
        params.abort_callback = abort.callback
        params.abort_callback_data = abort.data
        ctx = llama_cpp.llama_init_from_model(self._model, params)
        if not ctx:
            msg = f"there is no memory for a context of {self._n_ctx} tokens for device.draft_model: lower device.n_ctx"
            raise ModelError(msg)
        return ctx

    def _warm_up(self) -> float:
        """Measure how long a token takes, s."""
        seq = self._seq("")
        self._decode([0], 0, seq)
        began = time.perf_counter()
        self._decode([0], 1, seq)
        took_s = time.perf_counter() - began
        self._forget("")
        return took_s

    # --- guessing ------------------------------------------------------------------------------------------------

    def draft(self, key: str, tokens: Sequence[int], n: int) -> list[int]:
        """Guess at most `n` tokens after the text `tokens`, as long as it is sure of them.

        There are none while it still reads the text, in pieces, one a call. `key` identifies a text as it grows.
        """
        if len(tokens) + n > self._n_ctx or max(tokens) >= self._n_vocab:
            return []
        seq = self._seq(key)
        known = self._texts[key][1]
        n_same = min(_n_same(known, tokens), len(tokens) - 1)
        del known[n_same:]
        if not llama_cpp.llama_memory_seq_rm(self._memory, seq, n_same, -1):
            self._forget(key)  # it is read anew
            return []
        new = list(tokens[n_same : n_same + CATCH_UP])
        if not self._read(key, new) or len(known) < len(tokens):
            return []
        return self._guess(key, n)

    def _guess(self, key: str, n: int) -> list[int]:
        guess: list[int] = []
        while (token := self._surest()) >= 0:
            guess.append(token)
            began = time.perf_counter()
            if len(guess) == n or not self._read(key, [token]):
                break
            self.learn(time.perf_counter() - began)
        return guess

    def _read(self, key: str, new: list[int]) -> bool:
        """Read on in a text; return False if that was aborted, or there is no room."""
        seq, known = self._texts[key]
        rc = self._decode(new, len(known), seq)
        if rc == NO_KV_SLOT and len(self._texts) > 1:
            for other in [other for other in self._texts if other != key]:
                self._forget(other)
            rc = self._decode(new, len(known), seq)
        if rc != 0:
            if not llama_cpp.llama_memory_seq_rm(self._memory, seq, len(known), -1):
                self._forget(key)
            return False
        known += new
        return True

    def _seq(self, key: str) -> int:
        """Return the sequence of a text; the text used longest ago gives way to a new one."""
        if key not in self._texts:
            if not self._free:
                self._forget(next(iter(self._texts)))
            self._texts[key] = self._free.pop(), []
        self._texts[key] = self._texts.pop(key)
        return self._texts[key][0]

    def _forget(self, key: str) -> None:
        seq, _ = self._texts.pop(key)
        llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
        self._free.append(seq)


def difference(large: Any, small: Any) -> str:
    """Explain why a model of the vocabulary `small` cannot guess for one of `large`; empty if it can."""
    if llama_cpp.llama_vocab_type(large) != llama_cpp.llama_vocab_type(small):
        return "their tokenizers are of different kinds"
    n_large, n_small = llama_cpp.llama_vocab_n_tokens(large), llama_cpp.llama_vocab_n_tokens(small)
    if abs(n_large - n_small) > MORE_TOKENS:
        return f"their vocabularies have {n_large} and {n_small} tokens"
    for token in range(FIRST_COMPARED, min(n_large, n_small)):
        texts = [llama_cpp.llama_vocab_get_text(vocab, token) for vocab in (large, small)]
        if texts[0] != texts[1]:
            mine, theirs = (text.decode("utf-8", "replace") for text in texts)
            return f"token {token} is {mine!r} in one vocabulary and {theirs!r} in the other"
    return ""


def _n_same(known: Sequence[int], tokens: Sequence[int]) -> int:
    """Count how many leading tokens two texts have in common."""
    n = min(len(known), len(tokens))
    return next((i for i, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b), n)
