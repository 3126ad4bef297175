"""Recorded streams of many servers, cut anywhere and disturbed a little, against the same streams as they are.

    python -m benchmarks.relay.server_streams [--cuttings 10000] [--seed 1] [--floods] [--json]

Each stream of tests/fixtures/recorded/streams goes through the server's endpoint and is written in every shape, as a
stream and as a body. Then it comes in other pieces of bytes: nothing may differ by a byte. With one odd event in it,
and with events changed about where the protocol allows that, no body may differ. A difference is printed with the seed
of its case.

With `--floods` it measures instead how long others wait while a server floods: `turn_ms` is the processor's time of the
longest turn of the loop meanwhile, for each of tests/fixtures/floods.py and for a whole answer in one chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disco_daemon.api.anthropic.messages_shape import MessagesShape
from disco_daemon.api.ollama.ollama_shape import ChatLines
from disco_daemon.api.openai.shapes import AnswerShape, ChatShape, TextShape
from disco_daemon.api.responses.responses_request import ResponsesAsked
from disco_daemon.api.responses.responses_shape import ResponsesShape
from disco_daemon.bench.command import Figures, at_least, print_figures, run_measurement
from disco_daemon.endpoints.server import Server, ServerConfig
from disco_daemon.errors import EndpointError
from disco_daemon.types import Finish, GenerationRequest, Outcome, Plan, Side, Token, Usage
from tests.fixtures.floods import FLOODS, OPEN, much

from ..command import run_script

FOLDER = Path(__file__).parents[2] / "tests/fixtures/recorded/streams"
MAX_SHOWN = 5  # differences that are printed
MAX_REQUEST = 65536  # bytes of a request here
MAX_FLOOD_S = 5.0  # that a flood is listened to
WHOLE_WORDS = 50_000  # of an answer in one chunk
_ASKED = GenerationRequest("r", ({"role": "user", "content": "x"},))
_BETWEEN = re.compile(rb"\r\n\r\n|\n\n|\r\r")


@dataclass(frozen=True)
class Answer:
    """What a server's endpoint made of a stream: tokens and the reason for its end, or for its failure."""

    tokens: tuple[Token, ...]
    finish: str | None = None
    error: EndpointError | None = None

    @property
    def outcome(self) -> Outcome:
        """What the shapes get to know of it."""
        told = (0.1, 2.0, 0, {Side.SERVER: 5}, (), 0.0, 0.0)
        return Outcome("r", 5.0, "m", "race", Plan(0, 0), 7, Side.SERVER, self.finish, None, *told)

    def calls(self) -> list[tuple[str, str]]:
        """The calls: names and arguments, in order."""
        found: dict[int, tuple[str, str]] = {}
        for token in self.tokens:
            for piece in token.delta.calls if token.delta else ():
                name, arguments = found.get(piece.number, (piece.name, ""))
                found[piece.number] = name, arguments + piece.arguments
        return [found[number] for number in sorted(found)]


class _Wire:
    """In place of the HTTP client: a body that comes in these pieces."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    async def stream(self, path: str, body: object, stack: AsyncExitStack) -> AsyncIterator[bytes]:
        """Return the body."""
        del path, body, stack
        return self._body()

    async def _body(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


async def read(pieces: Sequence[bytes], n: int = 1, usage: Usage | None = None) -> Answer:
    """Return what the endpoint of a server makes of a body that comes in pieces; it is billed in `usage`."""
    server = Server(ServerConfig("http://127.0.0.1:9/v1", "m", ""))
    server._client = _Wire(pieces)  # type: ignore[assignment]
    request = GenerationRequest("r", ({"role": "user", "content": "Hi"},), extra={"n": n} if n > 1 else {})
    tokens: list[Token] = []
    try:
        async for event in server.generate(request, Usage() if usage is None else usage):
            if isinstance(event, Finish):
                return Answer(tuple(tokens), event.reason)
            if isinstance(event, Token):
                tokens.append(event)
    except EndpointError as e:
        return Answer(tuple(tokens), error=e)
    raise AssertionError("a stream without an end")


def shapes() -> dict[str, AnswerShape]:
    """Return the shapes of all APIs, none of them used."""
    return {
        "chat": ChatShape("r", 1, "m"), "messages": MessagesShape("r", 1, "m"),
        "responses": ResponsesShape("r", 1, "m", ResponsesAsked({})), "ollama": ChatLines("r", 1, "m"),
        "completions": TextShape("r", 1, "m"),
    }  # fmt: skip


def streamed(answer: Answer) -> dict[str, bytes]:
    """Return an answer as each API streams it."""
    found = {}
    for name, shape in shapes().items():
        if name != "completions" or _is_text(answer):
            sent = [shape.token(token, None, first=i == 0) for i, token in enumerate(answer.tokens)]
            end = (
                shape.ending(answer.outcome, include_usage=True) if answer.error is None else shape.failed(answer.error)
            )
            found[name] = b"".join([*sent, end])
    return found


def bodies(answer: Answer) -> dict[str, str]:
    """Return an answer as each API has it whole; in place of one that failed, what the reader has got of it."""
    found = {name: shape.body(answer.tokens, {}, answer.outcome) for name, shape in shapes().items()
             if name != "completions" or _is_text(answer)}  # fmt: skip
    reason = "" if answer.error is None else answer.error.reason
    return {name: json.dumps([reason, body]) for name, body in found.items()}


def _is_text(answer: Answer) -> bool:
    return all(token.delta is None and (token.logprobs is None) for token in answer.tokens)


# --- what is done to a stream ----------------------------------------------------------------------------------------

_DELTAS: tuple[Any, ...] = (
    None, {}, {"role": "assistant"}, {"content": ""}, {"content": None, "role": None}, {"content": []},
    {"tool_calls": None}, {"tool_calls": []}, {"tool_calls": [None]}, {"tool_calls": [{}]}, {"function_call": None},
    {"reasoning_content": ""}, {"reasoning": None}, {"refusal": None}, {"refusal": ""}, {"audio": None},
)  # fmt: skip
_CHUNKS: tuple[Any, ...] = (
    {"choices": [None]}, {"choices": []}, {"choices": None}, {}, {"usage": None},
    {"object": "ping", "x": [1, {"y": 2}]},
    {"choices": [{"index": 1, "delta": {"content": "nobody asked"}}]},
    {"choices": [{"index": 2, "delta": {"content": "for this"}, "finish_reason": "stop"}]},
    *({"choices": [{"index": 0, "delta": delta}]} for delta in _DELTAS),
    *({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]} for reason in ("null", "", None, "None")),
    {"choices": [{"index": 0, "delta": {}, "logprobs": {"content": None}}]},
    {"choices": [{"delta": {"content": ""}, "logprobs": {"content": [None, {"token": 3}]}}]},
)  # fmt: skip
ODD = (
    b": comment", b":", b"event: message", b"id: 7", b"retry: 1000", b"data:", b"data: null", b"junk", b"data : {}",
    b'data: {"choices":[],"x":NaN,"y":-Infinity}', b'data: {"choices":[],"x":"\xe9"}',
    b'data: {"choices":[],"x":"\\ud83d"}', b'data: {\ndata: "choices": []\ndata: }',
    *(b"data: " + json.dumps(chunk).encode() for chunk in _CHUNKS),
)  # fmt: skip


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    """Cut bytes into pieces: a few, many, or each by itself."""
    n = rng.choice((1, 2, 3, 9, 40, len(data)))
    ends = sorted({rng.randrange(1, len(data)) for _ in range(n)}) if n < len(data) else range(1, len(data))
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


def disturbed(data: bytes, rng: random.Random) -> bytes:
    """Put one odd event, or a mark of the order of bytes, between two events."""
    ends = [found.end() for found in _BETWEEN.finditer(data)]
    if not ends or rng.random() < 0.05:
        return b"\xef\xbb\xbf" + data
    at = rng.choice([0, *ends[:-1]])
    between = _BETWEEN.search(data)
    assert between is not None
    odd = rng.choice(ODD).replace(b"\n", between[0][: len(between[0]) // 2])
    return data[:at] + odd + between[0] + data[at:]


def reordered(data: bytes, rng: random.Random) -> bytes:
    """Change two neighbouring events about, where neither says anything of what the other one does."""
    between = _BETWEEN.search(data)
    if between is None:
        return data
    events = data.split(between[0])
    places = [i for i in range(len(events) - 1) if _is_free(events[i], events[i + 1])]
    for i in rng.sample(places, min(len(places), rng.randrange(1, 5))):
        if _is_free(events[i], events[i + 1]):
            events[i : i + 2] = events[i + 1], events[i]
    return between[0].join(events)


def _is_free(first: bytes, second: bytes) -> bool:
    """Whether two events may change places: a comment, or pieces of two calls."""
    if first.startswith(b":") or second.startswith(b":"):
        return b"[DONE]" not in first + second
    return len({*_pieces_of(first), *_pieces_of(second)}) == 2 == len([*_pieces_of(first), *_pieces_of(second)])


def _pieces_of(event: bytes) -> Iterator[int]:
    """Yield the indexes of calls of which an event has a piece that is not the first, if it says nothing else."""
    try:
        (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
    except (ValueError, KeyError, TypeError):
        return
    delta = choice.get("delta") or {}
    if delta.keys() == {"tool_calls"} and not choice.get("finish_reason"):
        for call in delta["tool_calls"]:
            if "id" not in call and "index" in call:
                yield call["index"]


# --- the run ---------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What came of all cases."""

    differences: list[str] = field(default_factory=list)
    n: Counter[str] = field(default_factory=Counter)

    def compare(self, case: str, shape_sets: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Note where two writings of an answer differ."""
        for these, those in shape_sets:
            self.differences += [f"{case}: {name}" for name in these if these[name] != those.get(name)]


def streams() -> dict[str, bytes]:
    """Return all recorded streams by the names of their files."""
    return {
        path.name: path.read_bytes()
        for path in sorted(FOLDER.iterdir())
        if path.suffix in (".sse", ".json") and path.name != "expected.json"
    }


async def run(cuttings: int, seed: int) -> Figures:
    """Return what came of so many cases; each stream has its turn."""
    found, recorded, began = Found(), streams(), time.monotonic()
    plain = {name: await read([data]) for name, data in recorded.items()}
    as_sent = {name: streamed(answer) for name, answer in plain.items()}
    as_whole = {name: bodies(answer) for name, answer in plain.items()}
    names = list(recorded)
    for case in range(cuttings):
        rng, name = random.Random(f"{seed}/{case}"), names[case % len(names)]
        data, kind = recorded[name], ("cut", "odd", "order")[case // len(names) % 3]
        if kind != "cut":
            data = disturbed(data, rng) if kind == "odd" else reordered(data, rng)
        answer = await read(cut(data, rng))
        found.n[kind] += 1
        pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [(as_whole[name], bodies(answer))]
        if kind == "cut":
            pairs.append((as_sent[name], streamed(answer)))
        found.compare(f"{name}, {kind}, case {case} of seed {seed}", pairs)
    for line in found.differences[:MAX_SHOWN]:
        print(line, file=sys.stderr)
    return {
        "streams": len(recorded), "providers": len({name.split("-")[0] for name in recorded}), "shapes": len(shapes()),
        "cuttings": sum(found.n.values()), "kinds": dict(found.n), "differences": len(found.differences),
        "seconds": round(time.monotonic() - began, 1), "seed": seed,
    }  # fmt: skip


# --- floods -----------------------------------------------------------------------------------------------------------


def pour(listener: socket.socket, head: bytes, flood: bytes) -> None:
    """Answer one request with a flood, for as long as somebody reads."""
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):
        connection.recv(MAX_REQUEST)
        connection.sendall(head)
        while flood:
            connection.sendall(flood)


async def longest_turn_ms(head: bytes, flood: bytes) -> float:
    """Return the longest turn of the loop while a server's flood is read, ms of the processor."""
    longest, last = 0.0, time.thread_time()

    async def turns() -> None:
        nonlocal longest, last
        while True:
            now = time.thread_time()
            longest, last = max(longest, now - last), now
            await asyncio.sleep(0)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        pouring = threading.Thread(target=pour, args=(listener, head, flood), daemon=True)
        pouring.start()
        server = Server(ServerConfig(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "m", "k"))
        await server.start()
        counting = asyncio.create_task(turns())
        with contextlib.suppress(EndpointError, TimeoutError):
            async with asyncio.timeout(MAX_FLOOD_S), contextlib.aclosing(server.generate(_ASKED, Usage())) as events:
                async for _ in events:
                    pass
        counting.cancel()
        await server.close()
    return longest * 1e3


async def run_floods() -> Figures:
    """Return the longest turn under each flood."""
    text = json.dumps({"choices": [{"delta": {"content": "word " * WHOLE_WORDS}, "finish_reason": "stop"}]})
    cases = {name: (head, much(flood)) for name, (head, flood, _) in FLOODS.items()}
    cases["a whole answer in one chunk"] = OPEN + f"data: {text}\n\n".encode(), b""
    return {"turn_ms": {name: round(await longest_turn_ms(*case), 2) for name, case in cases.items()}}


def _floods_table(figures: Figures) -> str:
    return "\n".join(f"{name:40} {turn_ms:8.2f} ms" for name, turn_ms in figures["turn_ms"].items())


def _table(figures: Figures) -> str:
    return (
        f"{figures['streams']} streams of {figures['providers']} providers, {figures['cuttings']} times in other "
        f"pieces, over {figures['shapes']} shapes: {figures['differences']} differences"
    )


def main() -> int:
    """Run it, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuttings", type=at_least(1), default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--floods", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.floods:
        return print_figures(run_measurement(run_floods()), _floods_table, as_json=args.json)
    figures = run_measurement(run(args.cuttings, args.seed))
    code = print_figures(figures, _table, as_json=args.json)
    return code or int(bool(figures and figures["differences"]))


if __name__ == "__main__":
    sys.exit(run_script(main))
