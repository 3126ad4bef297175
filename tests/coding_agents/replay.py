"""Two turns of Claude Code's conversation, as it sent them, to a device with room for them: what does its cache give?

The first line of its instructions is about billing, and has a number that changes with each request where Claude Code
knows the address as Anthropic's. Without the rule that leaves the line out, no cached prompt would ever fit again. To
another address 2.1.330 sends the line without that number, so it is put in here. The device's model has random weights:
what is cached needs no sense.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from disco_daemon.models.default import default_model_path
from tests.coding_agents.recorder import Request
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.weights import random_speaker

CONTEXT = 65_536
LIMIT = 1  # tokens of an answer: it is of no interest
LENGTHS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
AT_LEAST, AT_MOST = 0.99, 0.05  # of the second turn's prompt from the cache, with the rule and without it
WITHOUT = (
    "from disco_daemon.api.anthropic import messages_request\nmessages_request.without_billing = lambda text: text"
)


def turns(requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Return the first two requests of the conversation itself, which is the one with the most tools."""
    asked = [r.body for r in requests if r.method == "POST" and r.path.startswith("/v1/messages?") and r.status == 200]
    most = max((len(body.get("tools") or ()) for body in asked), default=0)
    return [body for body in asked if len(body.get("tools") or ()) == most][:2]


def first_lines(bodies: Sequence[dict[str, Any]]) -> list[str]:
    """Return the first line of each request's instructions."""
    return [body["system"][0]["text"].partition("\n")[0] for body in bodies]


def numbered(bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the requests with a number in each first line that no other has, as Anthropic is sent it."""
    made = []
    for i, body in enumerate(bodies):
        first, *rest = body["system"]
        line, end, text = first["text"].partition("\n")
        made.append(body | {"system": [first | {"text": f"{line} cch={i:05x};{end}{text}"}, *rest]})
    return made


def share(usage: dict[str, int]) -> float:
    """Return which share of a prompt came from the cache."""
    found = usage["cache_read_input_tokens"]
    return round(found / (found + usage["input_tokens"]), 4)


async def ask(daemon: DaemonProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a request as it was recorded, but for the length of its answer, and return the answer."""
    asked = {name: value for name, value in body.items() if name not in LENGTHS and name != "stream_options"}
    asked |= {"stream": False, "max_output_tokens" if path.startswith("/v1/responses") else "max_tokens": LIMIT}
    async with daemon.session.post(f"{daemon.root}{path}", json=asked) as response:
        told: dict[str, Any] = json.loads(await response.read())
    return told


@asynccontextmanager
async def roomy(folder: Path, settings: dict[str, Any], before: str = "") -> AsyncIterator[DaemonProcess]:
    """Run a daemon with a device alone that has room for the prompts of agents."""
    folder.mkdir(parents=True)
    model = random_speaker(folder / "random.gguf", default_model_path(), CONTEXT)
    device = settings | {"device": {**settings["device"], "n_ctx": CONTEXT, "rounding": "fast"}}
    async with running(folder / "d", model=model, settings=device, before=before) as daemon:
        await daemon.device_ready()
        yield daemon


async def cached(daemon: DaemonProcess, requests: Sequence[Request]) -> float:
    """Return which share of the second turn's prompt came from the cache, where the first has been asked before it."""
    told = [await ask(daemon, "/v1/messages?beta=true", body) for body in numbered(turns(requests))]
    assert all("usage" in answer for answer in told), told
    return share(told[1]["usage"])
