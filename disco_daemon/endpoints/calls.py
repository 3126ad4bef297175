"""The calls of tools in one choice of a server's stream, however it sends them, as pieces of one form. Pure.

OpenAI gives each call an `index`, its id and name once, and its arguments as text in pieces. Others leave out the
index, give all calls the same one, send the id late, empty or never, repeat the name with each piece, or send the
arguments as an object. What is certain: a new id begins a new call, and behind a whole JSON object begins another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..plain import writable_text
from ..types import CallForm, CallPart, Json, ObjectScan
from .writable import Halves, writable

_FUNCTION_CALL = -1  # the index of the one call in the older form: no server's own


class _Said:
    """What one entry of a server's list says of a call. Raises TypeError for what cannot be read."""

    __slots__ = ("arguments", "form", "id", "index", "name", "others")

    def __init__(self, entry: object) -> None:
        if not isinstance(entry, dict):
            raise TypeError("a tool call is no object")
        self.form, inner = CallForm.FUNCTION, entry.get("function")
        if inner is None and isinstance(entry.get("custom"), dict):
            self.form, inner = CallForm.CUSTOM, entry["custom"]
        if inner is None:
            inner = {key: entry[key] for key in ("name", "arguments") if key in entry}
        if not isinstance(inner, dict):
            raise TypeError("the function of a tool call is no object")
        self.index = _number(entry.get("index"))
        self.id = _id(entry.get("id"))
        self.name = _name(inner.get("name"))
        self.arguments = _arguments(inner.get("input" if self.form is CallForm.CUSTOM else "arguments"))
        self.others = _others(entry)

    @property
    def is_empty(self) -> bool:
        return not (self.id or self.name or self.arguments or self.others)


class _Call:
    """One call: what the server has said of it, and whether its beginning has been given out, with a `number`."""

    def __init__(self, index: int | None, form: CallForm) -> None:
        self.index, self.form = index, form
        self.id = self.name = ""
        self.number: int | None = None
        self.others: Json | None = None
        self.to_give: list[str] = []  # pieces of its arguments that have not been given out
        self.has_arguments = self.has_nothing = False  # has_nothing: an empty object came in place of any
        self._all: list[str] = []
        self._halves = Halves()
        self._scan = ObjectScan()

    @property
    def is_whole(self) -> bool:
        """Whether its arguments are a whole JSON object."""
        return self.has_nothing if not self.has_arguments else self.form is not CallForm.CUSTOM and self._scan.is_whole

    def grow(self, piece: str) -> None:
        """Take a piece of the arguments. Raises TypeError for what comes behind a whole object, but for that again.

        An empty object at the beginning stands for nothing yet: some send it before the true arguments.
        """
        text = self._halves.joined(piece)
        if not text:
            return
        if self.form is not CallForm.CUSTOM:
            said = text.strip()
            if self._scan.is_whole:
                if said and said != "".join(self._all).strip():
                    raise TypeError("a tool call goes on behind the end of its arguments")
                return
            if said == "{}" and not self.has_arguments:
                self.has_nothing = True
                return
        self.has_arguments = True
        self.to_give.append(text)
        self._all.append(text)
        self._scan.feed(text)

    def close(self, *, is_cut: bool) -> None:
        """Take note that nothing more comes: a function without arguments has an empty object."""
        if rest := self._halves.rest():
            self.to_give.append(rest)
        if not (self.has_arguments or is_cut or self.form is CallForm.CUSTOM):
            self.has_arguments, self.to_give = True, ["{}"]

    def grow_name(self, name: str) -> None:
        """Take a name, or a piece of one; servers repeat it, whole or as far as it is."""
        if self.number is not None or name == self.name:
            return
        self.name = name if name.startswith(self.name) else self.name + name


class Calls:
    """Puts the calls of one choice together. A call's beginning is given out with the first of its arguments.

    Until then its name may grow, and its id may come. A call without an id gets one made of `name`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._all: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._by_id: dict[str, _Call] = {}
        self._last: _Call | None = None
        self._ids: set[str] = set()
        self._n_begun = 0

    @property
    def form(self) -> CallForm | None:
        """The form of the calls, None if there are none."""
        return self._all[0].form if any(call.name for call in self._all) else None

    @property
    def is_waiting(self) -> bool:
        """Whether a call has begun whose beginning is not given out."""
        return self._last is not None and self._last.number is None

    def take(self, entries: object) -> list[CallPart]:
        """Return the pieces that a list of a server's makes certain. Raises TypeError for what cannot be read."""
        if isinstance(entries, dict):  # one call in place of a list of one
            entries = [entries]
        if not isinstance(entries, list):
            raise TypeError("tool_calls is no list")
        said = [found for entry in entries if entry is not None and not (found := _Said(entry)).is_empty]
        pieces: list[CallPart] = []
        for place, one in enumerate(said):
            pieces += self._take(one, place if len(said) > 1 else None)
        return pieces

    def take_old(self, entry: object) -> list[CallPart]:
        """Return the pieces of a `function_call`, as it was before there were tools. Raises TypeError."""
        said = _Said({"index": 0, "function": entry})
        said.index, said.form = _FUNCTION_CALL, CallForm.OLD
        return [] if said.is_empty else self._take(said, None)

    def end(self, *, is_cut: bool) -> list[CallPart]:
        """Return what is left to give out at the end of the choice; a function without arguments has an empty object.

        Raises TypeError for a call without a name, unless the answer was cut.
        """
        pieces: list[CallPart] = []
        for call in self._all:
            if call.number is None and not call.name:
                if call.has_arguments and not is_cut:
                    raise TypeError("a tool call has no name")
                continue
            call.close(is_cut=is_cut)
            pieces += self._given(call)
        return pieces

    def _take(self, said: _Said, place: int | None) -> list[CallPart]:
        pieces: list[CallPart] = []
        call = self._call_of(said, place)
        if call is None:
            pieces = self._begin_others()
            call = _Call(said.index, said.form)
            self._all.append(call)
        self._know(call, said)
        if said.name:
            call.grow_name(said.name)
        if said.others:
            call.others = {**(call.others or {}), **said.others}
        call.grow(said.arguments)
        if call.number is not None or (call.name and call.has_arguments):
            pieces += self._given(call)
        return pieces

    def _know(self, call: _Call, said: _Said) -> None:
        """Remember by what a call can be found again."""
        self._last = call
        if said.index is not None:
            call.index = said.index
            self._by_index[said.index] = call
        if said.id:
            call.id = call.id or said.id
            self._by_id.setdefault(said.id, call)

    def _call_of(self, said: _Said, place: int | None) -> _Call | None:
        """Return the call that an entry goes on with, None if it begins a new one."""
        at = self._last if said.index is None else self._by_index.get(said.index)
        if said.id:
            return self._by_its_id(said, at)
        if said.index is None and place is not None:  # the n-th of a list goes on with the n-th call
            at = self._all[place] if place < len(self._all) else None
            return at if at is not None and said.name in ("", at.name) and not at.is_whole else None
        if at is None and not said.name and self._last is not None and self._last.index is None:
            return self._last  # its index comes late
        if at is not None and said.name and at.is_whole and said.arguments.lstrip()[:1] == "{":
            return None
        if at is not None and said.name and said.name != at.name and said.index is None and at.has_arguments:
            return None
        return at

    def _by_its_id(self, said: _Said, at: _Call | None) -> _Call | None:
        known = self._by_id.get(said.id)
        if known is None:  # new, or the id of a call that has had none so far
            if at is None or at.id:
                return None
            is_another = said.name and at.has_arguments and (at.is_whole or said.name != at.name)
            return None if is_another else at
        if said.index is None or known.index is None or known.index == said.index:
            return known
        return at if at is not None and at.id in ("", said.id) else None  # two calls with one id

    def _begin_others(self) -> list[CallPart]:
        """Return the beginnings of earlier calls that wait for arguments: their order is that in which they came."""
        return [piece for call in self._all if call.number is None and call.name for piece in self._given(call)]

    def _given(self, call: _Call) -> list[CallPart]:
        """Return what has come of a call since the last time, with its beginning if that is due."""
        text, others = "".join(call.to_give), call.others
        call.to_give, call.others = [], None
        if call.number is not None:
            return [CallPart(call.number, text, form=call.form, others=others)] if text or others else []
        call.number, self._n_begun = self._n_begun, self._n_begun + 1
        made_up = not call.id or call.id in self._ids
        call_id = f"call_{self._name}_{call.number}" if made_up else call.id
        self._ids.add(call_id)
        return [CallPart(call.number, text, call_id, call.name, call.form, others)]


def _number(told: object) -> int | None:
    """Return an index, None for what is none: the calls are then told apart by ids and places."""
    if isinstance(told, str) and told.isascii() and told.isdigit() and len(told) < 10:
        return int(told)
    if isinstance(told, float) and told.is_integer():
        told = int(told)
    return told if type(told) is int and told >= 0 else None


def _id(told: object) -> str:
    if type(told) is int:
        return str(told)[:64]
    return writable_text(told) if isinstance(told, str) else ""


def _name(told: object) -> str:
    if told is None:
        return ""
    if not isinstance(told, str):
        raise TypeError("the name of a tool is no text")
    return writable_text(told)


def _arguments(told: object) -> str:
    """Return arguments as text; those that come as an object are written as one. Raises TypeError."""
    if told is None:
        return ""
    if isinstance(told, dict):
        return msgspec.json.encode(writable(told)).decode()
    if not isinstance(told, str):
        raise TypeError("the arguments of a tool call are neither a text nor an object")
    return told


def _others(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a server's own fields of a call, such as Gemini's signature, which it wants back."""
    known = ("index", "id", "type", "function", "custom", "name", "arguments")
    return {key: writable(value) for key, value in entry.items() if key not in known and value not in _NOTHING}


_NOTHING: tuple[Any, ...] = (None, "", [], {})
