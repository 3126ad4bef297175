"""What a choice tells of its tokens, by the unmodified client and a real device."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import llama_cpp
import openai
import pytest
import pytest_asyncio

from disco_daemon.engine import wire
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.models.default import default_model_path
from tests.fixtures.daemon import DaemonProcess, running

STORY: list[Any] = [{"role": "user", "content": "Tell me a story about the sea."}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def device(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    async with running(tmp_path_factory.mktemp("d"), settings={"device": {"n_ctx": 512}}) as daemon:
        await daemon.device_ready()
        yield daemon


def test_log_probabilities_are_those_that_llama_cpp_python_tells() -> None:
    prompt, path = "Once upon a time, in a small village", str(default_model_path())
    ours = Llama(wire.Load(model_path=path, n_ctx=64, n_threads=1, n_gpu_layers=0, exact=False), AbortFlag())
    tokens = ours.vocabulary.tokenize(prompt, add_special=True)
    sampler = ours.sampler(wire.Generate(id="r", messages=[], temperature=0))
    rows, last, told = [(token, i, 0, i == len(tokens) - 1) for i, token in enumerate(tokens)], len(tokens) - 1, []
    for n in range(4):
        assert ours.decode(rows) == 0
        token = ours.sample(sampler, last)
        told.append(ours.likelihood(last, token, 3))
        rows, last = [(token, len(tokens) + n, 0, True)], 0
    sampler.close()
    ours.close()
    theirs = llama_cpp.Llama(
        path, n_ctx=64, n_threads=1, n_threads_batch=1, logits_all=True, flash_attn=True, verbose=False
    )
    found: Any = theirs.create_completion(prompt, max_tokens=4, temperature=0, logprobs=3)
    logprobs = found["choices"][0]["logprobs"]
    theirs.close()
    assert [one.piece.decode() for one in told] == logprobs["tokens"]
    assert [one.logprob for one in told] == pytest.approx([float(p) for p in logprobs["token_logprobs"]], abs=1e-3)
    for one, top in zip(told, logprobs["top_logprobs"], strict=True):
        assert {piece.decode(): p for piece, p in one.top} == pytest.approx(
            {t: float(p) for t, p in top.items()}, abs=1e-3
        )


@pytest.mark.asyncio(loop_scope="module")
async def test_a_chat_tells_the_log_probabilities_of_its_text_streamed_as_whole(device: DaemonProcess) -> None:
    asked: dict[str, Any] = {
        "model": "disco", "messages": STORY, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = (await device.client.chat.completions.create(**asked)).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    assert len(whole.logprobs.content) == 12
    assert "".join(one.token for one in whole.logprobs.content) == whole.message.content
    assert all(one.logprob == one.top_logprobs[0].logprob for one in whole.logprobs.content), "it is greedy"
    streamed: list[Any] = []
    text = ""
    async for chunk in await device.client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            streamed += (choice.logprobs and choice.logprobs.content) or []
            assert "".join(one.token for one in streamed) == text
    assert streamed == whole.logprobs.content
    drawn = await device.client.chat.completions.create(
        **asked | {"temperature": 2, "max_tokens": 1}, extra_body={"top_k": 1}, frequency_penalty=2
    )
    assert drawn.choices[0].logprobs is not None
    assert drawn.choices[0].logprobs.content == whole.logprobs.content[:1], "whatever draws tokens by them"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_raw_completion_tells_them_in_its_own_shape(device: DaemonProcess) -> None:
    asked: dict[str, Any] = {"model": "disco", "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}
    whole = (await device.client.completions.create(**asked, logprobs=2)).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.tokens is not None
    assert "".join(whole.logprobs.tokens) == whole.text
    assert whole.logprobs.text_offset is not None
    assert [whole.text[at:][:1] for at in whole.logprobs.text_offset] == [token[:1] for token in whole.logprobs.tokens]
    assert [len(top) for top in whole.logprobs.top_logprobs or []] == [2] * 6
    assert (await device.client.completions.create(**asked)).choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        await device.client.completions.create(**asked, logprobs=21)


@pytest.mark.asyncio(loop_scope="module")
async def test_choices_are_repeatable_share_their_prompt_and_begin_as_the_answer_alone(device: DaemonProcess) -> None:
    hills: list[Any] = [{"role": "user", "content": "Tell me a story about the hills."}]
    asked: dict[str, Any] = {"model": "disco", "messages": hills, "max_tokens": 10, "temperature": 1.5, "seed": 7}
    before = (await device.state())["endpoints"]["device"]["engine"]
    whole = await device.client.chat.completions.create(**asked, n=3)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    alone = await device.client.chat.completions.create(**asked)
    assert alone.choices[0].message.content == texts[0]
    assert alone.usage is not None
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
    assert whole.usage.completion_tokens > 2 * alone.usage.completion_tokens
    disco = (whole.model_extra or {})["disco"]
    assert (
        disco["endpoints"]["device"]["completion_tokens"] == disco["tokens"]["device"] == whole.usage.completion_tokens
    )
    streamed, reasons = ["", "", ""], dict[int, str]()
    async for chunk in await device.client.chat.completions.create(**asked, n=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert streamed == texts
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    n_made = 2 * whole.usage.completion_tokens + alone.usage.completion_tokens + before["completion_tokens"]
    state = await device.until(lambda s: s["endpoints"]["device"]["engine"]["completion_tokens"] >= n_made)
    n_read = state["endpoints"]["device"]["engine"]["prompt_tokens"] - before["prompt_tokens"]
    assert n_read < 2 * whole.usage.prompt_tokens, "once, but for its last token"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_raw_prompt_has_choices_too_and_who_leaves_ends_them_all(device: DaemonProcess) -> None:
    raw = await device.client.completions.create(
        model="disco", prompt="Once upon a time", n=2, max_tokens=6, temperature=1.5, seed=3, logprobs=0
    )
    assert [choice.index for choice in raw.choices] == [0, 1]
    for choice in raw.choices:
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or []) == choice.text
    stream = await device.client.chat.completions.create(model="disco", messages=STORY, n=8, stream=True)
    async with stream:
        async for chunk in stream:
            if any(choice.index for choice in chunk.choices):
                break
    await device.until(lambda s: s["endpoints"]["device"]["in_flight"] == 0)
    with pytest.raises(openai.BadRequestError, match="n"):
        await device.client.chat.completions.create(model="disco", messages=STORY, n=9)
