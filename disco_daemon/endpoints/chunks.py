"""A server's chunks as tokens: the one place where its JSON is looked at, and one form for all that servers send.

What is typed here, the shapes of answers only write. What nobody can read and says nothing is left out; what cannot be
read and may say something is an error, which names the server. Pure.

It is longer than other files: what a chunk may mean is told by those before it, so one place has to read all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from msgspec import structs

from ..delivery.counting import TextCount, TextCounts
from ..plain import writable_text
from ..types import CallForm, Delta, Finish, FinishReason, Json, Token
from .calls import Calls
from .finish_reasons import ENDS, REPEATED, failed, word
from .leading_thought import LeadingThought, Tags
from .writable import Halves, writable

LEAST_LOGPROB = -9999.0  # OpenAI's word for a token that is all but impossible: JSON has no infinity
MAX_PIECE = 4096  # characters of one text that are taken at a time, where a whole answer comes in one chunk
MAX_ALTERNATIVES = 64  # beside one token; nobody tells more than twenty
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of a thought: the first one that has any counts
_BEHIND = frozenset({"refusal", "tool_calls", "function_call"})  # what stands behind all text before it
_KNOWN = frozenset({"role", "content", *_BEHIND, *_THOUGHTS})
_STOPS = ("stop_reason", "matched_stop")  # the stop string that ended a choice, as vLLM and SGLang name it
_NOTHING: tuple[Any, ...] = (None, "", [], {})


class CutError(Exception):
    """The answer has ended, but is not whole."""


class _Choice:
    """One choice of the answer: what of it has begun and is not said yet, and the server's word for its end."""

    __slots__ = (
        "_calls", "_name", "has_begun", "has_deltas", "is_held", "kept", "leading", "reason", "stop", "text", "thought",
    )  # fmt: skip

    def __init__(self, name: str, tags: Tags) -> None:
        self._name = name
        self.leading = LeadingThought(tags) if tags else None  # until it is known that none comes any more
        self.is_held = False  # whether the last chunk has said something of which nothing could be given out
        self.kept: list[Json] = []  # log-probabilities of what is held
        self._calls: Calls | None = None
        self.text, self.thought = Halves(), Halves()
        self.reason = ""
        self.stop: str | None = None
        self.has_begun = self.has_deltas = False

    @property
    def calls(self) -> Calls:
        """The calls of this choice, which few answers have."""
        if self._calls is None:
            self._calls = Calls(self._name)
        return self._calls

    @property
    def is_waiting(self) -> bool:
        """Whether a call has begun whose beginning is not given out."""
        return self._calls is not None and self._calls.is_waiting

    def divided(self, text: str, thought: str) -> tuple[str, str]:
        """Return a piece of text, and what was named a thought, with what of the text is one, too."""
        if self.leading is None:
            return text, thought
        if thought:  # the server tells them apart itself
            held, unsaid = self.leading.rest()
            text, thought = held + text, unsaid + thought
        else:
            text, thought = self.leading.divided(text)
        if self.leading.is_over:
            self.leading = None
        return text, thought

    def undivided(self, text: str, thought: str) -> tuple[str, str]:
        """Return both with what was held back behind them: no thought begins, or goes on, from here on."""
        if self.leading is None:
            return text, thought
        (more, unsaid), self.leading = self.leading.rest(), None
        return text + more, thought + unsaid

    def likely(self, told: Json | None) -> Json | None:
        """Return log-probabilities behind those that were kept, which are given out by it."""
        if not self.kept:
            return told
        kept, self.kept = self.kept, []
        return {"content": kept + told["content"] if told else kept}

    def end(self) -> tuple[Delta | None, str, FinishReason]:
        """Return what was held back, in a delta and as text, and why the choice ended. Raises CutError, TypeError."""
        reason = self._reason()
        text, thought = self.undivided(*self.divided(self.text.rest(), self.thought.rest()))
        is_cut = reason in (FinishReason.LENGTH, FinishReason.CONTENT_FILTER)
        calls = () if self._calls is None else tuple(self._calls.end(is_cut=is_cut))
        return (Delta(thought, calls=calls) if thought or calls else None), text, reason

    def _reason(self) -> FinishReason:
        form = None if self._calls is None else self._calls.form
        called = FinishReason.FUNCTION_CALL if form is CallForm.OLD else FinishReason.TOOL_CALLS
        if not self.reason:
            return FinishReason.STOP if form is None else called
        if (end := ENDS.get(self.reason)) is None:
            raise CutError(f"the server ended its answer with the finish_reason {self.reason!r}: {failed(self.reason)}")
        if end in (FinishReason.STOP, FinishReason.TOOL_CALLS, FinishReason.FUNCTION_CALL):
            return FinishReason.STOP if form is None else called
        return end


class Reader:
    """The chunks of one answer as Tokens, both kinds: a chat's `delta` and a raw completion's `text`.

    How many tokens it has by now, their ids or log-probabilities tell, or a usage block that comes with it; else its
    text, however that is cut: a chunk may count none. `n_tokens` were given out so far. Of `n_choices` each has an
    index; a choice that nobody asked for is left out. Calls without an id get one made of `name`. A thought
    between `tags` that begins a text is told from it.
    """

    def __init__(self, *, ids_back: bool = False, n_choices: int = 1, name: str = "", tags: Tags = ()) -> None:
        self._is_one = n_choices == 1
        self._is_plain = n_choices == 1 and not ids_back
        names = [name] if n_choices == 1 else [f"{name}_{i}" for i in range(n_choices)]
        self._choices = [_Choice(one, tags) for one in names]
        self._one = self._choices[0]
        self._ended: list[_Choice] = []  # those that have told a reason for an end, in order
        self._ids_back = ids_back
        self._ids: tuple[int, ...] = ()  # of chunks whose text is still to come: it is held, or half a character
        self._held_ids: tuple[int, ...] = ()  # those of them up to the last chunk that has said anything
        self._unnamed = 0  # tokens given out since the last ids
        self._names = False  # it has told ids: what comes without is a part of the next ones' text
        self.n_tokens = 0
        self.is_over = False  # whether all choices have told why they end; more of them may come nevertheless
        self._text, self._others = TextCount(), TextCounts()
        self._n_by_text = self._n_by_name = 0

    def plain(self, chunk: Mapping[str, Any]) -> Token | None:
        """Return the token of a chunk that has a piece of text and nothing else, as nearly every one does.

        None for all others, which `choices` and `token` read; this takes half of their time.
        """
        told = chunk.get("choices")
        if not self._is_plain or type(told) is not list or len(told) != 1 or type(choice := told[0]) is not dict:
            return None
        delta, one = choice.get("delta"), self._one
        if type(delta) is not dict or len(delta) != 1 or type(text := delta.get("content")) is not str:
            return None
        if choice.get("finish_reason") or choice.get("logprobs") or choice.get("index") or not one.text.is_whole(text):
            return None
        if one.leading is not None:
            return None
        one.has_deltas = one.has_begun = True
        n_tokens = self._count(text, None, None, one)
        self.n_tokens += n_tokens
        return Token(text, n_tokens)

    def choices(self, chunk: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
        """Return the choices of a chunk that were asked for. Raises TypeError for what is no list of choices."""
        told = chunk.get("choices")
        if not told:
            return ()
        if type(told) is list and len(told) == 1 and type(told[0]) is dict and not told[0].get("index"):
            return told
        return list(self._asked_for(told))

    def parts(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a large chunk as smaller ones that say the same, what ends it in the last one. Raises as `choices`."""
        lasts = []
        for choice in self.choices(chunk):
            *firsts, last = self._cut(choice)
            yield from ({"choices": [piece]} for piece in firsts)
            lasts.append(last)
        yield {**chunk, "choices": lasts}

    def _cut(self, choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a choice with a long text as several."""
        state = self._one if self._is_one else self._of(choice)
        said = None if state is None else _delta_of(choice, state)
        text = said.get("content") if said else None
        if said and isinstance(text, str) and len(text) > MAX_PIECE:
            index = choice.get("index", 0)
            *firsts, last = (text[at : at + MAX_PIECE] for at in range(0, len(text), MAX_PIECE))
            yield from ({"index": index, "delta": {"content": piece}} for piece in firsts)
            choice = {k: v for k, v in choice.items() if k not in ("message", "text")}
            choice["delta"] = {**said, "content": last}
        yield choice

    def _asked_for(self, told: object) -> Iterator[dict[str, Any]]:
        if not isinstance(told, list):
            raise TypeError("the choices are no list")
        for choice in told:
            if choice is None:
                continue
            if not isinstance(choice, dict):
                raise TypeError("a choice is no object")
            if self._is_one and type(index := choice.get("index")) is int and index > 0:
                continue  # nobody has asked for it
            yield choice

    def token(self, choice: dict[str, Any], n_told: int | None = None) -> Token | None:
        """Return one chunk's choice as a Token, None if it carries nothing. Raises TypeError for what cannot be read.

        `n_told` tokens the answer has with this chunk, by a usage block that came with it.
        """
        state = self._one if self._is_one else self._of(choice)
        if state is None:
            return None
        found = self._said(choice, state)
        if self._ids_back:
            found = self._with_ids(found, _ids(choice), is_held=state.is_held)
        if choice.get("finish_reason"):
            self._note_end(choice, state)
        if found is None:
            return None
        if n_told is not None:
            found = self._with_count(found, n_told - self.n_tokens)
        self.n_tokens += found.n_tokens
        state.has_begun = True
        return found if self._is_one else self._numbered(found, state)

    def ends(self, *, is_done: bool) -> list[Token | Finish]:
        """Return the end of the answer, with what was held back for it; `is_done`: the server has said that it is.

        Raises CutError for an answer that is not whole, and TypeError for one that cannot be read.
        """
        begun = [*self._ended, *(one for one in self._choices if one.has_begun and not one.reason)] or [self._one]
        for one in begun:
            if not one.reason and not (is_done and one.has_begun):
                raise CutError("the server ended its stream without a finish_reason: the answer was cut")
        found: list[Token | Finish] = []
        for one in begun:
            rest, reason = self._rest(one)
            if not self._is_one:
                ended = None if one is begun[-1] else reason.value
                found.append(structs.replace(self._numbered(rest, one), ended=ended))
            elif rest.delta or rest.text or rest.logprobs or rest.ids:
                found.append(rest)
        stop = begun[-1].stop if reason is FinishReason.STOP else None
        return [*found, Finish(reason.value, stop=stop, repeated=begun[-1].reason == REPEATED)]

    def _rest(self, one: _Choice) -> tuple[Token, FinishReason]:
        """Return what was held back of a choice, counted if it says anything, and why it ended. Raises as `_Choice`."""
        delta, text, reason = one.end()
        thought, likely = Delta(delta.thought) if delta else None, one.likely(None)
        n_tokens = self._count(text, thought, likely, one) if text or thought or likely else 0
        found = Token(text, n_tokens, delta, likely)
        if self._held_ids:
            self._ids = ()  # what came behind them has said nothing: the end's own mark
            found = self._with_ids(found, self._held_ids)
        self.n_tokens += found.n_tokens
        return found, reason

    # --- one chunk -----------------------------------------------------------------------------------------------

    def _of(self, choice: dict[str, Any]) -> _Choice | None:
        """Return the state of one of several choices, None for one too many. Raises TypeError if it has no number."""
        index = choice.get("index")
        if type(index) is not int or index < 0:
            raise TypeError("a choice without a number")
        return self._choices[index] if index < len(self._choices) else None

    def _numbered(self, found: Token, state: _Choice) -> Token:
        return structs.replace(found, index=self._choices.index(state), delta=found.delta or Delta())

    def _note_end(self, choice: dict[str, Any], state: _Choice) -> None:
        """Keep the server's word for why a choice ends: the last one, but none after it has failed."""
        reason = word(choice["finish_reason"])
        if not reason:
            return
        if not state.reason:
            self._ended.append(state)
            self.is_over = len(self._ended) == len(self._choices)
        if not state.reason or state.reason in ENDS:
            state.reason = reason
            state.stop = next((told for key in _STOPS if isinstance(told := choice.get(key), str)), None)

    def _said(self, choice: dict[str, Any], state: _Choice) -> Token | None:
        told, state.is_held = _delta_of(choice, state), False
        found = None if told is None else _read(told, choice.get("logprobs"), state)
        if found is None:
            return None
        text, typed, likely = found
        return Token(text, self._count(text, typed, likely, state), typed, likely)

    def _count(self, text: str, delta: Delta | None, logprobs: Json | None, state: _Choice) -> int:
        """Return how many tokens the answer has more than before: the first one of all counts whatever it is."""
        index = None if self._is_one else self._choices.index(state)
        if text:
            n = self._text.add(text) if index is None else self._others.add({"content": text}, index)
            self._n_by_text += n
        if delta:
            self._n_by_text += self._others.add(_spoken(delta), index)
        if logprobs:
            self._n_by_name += len(logprobs["content"])
        n = max(self._n_by_text, self._n_by_name)
        return n - self.n_tokens if n > self.n_tokens else int(not self.n_tokens)

    @overload
    def _with_ids(self, found: Token, ids: tuple[int, ...]) -> Token: ...

    @overload
    def _with_ids(self, found: Token | None, ids: tuple[int, ...], *, is_held: bool) -> Token | None: ...

    def _with_ids(self, found: Token | None, ids: tuple[int, ...], *, is_held: bool = False) -> Token | None:
        """The same with its ids."""
        self._ids += ids
        if found is None:
            self._held_ids = self._ids if is_held else self._held_ids
            return None
        ids, self._ids, self._held_ids = self._ids, (), ()
        self._names = self._names or bool(ids)
        n_tokens = found.n_tokens
        if self._names:  # of a text whose ids are still to come at least one token has begun
            n_tokens = max(0, len(ids) - self._unnamed) if ids else int(not self._unnamed)
        self._unnamed = 0 if ids else self._unnamed + n_tokens
        return Token(found.text, n_tokens, found.delta, found.logprobs, ids)

    @staticmethod
    def _with_count(found: Token, n_new: int) -> Token:
        """Return the token with the count that the usage block adds: of text never more than it has bytes.

        And never less than its text shows: not every server's blocks are running sums.
        """
        most = len(found.text.encode("utf-8", "replace")) if found.delta is None else 0
        n_tokens = max(found.n_tokens, min(n_new, most))
        return Token(found.text, n_tokens, found.delta, found.logprobs, found.ids)


def _delta_of(choice: dict[str, Any], state: _Choice) -> dict[str, Any] | None:
    """Return what a choice says: its delta, or a whole message, unless that repeats what came in deltas."""
    delta = choice.get("delta")
    if delta:
        if not isinstance(delta, dict):
            raise TypeError("a chunk's delta is no object")
        state.has_deltas = state.has_deltas or any(delta.get(key) for key in _KNOWN if key != "role")
        return delta
    message = choice.get("message")
    if message and not state.has_deltas:
        if not isinstance(message, dict):
            raise TypeError("a chunk's message is no object")
        return message
    if delta is None and "text" in choice:
        return {"content": choice["text"]}
    return None


def _read(told: dict[str, Any], logprobs: object, state: _Choice) -> tuple[str, Delta | None, Json | None] | None:
    """Return what a delta says: text, what is beside it, and log-probabilities. Raises TypeError."""
    text, thought = _content(told.get("content"))
    named = next((told[key] for key in _THOUGHTS if told.get(key)), "")
    is_said = bool(text or thought or named)
    state.has_begun = state.has_begun or is_said
    text = state.text.joined(text)
    thought = state.thought.joined(thought + named if isinstance(named, str) else thought)
    text, thought = state.divided(text, thought)
    likely = _logprobs(logprobs) if logprobs else None
    rest = {k: v for k, v in told.items() if k not in ("content", "role") and v not in _NOTHING}
    if not _BEHIND.isdisjoint(rest):
        text, thought = state.undivided(text, thought)
    delta = _beside(rest, thought, state) if rest or thought else None
    is_told = delta is not None and (state.is_waiting or (bool(state.kept) and state.leading is None))
    if text or delta or is_told:
        return text, delta, state.likely(likely)
    state.is_held = is_said
    if likely and is_said:
        state.kept += likely["content"]
    return None


def _beside(rest: dict[str, Any], thought: str, state: _Choice) -> Delta:
    """Return what a delta says beside its text. Raises TypeError."""
    refusal = rest.get("refusal")
    calls = state.calls.take(rest["tool_calls"]) if "tool_calls" in rest else []
    if "function_call" in rest:
        calls += state.calls.take_old(rest["function_call"])
    others = {writable_text(k): writable(v) for k, v in rest.items() if k not in _KNOWN}
    said = writable_text(refusal) if isinstance(refusal, str) else ""
    return Delta(thought, said, tuple(calls), others or None)


def _spoken(delta: Delta) -> dict[str, Any]:
    """Return what of a delta is made of tokens, as `TextCounts` takes it."""
    calls = [{"index": one.number, "name": one.name, "arguments": one.arguments} for one in delta.calls]
    return {"reasoning_content": delta.thought, "refusal": delta.refusal, "tool_calls": calls}


def _content(told: object) -> tuple[str, str]:
    """Return the text and thought of content, which may be in parts, as models of Mistral's that think send it.

    Raises TypeError for what is neither a text nor parts; parts that are no text say nothing here.
    """
    if told is None:
        return "", ""
    if isinstance(told, str):
        return told, ""
    if isinstance(told, dict):
        told = [told]
    if not isinstance(told, list):
        raise TypeError("the text of a chunk is no string")
    text = thought = ""
    for part in told:
        if isinstance(part, str):
            text += part
        elif isinstance(part, dict) and part.get("type") == "thinking":
            thought += _content(part.get("thinking"))[0]
        elif isinstance(part, dict) and part.get("type") in ("text", "output_text", None):
            said = part.get("text")
            if not isinstance(said, str | None):
                raise TypeError("a part of a chunk has a text that is no string")
            text += said or ""
        elif not isinstance(part, dict | None):
            raise TypeError("a part of a chunk is no object")
    return text, thought


def _logprobs(told: object) -> Json | None:
    """Return log-probabilities in OpenAI's form, what cannot be read left out. Raises TypeError for no object."""
    if not isinstance(told, dict):
        raise TypeError("logprobs is no object")
    content = told.get("content")
    if content is None and isinstance(told.get("tokens"), list):  # as raw completions have them
        values = told.get("token_logprobs")
        pairs = zip(told["tokens"], values if isinstance(values, list) else (), strict=False)
        content = [{"token": token, "logprob": value} for token, value in pairs]
    if not isinstance(content, list):
        return None
    found = []
    for told_one in content:
        if (one := _likelihood(told_one)) is not None:
            tops = told_one.get("top_logprobs")
            alternatives = map(_likelihood, tops[:MAX_ALTERNATIVES] if isinstance(tops, list) else ())
            found.append(one | {"top_logprobs": [top for top in alternatives if top is not None]})
    return {"content": found} if found else None


def _likelihood(told: object) -> dict[str, Any] | None:
    """Return one token with its log-probability, None for what is none."""
    if not isinstance(told, dict) or not isinstance(told.get("token"), str):
        return None
    value, raw = told.get("logprob"), told.get("bytes")
    is_number = isinstance(value, int | float) and LEAST_LOGPROB <= value <= -LEAST_LOGPROB
    is_bytes = isinstance(raw, list) and all(type(one) is int and 0 <= one < 256 for one in raw)
    return {
        "token": writable_text(told["token"]),
        "logprob": value if is_number else LEAST_LOGPROB,
        "bytes": raw if is_bytes else None,
    }


def _ids(choice: dict[str, Any]) -> tuple[int, ...]:
    """The chunk's token ids, () if it has none that can be read: they are an extra, and no reason to fail."""
    ids = choice.get("token_ids")
    good = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
    return tuple(ids) if good and ids else ()
