"""What the documents say is what the code does: import rules, tables, diagram, start-up cost."""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

from disco_daemon.cli import arguments
from disco_daemon.cli.main import make_parser
from disco_daemon.config import layers as config
from disco_daemon.config.schema import Config, keys
from disco_daemon.continuations import CONTINUATIONS
from disco_daemon.dispatch.policies import REGISTRY
from docs import generate
from tests.fixtures.documents import ARCHITECTURE, CONTINUING, PAGES, RELIABILITY, ROOT, code, rows

HEAVY = ("aiohttp", "llama_cpp", "numpy", "openai", "rich", "sqlite3", "textual", "asyncio")


# --- imports ------------------------------------------------------------------------------------------------------


def test_import_contracts_are_kept() -> None:
    command = [sys.executable, "-c", "import sys, importlinter.cli as c; sys.exit(c.lint_imports(no_cache=True))"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = grimp.build_graph("disco_daemon", "disco_tui", exclude_type_checking_imports=True, cache_dir=None)
    left = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while free := {module for module, imported in left.items() if not imported & left.keys()}:
        left = {module: imported for module, imported in left.items() if module not in free}
    assert not left, "these are in a circle, or lead to one"


def test_a_class_name_stands_for_one_thing() -> None:
    defined: dict[str, list[str]] = {}
    for path in sorted(path for package in ("disco_daemon", "tui") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in defined.items() if len(where) > 1} == {}


def test_a_file_name_stands_for_at_most_two_things() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(path for package in ("disco_daemon", "tui") for path in (ROOT / package).rglob("*.py")):
        found.setdefault(path.name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in found.items() if len(where) > 2 and name != "__init__.py"} == {}


def test_a_message_has_one_name_in_code_on_the_wire_and_in_the_pages() -> None:
    for path in sorted((ROOT / "disco_daemon").rglob("*.py")):
        named = re.findall(r"^class (\w+)\(.*\btag=\"(\w+)\"", path.read_text("utf-8"), re.MULTILINE)
        assert named == [], f"{path}: a tag is the class's name"


def room(module: str) -> str:
    return module.split(".")[1]


def test_rooms_import_only_what_the_table_allows() -> None:
    table = {code(name)[0]: imports for name, _, imports in rows(PAGES["reference/rooms.md"], "Rooms")}
    graph = grimp.build_graph("disco_daemon", cache_dir=None)
    modules = sorted(module for module in graph.modules if "." in module)
    assert {room(module) for module in modules} | {"profiles", "disco_tui"} == set(table)
    for module in modules:
        found = {room(m) for m in graph.find_modules_directly_imported_by(module) if "." in m} - {room(module)}
        allowed = set(table) if table[room(module)] == "every room" else set(code(table[room(module)]))
        assert found <= allowed, module


def test_the_command_line_starts_without_heavy_modules() -> None:
    program = (
        "import sys; from disco_daemon.cli.main import make_parser; make_parser().format_help(); "
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_daemon_starts_without_the_other_verbs_and_has_the_same_words() -> None:
    program = (
        "import sys; from disco_daemon.cli.main import make_parser; make_parser('up').parse_args(['up', '--json']); "
        "print([m for m in sys.modules if m.startswith('disco_daemon.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    names = ("main", "up", "terminal", "arguments")
    assert set(ast.literal_eval(done.stdout)) == {f"disco_daemon.cli.{name}" for name in names}
    alone, whole = (
        {command.words: command.parser.format_help() for command in arguments.commands(parser)}
        for parser in (make_parser("up"), make_parser())
    )
    assert alone == {"disco up": whole["disco up"]}


def test_a_file_of_more_than_400_lines_says_why() -> None:
    for path in (path for package in ("disco_daemon", "tui", "benchmarks") for path in (ROOT / package).rglob("*.py")):
        source = path.read_text("utf-8")
        if source.count("\n") > 400:
            why = ast.get_docstring(ast.parse(source)) or ""
            assert "longer" in why, f"split {path}, or let its docstring say why it is longer"


# What llama.cpp may refuse, and says so only by what it returns.
REFUSABLE = {
    "llama_decode", "llama_encode", "llama_state_seq_set_data", "llama_state_seq_set_data_ext", "llama_state_set_data",
    "llama_state_seq_get_data", "llama_state_seq_get_data_ext", "llama_state_seq_load_file", "llama_model_quantize",
    "llama_set_adapters_lora", "llama_set_adapter_lora", "llama_adapter_meta_val_str", "llama_memory_seq_rm",
    "llama_init_from_model", "llama_model_load_from_file", "restore",
}  # fmt: skip


def _ignored_refusals(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of what may be refused as statements of their own: nobody reads what they return."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            is_whole = name == "llama_memory_seq_rm" and [ast.unparse(a) for a in call.args[2:]] == ["-1", "-1"]
            if name in REFUSABLE and not is_whole:
                yield call


def test_nothing_that_llama_cpp_may_refuse_is_asked_of_it_without_a_look_at_the_answer() -> None:
    for path in sorted((ROOT / "disco_daemon" / "engine").rglob("*.py")):
        for call in _ignored_refusals(ast.parse(path.read_text("utf-8"))):
            pytest.fail(f"{path}:{call.lineno}: {ast.unparse(call)} may be refused, and nobody looks")


@pytest.mark.parametrize(
    ("code_", "n"),
    [
        ("llama_cpp.llama_memory_seq_rm(memory, seq, n, -1)", 1),
        ("llama_cpp.llama_memory_seq_rm(memory, seq, -1, -1)", 0),
        ("if not llama_cpp.llama_memory_seq_rm(memory, seq, n, -1): pass", 0),
        ("model.restore(seq, data)", 1),
        ("done = model.restore(seq, data)", 0),
        ("llama_decode(context, batch)", 1),
    ],
)
def test_a_refusal_that_nobody_reads_is_seen(code_: str, n: int) -> None:
    assert len(list(_ignored_refusals(ast.parse(code_)))) == n


# --- packaging ----------------------------------------------------------------------------------------------------


def test_every_package_folder_is_in_pyproject() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    folders = {"disco_daemon": "disco_daemon", "profiles": "disco_daemon.profiles", "tui": "disco_tui"}
    found = {
        ".".join([name, *path.parent.relative_to(ROOT / folder).parts])
        for folder, name in folders.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert found == set(setuptools["packages"])
    assert setuptools["package-dir"] == {name: folder for folder, name in folders.items()}
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            assert path.with_name("__init__.py").exists(), path.parent


# --- documents ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", generate.PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (ROOT / name).read_text("utf-8") == generate.PAGES[name](), "run `make docs`"


@pytest.mark.parametrize(("name", "block"), generate.BLOCKS)
def test_a_generated_block_is_up_to_date(name: str, block: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert text == generate.replace_block(text, block, generate.BLOCKS[name, block]()), "run `make docs`"


def test_every_marked_block_is_generated() -> None:
    marked = {
        (f"docs/{name}", block)
        for name, text in PAGES.items()
        for block in re.findall(r"<!-- (?:generated|end): ([\w-]+) -->", text)
    }
    assert marked == set(generate.BLOCKS)


def test_the_settings_page_lists_every_setting_with_its_default() -> None:
    sections = sorted({key.partition(".")[0] for key in keys()})
    tables = [row for name in sections for row in rows(PAGES["reference/settings.md"], name)]
    shown = {code(key)[0]: code(default)[0] for key, default, *_ in tables}
    assert len(tables) == len(shown)
    defaults = Config()
    assert shown == {key: json.dumps(config.get_value(defaults, key)) for key in sorted(keys())}


def test_the_settings_page_names_every_policy() -> None:
    (row,) = [row for row in rows(PAGES["reference/settings.md"], "policy") if row[0] == "`policy.name`"]
    assert all(re.search(rf"(?:^|[ ,]){entry.name}\b.*{re.escape(entry.note)}", row[3]) for entry in REGISTRY)


def commands(parser: argparse.ArgumentParser, path: str = "") -> Iterator[str]:
    """Every command the parser knows, down to positional words it offers a choice of."""
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    worded = [a for a in parser._actions if not a.option_strings and a.choices is not None and a not in nested]
    for verbs in nested:
        shown = {verb.dest for verb in verbs._choices_actions}  # others only say where they went
        for name, child in verbs.choices.items():
            if name in shown:
                yield from commands(child, f"{path} {name}".strip())
    for action in worded:
        yield from (f"{path} {word}" for word in action.choices or ())
    if not nested and not worded:
        yield path


def test_the_page_of_commands_lists_every_verb() -> None:
    listed = rows(PAGES["reference/commands.md"], "Commands")
    shown = [re.match(r"disco((?: [a-z]+)+)", code(command)[0]) for command, _ in listed]
    assert sorted(m[1].strip() if m else "?" for m in shown) == sorted(commands(make_parser()))


def documented_commands() -> list[str]:
    """The lines of README and the pages that start with `disco`, in fenced blocks and in backticks."""
    texts = [text for name, text in PAGES.items() if name != "reference/cli.md"]  # that one is made of the parser
    fenced = [
        line
        for text in texts
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    inline = [
        words for text in texts for words in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    ]
    lines = [line.split(" #")[0].strip() for line in (*fenced, *inline)]
    return sorted({line for line in lines if line.startswith("disco ") and "…" not in line})


@cache
def whole_parser() -> argparse.ArgumentParser:
    """The parser of all verbs, which keeps nothing of what it has read: one is enough for all lines."""
    return make_parser()


@pytest.mark.parametrize("line", documented_commands())
def test_documented_command_is_understood(line: str) -> None:
    words = [word.strip("[]") for word in shlex.split(line)[1:]]
    try:
        whole_parser().parse_args(words)
    except SystemExit as e:
        if e.code != 0 or words not in (["--help"], ["--version"]):
            pytest.fail(f"`{line}` ends with status {e.code}")


def test_every_continuation_method_is_described_and_accepted(tmp_path: Path) -> None:
    described = tuple(code(name)[0] for name, *_ in rows(CONTINUING, "Methods"))
    assert described == CONTINUATIONS
    for name in CONTINUATIONS:
        assert config.set_values(tmp_path / "config.toml", {"server.continuation": name}).server.continuation == name


NUMBERS = {
    (module, name): (value, why) for module, rows_of in generate.numbers().items() for name, value, why in rows_of
}
BOUND = re.compile(r"(^|_)(MAX|MOST|LEAST|LONGEST|LIMIT|TIMEOUT|SPARE|MANY)(_|$)|_(S|BYTES)$")


def test_every_bound_in_the_code_says_why_and_is_documented() -> None:
    bounds = {key: why for key, (_, why) in NUMBERS.items() if BOUND.search(key[1])}
    assert len(bounds) > 250
    assert [key for key, why in bounds.items() if not why] == [], "a comment beside the number says why"
    listed = [line for line in PAGES["reference/bounds.md"].splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in listed]
    shown = {(code(module)[0], code(name)[0]): code(value)[0] for name, value, module, _ in cells}
    assert shown == {key: value for key, (value, why) in NUMBERS.items() if why}


@pytest.mark.parametrize(("module", "name"), [key for key in NUMBERS if not key[0].startswith("cli")])
def test_a_documented_number_is_the_one_in_the_code(module: str, name: str) -> None:
    path = ROOT / "disco_daemon" / module.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")
    value, _ = NUMBERS[module, name]
    assert re.search(rf"^\s*{name}(: .+)? = {re.escape(value)}(?=\s|$)", source, re.MULTILINE), f"{name} in {module}"


def test_a_number_is_found_with_the_comment_behind_it_or_above() -> None:
    lines = ("A_S = 1.5  # behind", "", "# above,", "# two lines", "BB = 2 * 3", "cc = 4", "DD = len('')")
    source = "\n".join((*lines, "class E:", "    FF: int = 1 << 2  # in a class"))
    found = [("A_S", "1.5", "behind"), ("BB", "2 * 3", "above, two lines"), ("FF", "1 << 2", "in a class")]
    assert list(generate._numbers_in(source)) == found


# --- names of modules, functions and files ------------------------------------------------------------------------

ROOMS = {code(name)[0] for name, _, _ in rows(PAGES["reference/rooms.md"], "Rooms")} - {"profiles", "disco_tui"}
PATH = [
    [name for _, names in rows(ARCHITECTURE, title) for name in code(names)]
    for title in ("Asked before anything is planned", "The way down")
]
STEPS = [name for steps in PATH for name in steps]
FILES = [path.relative_to(ROOT) for path in (ROOT / "disco_daemon").rglob("*.py")]  # a graph of imports takes a second
MODULES = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in FILES}


def scope(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Names that a module or a class defines, with the statement that does it."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            found |= {name.id: node for name in names}
    return found


@cache
def parsed(source: str) -> ast.Module:
    """A module's tree, which many names are looked up in."""
    return ast.parse(source)


def is_defined(name: str) -> bool:
    """Whether a dotted name, such as `room.module.Class.method`, leads to a module or to something in one."""
    parts = name.split(".")
    module = next((n for n in range(len(parts), 0, -1) if ".".join(["disco_daemon", *parts[:n]]) in MODULES), 0)
    if not module or module == len(parts):
        return bool(module)
    path = ROOT.joinpath("disco_daemon", *parts[:module])
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")
    names = scope(parsed(source).body)
    for part in parts[module:]:
        if part not in names:
            return False
        node = names[part]
        names = scope(node.body) if isinstance(node, ast.ClassDef) else {}
    return True


def test_a_dotted_name_is_looked_up_in_the_source() -> None:
    for name in ("errors", "engine.llama", "errors.RequestError", "answer.answer.Answer.on", "api.doors.ROUTES"):
        assert is_defined(name), name
    for name in ("nowhere", "errors.nothing", "answer.answer.Answer.nothing", "errors.RequestError.on.more"):
        assert not is_defined(name), name


@pytest.mark.parametrize("name", STEPS)
def test_each_step_of_a_request_is_a_function(name: str) -> None:
    assert name[name.rindex(".") + 1 :].islower()
    assert is_defined(name), f"{name}: mend it in docs/explain/architecture.md"


@pytest.mark.parametrize("steps", PATH, ids=["asked", "down"])
def test_a_request_enters_each_folder_once_but_for_the_conductors(steps: list[str]) -> None:
    stays = [folder for folder, _ in itertools.groupby(name.partition(".")[0] for name in steps)]
    entered = [folder for folder in stays if folder != "conductor"]
    assert sorted(entered) == sorted(set(entered))


def test_the_page_on_architecture_is_short() -> None:
    assert len(STEPS) <= 35
    assert len(ARCHITECTURE.splitlines()) <= 170
    assert len(rows(ARCHITECTURE, "Words of the machines")) <= 15
    assert len(rows(ARCHITECTURE, "Glossary")) <= 25


def test_the_reading_order_is_short() -> None:
    steps = re.findall(r"^\d\. .*$", ARCHITECTURE.split("## Reading order\n")[1].split("\n## ")[0], re.MULTILINE)
    files = [file for step in steps for file in code(step.partition(" (")[0])]  # in brackets: what to read beyond it
    assert len(files) >= 8
    assert sum((ROOT / "disco_daemon" / file).read_text("utf-8").count("\n") for file in files) <= 1_000


@pytest.mark.parametrize("name", PAGES)
def test_every_module_and_file_that_a_document_names_is_there(name: str) -> None:
    text = re.sub(r"```.*?```", "", PAGES[name], flags=re.DOTALL)
    sections = {key.partition(".")[0] for key in keys()}
    for said in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"[a-z]\w*(\.\w+)+", said) and said.partition(".")[0] in ROOMS and said not in keys():
            known_file = re.search(r"\.(py|md|toml|yaml|sh|csv|sqlite|lock|log|json|sock)$", said)
            assert known_file or is_defined(said) or said.partition(".")[0] in sections, said
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*(/|\.py)", said) and "/" in said:
            places = [root / said for root in (ROOT, ROOT / "disco_daemon")]
            if said.endswith("/NAME.py"):  # a file that does not exist yet
                places = [place.parent for place in places]
            users_own = name.startswith("howto/") and said.endswith("/")
            assert users_own or said.startswith("disco/") or any(place.exists() for place in places), said


CHANGES = rows(PAGES["CONTRIBUTING.md"], "Ten changes you might want to make")


@pytest.mark.parametrize("row", CHANGES, ids=lambda row: row[0])
def test_a_change_touches_at_most_three_files_and_they_are_there(row: list[str]) -> None:
    _, files, _ = row
    named = code(files)
    assert 1 <= len(named) <= 3
    for file in named:
        path = ROOT / file
        assert path.parent.is_dir() if path.name == "NAME.py" else path.is_file(), file


def test_there_are_ten_changes() -> None:
    assert len(CHANGES) == 10


def module_of(name: str) -> str:
    """The module of a dotted name: its longest beginning that is one."""
    parts = name.split(".")
    return next(
        ".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(["disco_daemon", *parts[:n]]) in MODULES
    )


WAYS = rows(PAGES["CONTRIBUTING.md"], "The map's test")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0])
def test_a_newcomer_gets_by_one_page_to_at_most_four_files(way: list[str]) -> None:
    _, page, named = way
    (link,) = re.findall(r"\]\((docs/[^)]+)\)", page)
    path = link.partition("#")[0]
    assert f"({path}" in PAGES["README.md"], "the README leads to the page"
    names = code(named)
    assert all(is_defined(name) for name in names), names
    files = {module_of(name) for name in names}
    assert 1 <= len(files) <= 4
    text = PAGES[path.removeprefix("docs/")]
    for file in files:
        said = (f"`{file}", f"{file.replace('.', '/')}.py`")
        assert any(words in text for words in said), f"{path} does not name {file}"


def test_the_map_is_tried_by_five_questions() -> None:
    assert len(WAYS) == 5


# --- what is promised -------------------------------------------------------------------------------------------------

KEPT = [line.strip("| ").split(" | ") for line in RELIABILITY.splitlines() if re.match(r"\| (\d|All)", line)]
PROMISES = [cells for cells in KEPT if cells[0][0].isdigit()]  # the others are of all of them


def test_each_promise_stands_once_and_in_order() -> None:
    names = [cells[0] for cells in PROMISES]
    assert len(names) == len(set(names)) > 50
    numbers = [int(name.partition(".")[0]) for name in names]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(1, max(numbers) + 1))


@pytest.mark.parametrize("cells", KEPT, ids=lambda cells: cells[0][:60])
def test_a_promise_names_tests_that_are_there(cells: list[str]) -> None:
    named = [name for name in code(cells[-1]) if name.startswith("tests/")]
    assert named, cells
    for name in named:
        file, _, test = name.partition("::")
        text = (ROOT / file).read_text("utf-8")
        assert not test or re.search(rf"^(async def|def|class) {test}\b|^{test} = ", text, re.MULTILINE), name


def test_a_worker_of_the_terminal_ui_is_given_a_function() -> None:
    """A coroutine that is made before its worker begins is never awaited if the window closes in between."""
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sorted((ROOT / "tui").rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "run_worker"
        if "(" in ast.unparse(call.args[0]).removeprefix("cast(")
    ]
    assert found == []
