"""Mutated input for everything that reads what strangers wrote: no crash, and nothing over a second.

    python benchmarks/faults/fuzz.py [--cases 50000] [--seed 1] [--target schema]

Each target mutates real samples: bytes flipped, cut, doubled, numbers made huge. What the target refuses with its own
error is right; any other exception is a crash. Printed are cases, crashes with the input that made them, the slowest
case, and the lines of the target's modules that the first cases went through. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import random
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import msgspec

from disco_daemon.api.anthropic.messages_shape import MessagesShape
from disco_daemon.api.control import control_requests
from disco_daemon.api.http import bodies
from disco_daemon.api.ollama.ollama_shape import ChatLines
from disco_daemon.api.openai import openai_request
from disco_daemon.api.openai.shapes import ChatShape
from disco_daemon.api.responses import responses_items, responses_request, responses_tools
from disco_daemon.api.responses.responses_shape import ResponsesShape
from disco_daemon.config import layers as config
from disco_daemon.endpoints import calls, chunks, stream
from disco_daemon.engine import constraints, framing, wire
from disco_daemon.engine.json_schema.reading import GrammarError
from disco_daemon.engine.llama import grammar, sandbox, template
from disco_daemon.errors import DiscoError
from disco_daemon.models import gguf
from disco_daemon.types import Outcome, Plan, Side, Token

LIMIT_S = 1.0  # of processor time
TRACED = 300  # cases; a traced one takes ten times as long
ODD = (b"", b"\x00", b"\xff", b"{", b"}", b"[", b'"', b"\\", b"9" * 30, b"-1", b"1e400", b"null", b"\n\n", b"data: ")
ODD_NUMBERS: tuple[Any, ...] = (0, -1, 2, 2000, 10**9, 2**63, 2**64, -(10**30), 1e308, True, None, "", [], {})
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\nHm\n</think>\nHello"}] * 2

SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 1]}}, "required": ["a"]},
    {"type": "array", "items": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 9}, {"type": "null"}]}},
    {"type": "string", "pattern": "^(ab|c{2,5})[a-z]+\\.(com|org)$"},
    {
        "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}},
        "allOf": [{"$ref": "#/$defs/n"}],
    },
    {"type": "array", "prefixItems": [{"const": 3}, {"format": "date"}], "minItems": 1, "maxItems": 4},
    {"type": ["string", "null"], "additionalProperties": {"format": "uuid", "type": "string"}},
]
TEMPLATES = [
    (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    (
        "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + loop.index0 * 2 %}"
        "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].strip() ~ ns.n }}{% endif %}{% endfor %}"
    ),
    (
        "{% macro say(x) %}{{ '%s' % x }}{{ [x] * 3 }}{% endmacro %}{{ say(messages | tojson) | replace('a', '') }}"
        "{% for i in range(3) %}{{ bos_token * i }}{{ strftime_now('%Y') }}{% endfor %}"
    ),
]
CONFIG = (
    b'schema = 1\n[server]\nbase_url = "http://127.0.0.1:1/v1"\nmodel = "m"\ninput_usd_per_mtok = 0.15\n'
    b'[device]\nn_ctx = 4096\nscheduler = "andes"\n[policy]\nbudget = 0.3\nname = "race"\n[history]\nmax_rows = 100\n'
)
SSE = (
    (
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"Hi"}}]}\n\n: alive\n\n'
        b'data: {"choices":[{"index":0,"delta":{"content":[{"type":"text","text":" you"}],"reasoning_content":"x"},'
        b'"logprobs":{"content":[{"token":"a","logprob":-0.1}]},"token_ids":[1,2],"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: {"error":{"message":"no"}}\n\ndata: [DONE]\n\n'
    ),
    (
        b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"a","type":"function","function":{"name":'
        b'"look","arguments":"{\\"a\\":"}},{"id":"b","function":{"name":"see","arguments":{"b":[1]}}}]}}]}\n\n'
        b'data: {"choices":[{"message":{"refusal":"no","function_call":{"name":"f","arguments":"{}"},"x":[1]}}]}\n\n'
        b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]},'
        b'"finish_reason":"tool_calls"}]}\n\ndata: [DONE]\n\n'
    ),
)
BODIES = [
    b'{"model":"disco","messages":[{"role":"user","content":"Hi"}],"stream":true,"max_tokens":9,"stop":["a"],"seed":1}',
    (
        b'{"model":"disco","messages":[{"role":"system","content":[{"type":"text","text":"x"}]},{"role":"assistant",'
        b'"content":"y","prefix":true}],"response_format":{"type":"json_object"},"disco":{"route":"device","pace_tps":4}}'
    ),
    b'{"model":"disco","prompt":[[1,2,3]],"echo":false,"temperature":0.5,"logit_bias":{}}',
    b'{"base_url":"http://127.0.0.1/v1","api_key":"k","pace_tps":3,"device.n_ctx":4096}',
    (
        b'{"model":"disco","input":[{"role":"developer","content":"x"},{"type":"reasoning","encrypted_content":"disco:SGk="'
        b'},{"type":"function_call","call_id":"a","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"a"'
        b',"output":[{"type":"input_text","text":"y"}]}],"tools":[{"type":"custom","name":"f"}],"tool_choice":"auto"}'
    ),
]
ASKED = responses_request.to_chat({"model": "m", "input": "Hi"})
WHOLE = Outcome("r", 5.0, "m", "race", Plan(0, 0), 7, Side.SERVER, "stop", None, 0.1, 2.0, 0, {}, (), 0.0, 0.0)
READ_BODIES = (bodies, openai_request, responses_request, responses_items, responses_tools, control_requests)


def bent(data: bytes, rng: random.Random) -> bytes:
    """Change some bytes."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        i, j = sorted(rng.randrange(len(made) + 1) for _ in range(2))
        match rng.randrange(6):
            case 0 if made:
                made[min(i, len(made) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                del made[i : min(j, i + 40)]
            case 2:
                made[i:i] = made[i : min(j, i + 200)] * rng.choice((1, 1, 2, 50))
            case 3:
                made[i:i] = rng.choice(ODD)
            case 4:
                made[i : i + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\x80", b"9999"))
            case _:
                del made[j:]
    return bytes(made[: 1 << 16])


def bent_json(value: Any, rng: random.Random) -> Any:
    """A JSON value some part of which is another."""
    if rng.random() < 0.12:
        return rng.choice((*ODD_NUMBERS, rng.choice(SCHEMAS)))
    if isinstance(value, dict):
        names = [*constraints._COUNTS, "pattern", "$ref", "anyOf", "items", "enum", "const"]
        more = {rng.choice(names): rng.choice((*ODD_NUMBERS, *SCHEMAS))} if rng.random() < 0.15 else {}
        return {k: bent_json(v, rng) for k, v in value.items() if rng.random() > 0.05} | more
    if isinstance(value, list):
        return [bent_json(v, rng) for v in value] * rng.choice((1, 1, 1, 2, 20))
    if isinstance(value, str) and rng.random() < 0.3:
        return bent(value.encode(), rng).decode("utf-8", "replace")
    return value


@dataclass(frozen=True)
class Target:
    """Something that reads: `read` raises one of `refusals` for what it does not take."""

    modules: tuple[ModuleType, ...]
    make: Callable[[random.Random], Any]
    read: Callable[[Any], object]
    refusals: tuple[type[Exception], ...]


def _read_template(source: str) -> None:
    made = template.ChatTemplate(source, "<s>", "</s>")
    made.try_out()
    made.segments(MESSAGES, ["<|im_end|>", "</s>"], {"enable_thinking": False})


def _frames() -> list[bytes]:
    messages: list[wire.Message] = [
        wire.Generate(
            id="g1", messages=MESSAGES, temperature=0.5, stop=("a",), response_format={"type": "json_object"}
        ),
        wire.Count(id="q1", messages=MESSAGES, ids=True),
        wire.AppendText(id="g1", text="é", go=True, ids=(1, 2)),
        wire.CancelRequest(id="g1"),
        wire.TextPiece(id="g1", text="text", n_tokens=2, ids=(5, 6)),
        wire.PrefillProgress(id="g1", n_past=4, n_prompt=9),
        wire.Failed(id="g1", reason="r", message="m", your_fault=True),
        wire.Load(model_path="m.gguf", n_ctx=512, n_threads=1, n_gpu_layers=None),
        wire.Loaded(
            model="m",
            n_ctx=512,
            n_cells=512,
            n_seqs=64,
            bytes_per_token=1,
            load_s=0.5,
            prefill_tps=100.0,
            adapters={"a": ""},
        ),
    ]
    return [framing.frame(message) for message in messages]


def _read_frames(data: bytes) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        while (body := await framing.read_async(reader)) is not None:
            for decode in (wire.decode_to_engine, wire.decode_from_engine):
                with suppress(msgspec.MsgspecError, ValueError):
                    decode(body)

    asyncio.run(read())


def _read_sse(data: bytes) -> None:
    async def body() -> AsyncIterator[bytes]:
        for i in range(0, len(data), 97):
            yield data[i : i + 97]

    async def read() -> None:
        reader, tokens = chunks.Reader(name="x"), []
        events = stream.EventStream(body(), stream.Patience(5, 5))
        async for event in events.objects():
            tokens += [token for choice in reader.choices(event) if (token := reader.token(choice)) is not None]
        try:
            tokens += [one for one in reader.ends(is_done=events.done) if isinstance(one, Token)]
        except chunks.CutError:
            return
        _write(tokens)

    asyncio.run(read())


def _write(tokens: list[Token]) -> None:
    """Write an answer in each API's shape, as a stream and as a body: what was read can be written."""
    for shape in (
        ChatShape("r", 1, "m"),
        MessagesShape("r", 1, "m"),
        ChatLines("r", 1, "m"),
        ResponsesShape("r", 1, "m", ASKED),
    ):
        for token in tokens:
            shape.token(token, None, first=token is tokens[0])
        shape.ending(WHOLE, include_usage=True)
        msgspec.json.encode(shape.body(tokens, {}, WHOLE))


def _read_bodies(data: bytes) -> None:
    for parse in (
        lambda given: openai_request.parse_chat(bodies.decoded(given)),
        lambda given: openai_request.parse_completion(bodies.decoded(given)),
        control_requests.parse_adjustment,
        control_requests.parse_server,
        lambda given: responses_request.to_chat(bodies.decoded(given)),
    ):
        with suppress(DiscoError):
            parse(data)


def _read_config(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(data)
        file.flush()
        config.load(Path(file.name), {})


def _header() -> bytes:
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    pairs = [
        text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
        text(b"llama.block_count") + struct.pack("<II", 4, 24),
        text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 9) + text(b"<unk>") * 9,
    ]
    tensor = text(b"w") + struct.pack("<IQQIQ", 2, 64, 100, 8, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + b"".join(pairs) + tensor + bytes(64)


# As `endpoints.server_errors` takes them: the answer breaks, and goes on elsewhere.
REFUSED_STREAM = (DiscoError, TypeError, ValueError, AttributeError, LookupError, stream.Endless)


def targets() -> dict[str, Target]:
    """Return all targets by name."""
    refused, header, frames = DiscoError, _header(), _frames()
    return {
        "schema": Target(
            (constraints, grammar),
            lambda rng: {"type": "json_schema", "json_schema": {"schema": bent_json(rng.choice(SCHEMAS), rng)}},
            grammar.grammar_of, (GrammarError,),
        ),
        "template": Target(
            (template, sandbox), lambda rng: bent(rng.choice(TEMPLATES).encode(), rng).decode("utf-8", "replace"),
            _read_template, (template.TemplateError,),
        ),
        "engine-protocol": Target(
            (wire,), lambda rng: bent(b"".join(rng.sample(frames, 3)), rng), _read_frames,
            (ValueError, msgspec.MsgspecError),
        ),
        "gguf": Target((gguf,), lambda rng: bent(header, rng), gguf.read_header, (ValueError,)),
        "config": Target((config,), lambda rng: bent(CONFIG, rng), _read_config, (refused,)),
        "sse": Target((stream, chunks, calls), lambda rng: bent(rng.choice(SSE), rng), _read_sse, REFUSED_STREAM),
        "http-body": Target(READ_BODIES, lambda rng: bent(rng.choice(BODIES), rng), _read_bodies, (refused,)),
    }  # fmt: skip


class Lines:
    """Which lines of some modules are gone through."""

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        self._all: dict[str, set[int]] = {}
        for module in modules:
            path = str(module.__file__)
            whole = compile(inspect.getsource(module), path, "exec")
            self._all[path] = {line for code in _codes(whole) for _, _, line in code.co_lines() if line}
            self._all[path] -= {line for _, _, line in whole.co_lines() if line}
        self.seen: set[tuple[str, int]] = set()

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        """Note a line that runs, for sys.settrace."""
        del arg
        if (path := frame.f_code.co_filename) not in self._all:
            return None
        if event == "line":
            self.seen.add((path, frame.f_lineno))
        return self.trace

    @property
    def share(self) -> float:
        """The share of the lines inside functions that have run."""
        n = sum(map(len, self._all.values()))
        return sum(line in self._all[path] for path, line in self.seen) / n if n else 1.0


def _codes(code: CodeType) -> Iterable[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def run(target: Target, cases: int, seed: int, n_traced: int = TRACED) -> dict[str, Any]:
    """Feed a target, and return the result."""
    rng, lines = random.Random(seed), Lines(target.modules)
    slowest_s, crashes, slow = 0.0, [], 0
    for i in range(cases):
        given = target.make(rng)
        traced = i < n_traced
        if traced:
            sys.settrace(lines.trace)
        began = time.process_time()
        try:
            target.read(given)
        except target.refusals:
            pass
        except Exception as e:
            crashes.append(f"{type(e).__name__}: {str(e)[:100]} for {str(given)[:300]!r}")
        finally:
            sys.settrace(None)
        if not traced:
            took_s = time.process_time() - began
            slowest_s = max(slowest_s, took_s)
            slow += took_s > LIMIT_S
    return {
        "cases": cases, "crashes": len(crashes), "slow": slow, "slowest_ms": round(slowest_s * 1e3, 1),
        "lines": round(lines.share, 3), "first_crashes": crashes[:5],
    }  # fmt: skip


def main() -> None:
    """Run the targets, and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", choices=sorted(targets()), action="append")
    args = parser.parse_args()
    results = {}
    for name, target in targets().items():
        if not args.target or name in args.target:
            found = results[name] = run(target, args.cases, args.seed)
            print(
                f"{name:16} {found['cases']:7} cases, {found['crashes']} crashes, {found['slow']} over {LIMIT_S:g} s, "
                f"slowest {found['slowest_ms']:.1f} ms, {found['lines']:.0%} of the lines", flush=True,
            )  # fmt: skip
            for crash in found["first_crashes"]:
                print(f"    {crash}", flush=True)
    print(json.dumps({"seed": args.seed, "targets": results}))
    sys.exit(any(found["crashes"] or found["slow"] for found in results.values()))


if __name__ == "__main__":
    main()
