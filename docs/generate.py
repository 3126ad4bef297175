"""Make the parts of the documents that the code says itself: `make docs`, or `python docs/generate.py`.

`PAGES` are whole files, `BLOCKS` parts of files between `<!-- generated: NAME -->` and `<!-- end: NAME -->`.
tests/test_architecture.py compares all of them with the files.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
S = TypeVar("S", bound=Enum)


# --- docs/reference/settings.md -------------------------------------------------------------------------------------

SETTINGS = """\
# Settings

Made of `disco_daemon/config/schema.py` by `make docs`; a test compares the two.

A flag of `disco up` overrides a variable, a variable overrides config.toml; `disco config path` says where that is. The
variable of `server.base_url` is `DISCO_SERVER_BASE_URL`, and so on. `DISCO_CONFIG` names another config.toml,
`DISCO_MODELS_DIR` another folder of models. `disco config set KEY VALUE` writes one setting.

A setting with a `●` is taken up by a running daemon at once, from the next request on. All others wait for
`disco config reload` or the next start.
"""


def field_documents() -> dict[str, str]:
    """The text below each field of the schema's classes, as `Class.field`; msgspec itself does not keep it."""
    from disco_daemon.config import schema

    found = {}
    for cls in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(cls, ast.ClassDef):
            continue
        for field, below in zip(cls.body, cls.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                found[f"{cls.name}.{field.target.id}"] = " ".join(ast.literal_eval(below.value).split())
    return found


def values(kind: Any) -> str:
    """Return the values that a setting may have, by its type; the meaning says the shape of a text."""
    from msgspec import inspect as types

    match kind:
        case types.UnionType():
            return " or ".join(values(one) for one in kind.types)
        case types.LiteralType():
            return ", ".join(f"`{one}`" for one in kind.values)
        case types.IntType() | types.FloatType():
            bounds = (("≥", kind.ge), (">", kind.gt), ("≤", kind.le), ("<", kind.lt))
            said = [f"{sign} {bound:g}" for sign, bound in bounds if bound is not None]
            return " ".join(["integer" if isinstance(kind, types.IntType) else "number", ", ".join(said)]).strip()
        case types.NoneType():
            return "null"
        case types.BoolType():
            return "true, false"
        case types.StrType():
            return "text"
        case types.VarTupleType():
            return "list of texts"
        case types.DictType():
            return "table"
    raise TypeError(kind)


def settings() -> str:
    """Return all settings, one table a section."""
    import msgspec

    from disco_daemon.config.layers import get_value
    from disco_daemon.config.schema import LIVE, SECTIONS, Config, ModelSettings, NamedServer, RuleSettings
    from disco_daemon.dispatch.policies import names_with_notes

    documents, defaults, lines = field_documents(), Config(), [SETTINGS]
    for section, cls in SECTIONS.items():
        about = (inspect.getdoc(cls) or "").partition("] ")[2]
        lines += [f"## {section}", "", about, ""]
        lines += ["| key | default | values | meaning |", "| --- | --- | --- | --- |"]
        for field in msgspec.inspect.type_info(cls).fields:  # type: ignore[attr-defined]
            key = f"{section}.{field.name}"
            text = documents[f"{cls.__name__}.{field.name}"].replace("{policies}", names_with_notes())
            meaning = link(text) + (" ●" if key in LIVE else "")
            default = json.dumps(get_value(defaults, key))
            lines.append(f"| `{key}` | `{default}` | {values(field.type)} | {meaning} |")
        lines.append("")
    for several, one in (("models", ModelSettings), ("servers", NamedServer), ("rules", RuleSettings)):
        about = " ".join((inspect.getdoc(one) or "").partition("] ")[2].split())
        lines += [f"## [[{several}]]", "", about, ""]
        lines += ["| key | default | values | meaning |", "| --- | --- | --- | --- |"]
        fields = msgspec.inspect.type_info(one).fields  # type: ignore[attr-defined]
        for field in sorted(fields, key=lambda field: not field.required):
            if f"{one.__name__}.{field.name}" not in documents:  # it is as in the section that it is one of
                continue
            text = documents[f"{one.__name__}.{field.name}"]
            given = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            default = "none: needed" if field.required else f"`{json.dumps(given)}`"
            lines.append(f"| `{field.name}` | {default} | {values(field.type)} | {link(text)} |")
        lines.append("")
    return "\n".join(lines)


def link(text: str) -> str:
    """Mentions of documents as links from within docs/reference/, where all pages lie that are made of code."""
    to = re.compile(r"docs/(\w+)/([\w-]+\.md(?:#[\w-]+)?)")
    return to.sub(lambda said: f"[{said[2]}]({'' if said[1] == 'reference' else f'../{said[1]}/'}{said[2]})", text)


# --- the routes in docs/reference/api.md ----------------------------------------------------------------------------


def routes() -> str:
    """Every route of the API, by its path: what the handler says of it, and where it is served."""
    from disco_daemon.api.app import make_app
    from disco_daemon.api.doors import ROUTES
    from disco_daemon.api.http.guard import ApiConfig

    nothing: Any = object()
    app = make_app(nothing, nothing, ApiConfig("127.0.0.1", ""), nothing)
    lines = ["| route | what it does | besides the Unix socket |", "| --- | --- | --- |"]
    for route in app.router.routes():
        if route.method == "HEAD" or route.resource is None:
            continue
        path = route.resource.canonical
        _, _, said = " ".join((inspect.getdoc(route.handler) or "").split()).partition(": ")
        lines.append(f"| `{route.method} {display_path(path)}` | {said} | {ROUTES[route.method, path].value} |")
    return "\n".join(lines)


def doors() -> str:
    """The routes by the door at which they are served."""
    from disco_daemon.api.doors import ROUTES, At

    lines = ["| besides the Unix socket | routes |", "| --- | --- |"]
    for where in At:
        served = [f"`{method} {display_path(path)}`" for (method, path), at in ROUTES.items() if at is where]
        lines.append(f"| {where.value} | {', '.join(served)} |")
    return "\n".join(lines)


def doors_for_keys() -> str:
    """The routes that a key with a name opens, by what it gets there."""
    from disco_daemon.api.doors import FOR_KEYS, ROUTES, ForKey

    lines = ["| a key with a name gets it | routes |", "| --- | --- |"]
    opened = {what: [route for route in ROUTES if FOR_KEYS.get(route) is what] for what in (*ForKey, None)}
    for what, routes in opened.items():
        said = "not at all" if what is None else what.value
        lines.append(f"| {said} | {', '.join(f'`{method} {display_path(path)}`' for method, path in routes)} |")
    return "\n".join(lines)


def display_path(path: str) -> str:
    """Return a path as the documents write it."""
    return path.replace("{request_id}", "ID").replace("{name}", "NAME")


# --- the fields in docs/reference/api.md ----------------------------------------------------------------------------


def fields() -> str:
    """Every field of a request, what becomes of it and what it needs; neighbours of the same kind share a row."""
    from disco_daemon.types import FIELDS, Field

    lines = ["| field | device | server | needs | note |", "| --- | --- | --- | --- | --- |"]

    def kind(row: Field) -> tuple[str, ...]:
        return row.device.value, row.server.value, f"`{row.capability}`" if row.capability else "", row.note

    for cells, rows in groupby(FIELDS.values(), kind):
        names = ", ".join(f"`{row.name}`" for row in rows)
        lines.append(f"| {names} | {' | '.join(cells)} |")
    return "\n".join(lines)


# --- requests and answers in docs/reference/api.md ------------------------------------------------------------------


def of_api(block: str) -> Callable[[], str]:
    """The maker of a block that is made of /openapi.json: docs/described.py has it."""

    def made() -> str:
        from docs import described

        return described.BLOCKS[block]()

    return made


# --- the life of an answer in docs/reference/states.md --------------------------------------------------------------


def states() -> str:
    """The states of an answer, as a Mermaid diagram."""
    from disco_daemon.answer import TRANSITIONS, State

    return diagram(TRANSITIONS, [State.PLANNED])


def handoff_states() -> str:
    """The states of a handoff, as a Mermaid diagram."""
    from disco_daemon.answer import HANDOFF_TRANSITIONS, HandoffState

    first = [HandoffState.FOLLOWING, HandoffState.JOINING, HandoffState.JOINING_ALONE]
    return diagram(HANDOFF_TRANSITIONS, first)


def diagram(table: Mapping[S, Mapping[type, frozenset[S]]], first: Sequence[S]) -> str:
    """A table of transitions as a diagram; one arrow for each pair of states, with its events."""
    lines = ["stateDiagram-v2", *(f"    [*] --> {state.name}" for state in first)]
    for state, moves in table.items():
        for target in table:
            events = [event.__name__ for event, targets in moves.items() if target in targets]
            if events:
                lines.append(f"    {state.name} --> {target.name}: {', '.join(events)}")
        if not moves:
            lines.append(f"    {state.name} --> [*]")
    return "```mermaid\n" + "\n".join(lines) + "\n```"


# --- docs/reference/bounds.md ---------------------------------------------------------------------------------------

BOUNDS = """\
# Time-outs, bounds and constants

Every wait for the outside ends, and everything that grows has a limit. This page is made by `make docs` of the numbers
in the code and the comments beside them, so that each is written once; measurements and simulators have more. What you
can set yourself is in [settings.md](settings.md): `server.first_token_timeout_s`, `server.token_timeout_s`,
`server.thinking_timeout_s`, `handoff.stall_s`, `api.receive_timeout_s`, `history.max_rows` and others. `_S` is seconds,
`_TPS` token/s.
"""
MEASURE = ("bench", "simulate")  # rooms whose numbers describe an experiment, not the daemon


def numbers() -> dict[str, list[tuple[str, str, str]]]:
    """The public constants of each module that are numbers: name, value, comment ("" if there is none)."""
    found = {}
    for path in sorted((ROOT / "disco_daemon").rglob("*.py")):
        parts = path.relative_to(ROOT / "disco_daemon").with_suffix("").parts
        source = path.read_text("utf-8")
        rows = list(_numbers_in(source)) if parts[0] not in MEASURE else []
        if rows:
            found[".".join(part for part in parts if part != "__init__")] = rows
    return found


def _numbers_in(source: str) -> Iterator[tuple[str, str, str]]:
    module, lines = ast.parse(source), source.splitlines()
    for body in (module.body, *(node.body for node in module.body if isinstance(node, ast.ClassDef))):
        for node in body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if not isinstance(target, ast.Name) or value is None or not re.fullmatch(r"[A-Z][A-Z0-9_]+", target.id):
                continue
            if _is_number(value):
                shown = " ".join(_segment(lines, value).split())
                yield target.id, shown, _comment(lines, node.lineno, value.end_lineno or node.lineno)


def _segment(lines: list[str], node: ast.expr) -> str:
    """The source of an expression. That of `ast` splits the whole file into lines each time it is asked."""
    first, last = node.lineno - 1, node.end_lineno or node.lineno
    part = "\n".join(lines[first:last]).encode()
    return part[node.col_offset : len(part) - len(lines[last - 1].encode()) + (node.end_col_offset or 0)].decode()


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _comment(lines: list[str], first: int, last: int) -> str:
    """The comment behind a statement, or else the lines of comment above it; lines count from 1."""
    behind = lines[last - 1].partition("  # ")[2]
    above: list[str] = []
    while not behind and first > 1 and lines[first - 2].lstrip().startswith("# "):
        first -= 1
        above.insert(0, lines[first - 1].lstrip()[2:])
    return behind or " ".join(above)


def bounds() -> str:
    """Every number in the code with its reason, a table a room."""
    lines, rooms = [BOUNDS], dict[str, list[str]]()
    for module, rows in numbers().items():
        for name, value, why in rows:
            if why:
                cells = (f"`{name}`", f"`{value}`", f"`{module}`", why.replace("|", r"\|"))
                rooms.setdefault(module.partition(".")[0], []).append(f"| {' | '.join(cells)} |")
    for room, rows_of_room in rooms.items():
        lines += [f"## {room}", "", "| name | value | where | why |", "| --- | --- | --- | --- |", *rows_of_room, ""]
    return "\n".join(lines)


# --- all of it ----------------------------------------------------------------------------------------------------


def reference() -> str:
    """The command line."""
    from disco_daemon.cli.main import make_parser
    from disco_daemon.cli.reference import document

    return document(make_parser())


def openapi() -> str:
    """What /openapi.json serves, with a line for each method of a route and each type."""
    from docs.openapi.document import described

    return f"{_lines(described(), 3)}\n"


def _lines(value: Any, depth: int) -> str:
    """A value as JSON, with a line for each key of its objects down to `depth`."""
    if depth == 0 or not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return "{\n" + ",\n".join(f"{json.dumps(key)}:{_lines(below, depth - 1)}" for key, below in value.items()) + "\n}"


def recommended() -> str:
    """What is recommended on eight machines."""
    from docs import recommended as machines

    return machines.recommended()


PAGES: dict[str, Callable[[], str]] = {
    "disco_daemon/api/openapi.json": openapi,
    "docs/reference/bounds.md": bounds,
    "docs/reference/cli.md": reference,
    "docs/reference/recommended.md": recommended,
    "docs/reference/settings.md": settings,
}
BLOCKS: dict[tuple[str, str], Callable[[], str]] = {
    **{
        ("docs/reference/api.md", block): of_api(block) for block in ("asked", "bodies", "errors", "headers", "outcome")
    },
    ("docs/reference/api.md", "fields"): fields,
    ("docs/reference/api.md", "routes"): routes,
    ("docs/reference/doors.md", "doors"): doors,
    ("docs/reference/doors.md", "doors-for-keys"): doors_for_keys,
    ("docs/reference/states.md", "states"): states,
    ("docs/reference/states.md", "handoff-states"): handoff_states,
}


def replace_block(text: str, name: str, content: str) -> str:
    """A document with another content in one of its blocks. Raises ValueError without exactly one of that name."""
    begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        msg = f"expected one {begin} and one {end}"
        raise ValueError(msg)
    before, rest = text.split(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Write all of it."""
    sys.path.insert(0, str(ROOT))  # this checkout's code, installed or not
    for name, page in PAGES.items():
        (ROOT / name).write_text(page(), "utf-8")
    for (name, block), content in BLOCKS.items():
        path = ROOT / name
        path.write_text(replace_block(path.read_text("utf-8"), block, content()), "utf-8")


if __name__ == "__main__":
    main()
