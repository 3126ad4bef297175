"""Two real daemons that compute one model, with a slow network between them, and what one answer of theirs costs."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import tomlkit

from disco_daemon.bench.child import LOG_TAIL, BenchError, child, child_env
from disco_daemon.bench.command import progress
from disco_daemon.machines.split.trained_exits import KeptExits
from disco_daemon.system.program import verb

from .proxy import SlowProxy
from .tables import SplitAnswer
from .text import question_of, text_of

REQUEST_S = 300.0  # one answer, s
TRAINING_S, MLP_TOKENS = 3600.0, 10_000  # a training, s; tokens from which on it fits more than a linear map
LINK_S, LOOK_S = 90.0, 0.1  # until the link is up, with the layers loaded on both sides, and how often to look, s
DEVICE = {"rounding": "exact", "autotune": False}  # of both machines
FIRST_EDGE = "edge"
ENGINE = "disco_daemon.engine.worker"  # what an engine's command line names


class NotOfferedError(BenchError):
    """The daemon refuses a request as it was made."""


@dataclass(slots=True)
class HeardPieces:
    """One streamed answer: its pieces, when each came after the question, s, and what the daemon says of it.

    `alone` says of each piece whether the edge made it alone, if the request asked for its sides; `sent_at` is when
    the question was sent, s, by `time.perf_counter`.
    """

    pieces: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    disco: dict[str, Any] = field(default_factory=dict)
    took_s: float = 0.0
    alone: list[bool] = field(default_factory=list)
    sent_at: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def n_exact(self) -> int | None:
        """Number of characters before the first that was made alone; None if none was."""
        return len("".join(self.pieces[: self.alone.index(True)])) if any(self.alone) else None


@dataclass(frozen=True, slots=True)
class BenchDaemon:
    """A daemon at `root`, its process and folder, and how its verbs are typed; it is asked `raw` prompts, or chats."""

    root: str
    folder: Path
    session: aiohttp.ClientSession
    process: psutil.Process
    raw: bool = False

    def engines(self) -> list[psutil.Process]:
        """Return its engine processes. Raises BenchError if there is none."""
        found = [p for p in self.process.children(recursive=True) if ENGINE in p.cmdline()]
        if not found:
            msg = f"the daemon at {self.root} has no engine"
            raise BenchError(msg)
        return found

    async def type(self, *words: str) -> dict[str, Any]:
        """Return what a verb says. Raises BenchError."""
        return await type_verb(self.folder, *words, "--url", self.root)

    async def ask(
        self,
        root: str,
        prompt: str,
        max_tokens: int,
        on_piece: Callable[[HeardPieces], None] = lambda _: None,
        heard: HeardPieces | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> HeardPieces:
        """Stream one greedy answer over `root`, into `heard`; `on_piece` hears of each piece.

        `options` are disco's own, of the request. Raises BenchError: NotOfferedError if the request is refused.
        """
        route, question = question_of(prompt, raw=self.raw)
        body = {
            "model": "disco", **question, "max_tokens": max_tokens,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            **({"disco": dict(options)} if options else {}),
        }  # fmt: skip
        heard = heard or HeardPieces()
        heard.sent_at = sent = time.perf_counter()
        async with self.session.post(f"{root}{route}", json=body) as response:
            if response.status != 200:
                msg = f"{root} answered {response.status}: {(await response.text())[:LOG_TAIL]}"
                raise (NotOfferedError if 400 <= response.status < 500 else BenchError)(msg)
            async for line in response.content:
                if line.startswith(b"data: {") and _take(heard, json.loads(line[6:]), time.perf_counter() - sent):
                    on_piece(heard)
        heard.took_s = time.perf_counter() - sent
        if "completion_tokens" not in heard.usage:
            msg = f"an answer of {root} ended without its usage"
            raise BenchError(msg)
        return heard


def _take(heard: HeardPieces, chunk: Mapping[str, Any], at_s: float) -> bool:
    """Add what a chunk says; whether it has text. Raises BenchError."""
    if "error" in chunk:
        msg = f"the stream carried an error: {chunk['error']}"
        raise BenchError(msg)
    heard.usage = chunk.get("usage") or heard.usage
    heard.disco = chunk.get("disco") or heard.disco
    found = [text for choice in chunk["choices"] if (text := text_of(choice))]
    heard.pieces += found
    heard.times += [at_s] * len(found)
    heard.alone += [bool((chunk.get("disco") or {}).get("alone"))] * len(found)
    return bool(found)


# --- daemons ----------------------------------------------------------------------------------------------------------


def _env(folder: Path) -> dict[str, str]:
    return {"DISCO_CONFIG": str(folder / "config.toml")}


async def type_verb(folder: Path, *words: str, limit_s: float = REQUEST_S) -> dict[str, Any]:
    """Run `disco … --json` as on the machine with this folder; return its document. Raises BenchError."""
    process = await asyncio.create_subprocess_exec(
        *verb(words[0]), *words[1:], "--json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=child_env(folder) | _env(folder),
    )  # fmt: skip
    try:
        async with asyncio.timeout(limit_s):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        msg = f"disco {' '.join(words[:2])} failed: {err.decode(errors='replace')[-LOG_TAIL:].strip()}"
        raise BenchError(msg)
    found: dict[str, Any] = json.loads(out)
    return found


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Make these the settings in a folder, besides those that are there."""
    folder.mkdir(exist_ok=True)
    config = folder / "config.toml"
    found = tomlkit.parse(config.read_text(encoding="utf-8")).unwrap() if config.exists() else {}
    for section, values in settings.items():
        found[section] = found.get(section, {}) | values
    config.write_text(tomlkit.dumps(found), encoding="utf-8")


@asynccontextmanager
async def daemon(
    folder: Path, session: aiohttp.ClientSession, model: Path, settings: Mapping[str, Any], *, raw: bool = False
) -> AsyncIterator[BenchDaemon]:
    """Run a daemon with one thread whose settings are those in its folder, if any, and these; it is asked as said."""
    write_settings(folder, settings)
    argv = [
        *verb("up"), "--port", "0", "--json", "--until-eof", "--history", str(folder / "history.sqlite"),
        "--model", str(model), "--threads", "1", "--device-only", "--policy", "all-device", "--log-level", "warning",
    ]  # fmt: skip
    before = set(psutil.Process().children())
    async with child(argv, folder, "daemon", _env(folder)) as url:
        (process,) = set(psutil.Process().children()) - before
        yield BenchDaemon(url.removesuffix("/v1"), folder, session, process, raw)


async def until_linked(edge: BenchDaemon) -> None:
    """Wait until the edge can ask its partner. Raises BenchError."""
    until = time.perf_counter() + LINK_S
    while True:
        async with edge.session.get(f"{edge.root}/disco/v1/state") as response:
            state: dict[str, Any] = await response.json()
        link = state.get("split") or {}
        device = state.get("endpoints", {}).get("device", {})
        if link.get("state") == "up" and device.get("state") == "ready":
            return
        if time.perf_counter() > until:
            msg = f"the two daemons are not linked after {LINK_S:g} s: {link.get('error') or device.get('last_error')}"
            raise BenchError(msg)
        await asyncio.sleep(LOOK_S)


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def busy_s(processes: Sequence[psutil.Process]) -> float:
    """Return the processor time that the processes have taken so far, s. Raises BenchError if one has ended."""
    try:
        return sum(sum(process.cpu_times()[:2]) for process in processes)
    except psutil.NoSuchProcess as e:
        msg = "an engine has ended in the middle of the measurement"
        raise BenchError(msg) from e


# --- both of them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TwoMachines:
    """Edge and partner, the proxies before the partner's two ports, and their engines."""

    edge: BenchDaemon
    partner: BenchDaemon
    api: SlowProxy
    link: SlowProxy
    edge_engines: list[psutil.Process]
    partner_engines: list[psutil.Process]
    cut: int

    async def whole(self, prompt: str, max_tokens: int) -> HeardPieces:
        """Ask the whole model at the partner, and measure nothing."""
        return await self.partner.ask(f"http://127.0.0.1:{self.api.port}", prompt, max_tokens)

    async def cloud(self, prompt: str, max_tokens: int) -> tuple[HeardPieces, list[SplitAnswer]]:
        """Ask the whole model at the partner, through the network; return also what each prefix of the answer cost."""
        before, up, down = busy_s(self.partner_engines), self.api.n_up, self.api.n_down
        prefixes = list[SplitAnswer]()

        def hear(heard: HeardPieces) -> None:
            n, spent = len(heard.pieces), busy_s(self.partner_engines) - before
            sizes = {"bytes_up": self.api.n_up - up, "bytes_down": self.api.n_down - down}
            answer = SplitAnswer(heard.text, n, heard.times[-1], edge_s=0.0, partner_s=spent, round_trips=n, **sizes)
            prefixes.append(replace(answer, first_s=heard.times[0]))

        heard = await self.partner.ask(f"http://127.0.0.1:{self.api.port}", prompt, max_tokens, hear)
        if prefixes:  # the end of the text is a token, too
            n = int(heard.usage["completion_tokens"])
            prefixes[-1] = replace(prefixes[-1], n_tokens=n, round_trips=n, took_s=heard.took_s)
        return heard, prefixes

    async def split(self, prompt: str, max_tokens: int, mode: str = "exact", theta: float | None = None) -> SplitAnswer:
        """Ask the edge, in a mode of its split device. Raises BenchError: NotOfferedError if it has not this mode."""
        options = {} if mode == "exact" else {"split_mode": mode} | ({} if theta is None else {"theta": theta})
        edge_s, partner_s = busy_s(self.edge_engines), busy_s(self.partner_engines)
        up, down = self.link.n_up, self.link.n_down
        heard = await self.edge.ask(self.edge.root, prompt, max_tokens, options=options)
        split = heard.disco.get("split") or {}
        rows = split.get("layer_tokens") or {}
        return SplitAnswer(
            heard.text, int(heard.usage["completion_tokens"]), heard.took_s,
            edge_s=busy_s(self.edge_engines) - edge_s, partner_s=busy_s(self.partner_engines) - partner_s,
            round_trips=split.get("round_trips"), drafted=split.get("drafted"), accepted=split.get("accepted"),
            edge_rows=int(rows.get("edge", 0)) // self.cut if self.cut else None, partner_rows=split.get("n_rows"),
            judged_rows=split.get("n_judged"),
            bytes_up=self.link.n_up - up, bytes_down=self.link.n_down - down,
            first_s=heard.times[0] if heard.times else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class JoinedMachines:
    """A partner that runs, with proxies before its two ports; the edges that join it have folders in `folder`.

    `head` is the kind of the exit that came along with the layers, "" if there is none. At cut 0 they have the small
    model `draft` in place of layers.
    """

    partner: BenchDaemon
    api: SlowProxy
    link: SlowProxy
    folder: Path
    model: Path
    cut: int
    head: str
    peer_port: int
    draft: Path | None = None
    raw: bool = False

    @asynccontextmanager
    async def edge(self, codec: str, *, look_up: bool, name: str = FIRST_EDGE) -> AsyncIterator[TwoMachines]:
        """Run an edge, with or without drafts by prompt look-up; a new name joins first, and has nothing cached."""
        folder = await self.join(name)
        settings = {
            "device": {**DEVICE, "speculation": "auto" if look_up else "off"}, "delivery": {"mode": "off"},
            "split": {"partner": f"127.0.0.1:{self.link.port}", "codec": codec, "alone": "stop"},
        }  # fmt: skip
        model = self.draft or self.model
        async with daemon(folder, self.partner.session, model, settings, raw=self.raw) as edge:
            await until_linked(edge)
            yield TwoMachines(edge, self.partner, self.api, self.link, edge.engines(), self.partner.engines(), self.cut)

    async def join(self, name: str) -> Path:
        """Have a machine of this name join, unless it has; return its folder."""
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            code = (await self.partner.type("machines", "pair", "--as", "split", "--address", "127.0.0.1"))["code"]
            how = ("--cut", str(self.cut)) if self.draft is None else ("--draft", str(self.draft))
            # No daemon of this edge runs yet, and one of the user's has to be left alone.
            await type_verb(folder, "machines", "join", code, *how, "--name", name, "--url", "http://127.0.0.1:1")
        return folder


@asynccontextmanager
async def joined_machines(
    model: Path, cut: int, rtt_s: float, mbit_s: float, exits: Path | None = None, draft: Path | None = None, *,
    raw: bool = False,
) -> AsyncIterator[JoinedMachines]:  # fmt: skip
    """Run a partner with the whole model, for edges that have the layers up to a cut; at 0 the small model `draft`.

    They get the best of the `exits` behind the cut, if there is one. All are asked `raw` prompts, or chats.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="disco-split-") as name:
        folder, timeout = Path(name), aiohttp.ClientTimeout(total=REQUEST_S)
        head = "" if exits is None else bring_exit(model, cut, exits, folder / "partner")
        async with aiohttp.ClientSession(timeout=timeout) as session:
            settings = {
                "device": DEVICE, "delivery": {"mode": "off"},
                "peer": {"port": port}, "partner": {"listen": "127.0.0.1"},
            }  # fmt: skip
            async with daemon(folder / "partner", session, model, settings, raw=raw) as partner:
                api = SlowProxy(int(partner.root.rpartition(":")[2]), rtt_s, mbit_s)
                link = SlowProxy(port, rtt_s, mbit_s)
                async with api, link:
                    yield JoinedMachines(partner, api, link, folder, model, cut, head, port, draft, raw)


def bring_exit(model: Path, cut: int, exits: Path, folder: Path) -> str:
    """Copy the best exit behind a cut to the data of a machine; return its kind, "" if there is none."""
    best = KeptExits(model, exits).best(cut)
    if best is None:
        return ""
    target = KeptExits(model, folder / "disco" / "exits").folder
    target.mkdir(parents=True, exist_ok=True)
    for path in (best.path, best.path.with_suffix(".json")):
        shutil.copy(path, target)
    return best.figures.head


async def kept_exits(model: Path, cuts: Sequence[int], exits: Path, n_tokens: int, folder: Path) -> Path:
    """Return a folder with exits behind all cuts: those that are kept, or new ones, trained on so many tokens.

    With 0 tokens none is trained. Raises BenchError.
    """
    found = folder / "disco" / "exits"
    for cut in cuts:
        if not bring_exit(model, cut, exits, folder) and n_tokens:
            progress(f"training an exit behind {cut} layers on {n_tokens} tokens")
            await type_verb(
                folder, "exits", "train", "--model", str(model), "--cut", str(cut), "--tokens", str(n_tokens), "--head",
                "linear" if n_tokens < MLP_TOKENS else "auto", "--now", limit_s=TRAINING_S,
            )  # fmt: skip
    return found
