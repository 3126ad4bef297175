"""What an answer with calls may be, as a small tree, and its text in llama.cpp's GBNF. Pure.

A tree knows no JSON: where an answer has a value by a schema, whoever turns the tree into a text is asked for the name
of the rule that stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class JsonValue:
    """The JSON text of a value by a schema."""

    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Until:
    """Any text, none too, in which `mark` is not, and then `mark`."""

    mark: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """One character of a class in GBNF's brackets, such as `[0-9]`."""

    characters: str


@dataclass(frozen=True, slots=True)
class InOrder:
    """One part after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    """A part from `least` to `most` times, without an end if None; `between` stands between each two."""

    part: Node
    least: int
    most: int | None
    between: Node | None = None


@dataclass(frozen=True, slots=True)
class RuleOf:
    """What the grammar's `rules` have under this name: parts may hold themselves by it."""

    name: str


Node = Literal | JsonValue | Until | OneOf | InOrder | Either | Repeated | RuleOf
NOTHING = Literal("")
SPACE = Repeated(OneOf("[ \\t\\n]"), 0, 4)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer may be: `root`, and rules that it names."""

    root: Node
    rules: Mapping[str, Node] = field(default_factory=dict)


def in_order(*parts: Node | str) -> Node:
    """Return one part after the other; texts are literals."""
    return InOrder(tuple(Literal(part) if isinstance(part, str) else part for part in parts))


def optional(part: Node) -> Node:
    """Return a part that may be missing."""
    return Repeated(part, 0, 1)


def calls(call: Node, *, parallel: bool, between: Node | None = None) -> Grammar:
    """Return the grammar of one call, or with `parallel` of one or more."""
    one = RuleOf("one")
    return Grammar(Repeated(one, 1, None, between) if parallel else one, {one.name: call})


def members(parts: Sequence[tuple[Node, bool]], rules: dict[str, Node], name: str, between: str) -> Node:
    """Return parts in their order, each with whether it may be missing, and `between` between those that are there.

    Adds rules whose names begin with `name`: two for each part, for whether another one stands before it.
    """
    first: Node = NOTHING
    after: Node = NOTHING
    for i, (part, may_miss) in reversed(list(enumerate(parts))):
        here, behind = in_order(part, after), in_order(between, part, after)
        rules[f"{name}-{i}-first"] = Either((here, first)) if may_miss else here
        rules[f"{name}-{i}-after"] = Either((behind, after)) if may_miss else behind
        first, after = RuleOf(f"{name}-{i}-first"), RuleOf(f"{name}-{i}-after")
    return first


def gbnf(grammar: Grammar, name_of: Callable[[Mapping[str, Any], str], str]) -> str:
    """Write a tree in GBNF: the rule `root`, and others whose names begin with `call`.

    `name_of(schema, name)` returns the name of the rule that JSON values by a schema have; it may take the one it is
    given, which is a new one each time. The text of these rules is for the caller to add.
    """
    writer = _Writer(name_of)
    rules = {f"call-{name}": node for name, node in grammar.rules.items()}
    lines = [f"root ::= {writer.write(grammar.root)}"]
    lines += [f"{name} ::= {writer.write(node)}" for name, node in rules.items()]
    return "\n".join([*lines, *writer.lines]) + "\n"


class _Writer:
    def __init__(self, name_of: Callable[[Mapping[str, Any], str], str]) -> None:
        self._name_of = name_of
        self._untils: dict[str, str] = {}  # marks, and the rules for texts up to them
        self._n_values = 0
        self.lines: list[str] = []

    def write(self, node: Node) -> str:
        match node:
            case Literal(text):
                return literal(text)
            case JsonValue(schema):
                self._n_values += 1
                return self._name_of(schema, f"call-value-{self._n_values}")
            case Until(mark):
                return self._until(mark)
            case OneOf(characters):
                return characters
            case InOrder(parts):
                return " ".join(map(self._grouped, parts)) or '""'
            case Either(()):
                raise ValueError("nothing to choose from: llama.cpp would end the process")
            case Either(parts):
                return " | ".join(map(self._grouped, parts))
            case Repeated():
                return self._repeated(node)
            case RuleOf(name):
                return f"call-{name}"

    def _grouped(self, node: Node) -> str:
        text = self.write(node)
        return f"({text})" if isinstance(node, InOrder | Either | Repeated) else text

    def _repeated(self, node: Repeated) -> str:
        part = self._grouped(node.part)
        if node.between is not None and node.most != 1:
            rest = f"({self._grouped(node.between)} {part})" + _times(
                max(0, node.least - 1), None if node.most is None else node.most - 1
            )
            return f"{part} {rest}" if node.least else f"({part} {rest})?"
        return part + _times(node.least, node.most)

    def _until(self, mark: str) -> str:
        """Write a rule for each number of characters of the mark that have just been read.

        Source: Knuth, Morris and Pratt (1977), "Fast pattern matching in strings": the automaton of the pattern.
        """
        if mark not in self._untils:
            base = f"call-until-{len(self._untils) + 1}"
            self._untils[mark] = base
            names = [base, *(f"{base}-{i}" for i in range(1, len(mark)))]
            for n, step in enumerate(_automaton(mark)):
                bodies = [f"{_class([c])} {names[to]}" if to < len(mark) else _class([c]) for c, to in step.items()]
                self.lines.append(f"{names[n]} ::= {' | '.join(bodies)} | {_class(list(step), inverted=True)} {base}")
        return self._untils[mark]


def _automaton(mark: str) -> Iterator[dict[str, int]]:
    """Yield for each number of characters read which character leads to how many; all others lead to none."""
    for n in range(len(mark)):
        step: dict[str, int] = {}
        for c in dict.fromkeys(mark):
            text = mark[:n] + c
            step[c] = next(k for k in range(min(len(text), len(mark)), -1, -1) if text.endswith(mark[:k]))
        yield {c: to for c, to in step.items() if to}


def _times(least: int, most: int | None) -> str:
    match least, most:
        case 0, 1:
            return "?"
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 1, 1:
            return ""
    return f"{{{least},{'' if most is None else most}}}"


def _class(characters: Sequence[str], *, inverted: bool = False) -> str:
    return f"[{'^' * inverted}{''.join(map(_in_class, characters))}]"


def _in_class(c: str) -> str:
    return c if c.isascii() and c.isalnum() else f"\\U{ord(c):08X}"


def literal(text: str) -> str:
    """Write a text as GBNF has it."""
    return '"' + "".join(f"\\U{ord(c):08X}" if c in '"\\' or not c.isprintable() else c for c in text) + '"'
