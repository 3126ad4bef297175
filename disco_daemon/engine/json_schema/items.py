"""The rules for an array's items. Pure."""

from __future__ import annotations

import json
from typing import Any, Protocol

from .characters import literal
from .numbers import Numbers
from .plans import MAX_PLACES, Layout, laid_out
from .reading import GrammarError, SchemaReading, contrary_of
from .shapes import Arrays, Booleans, Null, Parts, Strings, Values

MAX_UNIQUE = 6  # values of which arrays have each at most once, in any order; of more, in the order of the schema
MAX_VALUES = 200  # values that are told one by one


class RuleWriter(Protocol):
    """Whoever writes the rules of a grammar."""

    reading: SchemaReading

    def shared(self, name: str) -> str: ...  # noqa: D102 — as Rules'
    def add(self, name: str, body: str) -> str: ...  # noqa: D102
    def new_name(self, kind: str) -> str: ...  # noqa: D102
    def known(self, key: object, kind: str, body: str) -> str: ...  # noqa: D102
    def value(self, parts: Parts) -> str: ...  # noqa: D102
    def repeated(self, rule: str, least: int, most: int | None) -> str: ...  # noqa: D102


def array_rule(rules: RuleWriter, kind: Arrays) -> str:
    """Return the body of the rule for arrays of a kind. Raises GrammarError."""
    layout = laid_out(rules.reading, kind)
    if layout is None:
        raise GrammarError("No array could hold to the JSON schema: what it requires is forbidden elsewhere in it.")
    space = rules.shared("space")
    is_unique = kind.is_unique and (layout.most is None or layout.most > 1)
    if is_unique and layout.rest is not None and not layout.first and not layout.contained:
        values = _values(rules.reading, layout.rest)
        if values is not None:
            return f'"[" {space} {_unique(rules, layout, values)} "]"'
    if is_unique:
        rules.reading.leave_out(
            "uniqueItems", "holds for items of an enum only: leave it out, or list what they may be."
        )
    inner = _containing(rules, layout) if layout.contained else _plain(rules, layout)
    return " ".join(filter(None, ['"["', space, inner, '"]"']))


def _plain(rules: RuleWriter, layout: Layout) -> str:
    """Return items of which each has its place only."""
    space = rules.shared("space")
    inner = ""
    n_first = len(layout.first)
    if layout.rest is not None and n_first:
        more = f"{rules.value(layout.rest)} {space}"
        behind = rules.known(("behind", more), "c", f'"," {space} {more}')
        most = None if layout.most is None else layout.most - n_first
        inner = rules.repeated(behind, max(0, layout.least - n_first), most)
    elif layout.rest is not None and layout.most != 0:
        more = f"{rules.value(layout.rest)} {space}"
        behind = rules.known(("behind", more), "c", f'"," {space} {more}')
        most = None if layout.most is None else layout.most - 1
        inner = " ".join(filter(None, [more, rules.repeated(behind, max(0, layout.least - 1), most)]))
        return inner if layout.least else f"({inner})?"
    for i in range(n_first - 1, -1, -1):
        comma = f'"," {space} ' if i else ""
        inner = f"{comma}{rules.value(layout.first[i])} {space} {inner}".strip()
        if i >= layout.least:
            inner = f"({inner})?"
    return inner


def _unique(rules: RuleWriter, layout: Layout, values: list[Any]) -> str:
    """Return some of these values, each at most once."""
    space = rules.shared("space")
    texts = [f"{literal(json.dumps(value, ensure_ascii=False))} {space}" for value in values]
    most = len(values) if layout.most is None else min(layout.most, len(values))
    if layout.least > most:
        raise GrammarError("'minItems' in the JSON schema asks for more items than there are values: lower it.")
    in_order = len(values) > MAX_UNIQUE
    made: dict[tuple[int, int], str] = {}

    def after(used: int, n: int) -> str:
        """Return the rule for what follows so many items; `used` are their bits, or how many are behind them."""
        if (used, n) in made:
            return made[used, n]
        name = made[used, n] = rules.new_name("u")
        ways = ['""'] if n >= layout.least else []
        comma = f'"," {space} ' if n else ""
        for i, text in enumerate(texts):
            is_left = i >= used if in_order else not used >> i & 1
            if not is_left or n == most or (in_order and n + len(texts) - i < layout.least):
                continue
            ways.append(f"{comma}{text} {after(i + 1 if in_order else used | 1 << i, n + 1)}")
        return rules.add(name, " | ".join(ways))

    return after(0, 0)


def _containing(rules: RuleWriter, layout: Layout) -> str:
    """Return items of which some are what the array has to contain."""
    space, reading = rules.shared("space"), rules.reading
    n_first = len(layout.first)
    cap = max([n_first, layout.least, layout.most or 0])
    n_states = (cap + 1) * _product(max(of.least, of.most or 0) + 1 for of in layout.contained)
    if n_states > MAX_PLACES:
        raise GrammarError("'contains' in the JSON schema stands beside counts that are too large: lower them.")
    made: dict[tuple[int, tuple[int, ...]], str | None] = {}

    def after(n: int, counts: tuple[int, ...]) -> str | None:
        """Return the rule for what follows `n` items, of which so many are contained."""
        key = (n if layout.most is not None else min(n, cap + 1), counts)
        if key in made:
            return made[key]
        made[key] = name = rules.new_name("k")
        is_enough = n >= layout.least and all(c >= of.least for c, of in zip(counts, layout.contained, strict=True))
        ways = ['""'] if is_enough else []
        parts = layout.first[n] if n < n_first else layout.rest
        if parts is not None and (layout.most is None or n < layout.most):
            comma = f'"," {space} ' if n else ""
            for wanted, then in _choices(layout, parts, counts):
                if reading.is_possible(wanted) and (rest := after(n + 1, then)) is not None:
                    ways.append(f"{comma}{rules.value(wanted)} {space} {rest}")
        if not ways:
            made[key] = None
            return None
        return rules.add(name, " | ".join(ways))

    found = after(0, (0,) * len(layout.contained))
    if found is None:
        raise GrammarError("No array could hold to 'contains' in the JSON schema, and to what stands beside it.")
    return found


def _choices(layout: Layout, parts: Parts, counts: tuple[int, ...]) -> list[tuple[Parts, tuple[int, ...]]]:
    """Return what an item may be, and how many there are then of what is contained."""
    found: list[tuple[Parts, tuple[int, ...]]] = [(parts, ())]
    for of, n in zip(layout.contained, counts, strict=True):
        made = []
        for so_far, then in found:
            is_full = n >= of.least if of.most is None else n >= of.most
            if not is_full:
                made.append(((*so_far, of.part), (*then, n + 1)))
            others = so_far if of.most is None else (*so_far, contrary_of(of.part))
            made.append((others, (*then, n)))
        found = made
    return [(SchemaReading.plain(wanted), then) for wanted, then in found]


def _product(numbers: Any) -> int:
    made = 1
    for n in numbers:
        made *= n
    return made


def _values(reading: SchemaReading, parts: Parts) -> list[Any] | None:
    """Return all values that hold to these, if there are few."""
    found: list[Any] = []
    for shape in reading.shapes(parts):
        for kind in shape.kinds.values():
            match kind:
                case Null():
                    found.append(None)
                case Booleans():
                    found += sorted(kind.values)
                case Numbers() if kind.only is not None:
                    found += [int(value) if value.denominator == 1 else float(value) for value in sorted(kind.only)]
                case Numbers() if kind.is_integer and kind.low is not None and kind.high is not None:
                    low, high = -int(-kind.low // 1), int(kind.high // 1)
                    if high - low > MAX_VALUES:
                        return None
                    found += list(range(low, high + 1))
                case Strings() if kind.words is not None:
                    found += sorted(kind.words)
                case Values():
                    found += [json.loads(text) for text in kind.texts]
                case _:
                    return None
    kept: list[Any] = []
    for value in found:
        if reading.allows(parts, value) and json.dumps(value) not in map(json.dumps, kept):
            kept.append(value)
    return kept if len(kept) <= MAX_VALUES else None
