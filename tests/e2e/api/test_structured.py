"""An answer in JSON from the device: whatever the model would rather say, it holds to the schema."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from disco_daemon.engine.constraints import MAX_CHOICES
from disco_daemon.engine.llama.recursion import LEVELS
from tests.fixtures.daemon import DaemonProcess, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

POINT = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "owl"]}, "legs": {"type": "integer"}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}


def formatted(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def device(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DaemonProcess]:
    async with running(tmp_path_factory.mktemp("d"), settings={"device": {"n_ctx": 512}}) as daemon:
        await daemon.device_ready()
        yield daemon


async def asked(device: DaemonProcess, max_tokens: int = 60, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Which animal has four legs, and how many?"}]
    return await device.client.chat.completions.create(
        model="disco/device", messages=messages, max_tokens=max_tokens, **{"temperature": 0} | more
    )


async def test_an_answer_holds_to_its_schema(device: DaemonProcess) -> None:
    whole = await asked(device, response_format=formatted(POINT))
    said = json.loads(whole.choices[0].message.content)
    assert said["name"] in ("fox", "owl")
    assert isinstance(said["legs"], int)
    assert said.keys() == {"name", "legs"}
    assert whole.choices[0].finish_reason == "stop"


async def test_what_a_schema_allows_and_the_device_leaves_out_is_told(device: DaemonProcess) -> None:
    form = formatted({"properties": {"legs": {"type": "integer"}}, "required": ["legs"]})
    whole = await asked(device, response_format=form)
    assert json.loads(whole.choices[0].message.content).keys() == {"legs"}
    assert whole.disco["narrowed"] == ["response_format.additionalProperties", "response_format.type"]
    assert "narrowed" not in (await asked(device, response_format=formatted(POINT))).disco
    letter = await asked(device, response_format=form, extra_body={"disco": {"whole_schema": True}})
    assert "narrowed" not in letter.disco
    assert letter.disco["ignored"] == []


async def test_any_object_is_an_object(device: DaemonProcess) -> None:
    stream = await asked(device, response_format={"type": "json_object"}, stream=True)
    text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
    assert text.startswith("{")


async def test_an_answer_by_a_schema_that_contains_itself_ends(device: DaemonProcess) -> None:
    linked = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    node = {"type": "object", "properties": {"n": linked}, "required": ["n"], "additionalProperties": False}
    for seed in range(4):  # the model opens one after the other, for as long as it may
        made = await asked(
            device, 400, response_format=formatted(node | {"$defs": {"node": node}}), seed=seed,
            temperature=1.5,
        )  # fmt: skip
        assert made.choices[0].finish_reason == "stop"
        said, n = json.loads(made.choices[0].message.content), 0
        while said is not None:
            said, n = said["n"], n + 1
        assert n <= LEVELS + 1


async def test_a_schema_that_cannot_be_obeyed_is_the_clients_fault(device: DaemonProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="it has to be one of JSON"):
        await asked(device, response_format=formatted({"type": "nonsense"}))
    with pytest.raises(openai.BadRequestError, match="json_object or json_schema"):
        await asked(device, response_format={"type": "xml"})
    assert (await asked(device)).choices[0].message.content


FAMILY = "👩\u200d👩\u200d👧\u200d👦"
RARE = f'{FAMILY} 𓀀𓁐 ᚠ日\n"\\\t\u0085'  # more than one token each, or what JSON, or a grammar, writes as an escape


async def test_emoji_and_rare_scripts_come_out_whole_streamed_and_whole(device: DaemonProcess) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {FAMILY: {"const": RARE}}, "required": [FAMILY]}
    schema |= {"additionalProperties": False}
    whole = await asked(device, 200, response_format=formatted(schema))
    assert json.loads(whole.choices[0].message.content) == {FAMILY: RARE}
    stream = await asked(device, 200, response_format=formatted({"enum": [RARE]}), stream=True)
    pieces = [c.choices[0].delta.content or "" async for c in stream if c.choices]
    assert json.loads("".join(pieces)) == RARE
    chosen = await asked(device, 200, extra_body={"guided_choice": [RARE]})
    assert chosen.choices[0].message.content == RARE


async def test_a_limit_inside_a_character_shows_nothing_of_it(device: DaemonProcess) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    shown = set()
    for limit in range(1, 10):
        answer = await device.client.chat.completions.create(
            model="disco/device", messages=messages, max_tokens=limit, response_format=formatted({"const": FAMILY})
        )
        shown.add(text := answer.choices[0].message.content or "")
        assert f'"{FAMILY}"'.startswith(text)
        assert answer.choices[0].finish_reason == "length"
    assert len(shown) < 9, "some tokens complete no character"


async def test_a_long_enum_is_obeyed(device: DaemonProcess) -> None:
    words = [f"word {i}" for i in range(MAX_CHOICES // 3)]
    whole = await asked(device, response_format=formatted({"enum": words}))
    assert whole.choices[0].finish_reason == "stop"
    assert json.loads(whole.choices[0].message.content) in words
