"""Mutated requests over HTTP at a real daemon: nothing may crash it, be a 500, or take longer than a second.

`python benchmarks/faults/fuzz_http.py [--requests 20000] [--seed 1] [--clients 8]`; the last line is JSON. Real
requests are mutated: a value of their JSON, bytes of their body, or bytes of the whole message; the rest of a message
that promises more never comes. The daemon's server answers at once with one token, so that what is slow is the daemon.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tomlkit

from disco_daemon.api.llama_server.rerank_routes import PATHS as RERANK
from disco_daemon.bench.child import child
from disco_daemon.bench.loopback import LoopbackServer

MOST_S = 1.0
PATIENCE_S = 30.0
CHAT: dict[str, Any] = {
    "model": "disco", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "max_tokens": 1, "temperature": 0.5, "top_p": 1, "stop": ["x"], "stream": True, "seed": 1, "n": 1,
    "stream_options": {"include_usage": True}, "disco": {"delivery": "off", "pace_tps": 9.5}, "logit_bias": {"1": 2},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "model": "disco", "instructions": "Be brief.", "max_output_tokens": 1, "stream": True, "tool_choice": "auto",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}, {"type": "custom", "name": "g"}],
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"},
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": "disco", "max_tokens": 1, "stream": True, "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "ok"}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024}, "stop_sequences": ["x"],
}  # fmt: skip
OLLAMA: dict[str, Any] = {
    "model": "disco:latest", "options": {"num_predict": 1, "temperature": 0.5, "top_k": 40.0, "num_ctx": 4096},
    "messages": [
        {"role": "user", "content": "Hi", "images": []},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "tool_name": "f", "content": "ok"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "format": {"type": "object"}, "think": False, "keep_alive": "5m", "stream": True,
}  # fmt: skip
GENERATE: dict[str, Any] = {
    "model": "disco", "prompt": "Hi", "system": "Be brief.", "images": [], "raw": False, "format": "json",
    "options": {"num_predict": 1, "stop": ["x"]}, "keep_alive": 0.5, "context": [1],
}  # fmt: skip
FILL: dict[str, Any] = {
    "model": "disco", "prompt": "def f(", "suffix": "return 1", "max_tokens": 1, "temperature": 0.5, "stop": ["x"],
    "stream": False, "seed": 1,
}  # fmt: skip
INFILL: dict[str, Any] = {
    "input_prefix": "def f(", "input_suffix": "return 1", "prompt": "a", "n_predict": 1, "temperature": 0.5,
    "input_extra": [{"filename": "a.py", "text": "x = 1"}], "n_indent": 0, "t_max_predict_ms": 500, "stop": ["x"],
    "stream": False, "samplers": ["top_k"], "cache_prompt": True, "top_k": 40,
}  # fmt: skip
REAL: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/completions", {"model": "disco", "prompt": "Hi", "max_tokens": 1, "echo": False}),
    ("POST", "/v1/completions", FILL),
    ("POST", "/infill", INFILL),
    ("POST", "/v1/embeddings", {"model": "disco", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 8}),
    *(
        ("POST", path, {"model": "disco", "query": "a", "documents": ["a", {"text": "b"}], "top_n": 1})
        for path in RERANK
    ),
    ("POST", "/v1/responses", RESPONSES),
    ("POST", "/v1/responses/input_tokens", RESPONSES),
    ("POST", "/v1/messages", MESSAGES),
    ("POST", "/v1/messages/count_tokens", MESSAGES),
    ("POST", "/api/chat", OLLAMA),
    ("POST", "/api/generate", GENERATE),
    ("POST", "/api/embed", {"model": "disco", "input": ["a", "b"], "truncate": True, "dimensions": 8}),
    ("POST", "/api/embeddings", {"model": "disco", "prompt": "a"}),
    ("POST", "/api/show", {"model": "disco"}),
    ("POST", "/api/pull", {"model": "disco"}),
    ("GET", "/api/tags", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/disco", None),
    ("GET", "/disco/v1/plan?tokens=10&waited=0", None),
    ("GET", "/disco/v1/whatif?rate=0.3&budget=0.5&alpha=0.1", None),
    ("GET", "/disco/v1/history?limit=10", None),
    ("GET", "/disco/v1/trace/latest", None),
    ("POST", "/disco/v1/answers/req-0", {"pace_tps": 4, "delivery": "paced"}),
    ("PATCH", "/disco/v1/settings", {"no.such": 1}),
    ("GET", "/health", None),
)
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 2**31, 2**63, 2**64, -(2**70), 1e308, "", "\0", "\ud83d", "é" * 50, "a" * 20_000, [], {},
    [[]], {"": None}, [None] * 100, "[" * 500, "$ref", {"$ref": "#"}, "\x1b]52;c;AAAA\x07", "../../etc/passwd", "nan",
)  # fmt: skip
DULL = (b"\0", b"\xff", b"\r\n", b"{", b"}", b"[", b'"', b"\\u0000", b"1e999", b"9" * 30, b" " * 100, b"\r\n\r\n", b":")


def mutate(value: Any, rng: random.Random) -> Any:
    """Replace, remove or double one place of a JSON value."""
    value = copy.deepcopy(value)
    at = value
    while isinstance(at, dict | list) and at:
        key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.7:
            at = at[key]
            continue
        what = rng.random()
        if what < 0.75:
            at[key] = rng.choice(ODD)
        elif what < 0.9:
            del at[key]
        elif isinstance(at, dict):
            at[str(rng.choice(ODD))[:50]] = at[key]
        else:
            at.append(at[key])
        break
    return value


def scramble(data: bytes, rng: random.Random) -> bytes:
    """Change, insert or remove some bytes."""
    for _ in range(rng.randint(1, 4)):
        i, j = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        j = min(j, i + 20)
        data = data[:i] + rng.choice((rng.choice(DULL), rng.randbytes(3), b"", data[i:j] * 2)) + data[j:]
    return data


def request(rng: random.Random) -> tuple[bytes, bool]:
    """One mutated message, and whether it was left whole as HTTP."""
    method, path, document = rng.choice(REAL)
    way = rng.random()
    body = b"" if document is None else json.dumps(mutate(document, rng) if way < 0.7 else document).encode()
    if body and 0.7 <= way < 0.85:
        body = scramble(body, rng)
    if document is None and way < 0.5:
        path = "/" + "".join(chr(c) for c in scramble(path[1:].encode(), rng) if 33 <= c < 127)
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    sent = head.encode() + (b"Content-Length: %d\r\n" % len(body) if body else b"") + b"\r\n" + body
    return (scramble(sent, rng), False) if way >= 0.85 else (sent, True)


class Fuzz:
    """A run of mutated messages, and its results so far."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.statuses: Counter[str] = Counter()
        self.worst: tuple[float, bytes] = (0.0, b"")
        self.wrong: list[tuple[str, bytes]] = []

    async def send(self, sent: bytes, *, whole: bool) -> None:
        """Send one, and see what comes back."""
        begun = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        said = b""
        try:
            async with asyncio.timeout(PATIENCE_S):
                writer.write(sent)
                if not whole:
                    writer.write_eof()
                said = await reader.read()
        except ConnectionError:
            said = b"HTTP/1.1 reset"
        except TimeoutError:
            self.wrong.append(("nothing came", sent))
        finally:
            writer.close()
        took_s = time.perf_counter() - begun
        self.worst = max(self.worst, (took_s, sent))
        status = said.split(b" ", 2)[1].decode("latin-1") if said.startswith(b"HTTP/1.1 ") else "closed"
        self.statuses[status] += 1
        if status == "500" or (whole and not status.isdigit()) or took_s > MOST_S:
            self.wrong.append((f"{status} after {took_s:.2f} s", sent))


async def fuzz_daemon(n: int, seed: int, clients: int) -> dict[str, Any]:
    """Send `n` messages to a daemon, and return the results."""
    with tempfile.TemporaryDirectory(prefix="disco-fuzz-") as name:
        folder = Path(name)
        async with LoopbackServer(tokens=1) as server:
            settings = {"server": {"base_url": server.url, "model": "loopback", "probe": False}}
            (folder / "config.toml").write_text(tomlkit.dumps(settings))
            argv = [sys.executable, "-P", "-m", "disco_daemon.cli.main", "up", "--port", "0", "--json"]
            argv += [
                "--until-eof",
                "--no-device",
                "--config",
                str(folder / "config.toml"),
                "--history",
                str(folder / "history.sqlite"),
            ]
            async with child(argv, folder, "daemon") as url:
                fuzz, rng = Fuzz(urlsplit(url).port or 0), random.Random(seed)
                messages = iter([request(rng) for _ in range(n)])

                async def client() -> None:
                    for sent, whole in messages:
                        await fuzz.send(sent, whole=whole)

                begun = time.perf_counter()
                await asyncio.gather(*(client() for _ in range(clients)))
                took_s = time.perf_counter() - begun
                await fuzz.send(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n", whole=True)
                log = (folder / "daemon.log").read_text()
    for why, sent in fuzz.wrong[:5]:
        print(why, sent[:400])
    faults = log.count("Traceback")
    if faults:
        print(log[log.index("Traceback") :][:3000])
    return {
        "ok": not fuzz.wrong and not faults,
        "requests": n,
        "seed": seed,
        "statuses": dict(sorted(fuzz.statuses.items())),
        "wrong": len(fuzz.wrong),
        "tracebacks": faults,
        "worst_s": round(fuzz.worst[0], 3),
        "took_s": round(took_s, 1),
        "log_lines": log.count("\n"),
    }


def main() -> int:
    """Fuzz, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    args = parser.parse_args()
    found = asyncio.run(fuzz_daemon(args.requests, args.seed, args.clients))
    print(json.dumps(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
