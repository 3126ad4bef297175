"""From a schema to the shapes that it allows. Pure.

Whatever a grammar cannot say makes fewer values, never more: a part of a `not` is left out, alternatives that nothing
can be said of are left out. What is left is a schema's, whatever else that allows. Where nothing would be left, or a
keyword that forbids cannot be said, the schema is refused; or, if `lenient`, read without that keyword, which is told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...tools.references import Document, Schema
from .automaton import Automaton, TooManyStates
from .expressions import Expression, Texts
from .formats import FORMATS
from .numbers import PLAIN, NumberError, Numbers, exactly
from .patterns import PatternError, pattern_of
from .plans import laid_out, planned
from .shapes import (
    ANY,
    ANYTHING,
    NOTHING,
    Arrays,
    Kind,
    Objects,
    Parts,
    SchemaPart,
    Strings,
    Values,
    ValueShape,
    narrowed,
)

MAX_STEPS = 20_000  # schemas looked at: references may lead to the same ones again and again
MAX_SHAPES = 300  # of one value: an enum of types and alternatives has a few
MAX_CONTRARY = 64  # shapes kept of what is not something else, such as the other alternatives of a `oneOf`
MAX_REASON = 80  # characters of a client's that a message shows


class GrammarError(ValueError):
    """A response format or a tool that cannot be obeyed; the message is fit for a user."""


_Read = Callable[["SchemaReading", Mapping[str, Any]], tuple[ValueShape, ...]]


class SchemaReading:
    """The shapes of the schemas of one document."""

    def __init__(
        self, document: Document, shapes_of: _Read, contrary: _Read, *, lenient: bool = False, whole: bool = False
    ) -> None:
        self.forgets = False  # whether a reference to nothing is left out, if `lenient`
        self._shapes_of, self._contrary = shapes_of, contrary
        self.is_whole = whole  # what no schema says the type or the name of, may be there
        self.document = document
        self.loosened: dict[str, None] = {}  # keywords that were left out
        self._lenient = lenient
        self._n_steps = 0
        self._shapes: dict[Parts, tuple[ValueShape, ...]] = {}
        self._open: set[SchemaPart] = set()  # those that are being read
        self._possible: dict[Parts, bool] = {}
        self._tried: set[Parts] = set()
        self._wide: set[Parts] = set()  # of which nothing of a likely type would end
        self._automata: dict[Kind | tuple[str, bool], Automaton] = {}
        self._made: list[Any] = []  # schemas that stand in no document; kept, since they are known by their ids

    # --- shapes ----------------------------------------------------------------------

    def shapes(self, parts: Parts) -> tuple[ValueShape, ...]:
        """Return the ways in which a value may hold to all of these. Raises GrammarError."""
        if parts not in self._shapes:
            found: tuple[ValueShape, ...] = (ANY,)
            for part in parts:
                found = self.product(found, self._read(part))
            self._shapes[parts] = found
        return self._shapes[parts]

    def _read(self, part: SchemaPart) -> tuple[ValueShape, ...]:
        self.step()
        schema = part.schema
        if isinstance(schema, bool):
            return (ANY,) if schema is not part.is_not else ()
        if part in self._open:
            raise GrammarError(f"The JSON schema refers to itself without an end{self.place(schema)}: {_ENDLESS}")
        self._open.add(part)
        try:
            return self._contrary(self, schema) if part.is_not else self._shapes_of(self, schema)
        finally:
            self._open.discard(part)

    def step(self, n: int = 1) -> None:
        """Count a step. Raises GrammarError after too many."""
        self._n_steps += n
        if self._n_steps > MAX_STEPS:
            raise GrammarError(TOO_LARGE)

    def product(
        self, some: Iterable[ValueShape], others: Iterable[ValueShape], most: int = 0
    ) -> tuple[ValueShape, ...]:
        """Return what is in one of each; at most `most`, if that is given."""
        others = tuple(others)
        found: dict[tuple[object, ...], ValueShape] = {}
        for one in some:
            for other in others:
                self.step()
                if one is ANY or other is ANY:
                    shape: ValueShape | None = other if one is ANY else one
                else:
                    shape = self._narrowed(one, other)
                if shape is not None:
                    found.setdefault(shape.key(), shape)
                if most and len(found) >= most:
                    return tuple(found.values())
        if len(found) > MAX_SHAPES:
            raise GrammarError(
                "The JSON schema allows too many combinations of alternatives: use fewer of anyOf, allOf."
            )
        return tuple(found.values())

    def _narrowed(self, one: ValueShape, other: ValueShape) -> ValueShape | None:
        kinds: dict[str, Kind] = {}
        for name, kind in one.kinds.items():
            if name not in other.kinds:
                continue
            also = other.kinds[name]
            if isinstance(kind, Values) and not isinstance(also, Values):
                made: Kind | None = self._filtered(kind, also)
            elif isinstance(also, Values) and not isinstance(kind, Values):
                made = self._filtered(also, kind)
            else:
                made = narrowed(kind, also)
            if made is not None and not self._is_void(made):
                kinds[name] = made
        if not kinds:
            return None
        return ValueShape(kinds, one.is_typed or other.is_typed, one.touched | other.touched)

    def _filtered(self, values: Values, kind: Kind) -> Values | None:
        texts = tuple(text for text in values.texts if self._has(kind, json.loads(text)))
        return Values(texts) if texts else None

    def _is_void(self, kind: Kind) -> bool:
        """Whether nothing is of a kind, as far as that is told by itself."""
        match kind:
            case Numbers():
                if kind.only is not None:
                    return not kind.only
                if kind.low is None or kind.high is None:
                    return False
                return kind.low > kind.high or (kind.low == kind.high and not kind.has(kind.low))
            case Arrays() | Objects():
                return kind.most is not None and kind.least > kind.most
            case Strings():
                if kind.words is not None and not any(self._has(kind, word) for word in kind.words):
                    return True
                return kind.most is not None and kind.least > kind.most
        return False

    # --- whether a value, or anything at all, holds to schemas ------------------------------------------------------

    def allows(self, parts: Parts, value: Any) -> bool:
        """Whether a value holds to all of these, as far as can be said."""
        self.step()
        name = _type_of(value)
        return any(name in shape.kinds and self._has(shape.kinds[name], value) for shape in self.shapes(parts))

    def _has(self, kind: Kind, value: Any) -> bool:
        match kind:
            case Values():
                return any(same(json.loads(text), value) for text in kind.texts)
            case Numbers():
                exact = exactly(value)
                return exact is not None and kind.has(exact)
            case Strings():
                return self._has_text(kind, value)
            case Arrays():
                return self._has_items(kind, value)
            case Objects():
                return self._has_members(kind, value)
        return not isinstance(value, bool) or value in getattr(kind, "values", ())

    def _has_text(self, kind: Strings, value: str) -> bool:
        return (
            len(value) >= kind.least
            and (kind.most is None or len(value) <= kind.most)
            and (kind.words is None or value in kind.words)
            and value not in kind.but
            and all(self.is_found(pattern, value) is not is_not for pattern, is_not in kind.patterns)
            and all(self.is_found(FORMATS[name], value) for name in kind.formats)
        )

    def _has_items(self, kind: Arrays, value: list[Any]) -> bool:
        if len(value) < kind.least or (kind.most is not None and len(value) > kind.most):
            return False
        if kind.is_unique and any(same(a, b) for i, a in enumerate(value) for b in value[:i]):
            return False
        if not all(self.allows(self.item(kind, i), item) for i, item in enumerate(value)):
            return False
        for contained in kind.contained:
            n = sum(self.allows((contained.part,), item) for item in value)
            n_others = sum(self.allows((contrary_of(contained.part),), item) for item in value)
            if n < contained.least or (contained.most is not None and len(value) - n_others > contained.most):
                return False
        return True

    def _has_members(self, kind: Objects, value: Mapping[str, Any]) -> bool:
        return (
            len(value) >= kind.least
            and (kind.most is None or len(value) <= kind.most)
            and all(name in value for name in kind.required)
            and all(self.allows(kind.names, name) for name in value)
            and all(self.allows(self.member(kind, name), inner) for name, inner in value.items())
        )

    def is_possible(self, parts: Parts) -> bool:
        """Whether any value holds to all of these, one that ends."""
        if parts in self._possible:
            return self._possible[parts]
        if parts in self._tried:
            return False  # as far as it needs itself
        self.step()
        is_outermost = not self._tried
        self._tried.add(parts)
        found = self._is_any(parts, wide=False)
        if not found and self._is_any(parts, wide=True):
            found = True
            self._wide.add(parts)
        self._tried.discard(parts)
        if found or is_outermost:
            self._possible[parts] = found
        return found

    def _is_any(self, parts: Parts, *, wide: bool) -> bool:
        return any(
            self.is_some(shape.kinds[type_])
            for shape in self.shapes(parts)
            for type_ in (shape.kinds if wide or self.is_whole else shape.likely())
        )

    def likely(self, parts: Parts, shape: ValueShape, *, is_root: bool = False) -> Iterable[str]:
        """Return the types that a value by a shape is written with: the likely ones, where any of these can end."""
        if self.is_whole or parts in self._wide:
            return shape.kinds
        if is_root and not shape.is_typed and not shape.touched and "object" in shape.kinds:
            return ("object",)  # what asks for JSON, and says no more, means an object
        return shape.likely()

    def is_some(self, kind: Kind) -> bool:
        """Whether a grammar can say anything of a kind, one that ends."""
        match kind:
            case Numbers():
                return not self._is_void(kind) and (kind in PLAIN or not self.automaton(kind).is_empty)
            case Strings():
                return not self._is_void(kind) and (kind.is_any_text or not self.automaton(kind).is_empty)
            case Arrays():
                return laid_out(self, kind) is not None
            case Objects():
                return planned(self, kind) is not None
        return True

    # --- what is within arrays and objects ----------------------------------------------------------------------

    def item(self, kind: Arrays, i: int) -> Parts:
        """Return what an array's item has to hold to."""
        found: dict[SchemaPart, None] = {}
        for places in kind.places:
            if i < len(places.prefix):
                found[places.prefix[i]] = None
            elif places.rest is not None:
                found[places.rest] = None
        return self.plain(found)

    def member(self, kind: Objects, name: str) -> Parts:
        """Return what an object's member of this name has to hold to."""
        found: dict[SchemaPart, None] = {}
        for members in kind.members:
            parts = [part for known, part in members.named if known == name]
            parts += [part for pattern, part in members.patterns if self.is_found(pattern, name)]
            if not parts and members.rest is not None:
                parts = [members.rest]
            found |= dict.fromkeys(parts)
        return self.plain(found)

    @staticmethod
    def plain(parts: Iterable[SchemaPart]) -> Parts:
        """Return parts, each once, without those to which everything holds."""
        return tuple(part for part in dict.fromkeys(parts) if part.schema is not True or part.is_not)

    # --- texts ----------------------------------------------------------------------

    def is_found(self, pattern: str, text: str) -> bool:
        """Whether a pattern is found in a text."""
        key = (pattern, False)
        if key not in self._automata:
            texts = Texts()
            self._automata[key] = self._automaton_of(lambda: texts.automaton(pattern_of(texts, pattern)), "pattern")
        return self._automata[key].accepts(text)

    def automaton(self, kind: Numbers | Strings) -> Automaton:
        """Return what is of a kind as an automaton. Raises GrammarError."""
        if kind not in self._automata:
            if isinstance(kind, Numbers):
                self._automata[kind] = self._automaton_of(kind.automaton, "multipleOf" if kind.divisors else "minimum")
            else:
                texts = Texts()
                self._automata[kind] = self._automaton_of(
                    lambda: texts.automaton(self.expression(texts, kind)),
                    "pattern" if kind.patterns else "maxLength" if kind.formats else "minLength",
                )
            self.step(len(self._automata[kind].steps) // 8)
        return self._automata[kind]

    @staticmethod
    def _automaton_of(make: Callable[[], Automaton], keyword: str) -> Automaton:
        try:
            return make()
        except TooManyStates:
            msg = (
                f"'{keyword}' of a JSON schema, with what stands beside it, takes too large a grammar: make it simpler."
            )
            raise GrammarError(msg) from None
        except (NumberError, PatternError) as e:
            msg_0 = f"In the JSON schema {e}"
            raise GrammarError(msg_0) from e

    def expression(self, texts: Texts, kind: Strings) -> Expression:
        """Return the texts of a kind as `Texts.automaton` has them."""
        found = [
            texts.complement(pattern_of(texts, pattern, forbidden=True)) if is_not else pattern_of(texts, pattern)
            for pattern, is_not in sorted(kind.patterns)
        ]
        found += [pattern_of(texts, FORMATS[name]) for name in sorted(kind.formats)]
        if kind.words is not None:
            found.append(texts.ended(texts.words(kind.words)))
        if kind.but:
            found.append(texts.complement(texts.ended(texts.words(kind.but))))
        if kind.least or kind.most is not None or not found:
            found.append(texts.ended(texts.repeated(texts.character, kind.least, kind.most)))
        return texts.all_of(*found)

    # --- schemas that stand in no document ----------------------------------------------------------------------

    def leave_out(self, keyword: str, why: str, place: str = "") -> None:
        """Read without a keyword, where that may be. Raises GrammarError."""
        if not self._lenient:
            raise GrammarError(f"'{keyword}' in the JSON schema{place} {why}")
        self.loosened[keyword] = None

    def written(self, schema: Schema, beside: Mapping[str, Any]) -> SchemaPart:
        """Return the part of a schema that says in other words what a keyword of another one says."""
        self._made.append(schema)
        self.document.adopt(schema, beside)
        return SchemaPart.of(schema)

    def place(self, schema: Schema) -> str:
        """Return words that say where in the document a schema is."""
        found = self.document.pointer(schema)
        return f" at #{found[:MAX_REASON]}" if found else ""

    def unsayable(self, schema: Mapping[str, Any], keyword: str, why: str) -> tuple[ValueShape, ...]:
        """Return what is left where a keyword is left out. Raises GrammarError."""
        self.leave_out(keyword, why, self.place(schema))
        return (ANY,)


_ENDLESS = "let the reference stand within properties or items."
TOO_LARGE = "The JSON schema makes too large a grammar: lower its counts, or name fewer properties and $refs."


def contrary_of(part: SchemaPart) -> SchemaPart:
    """Return what a value holds to that does not hold to a part."""
    if isinstance(part.schema, bool):
        return NOTHING if part.schema else ANYTHING
    return SchemaPart.of(part.schema, is_not=not part.is_not)


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
