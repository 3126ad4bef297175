"""Text to token ids and back, by the vocabulary and the chat template of a model.

It is longer than others: whatever is text in the engine becomes tokens by one class, which knows its control tokens.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ...tools.detect import detect
from ...types import Drawing, Infill, RawPrompt
from ...types.thought_marks import (
    ALL_FAMILIES,
    IN_FORMATS,
    ThoughtLimit,
    ThoughtMarks,
    args_for,
    marks_in,
    marks_of_tokens,
)
from ..wire import Count, Generate
from .calling import Calling
from .calls import OpeningMark
from .infill import InfillTokens
from .refusals import DrawingError, FormatError, PromptError, PromptTooLong
from .template import ChatTemplate, TemplateError
from .text import TextStream
from .thinking import ThinkingText, ThoughtBudget
from .turns import may_be_refused

ANCHOR = "\x01"  # text that merges with none behind it, in any vocabulary with byte tokens

_NO_TEXT = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN | llama_cpp.LLAMA_TOKEN_ATTR_UNUSED


# llama.cpp's time for a text grows with the square of its control tokens: a long prompt is cut in front of some.
CUT_CHARS = 4096
GLANCE_CHARS = 8  # for each token of the context: a first part of a long text shows that the whole does not fit
GLANCE_SLACK = 64  # tokens, for a word cut in the middle
MAX_KNOWN = 16  # prompts whose tokens are remembered: a request is counted first, and then computed
_PAIR = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "x"})


class Vocabulary:
    """The tokens of one model, and prompts in them. Any thread may call it.

    All mutable state: the latest prompts' tokens. Prompts of more than `n_ctx` tokens are refused, if it is known;
    `beat` is called from time to time while a long one is read.
    """

    def __init__(self, model: Any, template: str = "") -> None:
        """Read the vocabulary of a llama_model; `template` replaces its own chat template. Raises TemplateError."""
        self.handle = llama_cpp.llama_model_get_vocab(model)
        self.n_tokens: int = llama_cpp.llama_vocab_n_tokens(self.handle)
        self._pieces: dict[tuple[int, bool], bytes] = {}  # of tokens that were drawn: at most the vocabulary
        self._control = self._control_texts()
        bos, eos = self._special(llama_cpp.llama_vocab_bos), self._special(llama_cpp.llama_vocab_eos)
        source = template or (llama_cpp.llama_model_chat_template(model, None) or b"").decode("utf-8", "replace")
        self._bos, self._source = bos, source
        self.infill = InfillTokens(self.handle, self.tokenize, self._shown)
        self._template = ChatTemplate(source, bos, eos)
        self._template.try_out()
        self._tags: frozenset[int] = frozenset()
        self.thoughts = marks_in(source) or self._own_marks()
        self._tags = self._shown_marks()
        self.calling = Calling(detect(lambda messages, tools: self._template.render(messages, tools=tools)))
        marks = [self._ids_of(mark) for mark in self.calling.marks]
        self._marks = frozenset(t for ids in marks for t in ids if len(ids) == 1 or self._is_control(t))
        self.n_ctx = 0
        self.beat: Callable[[], None] = lambda: None
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def _own_marks(self) -> ThoughtMarks | None:
        """Return the marks of thoughts that are tokens of the vocabulary, for a template that does not have any."""
        return marks_of_tokens(lambda marks: all(len(self._ids_of(mark)) == 1 for mark in marks))

    def _shown_marks(self) -> frozenset[int]:
        """Return the tokens of these marks that have to be seen even if they are control tokens."""
        every = [self._ids_of(mark) for mark in (self.thoughts.every if self.thoughts is not None else ())]
        return frozenset(i for ids in every for i in ids if len(ids) == 1 or not self._read_piece(i))

    def _ids_of(self, mark: str) -> list[int]:
        return self.tokenize(mark, parse_special=True)

    def prompt_tokens(self, request: Generate | Count) -> list[int]:
        """Tokenize the prompt, without the answer so far. Raises TemplateError, PromptError, PromptTooLong.

        A prompt that comes twice, in a Count and a Generate, is tokenized once.
        """
        if request.prompt is not None:
            return self._raw_tokens(request.prompt)
        self._check_messages(request)
        parts = self._segments(request)
        digest = _digest(parts)
        with self._lock:
            if (known := self._known.get(digest)) is not None:
                self._known.move_to_end(digest)
                return known.tolist()
        tokens = self._tokens_of(parts)
        with self._lock:
            self._known[digest] = array("i", tokens)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return tokens

    def rearranges(self, request: Generate | Count) -> bool:
        """Whether the template refuses the order of these messages, so that turns are joined or filled in."""
        if request.prompt is not None:
            return False
        has_system = any(message.get("role") == "system" for message in request.messages)
        if not may_be_refused(request.messages) and (self._takes_system or not has_system):
            return False  # as nearly all are, and to render a long one takes milliseconds
        use, calling = request.tools, self.calling
        messages = calling.messages(request.messages, use)
        return not self._template.takes(messages, self._args(request), calling.shown(use))

    def _args(self, request: Generate | Count) -> dict[str, Any]:
        """Return what the template is told, by its own names."""
        return args_for(self._source, request.template_args) if request.template_args else {}

    def _check_messages(self, request: Generate | Count) -> None:
        """Refuse what cannot fit, judging by the number of messages and their size. Raises PromptTooLong."""
        if not self.n_ctx:
            return
        n_least = len(request.messages) * self._least
        if n_least > self.n_ctx:
            raise PromptTooLong(self.n_ctx, n_least)
        self._check_size(sum(len(m["content"]) for m in request.messages if isinstance(m.get("content"), str)))

    def _check_size(self, n_chars: int) -> None:
        """Refuse a text that cannot fit, if all of it were the longest tokens there are. Raises PromptTooLong."""
        if self.n_ctx and n_chars > self.n_ctx * GLANCE_CHARS and n_chars > self.n_ctx * self._longest:
            raise PromptTooLong(self.n_ctx, n_chars // self._longest)

    def _tokens_of(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Tokenize a prompt in parts, until the context is full. Raises PromptTooLong."""
        tokens: list[int] = []
        n_chars = sum(len(text) for text, _ in parts)
        n_done = 0
        self._check_size(n_chars)
        for index, (text, is_template) in enumerate(parts):
            add_bos = index == 0 and not (self._bos and text.startswith(self._bos))
            for piece in self._cut(text) if is_template else (text,):
                self._glance(piece, len(tokens), is_template=is_template)
                tokens += self.tokenize(piece, add_special=add_bos, parse_special=is_template)
                add_bos = False
                n_done += len(piece)
                if self.n_ctx and len(tokens) >= self.n_ctx and n_done < n_chars:
                    raise PromptTooLong(self.n_ctx, len(tokens) * n_chars // n_done)
                self.beat()
        return tokens

    def _glance(self, text: str, n_before: int, *, is_template: bool = False) -> None:
        """Refuse a long text whose first part already fills the context. Raises PromptTooLong."""
        n = self.n_ctx * GLANCE_CHARS
        if not n or len(text) <= 2 * n:
            return
        seen = len(self.tokenize(text[:n], parse_special=is_template))
        if n_before + seen - GLANCE_SLACK > self.n_ctx:
            raise PromptTooLong(self.n_ctx, n_before + seen * len(text) // n)

    def require_short(self, *texts: str) -> None:
        """Refuse texts that cannot fit together, by their size and their first parts. Raises PromptTooLong."""
        self._check_size(sum(map(len, texts)))
        for text in texts:
            self._glance(text, 0)
        self.beat()

    def _cut(self, text: str) -> Iterator[str]:
        """Cut a template's text into pieces that begin with a control token, each with the tokens of the whole."""
        start = 0
        while len(text) - start > 2 * CUT_CHARS and self._cuts is not None:
            found = self._cuts.search(text, start + CUT_CHARS)
            if found is None:
                break
            yield text[start : found.start()]
            start = found.start()
        yield text[start:]

    @cached_property
    def _cuts(self) -> re.Pattern[str] | None:
        """Find where a prompt may be cut: in front of a control token that takes no space from the text before it."""
        if llama_cpp.llama_vocab_get_add_eos(self.handle):  # else each piece would have an end of its own
            return None
        safe = [text for text in self._control if not text.isspace()]
        return re.compile("|".join(map(re.escape, sorted(safe, key=len, reverse=True)))) if safe else None

    @cached_property
    def _longest(self) -> int:
        """Return an upper bound of the bytes of a token."""
        texts = (llama_cpp.llama_vocab_get_text(self.handle, token) for token in range(self.n_tokens))
        return max((len(text) for text in texts if text), default=1)

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the template takes a system message in front."""
        return self._template.takes([{"role": "system", "content": "Hi"}, {"role": "user", "content": "Hi"}])

    @cached_property
    def _least(self) -> int:
        """Return the least number of tokens of a message; 0 where the template leaves messages out, or refuses some."""
        try:
            short, long = (len(self._tokens_of(self._template.segments(_PAIR * n, self._control))) for n in (2, 18))
        except (TemplateError, PromptTooLong):
            return 0
        return max(0, (long - short) // 32)

    def _segments(self, request: Generate | Count) -> list[tuple[str, bool]]:
        """Render messages in parts, as `ChatTemplate.segments`; close a thought that is not wanted."""
        use, calling = request.tools, self.calling
        messages = calling.messages(request.messages, use)
        parts = self._template.segments(messages, self._control, self._args(request), calling.shown(use))
        thoughts = self.thoughts
        if not (thoughts is not None and parts and thoughts.opens_thought(parts[-1][0])):
            return parts
        # As llama-server does where the template does not know how (common/chat.cpp, enable_thinking).
        unwanted = request.template_args.get("enable_thinking") is False
        begun = request.answer_so_far if isinstance(request, Generate) else request.answer
        bound = isinstance(request, Generate) and request.response_format is not None
        bound = bound or (use is not None and use.forced)
        if not (unwanted or bound or thoughts.is_answer(begun)):
            return parts
        text, is_template = parts[-1]
        return [*parts[:-1], (thoughts.closed(text), is_template)]

    @cached_property
    def between_turns(self) -> list[int]:
        """Return the tokens between an answer and the next question; none where thoughts are taken out of answers."""
        answer, question = "disco-answer", "disco-question"
        pair = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
        try:
            text = self._template.render([*pair, {"role": "user", "content": question}])
        except TemplateError:
            return []
        between = text.partition(answer)[2].partition(question)[0]
        return [] if self.thoughts is not None else self.tokenize(between, parse_special=True)

    def close_thought(self, prompt: list[int], text: str) -> list[int]:
        """Return a prompt for the answer `text` to follow: a thought that the prompt opens is closed."""
        if self.thoughts is None or not (self.opens_thought(prompt) and self.thoughts.is_answer(text)):
            return prompt
        return prompt + self._ids_of(self.thoughts.closer)

    def stream(self, request: Generate, prompt: Sequence[int], answer: str) -> TextStream:
        """Make a stream that turns the tokens behind `prompt` and the partial `answer` into text."""
        reads = request.prompt is None and self.calling.reads(request.tools)
        stop, n_indent = ((), 0) if reads else (request.stop, request.drawing.n_indent)
        thoughts = self.thoughts if request.prompt is None else None
        is_within = thoughts is not None and thoughts.is_within(answer)
        if thoughts is None or (answer and not is_within):
            found = TextStream(stop, n_indent)
        else:
            found = self._thinking(prompt, stop, n_indent, inside=bool(answer))
        return self.calling.text(request.tools, found, request.stop, "" if is_within else answer) if reads else found

    def _thinking(
        self, prompt: Sequence[int], stop: Sequence[str] = (), n_indent: int = 0, *, inside: bool = False
    ) -> TextStream:
        """Make a stream that tells the thought from the answer behind a prompt."""
        if self.thoughts is None:
            return TextStream(stop, n_indent)
        return ThinkingText(stop, n_indent, inside=inside or self.opens_thought(prompt), marks=self.thoughts)

    def opening_mark(self, request: Generate, prompt: Sequence[int]) -> OpeningMark | None:
        """Return what looks for the begin of a call in an answer that may have one; None for other answers."""
        if request.tools is None:
            return None
        return self.calling.mark(request.tools, self._thinking(prompt), self.piece_with_marks, self.answer_tokens)

    def thought_limit(self, request: Generate, prompt: Sequence[int]) -> ThoughtLimit | None:
        """Return how long a thought may be behind a prompt; None where there is no limit.

        Where the answer may be a call, the model says itself what it goes on with.
        """
        marks = self.thoughts or IN_FORMATS.get(self.calling.name)
        if request.thought_budget is None or request.prompt is not None or marks is None:
            return None
        return ThoughtLimit(
            family=next(name for name, known in ALL_FAMILIES.items() if known is marks),
            n_tokens=request.thought_budget,
            is_begun=self.opens_thought(prompt),
            closes_only=request.tools is not None and bool(marks.leads),
        )

    def thought_budget(self, limit: ThoughtLimit | None) -> ThoughtBudget | None:
        """Return what closes a thought that becomes too long. Raises FormatError for a family that is not known."""
        if limit is None:
            return None
        if (marks := ALL_FAMILIES.get(limit.family)) is None:
            raise FormatError(f"No thoughts are known by the name {limit.family!r}.")
        stream = ThinkingText(inside=limit.is_begun, marks=marks)
        closer = marks.closing if limit.closes_only else marks.closer
        whole = lambda token: self.piece(token, special=True)  # noqa: E731
        return ThoughtBudget(stream, limit.n_tokens, self._ids_of(closer), whole)

    def shown_piece(self, request: Generate, token: int) -> bytes:
        """Return the bytes of one token of an answer: where there may be calls, with their marks."""
        reads = request.prompt is None and self.calling.reads(request.tools)
        return self.piece_with_marks(token) if reads else self.piece(token)

    def piece_with_marks(self, token: int) -> bytes:
        """Return the bytes of one token, those of a mark of calls too."""
        return self.piece(token, special=token in self._marks)

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with the beginning of a thought."""
        if self.thoughts is None:
            return False
        tail = b"".join(self.piece(token, special=True) for token in prompt[-2 * len(self.thoughts.opening) :])
        return self.thoughts.opens_thought(tail.decode("utf-8", "replace"))

    def prompt_text(self, request: Count) -> str:
        """Render messages as text; empty for a raw prompt, or if a message spells a control token."""
        if request.prompt is not None:
            return ""
        parts = self._segments(request)
        return "".join(text for text, _ in parts) if all(is_template for _, is_template in parts) else ""

    def _raw_tokens(self, prompt: RawPrompt) -> list[int]:
        """Return the tokens of a raw prompt. Raises PromptError, PromptTooLong.

        In a text the marks for filling in the middle are tokens where they are spelled out; no other control token is.
        """
        if isinstance(prompt, Infill):
            self.require_short(prompt.begun)
            return self.infill.prompt(prompt, self.n_ctx)
        if not (isinstance(prompt, str) and self.infill.are_spelled(prompt)):
            return self.raw_tokens(prompt)
        self.require_short(prompt)
        return self.infill.with_marks(prompt)

    def raw_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        """Tokenize a text that is no chat, or return the same ids. Raises PromptError, PromptTooLong."""
        known = isinstance(prompt, str)
        if isinstance(prompt, str):
            self.require_short(prompt)
        tokens = self.tokenize(prompt, add_special=True) if isinstance(prompt, str) else self.check_ids(prompt)
        if not tokens:
            raise PromptError("The prompt is empty." if known else "The prompt has no token ids.")
        return tokens

    def check_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the same ids. Raises PromptError if one is not in this vocabulary."""
        if ids and not (min(ids) >= 0 and max(ids) < self.n_tokens):
            raise PromptError(f"A token id is not in the model's vocabulary of {self.n_tokens} tokens.")
        return list(ids)

    def answer_tokens(self, text: str, ids: Sequence[int] = ()) -> list[int]:
        """Return ids of answer text that follows other text: `ids` if known. Raises PromptError, PromptTooLong."""
        if ids or not text:
            return self.check_ids(ids)
        self.require_short(text)
        if not self._adds_space:
            return self.tokenize(text)
        anchor, tokens = self.tokenize(ANCHOR), self.tokenize(ANCHOR + text)
        return tokens[len(anchor) :] if tokens[: len(anchor)] == anchor else self.tokenize(text)

    @cached_property
    def _adds_space(self) -> bool:
        """Whether the tokenizer puts a space in front of a text, as many SentencePiece vocabularies do."""
        return b"".join(map(self.piece, self.tokenize("a"))) == b" a"

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Tokenize `text`; `parse_special` lets control tokens be spelled out."""
        data = text.encode("utf-8", "surrogatepass")
        room = len(data) + 8
        buffer = (llama_cpp.llama_token * room)()
        n = llama_cpp.llama_tokenize(self.handle, data, len(data), buffer, room, add_special, parse_special)
        if n < 0:
            buffer = (llama_cpp.llama_token * -n)()
            n = llama_cpp.llama_tokenize(self.handle, data, len(data), buffer, -n, add_special, parse_special)
        return list(buffer[:n])

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of one token; of those of answers, which come again and again, they are kept."""
        key = token, special
        if (found := self._pieces.get(key)) is None:
            found = self._pieces[key] = self._read_piece(token, special=special)
        return found

    def _read_piece(self, token: int, *, special: bool = False) -> bytes:
        special = special or token in self._tags  # some models have them as control tokens, others as text
        buffer = ctypes.create_string_buffer(64)
        n = llama_cpp.llama_token_to_piece(self.handle, token, buffer, 64, 0, special)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = llama_cpp.llama_token_to_piece(self.handle, token, buffer, -n, 0, special)
        return buffer.raw[:n]

    def extensions(self, token: int) -> list[int]:
        """Return all tokens whose bytes begin with this one's, itself included; none if it is no plain text."""
        start, (pieces, ids) = self.piece(token), self._index
        if not start or not self._is_text(token):
            return []
        low = high = bisect_left(pieces, start)
        while high < len(pieces) and pieces[high].startswith(start):
            high += 1
        return ids[low:high]

    @cached_property
    def _index(self) -> tuple[list[bytes], list[int]]:
        """Return the bytes of all text tokens, sorted, and their ids; made once, in 0.1 s for 50,000 tokens."""
        found = sorted((self._read_piece(t), t) for t in range(self.n_tokens) if self._is_text(t))
        return [piece for piece, _ in found], [t for _, t in found]

    @cached_property
    def initials(self) -> NDArray[np.int32]:
        """The token that is a token's first character alone, by id; -1 where there is none, or it is not ASCII."""
        pieces, ids = self._index
        alone = {piece: t for piece, t in zip(pieces, ids, strict=True) if len(piece) == 1 and piece.isascii()}
        found = np.full(self.n_tokens, -1, np.int32)
        found[ids] = [alone.get(piece[:1], -1) for piece in pieces]
        return found

    def _is_text(self, token: int) -> bool:
        return not (llama_cpp.llama_vocab_get_attr(self.handle, token) & _NO_TEXT or self.ends(token))

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """All tokens that end an answer; found once, in 10 ms for 50,000 tokens."""
        return tuple(filter(self.ends, range(self.n_tokens)))

    def check_drawing(self, drawing: Drawing) -> None:
        """Raise DrawingError for a token id that is not in this vocabulary."""
        biased = [token for token, _ in drawing.logit_bias]
        for name, ids in (("stop_token_ids", drawing.stop_token_ids), ("logit_bias", biased)):
            if (largest := max(ids, default=0)) >= self.n_tokens:
                msg = f"{name} has the token id {largest}, and the model's vocabulary only {self.n_tokens} tokens."
                raise DrawingError(msg, name)

    def spells_control(self, text: str) -> bool:
        """Whether a text has the letters of a control token."""
        return any(mark in text for mark in self._control)

    def ends(self, token: int) -> bool:
        """Whether the token ends an answer."""
        return bool(llama_cpp.llama_vocab_is_eog(self.handle, token))

    def _special(self, which: Any) -> str:
        token = which(self.handle)
        return self._shown(token) if token >= 0 else ""

    def _shown(self, token: int) -> str:
        return self.piece(token, special=True).decode("utf-8", "replace")

    def _is_control(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_get_attr(self.handle, token) & llama_cpp.LLAMA_TOKEN_ATTR_CONTROL)

    def _control_texts(self) -> list[str]:
        control = filter(self._is_control, range(self.n_tokens))
        return [text for t in control if (text := self._read_piece(t, special=True).decode("utf-8", "replace"))]


def _digest(parts: Sequence[tuple[str, bool]]) -> bytes:
    """Return a digest that identifies a prompt."""
    found = hashlib.blake2b(digest_size=16)
    for text, is_template in parts:
        data = text.encode("utf-8", "surrogatepass")
        found.update(b"%d %d " % (is_template, len(data)))
        found.update(data)
    return found.digest()
