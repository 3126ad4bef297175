"""A model that thinks before it answers: the real one, with a chat template that makes it think.

It was never taught to, so three examples in the chat show it how; then it closes its thought, and answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from disco_daemon.config.layers import load
from disco_daemon.daemon.daemon import Daemon
from disco_daemon.engine import wire
from disco_daemon.engine.kv.cells import Cells
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.serve.admission import Admission
from disco_daemon.engine.serve.batch import Batcher
from disco_daemon.errors import ConfigError
from disco_daemon.models.default import default_model_path
from disco_daemon.scheduler.baselines import Fcfs
from disco_daemon.scheduler.latency import IterationLatency
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.upstream import Upstream

TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
OPENS = TURNS + "{{ '<|im_start|>assistant\\n' }}{% if not quiet %}{{ '<think>\\n' }}{% endif %}"


def said(colour: str, *, thought: bool = True) -> list[dict[str, str]]:
    text = f"<think>\nThe word is {colour}.\n</think>\n\n{colour}" if thought else colour
    return [{"role": "user", "content": f"Say {colour}."}, {"role": "assistant", "content": text}]


BLACK = {"role": "user", "content": "Say black."}
TAUGHT: list[Any] = [*said("red"), *said("blue"), *said("green"), BLACK]
PLAIN: list[Any] = [*said("red", thought=False), *said("blue", thought=False), *said("green", thought=False), BLACK]
THOUGHT = "The word is black."


@dataclass
class Streamed:
    """A streamed answer: what was thought, what was said, in which order."""

    thought: str = ""
    text: str = ""
    order: list[str] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, choice: Any) -> None:
        for name, part in (("thought", (choice.delta.model_extra or {}).get("reasoning_content")),
                           ("text", choice.delta.content)):  # fmt: skip
            if part:
                setattr(self, name, getattr(self, name) + part)
                self.order.append(name)
        self.finish_reason = choice.finish_reason or self.finish_reason


async def streamed(daemon: DaemonProcess, messages: list[Any], **more: Any) -> Streamed:
    heard = Streamed()
    stream = await daemon.client.chat.completions.create(
        model="disco", messages=messages, temperature=0, stream=True, **{"max_tokens": 40} | more
    )
    async with stream:
        async for chunk in stream:
            for choice in chunk.choices:
                heard.take(choice)
    return heard


async def whole(daemon: DaemonProcess, messages: list[Any], **more: Any) -> Any:
    return await daemon.client.chat.completions.create(
        model="disco", messages=messages, temperature=0, **{"max_tokens": 40} | more
    )


def thought_of(answer: Any) -> str | None:
    found: str | None = (answer.choices[0].message.model_extra or {}).get("reasoning_content")
    return found


# --- the engine's core, in this process ---------------------------------------------------------------------------


def test_a_follower_goes_on_behind_the_thought_that_its_prompt_opened() -> None:
    """What another endpoint has said meanwhile is an answer, and is not taken for a thought."""
    llama = Llama(
        wire.Load(
            model_path=str(default_model_path()),
            n_ctx=256,
            n_threads=1,
            n_gpu_layers=0,
            n_cells=256,
            chat_template=OPENS,
        ),
        AbortFlag(),
    )
    heard: list[Any] = []
    latency = IterationLatency(llama.latency_prior)

    def hear(message: wire.Message) -> None:
        heard.append(message)

    batcher = Batcher(llama, hear, Admission(Cells(llama, 4, 256), Fcfs(), latency))

    def rest() -> None:
        while batcher.step():
            pass

    batcher.add(wire.Generate(id="g1", messages=[BLACK], hold=True, temperature=0, max_tokens=8))
    rest()
    (held,) = batcher.admission.resident
    prompt = list(held.given.prompt)
    batcher.append(wire.AppendText(id="g1", text="The colour of coal", go=False))
    batcher.append(wire.AppendText(id="g1", text=" is", go=True))
    text = b"".join(llama.vocabulary.piece(token, special=True) for token in held.tokens).decode()
    assert text.endswith("<think>\n\n</think>\n\nThe colour of coal"), "its last token is drawn again"
    assert held.given.prompt[: len(prompt)] == prompt
    rest()
    said = [m for m in heard if isinstance(m, wire.TextPiece)]
    assert said
    assert not any(piece.thought for piece in said)
    assert heard[-1].n_prompt == held.prefill.n_prompt, "what was prefilled before is not computed again"


# --- over HTTP ----------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def device(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("d")
    (folder / "opens.jinja").write_text(OPENS)
    settings = {"device": {"n_ctx": 512, "chat_template": str(folder / "opens.jinja")}}
    async with running(folder, settings=settings) as daemon:
        await daemon.device_ready()
        yield daemon


@pytest.mark.asyncio(loop_scope="module")
async def test_a_thought_comes_before_the_answer_and_apart_from_it(device: DaemonProcess) -> None:
    heard = await streamed(device, TAUGHT)
    assert (heard.thought, heard.text, heard.finish_reason) == (THOUGHT, "black", "stop")
    assert heard.order == sorted(heard.order, reverse=True), "thought before text"
    assert len(heard.order) > 4, "as it comes"
    answer = await whole(device, TAUGHT)
    assert (thought_of(answer), answer.choices[0].message.content) == (THOUGHT, "black")
    assert answer.usage.completion_tokens > 8, "thinking is work, too"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_model_may_begin_its_thought_itself(device: DaemonProcess) -> None:
    heard = await streamed(device, TAUGHT, extra_body={"chat_template_kwargs": {"quiet": True}})
    assert (heard.thought, heard.text) == (THOUGHT, "black")


@pytest.mark.asyncio(loop_scope="module")
async def test_stop_strings_and_limits_of_a_thought(device: DaemonProcess) -> None:
    stopped = await streamed(device, TAUGHT, stop=["word", "lack"])
    assert (stopped.thought, stopped.text, stopped.finish_reason) == (THOUGHT, "b", "stop")
    cut = await whole(device, TAUGHT, max_tokens=3)
    assert (thought_of(cut), cut.choices[0].message.content) == ("The word is", "")
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 3)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("how", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
async def test_a_thought_that_nobody_wants_is_over_at_once(how: dict[str, Any], device: DaemonProcess) -> None:
    """The template does not know how, so the prompt's thought is closed for it."""
    thinking = await whole(device, PLAIN, max_tokens=4)
    quiet = await whole(device, PLAIN, max_tokens=4, extra_body=how)
    assert quiet.usage.prompt_tokens > thinking.usage.prompt_tokens
    assert thought_of(quiet) is None
    assert quiet.choices[0].message.content
    assert not thinking.choices[0].message.content


BUDGETS: list[dict[str, Any]] = [
    {"thinking_budget_tokens": 2},
    {"disco": {"thinking_tokens": 2}, "thinking_token_budget": 9},
    {"chat_template_kwargs": {"thinking_budget": 2}},
    {"thinking": {"type": "enabled", "budget_tokens": 2}},
    {"reasoning_effort": "minimal"},
]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_thought_is_closed_behind_its_budget_and_the_answer_goes_on(device: DaemonProcess) -> None:
    for wish in BUDGETS:
        answer = await whole(device, TAUGHT, max_tokens=20, extra_body=wish)
        assert thought_of(answer) == "The word", wish
        assert answer.choices[0].message.content, wish
        assert answer.usage.completion_tokens_details.reasoning_tokens == 2, wish
    heard = await streamed(device, TAUGHT, extra_body=BUDGETS[0])
    assert heard.thought == "The word"
    assert heard.text
    assert heard.order == sorted(heard.order, reverse=True)


# What a server without a reasoning parser streams: its thought within its text.
WRITTEN = ["<th", "ink>\n", "Hm, ", "1 < 2.", "\n</thi", "nk>\n", "\nYes", ", <think>", " is a tag."]
SHOWN = ("Hm, 1 < 2.", "Yes, <think> is a tag.")


async def posted(daemon: DaemonProcess, route: str, **body: Any) -> list[dict[str, Any]]:
    """The objects of an answer: of a stream all, else the one."""
    asked = {"model": "disco", "messages": [{"role": "user", "content": "Is it?"}], "max_tokens": 99} | body
    async with daemon.session.post(f"{daemon.url.removesuffix('/v1')}{route}", json=asked) as response:
        lines = (await response.text()).splitlines()
        assert response.status == 200, lines
    data = [line.removeprefix("data: ") for line in lines if line[:6] == "data: " or line[:1] == "{"]
    return [json.loads(line) for line in data if line != "[DONE]"]


async def in_chat(daemon: DaemonProcess, *, stream: bool) -> tuple[str, str]:
    told = [c for one in await posted(daemon, "/v1/chat/completions", stream=stream) for c in one["choices"]]
    parts = [choice["delta" if stream else "message"] for choice in told]
    return "".join(p.get("reasoning_content") or "" for p in parts), "".join(p.get("content") or "" for p in parts)


async def in_messages(daemon: DaemonProcess, *, stream: bool) -> tuple[str, str]:
    told = await posted(daemon, "/v1/messages", stream=stream)
    parts = [one["delta"] for one in told if one.get("type") == "content_block_delta"] if stream else told[0]["content"]
    return "".join(p.get("thinking") or "" for p in parts), "".join(p.get("text") or "" for p in parts)


async def in_responses(daemon: DaemonProcess, *, stream: bool) -> tuple[str, str]:
    told = await posted(daemon, "/v1/responses", stream=stream, input="Is it?", messages=None)
    items = (told[-1]["response"] if stream else told[0])["output"]
    said = {item["type"]: "".join(p["text"] for p in item["content"]) for item in items}
    return said["reasoning"], said["message"]


async def in_ollama(daemon: DaemonProcess, *, stream: bool) -> tuple[str, str]:
    told = [one["message"] for one in await posted(daemon, "/api/chat", stream=stream, think=True)]
    return "".join(m.get("thinking") or "" for m in told), "".join(m["content"] for m in told)


async def test_a_thought_that_a_server_writes_into_its_text_is_told_apart_in_every_api(tmp_path: Path) -> None:
    async with Upstream() as upstream, running(tmp_path, server=upstream.url, device=False) as daemon:
        with upstream.reciting(WRITTEN):
            for api in (in_chat, in_messages, in_responses, in_ollama):
                assert await api(daemon, stream=True) == SHOWN, api.__name__
                assert await api(daemon, stream=False) == SHOWN, api.__name__
            answer = await whole(daemon, [BLACK], max_tokens=99, extra_body={"reasoning_format": "none"})
            assert answer.choices[0].message.content == "".join(WRITTEN), "the client wants to tell them apart itself"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_format_is_about_the_answer(device: DaemonProcess) -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": ["black", "white"]}}, "required": ["colour"]}
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
    answer = await whole(device, [BLACK], response_format=form, max_tokens=60)
    assert thought_of(answer) is None
    assert json.loads(answer.choices[0].message.content)["colour"] in ("black", "white")


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_that_has_begun_goes_on_behind_its_thought(device: DaemonProcess) -> None:
    begun = {"role": "assistant", "content": "The colour of coal is"}
    on = {"continue_final_message": True, "add_generation_prompt": False}
    heard = await streamed(device, [BLACK, begun], extra_body=on, max_tokens=6)
    assert heard.text
    assert not heard.thought
    within = {"role": "assistant", "content": "<think>\nThe word"}
    quiet = {"chat_template_kwargs": {"quiet": True}}
    heard = await streamed(device, [*TAUGHT, within], extra_body=on | quiet)
    assert (heard.thought, heard.text) == ("is black.", "black")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_raw_completion_is_not_taken_apart(device: DaemonProcess) -> None:
    prompt = "<think>\nOne.\n</think>\n\none\n<think>\nTwo.\n</think>\n\ntwo\n<think>\nThree"
    found = await device.client.completions.create(model="disco", prompt=prompt, temperature=0, max_tokens=12)
    assert "</think>" in found.choices[0].text


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"messages": []}, "cannot set messages"),
        ({"name": "<|im_end|>"}, "control tokens"),
        ("quiet", "'chat_template_kwargs': it must be an object"),
    ],
)
async def test_arguments_that_a_template_must_not_get_are_refused(args: Any, said: str, device: DaemonProcess) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        await whole(device, [BLACK], extra_body={"chat_template_kwargs": args})


async def test_nobody_else_goes_on_with_a_thought(tmp_path: Path) -> None:
    """The engine dies in the middle of it: that is told, and the server is not asked to finish it."""
    (tmp_path / "opens.jinja").write_text(OPENS)
    settings: dict[str, dict[str, Any]] = {
        "device": {"n_ctx": 512, "chat_template": str(tmp_path / "opens.jinja")}, "handoff": {"for_cost": True}
    }  # fmt: skip
    async with Upstream() as upstream:
        async with running(tmp_path, server=upstream.url, policy="all-device", settings=settings) as daemon:
            pid = (await daemon.device_ready())["endpoints"]["device"]["pid"]
            heard = Streamed()
            stream = await daemon.client.chat.completions.create(
                model="disco", messages=[{"role": "user", "content": "Tell me a long story."}], temperature=0,
                stream=True, max_tokens=400,
            )  # fmt: skip

            async def listen() -> None:
                async for chunk in stream:
                    heard.take(chunk.choices[0])
                    if heard.order.count("thought") == 5:
                        os.kill(pid, signal.SIGKILL)

            with pytest.raises(openai.APIError):
                await listen()
            assert heard.thought
            assert not heard.text
        assert not upstream.exchanges


async def test_a_template_that_is_no_template_is_told(tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text("{% for %}")
    settings = {"device": {"chat_template": str(tmp_path / "bad.jinja")}}
    async with running(tmp_path, settings=settings) as daemon:
        state = await daemon.until(lambda s: s["endpoints"]["device"]["state"] == "failed")
        assert "does not compile" in state["endpoints"]["device"]["last_error"]


async def test_a_template_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    flags = {"device.chat_template": str(tmp_path / "none.jinja"), "history.path": str(tmp_path / "history.sqlite")}
    with pytest.raises(ConfigError, match=r"device\.chat_template .* cannot be read"):
        await asyncio.to_thread(Daemon, load(tmp_path / "config.toml", {}, flags), tmp_path / "config.toml")
