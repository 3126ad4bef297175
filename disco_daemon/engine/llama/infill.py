"""Prompts for filling in the middle, by the tokens that a model has for it.

The same ids as llama-server's `/infill` (tools/server, `format_prompt_infill`), but in a context so small that its
prompt would leave no room for an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import llama_cpp

from ...types import Infill
from ...types.infill import WITH_TOKENS
from .refusals import PromptError

BATCH = 2048  # tokens of prefix and suffix together, at most: llama-server's logical batch
ROOM = 256  # tokens of the context that no extra text takes; llama-server leaves twice its limit of an answer
PREFIX_SHARE = 3  # to one of the suffix
PROJECT, FILE = "myproject\n", "filename\n"  # llama-server's names: nobody tells it others
SNIPPET = "\n\n--- snippet ---\n\n"  # between extra texts, where no token is for that
LOOK_CHARS = 16  # characters of a long text that are read for each token wanted of it, at first
SLACK = 64  # tokens beside a cut that may be others than those of the whole text
NO_TOKENS = f"This model has no tokens for filling in the middle; {WITH_TOKENS}."

Tokenize = Callable[[str], list[int]]  # text without control tokens


class NoInfill(PromptError):
    """The model cannot fill in the middle."""

    reason = "unsupported"
    param = "suffix"


class InfillTokens:
    """The tokens of one vocabulary for filling in the middle, and prompts by them; -1 for one that it has not."""

    def __init__(self, vocab: Any, tokenize: Tokenize, text_of: Callable[[int], str]) -> None:
        """Read the tokens of a llama_vocab; `tokenize` makes ids of text, `text_of` shows one, a mark too."""
        self._tokenize = tokenize
        self.pre: int = llama_cpp.llama_vocab_fim_pre(vocab)
        self.suf: int = llama_cpp.llama_vocab_fim_suf(vocab)
        self.mid: int = llama_cpp.llama_vocab_fim_mid(vocab)
        self.pad: int = llama_cpp.llama_vocab_fim_pad(vocab)
        self.rep: int = llama_cpp.llama_vocab_fim_rep(vocab)
        self.sep: int = llama_cpp.llama_vocab_fim_sep(vocab)
        self._bos = [llama_cpp.llama_vocab_bos(vocab)] if llama_cpp.llama_vocab_get_add_bos(vocab) else []
        self.is_there = min(self.pre, self.suf, self.mid) >= 0
        every = (self.pre, self.suf, self.mid, self.pad, self.rep, self.sep) if self.is_there else ()
        self._marks = {text: token for token in every if token >= 0 and (text := text_of(token).strip())}
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def are_spelled(self, text: str) -> bool:
        """Whether a raw text spells one of the marks."""
        return self._pattern is not None and self._pattern.search(text) is not None

    def with_marks(self, text: str) -> list[int]:
        """Return the tokens of a whole raw prompt, in which the marks are tokens, and other control tokens text."""
        return self._bos + self._marked(text)

    def _marked(self, text: str) -> list[int]:
        tokens, at = list[int](), 0
        for found in self._pattern.finditer(text) if self._pattern is not None else ():
            if found.start() > at:
                tokens += self._tokenize(text[at : found.start()])
            tokens.append(self._marks[found[0]])
            at = found.end()
        return tokens + self._tokenize(text[at:]) if at < len(text) else tokens

    def prompt(self, gap: Infill, n_ctx: int) -> list[int]:
        """Return the prompt for a gap in a context of `n_ctx` tokens (0: not known). Raises NoInfill."""
        if not self.is_there:
            raise NoInfill(NO_TOKENS)
        batch = min(BATCH, n_ctx // 2) if n_ctx else BATCH
        begun = self._marked(gap.begun)
        prefix = self._last(gap.prefix, PREFIX_SHARE * (batch // 4))
        suffix = self._first(gap.suffix, max(0, batch // 4 - (2 + len(begun))))
        extra = self._extra(gap, max(0, n_ctx - batch - ROOM) if n_ctx else BATCH)
        return [*extra, *self._bos, self.pre, *prefix, *begun, self.suf, *suffix, self.mid]

    def _extra(self, gap: Infill, n: int) -> list[int]:
        """Return the last `n` tokens of what comes before the prefix."""
        parts = [[self.sep, *self._tokenize(FILE)]] if self.sep >= 0 else []
        n_made = sum(map(len, parts))
        for one in reversed(gap.extra):
            if n_made >= n:
                break
            name = [self.sep, *self._tokenize(f"{one.filename}\n")] if self.sep >= 0 else self._tokenize(SNIPPET)
            parts.append([*name, *self._last(one.text, n - n_made)])
            n_made += len(parts[-1])
        else:
            if self.rep >= 0:
                parts.append([self.rep, *self._tokenize(PROJECT)])
        tokens = [token for part in reversed(parts) for token in part]
        return tokens[max(0, len(tokens) - n) :]

    def _last(self, text: str, n: int) -> list[int]:
        """Return the last `n` tokens of a text, of which no more is read than that needs."""
        n_chars = (n + SLACK) * LOOK_CHARS
        while n_chars < len(text):
            tokens = self._tokenize(text[-n_chars:])
            if len(tokens) >= n + SLACK:
                return tokens[len(tokens) - n :]
            n_chars *= 4
        tokens = self._tokenize(text)
        return tokens[max(0, len(tokens) - n) :]

    def _first(self, text: str, n: int) -> list[int]:
        """Return the first `n` tokens of a text, of which no more is read than that needs."""
        n_chars = (n + SLACK) * LOOK_CHARS
        while n_chars < len(text):
            tokens = self._tokenize(text[:n_chars])
            if len(tokens) >= n + SLACK:
                return tokens[:n]
            n_chars *= 4
        return self._tokenize(text)[:n]
