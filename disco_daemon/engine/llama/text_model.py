"""A model that makes vectors of texts, or rates them by a query, and answers nothing: no KV cache, no sampler."""

from __future__ import annotations

import re
import time
from contextlib import closing

import llama_cpp

from ...models.text_models import pooling_of
from ...types import Given
from ..wire import SINGLE_PROMPT_CHUNK, Load
from .context import context_params
from .embedder import PIECE, EmbeddingContext, EmbeddingError, Passage, reads_whole, text_need
from .library import usable_threads
from .memory import available_bytes
from .metadata import Metadata
from .model import AbortFlag, Llama, Weights, fitting_load, load_weights
from .refusals import ModelError, PromptError
from .vocabulary import Vocabulary

RERANK = b"rerank"  # the name of a chat template in a header: of a query with a document, for a model that generates
QUERY, DOCUMENT = "{query}", "{document}"  # what stands in it for them

_PLACES = re.compile(f"({re.escape(QUERY)}|{re.escape(DOCUMENT)})")


class TextModel:
    """Weights and vocabulary of such a model; texts may have `n_ctx` tokens."""

    def __init__(self, load: Load, abort: AbortFlag, weights: Weights) -> None:
        """Take a loaded model, and measure it. Raises ModelError."""
        model = weights.model
        self._model, self._load, self._abort = model, load, abort
        header = Metadata(model)
        self.pooling = pooling_of(header.text("general.architecture"), header.number("pooling_type"))
        self.reads_whole = reads_whole(header)
        self.n_embd_out = int(llama_cpp.llama_model_n_embd_out(model))
        self.n_gpu_layers = load.n_gpu_layers or 0
        try:
            self.vocabulary = Vocabulary(model)
            self.n_ctx = self.vocabulary.n_ctx = self._fit()
            self.prefill_tps = self._measure()
        except BaseException:  # whoever tries again, with less of it on the GPU, needs the memory
            llama_cpp.llama_model_free(model)
            raise
        self.load_s = time.perf_counter() - weights.began

    @property
    def n_at_once(self) -> int:
        """The most tokens of one llama_decode."""
        return max(SINGLE_PROMPT_CHUNK, self.n_ctx) if self.reads_whole else SINGLE_PROMPT_CHUNK

    def _fit(self) -> int:
        """Return the most tokens of a text: those it was trained for, those that are set, or as memory allows."""
        trained = int(llama_cpp.llama_model_n_ctx_train(self._model))
        free = available_bytes()
        if not self.n_gpu_layers:  # weights that are the file's pages count as available
            free -= llama_cpp.llama_model_size(self._model)
        try:
            need = text_need(self._model, self.vocabulary.n_tokens, has_flash=self._load.flash_attn is not False)
            return need.n_ctx(min(trained, self._load.n_ctx or trained), free)
        except MemoryError as e:
            raise ModelError(str(e)) from e

    def _measure(self) -> float:
        """Return how quickly texts are read, token/s; what is measured warms the caches, too. Raises ModelError."""
        try:
            context = self.context(PIECE)
        except EmbeddingError as e:
            raise ModelError(str(e)) from e
        n = min(PIECE, self.n_ctx) // 2
        piece = Passage([self.vocabulary.tokenize("a")[-1]] * n, 0, n)
        with closing(context):
            for _ in range(2):  # the first batch of a context is slow
                began = time.perf_counter()
                rc, _vectors = context.decode([piece])
                if rc != 0:
                    raise ModelError(f"llama.cpp cannot compute a text with this model: llama_decode returned {rc}")
            return n / (time.perf_counter() - began)

    def context(self, n_ctx: int) -> EmbeddingContext:
        """Open a context for texts of up to `n_ctx` tokens. Raises EmbeddingError."""
        params = context_params(self._load, Metadata(self._model))
        params.n_ctx = n_ctx
        params.n_threads_batch = usable_threads(self._load.n_threads_batch or self._load.n_threads)
        params.abort_callback, params.abort_callback_data = self._abort.callback, self._abort.data
        return EmbeddingContext(self._model, params, self.vocabulary.n_tokens)

    def pair(self, query: str, given: Given) -> list[int]:
        """Tokenize a query with a document, as the model was trained to rate them. Raises PromptError.

        As llama-server does (`format_prompt_rerank`): by the model's own template for that, or else with the tokens
        that end and part texts.
        """
        if not isinstance(given, str):
            raise PromptError("A document to be rated is a text, not token ids.")
        self.vocabulary.require_short(query, given)
        vocabulary, vocab = self.vocabulary, self.vocabulary.handle
        template = llama_cpp.llama_model_chat_template(self._model, RERANK)
        if template is not None:
            text = template.decode("utf-8", "replace")
            texts = {QUERY: query, DOCUMENT: given}
            if not (vocabulary.spells_control(query) or vocabulary.spells_control(given)):
                return vocabulary.tokenize(_PLACES.sub(lambda place: texts[place[0]], text), parse_special=True)
            # A text is a stranger's: only what the template itself spells is a control token.
            parts = [part for part in _PLACES.split(text) if part]
            return [
                t for part in parts for t in vocabulary.tokenize(texts.get(part, part), parse_special=part not in texts)
            ]
        end = llama_cpp.llama_vocab_eos(vocab)
        end = end if end >= 0 else llama_cpp.llama_vocab_sep(vocab)
        first = [llama_cpp.llama_vocab_bos(vocab)] if llama_cpp.llama_vocab_get_add_bos(vocab) else []
        last = [end] if llama_cpp.llama_vocab_get_add_eos(vocab) else []
        between = [llama_cpp.llama_vocab_sep(vocab)] if llama_cpp.llama_vocab_get_add_sep(vocab) else []
        asked, read = (vocabulary.tokenize(text) for text in (query, given))
        return [*first, *asked, *last, *between, *read, *last]


def load_either(load: Load, abort: AbortFlag, *, warm: bool) -> Llama | TextModel:
    """Load a model, which answers or makes vectors, with as much of it on the GPU as fits. Raises ModelError."""

    def make(placed: Load) -> Llama | TextModel:
        weights = load_weights(placed)
        header = Metadata(weights.model)
        if pooling_of(header.text("general.architecture"), header.number("pooling_type")):
            return TextModel(placed, abort, weights)
        return Llama(placed, abort, warm=warm, weights=weights)

    return fitting_load(load, make)
