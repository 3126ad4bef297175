"""The sandbox of a model's chat template: it is a foreign program, which may neither reach out nor run away.

Jinja's own sandbox keeps it from everything else. This one also bounds its cost: `{{ 'a' * 10**9 }}` and
two nested ranges are legal Jinja. Loops, calls, filters, tests, look-ups and operators each take a step out of a
budget of steps and processor time; an operation that makes large values of small ones is checked before it is done,
and all that is made is summed. The bounds are far above the needs of templates: that of Llama 3.1 takes 30 steps a
message. The file is longer than others, since each way to spend time or memory is one more row in the same account.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import islice
from string import Formatter
from types import MethodType
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

RENDER_S = 1.0  # of processor time for one conversation; common templates take 10 µs a message
MAX_STEPS = 2_000_000  # of a chat template: loops, calls, look-ups
MAX_TEXT = 32 << 20  # characters of one text, and of all that is said; a request body has at most 8 MiB
MAX_ITEMS = 200_000  # of a list, those inside it counted too
MAX_NUMBER = 100_000  # given to a function or filter: a width, a count
MAX_BITS = 4096  # of an integer
MAX_SOURCE = 256 * 1024  # characters of a template; the longest known ones have 30,000
MAX_MADE = 256 << 20  # bytes of all texts and lists that are made of others, since variables may keep each of them
MAX_PASSED = 1 << 20  # characters given to a filter that looks at each word in Python
MAX_FIELDS = 10_000  # conversions of a format
MAX_SAID = 1000  # characters of an error's message
_LOOK_AFTER = 64 << 10  # of weight, in characters; the clock takes as long as a step
_STEP_WEIGHT = 1024  # of a step that handles nothing large

# Operators that make a long text of two shorter ones, or of a text and a number.
_GROWS = frozenset({
    "replace", "join", "format", "format_map", "expandtabs", "translate", "indent", "wordwrap", "ljust", "rjust",
    "center", "zfill", "%", "tojson", "pprint",
})  # fmt: skip
# Filters that make no text of what they are given.
_LIGHT = frozenset({
    "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reverse", "slice",
})  # fmt: skip
# Filters that go through what they are given: all at once, or item by item, each of which is then a step.
_AT_ONCE = frozenset({
    "groupby", "join", "list", "max", "min", "reverse", "slice", "sort", "string", "tojson",
})  # fmt: skip
_ONE_BY_ONE = frozenset({"batch", "map", "reject", "rejectattr", "select", "selectattr", "sum", "unique"})
_SLOW = frozenset({"indent", "title", "truncate", "urlencode", "wordcount"})
_PASS_ON = frozenset({"attr", "d", "default", "first", "get", "last", "max", "min", "pop"})  # they make nothing new
# Methods that compare with all that their owner holds: lists may hold one long text many times.
_COMPARE = frozenset({"count", "index", "remove"})
# Tests that look at what a value is, not at what it holds.
_GLANCES = frozenset({
    "boolean", "callable", "defined", "divisibleby", "escaped", "even", "false", "filter", "float", "integer",
    "iterable", "mapping", "none", "number", "odd", "sameas", "sequence", "string", "test", "true", "undefined",
})  # fmt: skip
_UNWANTED = ("urlize", "xmlattr", "random", "pprint", "wordwrap", "striptags")  # filters for web pages
# Methods that make bytes, which nothing here counts, or that no step bounds.
_UNSAFE = frozenset({"encode", "escape", "fromkeys", "isdisjoint", "striptags", "to_bytes", "unescape"})
_LINE_END = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_WORD = re.compile(r"\S+")
# A conversion of `%` with a width or precision of more than 3 digits, or one that is given beside it.
_WIDE = re.compile(r"%%|(%\([^()]*\(|%(?:\([^)]*\))?[#0\- +]*(?:\*|\d{4}|\d*\.(?:\*|\d{4})))")
_VIEWS: tuple[type, ...] = (type({}.items()), type({}.keys()), type({}.values()))
_HOLDERS = (list, tuple, dict, Namespace, MethodType, *_VIEWS)


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

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

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
            "_check_literal": _hook(self._check_literal), "_weighed": _hook(self._weighed),
            "_sliced": _hook(self._made),
        }  # fmt: skip
        self.tests = {
            k: run if k in _GLANCES else self._as_watched(cast(Callable[..., Any], run))
            for k, run in self.tests.items()
        }
        del self.globals["lipsum"]
        self.begin()

    def begin(self) -> None:
        """Begin a new rendering, with a full budget."""
        self._steps = 0
        self._characters = self._appended = self._made_bytes = self._unseen = 0
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
        if not self.is_safe_callable(__obj):
            raise SecurityError("it calls what it may not")  # Jinja's own message shows the value, however large
        name, given = getattr(__obj, "__name__", ""), (*args, *kwargs.values())
        name = name if type(name) is str else ""
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja puts a function of its own round `format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | list | tuple | dict):
            self._spend(len(owner))
        if args and (isinstance(__obj, LoopContext) or (__obj is dict and not isinstance(args[0], Mapping))):
            args = (self._each(args[0]), *args[1:])
        elif name == "join" and args and isinstance(args[0], Iterator):
            args = given = (list(self._each(args[0])),)
        self._affordable(name, (owner, *given))
        if not isinstance(__obj, Macro | LoopContext):  # those are the template's own, and watched inside
            self._weigh(list(given))
        if type(owner) is _OwnList and name == "append":
            self._appendable(owner, args)
        elif isinstance(owner, list | tuple) and name in _COMPARE:
            self._weigh([owner, *given])
        elif isinstance(owner, str) and name in ("split", "rsplit", "splitlines"):
            self._few_pieces(owner, name, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        return self._check_size(result) if name in _PASS_ON else self._made(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator that can make a large value of small ones."""
        self._step()
        if operator == "*":
            self._times(left, right)
        elif operator == "**" and _bits(left) * (abs(right) if isinstance(right, int) else 1) > MAX_BITS:
            raise TooMuch("it computes too large a power")
        elif operator == "%" and isinstance(left, str):
            self._affordable("%", (left, right))
        elif operator == "-" and isinstance(left, AbstractSet):
            raise SecurityError("it may subtract only numbers")
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self._room(left, len(left) + len(right))
        return self._made(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may have this; of what changes a value, only two methods of its own lists."""
        own = type(obj) is _OwnList and attr in ("append", "pop")
        return own or (attr not in _UNSAFE and super().is_safe_attribute(obj, attr, value))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`a.b`."""
        self._step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`a[b]`; nothing is at a list or the like, of which a failure's message would show all."""
        self._step()
        if not isinstance(argument, str | int | float | Undefined | None):
            return self.undefined(obj=obj, name=f"at a {type(argument).__name__}")
        return super().getitem(obj, argument)

    def _as_step(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Make a filter a step. It takes the context, so that nothing is computed while the template compiles."""
        kind = getattr(getattr(run, "jinja_pass_arg", None), "name", "")

        def step(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
            self._step()
            given = [*args, *kwargs.values()]
            if name in _AT_ONCE and isinstance(value, Iterator):
                value = list(self._each(value))
            if name in _AT_ONCE | _ONE_BY_ONE and name not in ("string", "tojson") and hasattr(value, "__len__"):
                self._room([], len(value))
            if name in _SLOW and isinstance(value, str) and len(value) > MAX_PASSED:
                raise TooMuch(f"it gives {name} more than {MAX_PASSED} characters")
            self._affordable(name, (value, *given))
            if name not in ("d", "default"):
                self._weigh(given if name in _LIGHT else [value, *given])
            if name in _ONE_BY_ONE and value:
                value = self._each(value, watched=name != "map")
            first = {"context": (context,), "eval_context": (context.eval_ctx,), "environment": (self,)}.get(kind, ())
            result = run(*first, value, *args, **kwargs)
            return self._check_size(result) if result is value or name in _PASS_ON else self._made(result)

        return pass_context(step)

    def _as_watched(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Make a test a step that weighs what it is given; `select` and the like take it too."""
        kind = getattr(getattr(run, "jinja_pass_arg", None), "name", "")

        def step(context: Context, *given: Any, **named: Any) -> Any:
            self._step()
            self._weigh([*given, *named.values()])
            return run(*((self,) if kind == "environment" else ()), *given, **named)

        return pass_context(step)

    def _each(self, items: Any, watched: bool = False) -> Iterator[Any]:
        """Yield the items of a loop, each as a step; a watched one is weighed."""
        for item in items:
            self._step()
            if watched:
                self._weigh(item)
            yield item

    def _join(self, parts: list[Any]) -> str:
        """`a ~ b`."""
        self._step()
        texts = [_text(part) for part in parts]
        self._room("", sum(map(len, texts)))
        return cast(str, self._made("".join(texts)))

    def _check_literal(self, value: Any) -> Any:
        """Check a list or dictionary literal: it may hold others, and those others."""
        self._step()
        self._weigh(value)
        return _OwnList(value) if type(value) is list else value

    def _count_output(self, value: Any) -> str:
        """Count text that is put out, also inside a macro or block."""
        self._step()
        text = _text(value)
        self._characters += len(text)
        self._spend(len(text))
        self._room("", self._characters)
        return text

    def _appendable(self, owner: list[Any], given: tuple[Any, ...]) -> None:
        """Refuse to append what holds other values, or too much. Raises SecurityError, TooMuch."""
        if not all(isinstance(value, str | int | float | None) for value in given):
            raise SecurityError("it may append only texts and numbers to its lists")
        self._room([], len(owner) + 1)
        self._appended += self._weigh(given)
        self._room("", self._appended)

    # --- what that costs -----------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TooMuch(f"it takes more than {MAX_STEPS} steps")
        self._spend(_STEP_WEIGHT)

    def _spend(self, weight: int) -> None:
        """Look at the clock if much has been handled since: what is heavy itself makes the next step look again."""
        self._unseen += weight
        if self._unseen > _LOOK_AFTER:
            self._unseen = weight
            if time.thread_time() > self._until:
                raise TooMuch(f"it takes more than {RENDER_S:g} s")

    def _weigh(self, value: Any) -> int:
        weight = weigh(value)
        self._spend(weight)
        return weight

    def _weighed(self, value: Any) -> Any:
        """Return a value that is to be compared. Raises TooMuch if it holds too much."""
        self._step()
        self._weigh(value)
        return value

    def _made(self, value: Any) -> Any:
        """Return what is made of other values, unless it is too much beside all that was made before."""
        if isinstance(value, str | list | tuple | dict):
            size = sys.getsizeof(value)
            self._made_bytes += size
            if self._made_bytes > MAX_MADE:
                raise TooMuch(f"it makes texts and lists of more than {MAX_MADE} bytes in all")
            self._spend(size)
        return self._check_size(value)

    def _few_pieces(self, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse to split a text into more pieces than a list may have."""
        separator = args[0] if args else kwargs.get("sep")
        most = args[1] if len(args) > 1 else kwargs.get("maxsplit", -1)
        if name != "splitlines" and isinstance(most, int) and most >= 0:
            return
        if name != "splitlines" and isinstance(separator, str) and separator:
            n = text.count(separator)
        else:
            found = (_LINE_END if name == "splitlines" else _WORD).finditer(text)
            n = sum(1 for _ in islice(found, MAX_ITEMS + 1))
        self._room([], n)

    def _affordable(self, name: str, given: tuple[Any, ...]) -> None:
        """Refuse a call that can make too much of its arguments. Raises TooMuch."""
        for value in given:
            if isinstance(value, int) and abs(value) > MAX_NUMBER:
                raise TooMuch(f"it asks for {name or 'something'} of more than {MAX_NUMBER}")
        if name not in _GROWS:
            return
        if name in ("%", "format", "format_map") and isinstance(given[0], str) and _is_wide(name, given[0]):
            raise TooMuch(f"it asks for {name} of a width beyond all bounds")
        sizes = sorted((self._weigh(value) for value in given), reverse=True)[:2]
        if len(sizes) == 2 and sizes[0] * max(1, sizes[1]) > 8 * MAX_TEXT:
            raise TooMuch(f"it makes too long a text by {name}")
        if name == "translate" and sizes[0] > MAX_PASSED:
            raise TooMuch(f"it translates more than {MAX_PASSED} characters")

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

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        """`a[b:c]`, which makes a copy."""
        self.generic_visit(node)
        return _through("_sliced", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_ScopedEvalContextModifier(  # noqa: N802
        self, node: nodes.ScopedEvalContextModifier
    ) -> nodes.ScopedEvalContextModifier:
        """`{% autoescape true %}` makes five characters of one after all have been counted; a prompt is no web page."""
        if any(not isinstance(option.value, nodes.Const) or option.value.value for option in node.options):
            raise SecurityError("a prompt is not escaped as a web page is")
        self.generic_visit(node)
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


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    weigh(value)
    return str(value)


def said(value: object) -> str:
    """Return the words of an error, or of what a template raises, cut to `MAX_SAID`; they may hold foreign values."""
    try:
        weigh(list(value.args) if isinstance(value, Exception) else value)
    except TooMuch:
        return f"a {type(value).__name__} too long to be shown"
    return str(value)[:MAX_SAID]


def weigh(value: Any) -> int:
    """Estimate how long a value is as text. Raises TooMuch if it holds too much, such as lists of lists of lists."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return min(abs(value), MAX_NUMBER)
    if not isinstance(value, _HOLDERS):
        return 1
    total, n = 0, 0
    waiting: list[Any] = [value]
    while waiting:
        inner = waiting.pop()
        n += 1
        if isinstance(inner, str | bytes):
            total += len(inner)
        elif isinstance(inner, _HOLDERS):
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
    if kind is MethodType:
        return [value.__self__]  # as text it shows whose it is
    return [*value.keys(), *value.values()] if isinstance(value, Mapping) else list(value)


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _is_wide(name: str, text: str) -> bool:
    """Whether a format may have a width of more than 3 digits, one given beside it, or too many conversions."""
    if text.count("{") + text.count("%") > MAX_FIELDS:
        return True
    if name == "%":
        return any(found[1] for found in _WIDE.finditer(text))
    return any(spec and ("{" in spec or re.search(r"\d{4}", spec)) for _, _, spec, _ in Formatter().parse(text))
