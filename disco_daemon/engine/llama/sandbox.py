"""The sandbox of a model's chat template: it is a foreign program, which may neither reach out nor run away.

Jinja's own sandbox keeps it from everything else. This one also bounds its cost: `{{ 'a' * 10**9 }}` and
two nested ranges are legal Jinja. Loops, calls, filters, look-ups and operators each take a step out of a budget of
steps and processor time; an operation that makes large values of small ones is checked before it is done. The bounds
are far above the needs of templates: that of Llama 3.1 takes 30 steps a message.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Namespace, pass_context
from jinja2.visitor import NodeTransformer

RENDER_S = 1.0  # of processor time for one conversation; common templates take 10 µs a message
MAX_STEPS = 2_000_000  # of a chat template: loops, calls, look-ups
MAX_TEXT = 32 << 20  # characters of one text, and of all that is said; a request body has at most 8 MiB
MAX_ITEMS = 200_000  # of a list, those inside it counted too
MAX_NUMBER = 100_000  # given to a function or filter: a width, a count
MAX_BITS = 4096  # of an integer
MAX_SOURCE = 256 * 1024  # characters of a template; the longest known ones have 30,000
_LOOK_EVERY = 64  # steps; the clock takes as long as one

# Operators that make a long text of two shorter ones, or of a text and a number.
_GROWS = frozenset({
    "replace", "join", "format", "format_map", "expandtabs", "translate", "indent", "wordwrap", "ljust", "rjust",
    "center", "zfill", "%", "tojson", "pprint",
})  # fmt: skip
# Filters that make no text of what they are given.
_LIGHT = frozenset({
    "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reverse", "slice",
})  # fmt: skip
# What compares the values that it is given, each perhaps with each: lists may hold one long text many times.
_COMPARE = frozenset({"count", "index", "remove", "reject", "rejectattr", "select", "selectattr"})
_KEEPERS = (dict, Namespace, Cycler)  # they hold what they are given
_UNWANTED = ("urlize", "xmlattr", "random", "pprint", "wordwrap")  # filters for web pages


class TooMuch(jinja2.TemplateRuntimeError):
    """A template takes more steps, time or memory than any template needs."""


class _OwnList(list[Any]):
    """A list that the template wrote down itself. It may append texts and numbers to it, and take them off again.

    Kimi K2's templates keep the ids of calls so. A list that is given stays as it is, and one in a list stays small.
    """


class Generation(Extension):
    """`{% generation %}`, by which trainers find what an assistant said; in a prompt its body is text like any other.

    Source: the `AssistantTracker` of Hugging Face Transformers; as there, what is set inside is not seen outside.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja has it so

    def parse(self, parser: Parser) -> nodes.Scope:
        """Return the body, in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget for each rendering; `begin` fills it. For one thread at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation],
            finalize=self._count_output, optimized=False, cache_size=0,
        )  # fmt: skip
        self.filters["tojson"] = _to_json
        for name in _UNWANTED:
            self.filters.pop(name, None)
        self.filters = {name: self._as_step(name, run) for name, run in self.filters.items()}
        self.filters |= {
            "_each": _hook(self._each), "_join": _hook(self._join), "_text": _hook(str),
            "_check_literal": _hook(self._check_literal), "_weighed": _hook(_weighed),
        }  # fmt: skip
        del self.globals["lipsum"]
        self.begin()

    def begin(self) -> None:
        """Begin a new rendering, with a full budget."""
        self._steps = 0
        self._characters = self._appended = 0
        self._until = time.thread_time() + RENDER_S

    # --- what a template does ------------------------------------------------------------------------------------

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TooMuch(f"it has {len(source)} characters; at most {MAX_SOURCE} are possible")
        tree: nodes.Template = _Watched().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call(self, __context: Context, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method."""
        self._step()
        name, given = getattr(__obj, "__name__", ""), (*args, *kwargs.values())
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja puts a function of its own round `format`
        self._affordable(name, (owner := getattr(method, "__self__", None), *given))
        if __obj in _KEEPERS:
            _weigh(given)
        if type(owner) is _OwnList and name == "append":
            self._appendable(owner, args)
        elif isinstance(owner, list | tuple) and name in _COMPARE:
            _weigh([owner, *given])
        return self._check_size(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator that can make a large value of small ones."""
        self._step()
        if operator == "*":
            self._times(left, right)
        elif operator == "**" and _bits(left) * (abs(right) if isinstance(right, int) else 1) > MAX_BITS:
            raise TooMuch("it computes too large a power")
        elif operator == "%" and isinstance(left, str):
            self._affordable("%", (left, right))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self._room(left, len(left) + len(right))
        return self._check_size(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may have this; of what changes a value, only two methods of its own lists."""
        return (type(obj) is _OwnList and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`a.b`."""
        self._step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`a[b]`."""
        self._step()
        return super().getitem(obj, argument)

    def _as_step(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Make a filter a step. It takes the context, so that nothing is computed while the template compiles."""
        kind = getattr(getattr(run, "jinja_pass_arg", None), "name", "")

        def step(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
            self._step()
            if name in ("join", "list", "sum", "sort", "unique", "string", "tojson") and isinstance(value, Iterator):
                value = list(self._each(value))
            self._affordable(name, (value, *args, *kwargs.values()))
            if name not in _LIGHT:
                _weigh([value, *args, *kwargs.values()] if name in _COMPARE else value)
            first = {"context": (context,), "eval_context": (context.eval_ctx,), "environment": (self,)}.get(kind, ())
            return self._check_size(run(*first, value, *args, **kwargs))

        return pass_context(step)

    def _each(self, items: Any) -> Iterator[Any]:
        """Yield the items of a loop, each as a step."""
        for item in items:
            self._step()
            yield item

    def _join(self, parts: list[Any]) -> str:
        """`a ~ b`."""
        self._step()
        texts = [_text(part) for part in parts]
        self._room("", sum(map(len, texts)))
        return "".join(texts)

    def _check_literal(self, value: Any) -> Any:
        """Check a list or dictionary literal: it may hold others, and those others."""
        self._step()
        _weigh(value)
        return _OwnList(value) if type(value) is list else value

    def _count_output(self, value: Any) -> str:
        """Count text that is put out, also inside a macro or block."""
        self._step()
        text = _text(value)
        self._characters += len(text)
        self._room("", self._characters)
        return text

    def _appendable(self, owner: list[Any], given: tuple[Any, ...]) -> None:
        """Refuse to append what holds other values, or too much. Raises SecurityError, TooMuch."""
        if not all(isinstance(value, str | int | float | None) for value in given):
            raise SecurityError("it may append only texts and numbers to its lists")
        self._room([], len(owner) + 1)
        self._appended += _weigh(given)
        self._room("", self._appended)

    # --- what that costs -----------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._steps += 1
        if self._steps % _LOOK_EVERY == 0 and time.thread_time() > self._until:
            raise TooMuch(f"it takes more than {RENDER_S:g} s")
        if self._steps > MAX_STEPS:
            raise TooMuch(f"it takes more than {MAX_STEPS} steps")

    def _affordable(self, name: str, given: tuple[Any, ...]) -> None:
        """Refuse a call that can make too much of its arguments. Raises TooMuch."""
        for value in given:
            if isinstance(value, int) and abs(value) > MAX_NUMBER:
                raise TooMuch(f"it asks for {name or 'something'} of more than {MAX_NUMBER}")
        if name not in _GROWS:
            return
        if name in ("%", "format", "format_map") and isinstance(given[0], str) and _is_wide(given[0]):
            raise TooMuch(f"it asks for {name} of a width beyond all bounds")
        sizes = sorted((_weigh(value) for value in given), reverse=True)[:2]
        if len(sizes) == 2 and sizes[0] * max(1, sizes[1]) > 8 * MAX_TEXT:
            raise TooMuch(f"it makes too long a text by {name}")

    def _times(self, left: Any, right: Any) -> None:
        """`left * right`."""
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple | bytes) and isinstance(times, int):
                self._room(value, len(value) * max(0, times))
        if _bits(left) + _bits(right) > MAX_BITS:
            raise TooMuch("it computes too large a number")

    def _room(self, kind: Any, n: int) -> None:
        most = MAX_TEXT if isinstance(kind, str) else MAX_ITEMS
        if n > most:
            raise TooMuch(f"it makes {'a text' if isinstance(kind, str) else 'a list'} of more than {most}")

    def _check_size(self, value: Any) -> Any:
        """Return a result, unless it is too large. Raises TooMuch."""
        if isinstance(value, str | list | tuple | dict):
            self._room(value if isinstance(value, str) else [], len(value))
        elif _bits(value) > MAX_BITS:
            raise TooMuch("it computes too large a number")
        return value


class _Watched(NodeTransformer):
    """Puts through the sandbox what Jinja has no hook for: loops, `~`, literals and the template's own text."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - Jinja's name
        """A loop."""
        self.generic_visit(node)
        node.iter = _through("_each", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        """`a ~ b`."""
        self.generic_visit(node)
        return _through("_join", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        """`[a, b]`."""
        self.generic_visit(node)
        return _through("_check_literal", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        """`{a: b}`."""
        self.generic_visit(node)
        return _through("_check_literal", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        """`(a, b)`, unless it is assigned to."""
        self.generic_visit(node)
        return _through("_check_literal", node) if node.ctx == "load" else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        """`a == b`, `a in b`: done at once, however much the two hold."""
        self.generic_visit(node)
        node.expr = _through("_weighed", node.expr)
        for operand in node.ops:
            operand.expr = _through("_weighed", operand.expr)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Test:  # noqa: N802
        """`a is eq b`: as a comparison. One without a second value compares nothing."""
        self.generic_visit(node)
        if node.args:
            node.node = _through("_weighed", node.node)
            node.args = [_through("_weighed", arg) for arg in node.args]
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Filter:  # noqa: N802
        """Text outside of all braces."""
        return _through("_text", nodes.Const(node.data, lineno=node.lineno))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as templates expect it: keys in their order, and nothing escaped for web pages, as Jinja's own would.

    Source: `chat_template_utils` of Hugging Face Transformers.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _hook(run: Callable[[Any], Any]) -> Callable[..., Any]:
    """As a filter that is not computed while the template compiles."""
    return pass_context(lambda context, value: run(value))


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


def _weighed(value: Any) -> Any:
    """Return a value that is to be compared. Raises TooMuch if it holds too much."""
    if not isinstance(value, str | int):
        _weigh(value)
    return value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    _weigh(value)
    return str(value)


def _weigh(value: Any) -> int:
    """Estimate how long a value is as text. Raises TooMuch if it holds too much, such as lists of lists of lists."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return min(abs(value), MAX_NUMBER)
    if not isinstance(value, list | tuple | dict | Namespace):
        return 1
    total, n = 0, 0
    waiting: list[Any] = [value]
    while waiting:
        inner = waiting.pop()
        n += 1
        if isinstance(inner, str | bytes):
            total += len(inner)
        elif isinstance(inner, list | tuple | dict | Namespace):
            waiting += _parts(inner)
        else:
            total += 8
        if n + len(waiting) > MAX_ITEMS or total > MAX_TEXT:
            raise TooMuch("it makes a list, or a dictionary, that holds too much")
    return total + 2 * n


def _parts(value: Any) -> list[Any]:
    kind: type = type(value)
    if kind is Namespace:
        return list(object.__getattribute__(value, "_Namespace__attrs").values())
    return [*value.keys(), *value.values()] if isinstance(value, Mapping) else list(value)


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _is_wide(text: str) -> bool:
    """Whether a format may have a width of more than 3 digits, or one that is given beside it."""
    digits = 0
    after = False  # within a conversion
    for c in text:
        if c in "%{":
            after, digits = True, 0
        elif after and c == "*":
            return True
        elif after and c.isdigit():
            digits += 1
            if digits > 3:
                return True
        elif c.isspace() or c == "}":
            after = False
        else:
            digits = 0
    return False
