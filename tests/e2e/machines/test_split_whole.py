"""A machine with the whole model's file that has joined a partner: what is not to leave it is answered by that file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from disco_daemon.models.default import default_model_path
from tests.e2e.machines.test_split import CUT, PROMPTS, Machine, machine, partner_list, posted, set_live
from tests.fixtures.daemon import ask

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def partner(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Machine]:
    async with machine(tmp_path_factory.mktemp("partner")) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge(partner: Machine, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Machine]:
    async with machine(tmp_path_factory.mktemp("edge")) as one:
        code = (await partner.json("machines", "pair", "--as", "split"))["code"]
        await one.json("machines", "join", code, "--cut", str(CUT), "--name", "laptop")
        await one.in_state("up")
        yield one


def text_of(body: dict[str, Any]) -> str:
    text: str = body["choices"][0]["message"]["content"]
    return text


async def test_a_private_request_is_answered_by_the_whole_model_here_and_no_row_leaves(
    partner: Machine, edge: Machine
) -> None:
    expected = await ask(partner.daemon, PROMPTS[0], max_tokens=12)
    status, quality, body = await posted(edge, private=True)
    assert (status, quality, text_of(body)) == (200, "whole", expected.text)
    assert "split" not in body["disco"], "no other machine had a part in it"
    assert (await set_live(edge, policy__private=True))[0] == 200
    try:
        status, quality, body = await posted(edge)
        assert (status, quality, text_of(body)) == (200, "whole", expected.text)
    finally:
        await set_live(edge, policy__private=False)
    await edge.in_state("up")
    public = await ask(edge.daemon, PROMPTS[1], max_tokens=8)
    assert public.disco["split"]["n_rows"] > 0
    async with asyncio.timeout(30):
        while not (rows := (await partner_list(partner))["members"][0]["rows"]):
            await asyncio.sleep(0.1)  # a link reports what it carried once a second
    assert rows <= public.disco["prompt_tokens"] + 8, "those of the private answers would be more"


async def test_a_private_request_may_still_ask_for_the_exit_alone(edge: Machine) -> None:
    status, _, body = await posted(edge, private=True, split_mode="alone")
    assert (status, "exit" in body["error"]["message"]) == (400, True), "it came without one"


async def test_embeddings_are_the_whole_models(partner: Machine, edge: Machine) -> None:
    texts = ["A lighthouse.", "A ship."]
    here = await edge.daemon.client.embeddings.create(model="disco", input=texts)
    there = await partner.daemon.client.embeddings.create(model="disco", input=texts)
    assert [one.embedding for one in here.data] == [one.embedding for one in there.data]


async def test_what_is_not_private_goes_to_both_machines(partner: Machine, edge: Machine) -> None:
    whole = await ask(partner.daemon, PROMPTS[1], max_tokens=24)
    split = await ask(edge.daemon, PROMPTS[1], max_tokens=24)
    assert split.text == whole.text
    assert split.disco["split"]["n_rows"] > 0
