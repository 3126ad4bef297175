"""The async client of a running daemon, for conversations: `disco chat` and the terminal UI share it.

    async with Link("http://127.0.0.1:4747") as link, aclosing(link.chat(messages)) as pieces:
        async for piece in pieces:
            print(piece.text, end="")

Closing the generator stops the answer. Every error is a DaemonError, fit for a user.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from ..plain import plain, reason_of
from ..system import socketfile
from ..system.net import is_http_url, without_credentials
from ..types import Side
from . import once as client
from .once import CONNECT_TIMEOUT_S, MAX_ERROR, RELOAD_TIMEOUT_S, DaemonError, headers, not_running, refusal

REQUEST_TIMEOUT_S = 10.0  # for a document; the daemon makes each in milliseconds
WHATIF_TIMEOUT_S = 60.0  # a what-if; the first one reads the whole history
CHECK_TIMEOUT_S = 40.0  # a list of models and an answer; the daemon gives up before
OFFERS_TIMEOUT_S = 75.0  # the engine's part may be asked for memory, and for the speed of the device's model
SILENCE_TIMEOUT_S = 600.0  # between two reads of an answer; a daemon gives up on its endpoints long before
MAX_LINE = 4 * 1024 * 1024  # bytes of one event; a token takes a few hundred
PIECE = 256 * 1024  # bytes of a question that are sent at once
TOO_LITTLE = "too_little"  # the code of a what-if without enough history
NO_TRACE = ("trace_gone", "not_found")  # codes where there is no trace; the second one is of a daemon that has none
_JSON = {"Content-Type": "application/json"}
_COMMENT = b": disco "


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """One piece of an answer's stream.

    `text` of the answer and `thought` before it, made by `side`, `alone` if by a part of a model only; a `note` that no
    reader of the answer sees; `finish`, once, is OpenAI's finish_reason; `disco`, once and last, how the answer came
    about (`Outcome.to_json`).
    """

    text: str = ""
    thought: str = ""
    side: Side | None = None
    alone: bool = False
    note: str = ""
    finish: str | None = None
    disco: Mapping[str, Any] | None = None


class Link:
    """A daemon at `root`, without /v1; `key` is its API key. To be entered before use, in the loop that uses it.

    One on this machine is asked by its Unix socket, which needs no key; see `client.way`.
    """

    def __init__(self, root: str, key: str = "") -> None:
        self.root = root
        self._shown = without_credentials(root) if is_http_url(root) else root
        self._key = key
        self._port = client.local_port(root)
        self._may_wake = True  # a service manager is woken once, not with each request
        self._entered = False
        self._sessions: dict[Path | None, aiohttp.ClientSession] = {}

    def __repr__(self) -> str:
        return f"<Link {self._shown} {'open' if self._entered else 'closed'}>"

    async def __aenter__(self) -> Self:
        self._entered = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._entered = False
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    async def _session(self) -> aiohttp.ClientSession:
        """Return the session for the present way to the daemon. Raises DaemonError."""
        path = None if self._port is None else socketfile.found(self._port)
        if path is None:
            path = await asyncio.to_thread(client.way, self.root, wake=self._may_wake)
            self._may_wake = False
        if (session := self._sessions.get(path)) is None:
            # A connection for each request: none that died with a daemon is left for a question to be lost in. No
            # proxies (`trust_env`): the daemon is on this machine.
            connector: aiohttp.BaseConnector = aiohttp.TCPConnector(force_close=True, limit=0)
            sent_headers = headers(self._key)
            if path is not None:
                connector, sent_headers = aiohttp.UnixConnector(str(path), force_close=True, limit=0), {}
            session = aiohttp.ClientSession(connector=connector, headers=sent_headers, trust_env=False)
            self._sessions[path] = session
        return session

    # --- answers -------------------------------------------------------------------------------------------------

    async def chat(
        self, messages: Iterable[Mapping[str, Any]], *, model: str = "disco", **options: Any
    ) -> AsyncGenerator[AnswerPiece, None]:
        """Stream one answer; `options` are OpenAI's parameters and the `disco` object. Close it to stop the answer.

        Raises DaemonError, after some pieces too, and whatever reading the first of `messages` raises.
        """
        extension = {"sides": True} | dict(options.pop("disco", None) or {})
        body = _encode({"model": model, **options, "stream": True, "disco": extension}, messages)
        patience = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S)
        async with self._request("POST", "/v1/chat/completions", patience, data=body, headers=_JSON) as response:
            async for line in _lines(response.content):
                if line == b"data: [DONE]":
                    return
                if (piece := _piece(line)) is not None:
                    yield piece
        raise DaemonError("the daemon ended the answer too early: see its log, or ask again")

    # --- documents -----------------------------------------------------------------------------------------------

    async def state(self) -> dict[str, Any]:
        """Return the daemon's whole state. Raises DaemonError, as all methods below."""
        return await self._document("/disco/v1/state")

    async def settings(self) -> dict[str, Any]:
        """Return `settings` in force, secrets masked; `live` names those that a running daemon takes up."""
        return await self._document("/disco/v1/settings")

    async def change(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Write settings, `section.name` to value; return the daemon's answer."""
        return await self._document("/disco/v1/settings", method="PATCH", body=dict(changes))

    async def models(self) -> list[str]:
        """Return the model names that the daemon serves now; `disco` lets it decide."""
        return [str(card["id"]) for card in await self._rows("/v1/models")]

    async def history(self, limit: int) -> list[dict[str, Any]]:
        """Return the latest requests, newest first."""
        return await self._rows("/disco/v1/history", {"limit": str(limit)})

    async def plan(self, tokens: int) -> dict[str, Any]:
        """Return the plan for a prompt of that many tokens, and its reasons."""
        return await self._document("/disco/v1/plan", {"tokens": str(tokens)})

    async def ledger(self, days: int) -> list[dict[str, Any]]:
        """Return what was spent on each of the latest days, newest first."""
        return await self._rows("/disco/v1/ledger", {"days": str(days)})

    async def whatif(
        self, rate: float, budget: float, *, alpha: float | None = None, kappa: float | None = None
    ) -> dict[str, Any] | None:
        """Return what an exchange rate, $/kWh, and a budget ratio would have done to the user's own requests.

        `alpha` and `kappa` are the knobs of the policies `paper` and `optimal`, as set where None. None where there is
        too little history.
        """
        wanted = {"rate": rate, "budget": budget, "alpha": alpha, "kappa": kappa}
        asked = {name: repr(float(value)) for name, value in wanted.items() if value is not None}
        try:
            return await self._document("/disco/v1/whatif", asked, timeout_s=WHATIF_TIMEOUT_S)
        except DaemonError as e:
            if e.code == TOO_LITTLE:
                return None
            raise

    async def trace(self, request_id: str) -> dict[str, Any] | None:
        """Return arrival and showing of each token of a recent answer; `latest` is the last one. None if not kept."""
        try:
            return await self._document(f"/disco/v1/trace/{quote(request_id, safe='')}")
        except DaemonError as e:
            if e.code in NO_TRACE:
                return None
            raise

    # --- first steps ---------------------------------------------------------------------------------------------

    async def providers(self) -> dict[str, Any]:
        """Return the known `providers`, the configured `server`, and the `device` with the models here."""
        return await self._document("/disco/v1/providers")

    async def check_server(self, base_url: str, api_key: str = "", model: str = "", name: str = "") -> dict[str, Any]:
        """Check a server: return its `models`, and with a model `ttft_s` and `price`; or the `problem`.

        Without a key the daemon takes the one that it has for that address, or for the server of that `name`. With a
        model this may cost a little.
        """
        body = {"base_url": base_url, "api_key": api_key, "model": model} | ({"name": name} if name else {})
        return await self._document("/disco/v1/server/check", method="POST", body=body, timeout_s=CHECK_TIMEOUT_S)

    async def set_server(self, base_url: str, api_key: str = "", model: str = "", name: str = "") -> dict[str, Any]:
        """Have the daemon write a server down and go by it; an empty address takes the server away.

        With a `name` it is one of several, beside the others.
        """
        body = {"base_url": base_url, "api_key": api_key, "model": model} | ({"name": name} if name else {})
        return await self._document("/disco/v1/server", method="PUT", body=body, timeout_s=RELOAD_TIMEOUT_S)

    async def set_device(self, model: str) -> dict[str, Any]:
        """Have this machine answer with a model of `providers()`; "" is the default one, "previous" the last one."""
        body = {"model": model}
        return await self._document("/disco/v1/device", method="PUT", body=body, timeout_s=RELOAD_TIMEOUT_S)

    async def offers(self) -> dict[str, Any]:
        """Return the `models` that suit the daemon's machine, the recommended one first."""
        return await self._document("/disco/v1/offers", timeout_s=OFFERS_TIMEOUT_S)

    async def fetch_model(self, name: str) -> dict[str, Any]:
        """Have the daemon fetch an offered model and use it; `state()` has how far it is, in `fetch`."""
        return await self._document("/disco/v1/fetch", method="POST", body={"model": name})

    async def cancel_fetch(self) -> dict[str, Any]:
        """End the fetch that runs; what came is kept."""
        return await self._document("/disco/v1/fetch", method="DELETE")

    async def reload(self) -> dict[str, Any]:
        """Have the daemon read its configuration again; return what is `changed`, and what `needs_restart`."""
        return await self._document("/disco/v1/reload", method="POST", timeout_s=RELOAD_TIMEOUT_S)

    # --- within --------------------------------------------------------------------------------------------------

    async def _rows(self, path: str, query: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        rows = (await self._document(path, query)).get("data")
        if not isinstance(rows, list):
            raise self._stranger()
        return rows

    async def _document(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        method: str = "GET",
        timeout_s: float = REQUEST_TIMEOUT_S,
        body: Any = None,
    ) -> dict[str, Any]:
        patience = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        async with self._request(method, path, patience, params=query, json=body) as response:
            try:
                found = await response.json(content_type=None)
            except ValueError as e:
                raise self._stranger() from e
        if not isinstance(found, dict):
            raise self._stranger()
        return {key: _make_plain(value) for key, value in found.items()}

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, patience: aiohttp.ClientTimeout, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response to a request, if it is 200; errors then or later are a DaemonError."""
        assert self._entered, "a Link is used inside `async with`"
        if not is_http_url(self.root):
            raise DaemonError(f"{self._shown} is no address of a daemon: give one like http://127.0.0.1:4747")
        url = self.root.rstrip("/") + path
        session = await self._session()
        try:
            # A daemon sends no redirect, and its key is for the daemon alone.
            async with session.request(method, url, timeout=patience, allow_redirects=False, **more) as response:
                if response.status != 200:
                    raise refusal(self._shown, response.status, await response.content.read(MAX_ERROR))
                yield response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as e:
            self._may_wake = True
            raise not_running(self._shown, getattr(e, "os_error", "no answer")) from e
        except aiohttp.ClientPayloadError as e:  # its own words are of chunks and lengths
            msg = f"the connection to the daemon at {self._shown} broke before the end of its answer"
            raise DaemonError(msg) from e
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
            msg = f"the connection to the daemon at {self._shown} broke: {reason_of(e)}"
            raise DaemonError(msg) from e

    def _stranger(self) -> DaemonError:
        return DaemonError(f"what answers at {self._shown} is no disco daemon: give the address of one")


def _make_plain(value: Any) -> Any:
    """Return a document whose texts are plain: some of them come from servers and model files, and all are shown."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, list):
        return [_make_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _make_plain(item) for key, item in value.items()}
    return value


def _encode(body: Mapping[str, Any], messages: Iterable[Mapping[str, Any]]) -> bytes | AsyncGenerator[bytes, None]:
    """Return a body with its messages; a long conversation is sent in parts, so that it is never whole in memory."""
    pieces = _pieces(body, messages)
    first, second = next(pieces), next(pieces, None)
    if second is None:
        return first

    async def parts() -> AsyncGenerator[bytes, None]:
        for piece in chain((first, second), pieces):
            yield piece

    return parts()


def _pieces(body: Mapping[str, Any], messages: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    found = bytearray(json.dumps(body)[:-1].encode())
    found += b', "messages": ['
    for i, message in enumerate(messages):
        found += b", " * bool(i) + json.dumps(dict(message)).encode()
        if len(found) >= PIECE:
            yield bytes(found)
            found.clear()
    yield bytes(found + b"]}")


async def _lines(body: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an event stream, without their ends. aiohttp's own end at 128 KiB with a ValueError."""
    buffer = b""
    async for data in body.iter_any():
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
        if len(buffer) > MAX_LINE:
            raise DaemonError(f"the daemon sent a line of more than {MAX_LINE} bytes")
        await asyncio.sleep(0)  # many pieces at once must not keep the screen waiting


def _piece(line: bytes) -> AnswerPiece | None:
    """Return the piece in one line; None if there is none. Raises DaemonError for an error, and for other documents."""
    if line.startswith(_COMMENT):
        return AnswerPiece(note=line.removeprefix(_COMMENT).decode("utf-8", "replace"))
    if not line.startswith(b"data: "):
        return None
    try:
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            raise DaemonError(str(chunk["error"]["message"]), chunk["error"].get("code"))
        return _of(chunk)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise DaemonError(f"the daemon's answer cannot be read: {e}") from e


def _of(chunk: Mapping[str, Any]) -> AnswerPiece | None:
    """Return the piece in one chunk; raises KeyError, TypeError, AttributeError or ValueError if it is no chunk."""
    choice = chunk["choices"][0] if chunk["choices"] else {}
    delta = choice.get("delta") or {}
    disco = chunk.get("disco") or {}
    side = disco.get("side")
    piece = AnswerPiece(
        text=delta.get("content") or "",
        thought=delta.get("reasoning_content") or "",
        side=None if side is None else Side(side),
        alone=disco.get("alone") is True,
        finish=choice.get("finish_reason"),
        disco=disco if "request_id" in disco else None,
    )
    return None if piece in (AnswerPiece(), AnswerPiece(side=piece.side, alone=piece.alone)) else piece
