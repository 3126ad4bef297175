"""Bytes of strangers become text whatever they are: no template, header or frame ends a process by not being UTF-8."""

from __future__ import annotations

import ast
import codecs
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from disco_daemon.clock import SystemClock
from disco_daemon.engine import framing, wire
from disco_daemon.engine.inbox import EngineGone
from disco_daemon.engine.llama.template import ChatTemplate, TemplateError
from disco_daemon.engine.supervisor import Engine
from tests.fixtures.weights import random_bytes_speaker

ROOT = Path(__file__).parents[3]
HI = [{"role": "user", "content": "Hi"}]
# What these return is ASCII, or was written by ourselves just there.
OURS = {"encode", "b64encode", "b32encode", "dumps", "public_bytes", "private_bytes"}
CAUGHT = {"UnicodeDecodeError", "ValueError", "Exception"}
KNOWN = {
    "disco_daemon/link/trust/pairing_code.py: _unpack_host": "who reads a code catches its ValueError",
    "disco_daemon/engine/llama/ggml.py: packing": "names of types that llama.cpp itself has, in ASCII",
}


def strict_decodes(path: Path) -> Iterator[str]:
    """Yield the functions in which bytes become text, where bytes that are none raise an error that nobody awaits."""
    name = str(path.relative_to(ROOT))

    def visit(node: ast.AST, function: str, *, caught: bool) -> Iterator[str]:
        match node:
            case ast.FunctionDef(name=inner) | ast.AsyncFunctionDef(name=inner):
                function, caught = inner, False
            case ast.Try(body=body, handlers=handlers):
                types = [ast.unparse(handler.type) if handler.type else "Exception" for handler in handlers]
                catches = caught or any(word.strip("() ") in CAUGHT for one in types for word in one.split(","))
                for part in body:
                    yield from visit(part, function, caught=catches)
                for other in (*handlers, *node.orelse, *node.finalbody):
                    yield from visit(other, function, caught=caught)
                return
            case ast.Call(func=ast.Attribute(value=whose, attr="decode"), args=args, keywords=keywords):
                is_ours = isinstance(whose, ast.Call) and ast.unparse(whose.func).split(".")[-1] in OURS
                is_bytes = not args or _names_encoding(args[0])
                if is_bytes and not is_ours and not caught and len(args) < 2 and not keywords:
                    yield f"{name}: {function}"
            case ast.Call(func=ast.Call(func=ast.Attribute(attr="getincrementaldecoder")), args=[]):
                yield f"{name}: {function}"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function, caught=caught)

    yield from visit(ast.parse(path.read_text("utf-8")), "", caught=False)


def _names_encoding(node: ast.expr) -> bool:
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        return False
    codecs.lookup(node.value)
    return True


def test_bytes_become_text_with_a_word_on_those_that_are_none() -> None:
    found = {where for folder in ("disco_daemon", "tui") for path in (ROOT / folder).rglob("*.py")
             for where in strict_decodes(path)}  # fmt: skip
    assert found == set(KNOWN)


@pytest.mark.parametrize(
    ("literal", "expected"),
    [(r"'\ud83d\ude00'", "\N{GRINNING FACE}"), (r"'a\ude00'", "a\ufffd"), (r"'\ud83d!'", "\ufffd!")],
)
def test_halves_of_characters_that_a_template_spells_are_joined_or_replaced(literal: str, expected: str) -> None:
    assert ChatTemplate(f"{{{{ {literal} }}}}", "", "").render(HI) == expected
    with pytest.raises(TemplateError, match=re.escape(expected)) as refused:
        ChatTemplate(f"{{{{ raise_exception({literal}) }}}}", "", "").render(HI)
    assert framing.frame(wire.refusal("1", refused.value)), "the refusal can be sent"


async def test_a_model_whose_path_is_no_utf_8_is_named(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.gguf"))
    shutil.move(random_bytes_speaker(tmp_path / "sound.gguf", 256), path)
    engine = Engine(wire.Load(model_path=str(path), n_ctx=256, n_threads=1), SystemClock())
    engine.start()
    try:
        with pytest.raises(EngineGone, match="cannot be sent"):
            await engine.ready(60.0)
    finally:
        await engine.close()
