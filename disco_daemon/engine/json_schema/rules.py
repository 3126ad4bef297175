"""The rules of a grammar, in llama.cpp's GBNF, for what a schema allows. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...tools.references import Document
from .characters import in_json, literal, plainly
from .items import array_rule
from .keywords import shapes_of
from .negation import contrary
from .numbers import INTEGERS, Numbers
from .plans import MemberPlan, planned
from .reading import TOO_LARGE, GrammarError, SchemaReading
from .shapes import (
    BLANK,
    Arrays,
    Booleans,
    Kind,
    Objects,
    Parts,
    SchemaPart,
    Strings,
    Values,
)

MAX_GRAMMAR = 256 * 1024  # characters of what a schema is turned into; llama.cpp reads that in milliseconds
MAX_RUN = 100  # of one repetition; llama.cpp writes a rule for each, and refuses 2,000
STEP = 10  # repetitions that become one rule, and so many of these one again

# Between the signs of JSON there may be one space, but none before an answer or behind it: it ends where its JSON does.
# All is on one line: indents are tokens that nobody asked for.
SHARED = {
    "space": '" "?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "integer": '"-"? [1-9] [0-9]{0,14} | "0"',
    "number": '"-"? ("0" | [1-9] [0-9]{0,14}) ("." [0-9]{1,15})? ([eE] [-+]? [0-9]{1,2})?',
    # What JSON writes as an escape does not stand in a string as it is. Escapes are of whole characters: a model would
    # have to complete half of one beyond U+FFFF.
    "char": r"""[^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | """
    '"u" ([0-9a-cA-Ce-fE-F] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2}))',
    "string": r'"\"" char* "\""',
    "value": "object | array | string | number | boolean | null",
    "object": '"{" space (member ("," space member)*)? "}"',
    "member": 'string space ":" space value space',
    "array": '"[" space (item ("," space item)*)? "]"',
    "item": "value space",
}
_NEEDS = {
    "string": ["char"], "value": ["object", "array", "string", "number", "boolean", "null"],
    "object": ["member", "space"], "member": ["string", "value", "space"], "array": ["item", "space"],
    "item": ["value", "space"],
}  # fmt: skip


def rules_of(
    schema: Mapping[str, Any] | bool,
    *,
    lenient: bool = False,
    whole: bool = False,
    forgets: bool = False,
) -> tuple[dict[str, str], list[str]]:
    """Return the rules of a schema by name, `root` the first, and the keywords that they do not keep.

    There are such only if `lenient`; a reference to nothing is one only if it `forgets` these. If `whole`, a value may
    be of each type and have each member that the schema does not forbid, else those only that it speaks of. Raises
    GrammarError.
    """
    reading = SchemaReading(Document(schema), shapes_of, contrary, lenient=lenient, whole=whole)
    reading.forgets = forgets
    try:
        rules = Rules(reading)
        rules.write((SchemaPart.of(schema),))
    except RecursionError:
        raise GrammarError("The JSON schema is nested too deep: flatten it.") from None
    return rules.found, list(reading.loosened)


class Rules:
    """The rules of one grammar so far."""

    def __init__(self, reading: SchemaReading) -> None:
        self.reading = reading
        self.found: dict[str, str] = {"root": ""}
        self._names: dict[object, str] = {(): "value"}
        self._open: set[Parts] = set()  # those that are being written, and of these, those that hold themselves
        self._used: set[Parts] = set()
        self._n_characters = 0
        self._n_names = 0

    def write(self, parts: Parts) -> None:
        """Write the rules of a whole answer."""
        if not self.reading.is_possible(parts):
            raise GrammarError(f"No answer could hold to the JSON schema: {_IMPOSSIBLE}")
        self.found["root"] = self._body(parts, "v", is_root=True)

    # --- names ----------------------------------------------------------------------

    def shared(self, name: str) -> str:
        """Return the name of a rule that all grammars have alike."""
        if name not in self.found:
            self.add(name, SHARED[name])
            for other in _NEEDS.get(name, ()):
                self.shared(other)
        return name

    def add(self, name: str, body: str) -> str:
        """Add a rule."""
        self._n_characters += len(name) + len(body)
        if self._n_characters > MAX_GRAMMAR:
            raise GrammarError(TOO_LARGE)
        self.found[name] = body
        return name

    def new_name(self, kind: str) -> str:
        """Return a name for a rule that is to come."""
        self._n_names += 1
        self.reading.step()
        return f"{kind}{self._n_names}"

    def known(self, key: object, kind: str, body: str) -> str:
        """Return the name of a rule, the same one for the same key."""
        if key not in self._names:
            self._names[key] = self.add(self.new_name(kind), body)
        return self._names[key]

    # --- values ----------------------------------------------------------------------

    def value(self, parts: Parts) -> str:
        """Return the name of the rule for a value that holds to all of these."""
        if parts in self._open:
            self._used.add(parts)
        elif parts not in self._names:
            name = self._names[parts] = self.new_name("v")
            self._open.add(parts)
            body = self._body(parts, name, is_root=False)
            self._open.discard(parts)
            if body in self.found and parts not in self._used:
                self._names[parts] = body  # another name for it would be one too many
            else:
                self.add(name, body)
        if self._names[parts] == "value":
            self.shared("value")
        return self._names[parts]

    def _body(self, parts: Parts, name: str, *, is_root: bool) -> str:
        self.reading.is_possible(parts)  # from here on it is known which types end
        kinds: dict[Kind, str] = {}
        for shape in self.reading.shapes(parts):
            for type_ in self.reading.likely(parts, shape, is_root=is_root):
                if self.reading.is_some(shape.kinds[type_]):
                    kinds[shape.kinds[type_]] = type_
        if set(BLANK.values()) <= kinds.keys():
            return self.shared("value")
        kept = {kind: type_ for kind, type_ in kinds.items() if kind == BLANK[type_] or BLANK[type_] not in kinds}
        if not kept:
            raise GrammarError(f"No answer could hold to the JSON schema: {_IMPOSSIBLE}")
        return " | ".join(dict.fromkeys(self._kind(kind, name) for kind in kept))

    def _kind(self, kind: Kind, name: str) -> str:
        """Return the body, or the name, of the rule for values of one kind."""
        for known, blank in BLANK.items():
            if kind == blank:
                return self.shared(known)
        if kind == INTEGERS:
            return self.shared("integer")
        match kind:
            case Booleans():
                return " | ".join(f'"{json.dumps(value)}"' for value in sorted(kind.values))
            case Values():
                return " | ".join(map(literal, kind.texts))
            case Numbers():
                return self._once(kind, "n", name)
            case Strings():
                return self._once(kind, "s", name)
            case Arrays() | Objects():
                if kind not in self._names:
                    made = self._names[kind] = self.new_name("o")
                    self.add(made, "")  # it may hold itself
                    self.add(made, array_rule(self, kind) if isinstance(kind, Arrays) else self._object(kind))
                return self._names[kind]
        return self.shared("null")

    def _once(self, kind: Numbers | Strings, letter: str, name: str) -> str:
        """Return the name of the rule for numbers or strings; the same kind has the same one."""
        if kind not in self._names:
            self._names[kind] = self._number(kind) if isinstance(kind, Numbers) else self._string(kind)
        return self._names[kind]

    def _number(self, kind: Numbers) -> str:
        name = self.new_name("n")
        for rule, body in self.reading.automaton(kind).rules(name, plainly, "", EMPTY).items():
            self.add(rule, body)
        return name

    def _string(self, kind: Strings) -> str:
        name, quote = self.new_name("s"), '"\\""'
        if kind.is_any_text:
            return self.add(name, f"{quote} {self.repeated(self.shared('char'), kind.least, kind.most)} {quote}")
        for rule, body in self.reading.automaton(kind).rules(name, in_json, quote, quote).items():
            self.add(rule, body)
        return name

    # --- objects ----------------------------------------------------------------------

    def _object(self, kind: Objects) -> str:
        plan = planned(self.reading, kind)
        if plan is None:
            raise GrammarError(f"No object could hold to the JSON schema: {_IMPOSSIBLE}")
        space = self.shared("space")
        members = _MemberRules(self, plan).first()
        return " ".join(filter(None, ['"{"', space, members, '"}"']))

    def pair(self, name: str, parts: Parts) -> str:
        """Return the rule of a member by its name."""
        space = self.shared("space")
        key = literal(json.dumps(name, ensure_ascii=False))
        return self.known((name, parts), "p", f'{key} {space} ":" {space} {self.value(parts)} {space}')

    def free_pair(self, names: Strings, parts: Parts) -> str:
        """Return the rule of a member whose name is of a kind."""
        space = self.shared("space")
        key = self.shared("string") if names == BLANK["string"] else self._once(names, "s", "")
        return self.known((names, parts), "p", f'{key} {space} ":" {space} {self.value(parts)} {space}')

    # --- repetitions ----------------------------------------------------------------------

    def repeated(self, rule: str, least: int, most: int | None) -> str:
        """Return a rule so often. llama.cpp writes out each of a repetition: large ones are made of smaller ones."""
        if most is None:
            return " ".join(filter(None, [self._exactly(rule, least), f"{rule}*"]))
        if most <= MAX_RUN:
            return f"{rule}{{{least},{most}}}" if least < most else f"{rule}{{{least}}}" if least else ""
        return " ".join(filter(None, [self._exactly(rule, least), self._up_to(rule, most - least)]))

    def _level(self, rule: str, level: int) -> str:
        """Return a rule for STEP ** level of another one."""
        if not level:
            return rule
        return self.known((rule, level), "r", f"{self._level(rule, level - 1)}{{{STEP}}}")

    def _exactly(self, rule: str, n: int) -> str:
        parts, level = [], 0
        while n:
            n, digit = divmod(n, STEP)
            if digit:
                parts.append(f"{self._level(rule, level)}{{{digit}}}" if digit > 1 else self._level(rule, level))
            level += 1
        return " ".join(reversed(parts))

    def _up_to(self, rule: str, n: int) -> str:
        """Return at most `n` of a rule: as a number is at most another one, digit by digit."""
        level = len(str(n)) - 1
        ways, before = [], ""
        for k in range(level, -1, -1):
            digit = n // STEP**k % STEP
            if digit:
                full = [f"{self._level(rule, i)}{{0,{STEP - 1}}}" for i in range(k - 1, -1, -1)]
                ways.append(
                    " ".join(
                        filter(None, [before, f"{self._level(rule, k)}{{0,{digit - 1}}}" if digit > 1 else "", *full])
                    )
                )
                before = f"{before} {self._level(rule, k)}{{{digit}}}".strip()
        return f"({' | '.join(way or EMPTY for way in [*ways, before])})" if n else ""


EMPTY = '""'
_IMPOSSIBLE = "what it requires is forbidden elsewhere in it, or nested without an end, or no grammar can tell."


class _MemberRules:
    """The rules of an object's members: for each, whether another one stands before it, and how many there are."""

    def __init__(self, rules: Rules, plan: MemberPlan) -> None:
        self._rules, self._plan = rules, plan
        self._counts = bool(plan.most is not None or plan.least > sum(named.is_required for named in plan.named))
        self._made: dict[tuple[int, bool, int], str | None] = {}

    def first(self) -> str:
        """Return the members of an object."""
        return self._from(0, is_first=True, n=0) or ""

    def _from(self, i: int, *, is_first: bool, n: int) -> str | None:
        """Return the members from number `i` on; None if there can be none that are enough, or few enough."""
        key = (i, is_first, n)
        if key not in self._made:
            self._made[key] = self._body(i, is_first=is_first, n=n)
        return self._made[key]

    def _body(self, i: int, *, is_first: bool, n: int) -> str | None:
        rules, plan = self._rules, self._plan
        if plan.most is not None and n > plan.most:
            return None
        if i == len(plan.named):
            return self._free(is_first=is_first, n=n)
        member = plan.named[i]
        comma = "" if is_first else f'"," {rules.shared("space")}'
        after = self._from(i + 1, is_first=False, n=n + 1 if self._counts else 0)
        ways = []
        if after is not None:
            ways.append(" ".join(filter(None, [comma, rules.pair(member.name, member.parts), after])))
        if not member.is_required:
            skipped = self._from(i + 1, is_first=is_first, n=n)
            if skipped is not None:
                ways.append(skipped or EMPTY)
        if not ways:
            return None
        return ways[0] if len(ways) == 1 else rules.add(rules.new_name("m"), " | ".join(ways))

    def _free(self, *, is_first: bool, n: int) -> str | None:
        """Return the members without a name of their own; of several, one is sure to be another than the named."""
        rules, plan = self._rules, self._plan
        least = max(0, plan.least - n) if self._counts else 0
        if least > 1 or (least and not plan.free):
            return None
        most = None if plan.most is None else plan.most - n
        if not plan.free or most == 0:
            return ""
        space = rules.shared("space")
        pairs = [rules.free_pair(free.names, free.parts) for free in plan.free]
        pair = pairs[0] if len(pairs) == 1 else rules.known(tuple(pairs), "p", " | ".join(pairs))
        behind = rules.known(("behind", pair), "c", f'"," {space} {pair}')
        if not is_first:
            return rules.repeated(behind, least, most)
        rest = rules.repeated(behind, 0, None if most is None else most - 1)
        return f"{pair} {rest}".strip() if least else f"({f'{pair} {rest}'.strip()})?"
