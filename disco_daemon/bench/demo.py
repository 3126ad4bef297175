"""What disco is for, in half a minute: two races, a saving, a server that dies, and either side alone beside it.

This machine computes. The server is played, so that no second engine takes the first one's processor: its times are
recorded ones of a real service, one draw of them a question, the same for disco and for the server alone. Its words are
recorded ones of the very model that answers here (`python -m tests.fixtures.record_demo`).
"""

from __future__ import annotations

import asyncio
import csv
import itertools
import statistics
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import tomlkit
from aiohttp import web
from openai import APIError, AsyncOpenAI, DefaultAsyncHttpxClient

from ..client.amounts import dollars
from ..models.default import fetch_default_model
from ..system.processors import n_cores
from ..system.program import verb
from .child import BenchError, child
from .loopback import LoopbackServer
from .script import Exchange, text_of

SERVICE, TRACE = "OpenAI's gpt-3.5-turbo", "gpt-3.5-turbo.csv"
SOURCE = "measured by thefastest.ai, April to May 2024, MIT"
PRICES = {"input_usd_per_mtok": 0.5, "output_usd_per_mtok": 1.5}  # as OpenAI lists it: profiles/servers/openai.toml
SHORT, LONG = "What is the capital of France?", "Summarise this text in one sentence."
DEAR, KILLED = "Why do we dream?", "What is a rainbow?"
# Of the answers, tokens. The first two end just there and count as cut: by two whole short ones a daemon that knows no
# others would expect the third to be as short, and not worth a move.
LENGTHS = {SHORT: 7, LONG: 48, DEAR: 160, KILLED: 96}
SYSTEM = "You are a helpful assistant."  # of the answers that are shown to their end
MARKS = {"device": "◆", "server": "◇"}
TIMES = ("ttft_s", "device_ttft_s", "server_ttft_s")  # of disco, and of either side alone
ALONE_TOKENS = 2  # of the answers that are only timed
KILL_AFTER = 14  # pieces of an answer: in the middle of its first sentence
# A text that this machine reads for LONG_S; the service takes half a second. One that it reads in DEAR_S leaves it
# enough of the answer to take over.
LONG_S, DEAR_S, N_WORDS = 1.2, 0.4, (60, 2000)
N_LEAST, N_AROUND = 17, 40  # words of the latter; what the rest of that conversation is worth of words
ROUNDS, ROUNDS_S = (
    (2, 5),
    12.0,
)  # at least and at most, and none begins after so long: the demo is to take half a minute
REQUEST_TIMEOUT_S = 120.0  # an answer on a machine that has a dozen other things to do

PASSAGE = """\
The lighthouse on the eastern cape was built in 1871 from granite that was quarried on the island itself. Its lamp
first burned colza oil, then paraffin, and was electrified only in 1956, when a cable was laid across the sound.
Three keepers lived there with their families. They kept a vegetable garden behind a wall that broke the wind, a few
sheep, and a school of six children who were taught by the wife of the second keeper. Every evening one of the men
climbed the one hundred and forty-two steps, trimmed the wick and wound the clockwork that turned the lens. In fog
they fired a small cannon every ten minutes, until a siren replaced it. The log books, which survive almost
complete, record storms, passing ships, the price of flour, births, and one wedding. In the winter of 1904 the
supply boat could not land for eleven weeks, and the keepers lived on potatoes and salted fish. The station was
automated in 1988. Today a small museum is open in summer; it is run by volunteers, among them two grandchildren of
the last keeper, who like to show visitors the lens."""

Draw = tuple[float, float]  # time to first token, s, and speed, token/s


def recorded_draws() -> list[Draw]:
    """Return the service's recorded times, in their order."""
    lines = (files("disco_daemon.profiles") / "traces" / TRACE).read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return [(float(row["ttft_s"]), float(row["tps"])) for row in rows]


def recorded_answers() -> dict[str, list[str]]:
    """Return the pieces of the recorded answer to each question."""
    answers = tomllib.loads((files("disco_daemon.profiles") / "demo_answers.toml").read_text(encoding="utf-8"))
    return {question: [str(piece) for piece in pieces] for question, pieces in answers.items()}


def chat(system: str, question: str, n_words: int = 0) -> list[dict[str, str]]:
    """Return the messages of a question, with `n_words` of a text below it."""
    text = " ".join(itertools.islice(itertools.cycle(PASSAGE.split()), n_words))
    return [{"role": "system", "content": system}, {"role": "user", "content": f"{question}\n\n{text}".strip()}]


def longer_chat(n_words: int) -> list[dict[str, str]]:
    """Return the messages of a conversation about a text, which comes to another question."""
    more = [{"role": "assistant", "content": "It is about a lighthouse."}, {"role": "user", "content": DEAR}]
    return chat(SYSTEM, LONG, n_words) + more


class PlayedServer(LoopbackServer):
    """A server that says what was recorded, when `draw` says so."""

    def __init__(self, answers: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self.draw: Draw = (0.0, 1000.0)
        self._answers = answers

    def on_request(self, exchange: Exchange) -> None:
        """Take the recorded answer in place of the script's."""
        asked, limit = text_of(exchange.body["messages"][-1]), exchange.body.get("max_tokens")
        pieces = next((found for question, found in self._answers.items() if question in asked), ["Hello", "."])
        exchange.tokens = pieces[:limit]
        exchange.reason = "length" if limit and limit <= len(pieces) else "stop"

    async def before(self, request: web.Request, response: web.StreamResponse, exchange: Exchange, i: int) -> None:
        """Wait until piece `i` is due: by the clock of the request, so that no delay adds up."""
        ttft_s, tps = self.draw
        due = exchange.started_at + ttft_s + min(i, len(exchange.tokens) - 1) / tps
        await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))


@dataclass(frozen=True, slots=True)
class Live:
    """A real server instead of the played one."""

    base_url: str
    model: str
    api_key: str


class Stage(Protocol):
    """Where the demo is shown. Sides are `device` and `server`."""

    def say(self, line: str, *, title: bool = False) -> None:
        """Show a line of the story."""
        ...

    def asked(self, question: str, sides: Sequence[str]) -> None:
        """Show that these sides were asked just now; what they do is shown until the first piece comes."""
        ...

    def piece(self, text: str, side: str) -> None:
        """Show a piece of the answer and who wrote it."""
        ...

    def ended(self) -> None:
        """Show that the answer is whole."""
        ...


@dataclass(slots=True)
class Heard:
    """One answer: its pieces with the side that wrote each, when each of them came, s, and how it came about."""

    sent: float
    pieces: list[tuple[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    disco: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        """From just before the question was sent to the first piece, s."""
        return self.times[0] - self.sent

    def by(self, side: str) -> str:
        """Return what that side wrote."""
        return "".join(text for text, author in self.pieces if author == side)

    @property
    def pause_s(self) -> float | None:
        """The time between the last piece of one side and the first one of the other, s; None without a change."""
        pairs = zip(itertools.pairwise(self.pieces), itertools.pairwise(self.times), strict=True)
        return next((times[1] - times[0] for pieces, times in pairs if pieces[0][1] != pieces[1][1]), None)


async def run_demo(
    stage: Stage, say: Callable[[str], None], *, live: Live | None = None, draws: Sequence[Draw] = ()
) -> dict[str, Any]:
    """Run the demo. `say` gets what is done before the first act; `draws` stand for the recorded ones.

    Returns `{"requests": [...], "moved": …, "killed": …, "summary": {...}}`, times in s, cost in $. Raises DiscoError.
    """
    model = await asyncio.to_thread(fetch_default_model, say)
    say("starting a daemon of the demo's own: your settings and history stay as they are")
    async with AsyncExitStack() as stack:
        played = None if live else await stack.enter_async_context(PlayedServer(recorded_answers()))
        daemon = await stack.enter_async_context(_daemon(model, live, played))
        http = DefaultAsyncHttpxClient(follow_redirects=False, trust_env=False)
        client = AsyncOpenAI(
            base_url=daemon, api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S, http_client=http
        )
        demo = Demo(await stack.enter_async_context(client), stage, played, list(draws) or recorded_draws())
        try:
            return await demo.run()
        except (APIError, TimeoutError) as e:
            msg = f"the demo's own daemon gave no answer: {e or type(e).__name__}"
            raise BenchError(msg) from e


class Demo:
    """The acts, one after the other."""

    def __init__(self, client: AsyncOpenAI, stage: Stage, played: PlayedServer | None, draws: Sequence[Draw]) -> None:
        self._client = client
        self._stage = stage
        self._played = played
        self._draws = draws
        self._next_draw = itertools.cycle(draws)
        self._numbers = itertools.count(100)  # all of three digits, so that the prompts have one length

    async def run(self) -> dict[str, Any]:
        """Run all acts. Raises BenchError, openai.APIError, TimeoutError."""
        for side in ("device", "server"):  # the first answer of each includes loading a model, and a connection
            await self._ask(f"disco/{side}", self._fresh("Hello!"), ALONE_TOKENS)
        began, n_words = time.perf_counter(), len(PASSAGE.split())
        read_s = (await self._ask("disco/device", self._fresh(LONG, n_words), ALONE_TOKENS)).ttft_s
        n_long = max(N_WORDS[0], min(N_WORDS[1], round(n_words * LONG_S / read_s)))
        n_dear = max(N_LEAST, min(N_WORDS[1], round(n_words * DEAR_S / read_s)) - N_AROUND)
        say = self._stage.say
        say("1. A short question, asked of both sides: the first word wins", title=True)
        rows = [await self._race(SHORT, 0, 0)]
        say(f"2. The same with a text of {n_long} words, which this machine takes longer to read", title=True)
        rows.append(await self._race(LONG, n_long, 0))
        say("3. Both again by the next recorded times, with each side alone beside it", title=True)
        for number in range(1, ROUNDS[1]):
            if number >= ROUNDS[0] and time.perf_counter() - began > ROUNDS_S:
                break
            rows += [await self._race(SHORT, 0, number), await self._race(LONG, n_long, number)]
        moved = killed = None
        if self._played is not None:
            price = f"${PRICES['output_usd_per_mtok']:.2f} a million tokens"
            say(f"4. The server is first, but costs {price}: the answer moves", title=True)
            moved = await self._move(self._played, longer_chat(n_dear))
            say("5. Only the server is asked, and killed in mid-sentence", title=True)
            killed = await self._kill(self._played)
        took_s = round(time.perf_counter() - began, 1)
        return {"requests": rows, "moved": moved, "killed": killed, "summary": _summary(rows, moved, took_s)}

    async def _race(self, question: str, n_words: int, number: int) -> dict[str, Any]:
        """Ask disco and each side alone, in another order each round; the server has the same times for all of them."""
        if self._played is not None:
            self._played.draw = next(self._next_draw)
        arms, heard = ("disco", "disco/device", "disco/server"), {}
        for model in (*arms[number % 3 :], *arms[: number % 3]):
            if number == 0 and model == "disco":
                self._stage.asked(question, ("device", "server"))
                heard[model] = await self._ask(model, self._fresh(question, n_words), LENGTHS[question], shown=True)
                self._stage.ended()
            else:
                heard[model] = await self._ask(model, self._fresh(question, n_words), ALONE_TOKENS)
        raced, device, server = (heard[model] for model in arms)
        row = {
            "question": question,
            "recorded_ttft_s": self._played.draw[0] if self._played else None,
            "prompt_tokens": raced.disco["prompt_tokens"],
            "winner": raced.disco["winner"],
            "ttft_s": round(raced.ttft_s, 4),
            "device_ttft_s": round(device.ttft_s, 4),
            "server_ttft_s": round(server.ttft_s, 4),
            "tokens": raced.disco["tokens"],
            "cost_usd": raced.disco["cost_usd"],
        }
        self._stage.say(f"{MARKS[row['winner']]} {first_words(row)}")
        return row

    async def _move(self, played: PlayedServer, messages: list[dict[str, str]]) -> dict[str, Any]:
        """Ask both where the server is first, by its fastest draw; what is left moves as soon as that pays."""
        played.draw = min(self._draws)
        self._stage.asked(DEAR, ("device", "server"))
        heard = await self._ask("disco", messages, LENGTHS[DEAR], shown=True, delivery="reserve")
        self._stage.ended()
        found, wrote = heard.disco, heard.disco["tokens"]
        n, n_prompt = wrote["device"] + wrote["server"], found["prompt_tokens"]
        unmoved_usd = (n_prompt * PRICES["input_usd_per_mtok"] + n * PRICES["output_usd_per_mtok"]) / 1e6
        saved_usd = unmoved_usd - found["cost_usd"] if found["winner"] == "server" and found["handoffs"] else 0.0
        if saved_usd > 0:
            self._stage.say(
                f"{MARKS['device']} wrote {wrote['device']} of {n} tokens: {dollars(found['cost_usd'])}, "
                f"its power included, not {dollars(unmoved_usd)}"
            )
        else:
            self._stage.say("it stayed: this machine was first, or reads too slowly to catch up")
        return {"tokens": found["tokens"], "handoffs": found["handoffs"], "saved_usd": saved_usd, "usd": unmoved_usd}

    async def _kill(self, played: PlayedServer) -> dict[str, Any]:
        """Ask the server alone, and end it while it speaks: its connections break, and nothing listens any more."""
        played.draw = sorted(self._draws)[len(self._draws) // 2]
        self._stage.asked(KILLED, ("server",))
        heard = await self._ask(
            "disco", chat(SYSTEM, KILLED), LENGTHS[KILLED], shown=True, route="prefer-server", kill=played
        )
        self._stage.ended()
        server, device, pause_s = heard.by("server"), heard.by("device"), heard.pause_s
        if pause_s is None:
            raise BenchError("the server was killed, and its answer ended with it")
        self._stage.say(f"the server is dead; {MARKS['device']} went on from its last letter {pause_s:.2f} s later")
        return {"server_text": server, "device_text": device, "pause_s": round(pause_s, 4)}

    def _fresh(self, question: str, n_words: int = 0) -> list[dict[str, str]]:
        """Return a question with something in front that was never asked: what is cached from before shows nothing."""
        return chat(f"{next(self._numbers)}.", question, n_words)

    async def _ask(
        self, model: str, messages: Any, max_tokens: int, *, shown: bool = False,
        kill: PlayedServer | None = None, **wishes: str,
    ) -> Heard:  # fmt: skip
        """One streamed answer through the unmodified client. Raises BenchError, openai.APIError, TimeoutError."""
        # An answer that is delivered as it comes moves after a failure only.
        heard = Heard(time.perf_counter())
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            stream: Any = await self._client.chat.completions.create(
                model=model, messages=messages, max_tokens=max_tokens, temperature=0, stream=True,
                extra_body={"disco": {"sides": True, "delivery": "off"} | wishes},
            )  # fmt: skip
            async for chunk in stream:
                now, told = time.perf_counter(), (chunk.model_extra or {}).get("disco", {})
                if text := chunk.choices[0].delta.content if chunk.choices else None:
                    heard.pieces.append((text, told["side"]))
                    heard.times.append(now)
                    if shown:
                        self._stage.piece(text, told["side"])
                    if kill is not None and len(heard.pieces) == KILL_AFTER:
                        await kill.close()
                heard.disco = told if "winner" in told else heard.disco
        if not heard.disco or not heard.pieces:
            msg = f"{model} gave no answer to {messages[-1]['content'][:40]!r}"
            raise BenchError(msg)
        return heard


def first_words(row: Mapping[str, float]) -> str:
    """Return the times to the first word of disco and of either side alone."""
    disco, device, server = (row[key] for key in TIMES)
    return f"disco {disco:.2f} s · this machine alone {device:.2f} s · server alone {server:.2f} s"


def _times(rows: Sequence[Mapping[str, Any]], what: Callable[[list[float]], float]) -> dict[str, float]:
    return {key: round(what([row[key] for row in rows]), 4) for key in TIMES}


def _summary(rows: Sequence[Mapping[str, Any]], moved: Mapping[str, Any] | None, took_s: float) -> dict[str, Any]:
    each = {question: [row for row in rows if row["question"] == question] for question in (SHORT, LONG)}
    return {
        "of": len(rows),
        "wins": {side: sum(row["winner"] == side for row in rows) for side in MARKS},
        "mean": _times(rows, statistics.fmean),
        "median": _times(rows, statistics.median),
        "mean_short": _times(each[SHORT], statistics.fmean),
        "mean_long": _times(each[LONG], statistics.fmean),
        "saved_usd": moved["saved_usd"] if moved else 0.0,
        "took_s": took_s,
    }


@asynccontextmanager
async def _daemon(model: Path, live: Live | None, played: PlayedServer | None) -> AsyncIterator[str]:
    """Run a daemon between this machine's model and that server; yield its address."""
    server: dict[str, Any] = {}
    env = {}
    if live is not None:
        server, env = {"base_url": live.base_url, "model": live.model}, {"OPENAI_API_KEY": live.api_key}
    elif played is not None:
        # As with OpenAI: nobody there goes on with half an answer.
        server = {"base_url": played.url, "model": "played", "continuation": "none"} | PRICES
    # Both sides have the same words here, so they race as equals; a loser that speaks on would take the processor.
    settings = {"server": server | {"probe": False}, "policy": {"shadow": False, "unequal": "race"}}
    with tempfile.TemporaryDirectory(prefix="disco-demo-") as name:
        folder = Path(name)
        (folder / "config.toml").write_text(tomlkit.dumps(settings), encoding="utf-8")
        argv = [
            *verb("up"), "--port", "0", "--json", "--until-eof", "--config", str(folder / "config.toml"),
            "--history", str(folder / "history.sqlite"), "--model", str(model), "--threads", str(max(1, n_cores() - 1)),
            "--policy", "race",
        ]  # fmt: skip
        async with child(argv, folder, "daemon", env) as url:
            yield url
