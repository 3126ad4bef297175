"""A small whole model drafts here for a large one at a partner: ids go up, and the answer is the large model's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from disco_daemon.clock import SystemClock
from disco_daemon.engine.llama.model import requantize
from disco_daemon.engine.supervisor import Engine
from disco_daemon.link.protocol import IDS, NeedRows, OpenAnswer, SendRows
from disco_daemon.machines.split.drafter import own_certainty
from disco_daemon.models.default import default_model_path
from disco_daemon.models.segment_files import SegmentFiles
from disco_daemon.types import Append, LayerRange
from tests.e2e.cli.test_cli import disco
from tests.e2e.machines.test_split import PROMPTS, Machine, children, machine, posted, set_live
from tests.e2e.machines.test_split_engines import QUESTIONS, N, Pair, config, paired, question, told
from tests.e2e.machines.test_split_modes import by, cut_in_mid_answer, usage_of
from tests.fixtures.daemon import Heard, ask

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
    pytest.mark.timeout(600),
]

WHOLE = LayerRange(0, N, N)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The large model with other weights: it has another opinion now and then."""
    path = tmp_path_factory.mktemp("good") / "good.Q8_0.gguf"
    requantize(str(default_model_path()), str(path), 2)
    return path


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lower 24 layers of the large model under its head, as a model of their own: it is mostly wrong."""
    [path] = SegmentFiles(tmp_path_factory.mktemp("weak"), 1 << 30).write(default_model_path(), [LayerRange(0, 24, N)])
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(good: Path) -> AsyncIterator[Pair]:
    async with paired([good, default_model_path()], exit_=own_certainty(), codec=IDS, ranges=[None, WHOLE]) as both:
        yield both


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole() -> AsyncIterator[Engine]:
    engine = Engine(config(default_model_path(), None), SystemClock())
    engine.start()
    await engine.ready(60)
    yield engine
    await engine.close()


@pytest.mark.parametrize("text", QUESTIONS)
async def test_a_greedy_answer_is_the_large_models_for_fewer_questions_than_tokens(
    pair: Pair, whole: Engine, text: str
) -> None:
    request = question(text, 40)
    expected, _ = await told(whole.open(request))
    pair.wire.delay_s = 0.1  # over a way that is worth drafting for
    got, done, use = await usage_of(pair.edge, request)
    pair.wire.delay_s = 0.0
    assert got == expected
    assert use.bytes_up == 0, "no row has a number"
    assert use.partner_rows > 0 < use.edge_rows
    if done.n_completion > 16:
        assert use.round_trips < done.n_completion
        assert use.accepted > 0


async def test_an_answer_with_a_seed_is_the_large_models(pair: Pair, whole: Engine) -> None:
    request = question("Tell me a story about the sea.", 40, temperature=0.7, seed=7)
    expected, _ = await told(whole.open(request))
    assert (await told(pair.edge.open(request)))[0] == expected


async def test_an_answer_in_a_format_and_with_penalties_is_the_large_models(pair: Pair, whole: Engine) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes yes yes yes", "no no no no no"]}}}
    formed = replace(question("Yes or no?", 40), extra={"response_format": schema})
    hard = question(QUESTIONS[0], 32)
    hard = replace(hard, sampling=replace(hard.sampling, frequency_penalty=1.5, temperature=0.7, seed=3))
    for request in (formed, hard):
        assert (await told(pair.edge.open(request)))[0] == (await told(whole.open(request)))[0]


async def test_eight_answers_at_a_time_are_those_of_one_at_a_time(pair: Pair, whole: Engine) -> None:
    requests = [question(f"Write {n} sentences about the number {n}.", 12) for n in range(2, 10)]
    expected = [(await told(whole.open(request)))[0] for request in requests]
    got = await asyncio.gather(*(told(pair.edge.open(request)) for request in requests))
    assert [text for text, _ in got] == expected


async def test_a_weak_drafter_costs_questions_and_changes_no_word(weak: Path, whole: Engine) -> None:
    model = [weak, default_model_path()]
    async with paired(model, exit_=own_certainty(), codec=IDS, ranges=[None, WHOLE]) as both:
        for request in (question(QUESTIONS[0], 32), question(QUESTIONS[2], 32, temperature=0.7, seed=1)):
            got, done, use = await usage_of(both.edge, request)
            assert got == (await told(whole.open(request)))[0]
            assert use.drafted - use.accepted > 0, "it was wrong, and the partner said so"
            assert done.n_completion > 8


async def test_ids_are_asked_for_again_by_position_when_the_partner_has_no_room(good: Path, whole: Engine) -> None:
    requests = [question(f"Tell me about the number {n}.", 64) for n in range(1, 5)]
    expected = [text for text, _ in await asyncio.gather(*(told(whole.open(request)) for request in requests))]
    model = [good, default_model_path()]
    async with paired(model, n_partner=256, n_ctx=256, exit_=own_certainty(), codec=IDS, ranges=[None, WHOLE]) as both:
        got = await asyncio.gather(*(told(both.edge.open(request)) for request in requests))
        assert [text for text, _ in got] == expected
        assert any(isinstance(message, NeedRows) for message in await both.wire.settle())


async def test_the_ids_of_a_prompt_go_up_before_it_is_computed_here_and_once_only(pair: Pair, whole: Engine) -> None:
    request = question("Summarize: " + "The lighthouse keeper counts the ships that pass at night. " * 12, 16)
    start = len(await pair.wire.settle())
    first, _, _ = await usage_of(pair.edge, request)
    assert first == (await told(whole.open(request)))[0]
    seen = (await pair.wire.settle())[start:]
    [opened] = [message for message in seen if isinstance(message, OpenAnswer)]
    ids = {m.pos + i: id_ for m in seen if isinstance(m, SendRows) for i, id_ in enumerate(m.tokens)}
    assert [ids[at] for at in sorted(ids) if at < len(opened.tokens)] == list(opened.tokens[min(ids) :])
    start += len(seen)
    again, _, _ = await usage_of(pair.edge, request)
    assert again == first
    seen = (await pair.wire.settle())[start:]
    assert min(m.pos for m in seen if isinstance(m, SendRows)) > 0.9 * len(opened.tokens), "it has the prompt"


async def test_an_answer_goes_on_by_the_small_model_and_is_exact_again(pair: Pair) -> None:
    for _ in range(3):  # for an edge whose machine was held up, a verdict may be late without a cut
        pieces, use, n_cut, seen = await cut_in_mid_answer(pair)
        if use.alone_from == n_cut and not pieces[-1].alone:
            break
        pair.wire.cut()
        pair.wire.join()
    assert use.alone_from == n_cut
    ends = accumulate(piece.n_tokens for piece in pieces)
    at_cut = "".join(piece.text for piece, end in zip(pieces, ends, strict=True) if end <= n_cut)
    assert at_cut
    # How many tokens eight verdicts decide depends on how far the edge drafts while it waits for one.
    expected, _, _ = await usage_of(pair.edge, by("exact", n_cut))
    assert expected.startswith(at_cut)
    assert use.n_alone >= 4
    assert not pieces[-1].alone
    opened = [message for message in seen if isinstance(message, OpenAnswer)]
    n_at_cut = len(opened[0].tokens) + use.alone_from
    assert n_at_cut < len(opened[-1].tokens) <= n_at_cut + use.n_alone, "the small model writes on until it is there"


async def test_alone_is_the_small_models_own_answer(pair: Pair, good: Path) -> None:
    small = Engine(config(good, None), SystemClock())
    small.start()
    try:
        await small.ready(60)
        expected, _ = await told(small.open(question("Write a poem about a lighthouse.", 24)))
    finally:
        await small.close()
    got, _, use = await usage_of(pair.edge, by("alone", 24))
    assert got == expected
    assert (use.partner_rows, use.bytes_up) == (0, 0)


async def test_an_answer_that_a_server_began_goes_on_as_the_large_model_would(pair: Pair, whole: Engine) -> None:
    request = question("Tell me about lighthouses.", 32)
    texts = []
    for engine in (whole, pair.edge):
        answer = engine.open(request, hold=True)
        answer.send(Append("A lighthouse is a tower"))
        answer.send(Append(" that", go=True))
        texts.append((await told(answer))[0])
    assert texts[0] == texts[1]


# --- two daemons ------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def partner(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Machine]:
    async with machine(tmp_path_factory.mktemp("partner")) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge(partner: Machine, good: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Machine]:
    async with machine(tmp_path_factory.mktemp("edge"), model=good) as one:
        code = (await partner.json("machines", "pair", "--as", "split"))["code"]
        joined = await one.json("machines", "join", code, "--draft", str(good), "--name", "laptop")
        assert (joined["cut"], joined["running"]) == (0, True)
        assert joined["n_bytes"] < 4e6, "only the vocabulary is fetched"
        yield one


async def test_two_machines_say_what_the_large_model_says(partner: Machine, edge: Machine, good: Path) -> None:
    status = await edge.in_state("up")
    shown = (status["mode"], status["cut"], status["codec"], status["same_bits"], status["draft_model"])
    assert shown == ("exact", 0, IDS, True, str(good))
    for prompt in PROMPTS:
        expected = await ask(partner.daemon, prompt, max_tokens=48)
        heard = await ask(edge.daemon, prompt, max_tokens=48)
        assert heard.text == expected.text
        split = heard.disco["split"]
        assert (split["quality"], split["codec"], split["same_bits"]) == ("whole", IDS, True)
        assert split["layer_tokens"] == {"edge": 0, "partner": N * split["n_rows"]}
        assert split["bytes"]["up"] == 0 < split["n_rows"]
    _, out, _ = await edge.type("split", "status")
    assert "drafts here, the whole model is at" in out
    _, out, _ = await partner.type("machines", "list", "--as", "split")
    assert "the whole model" in out
    [member] = (await partner.json("machines", "list", "--as", "split"))["members"]
    assert member["same_bits"] is True


async def test_alone_is_offered_and_confident_is_refused_with_the_reason(edge: Machine) -> None:
    status, _, body = await posted(edge, split_mode="confident")
    assert (status, "whole small model drafts" in body["error"]["message"]) == (400, True)
    status, quality, body = await posted(edge, split_mode="alone")
    alone, split = body["choices"][0]["message"]["content"], body["disco"]["split"]
    assert (status, quality, split["n_rows"], split["bytes"]) == (200, "alone", 0, {"up": 0, "down": 0})
    status, _, body = await posted(edge, private=True)
    assert (status, "small model" in body["error"]["message"]) == (400, True)
    assert (await set_live(edge, split__private_alone=True))[0] == 200
    status, quality, body = await posted(edge, private=True)
    assert (status, quality, body["choices"][0]["message"]["content"]) == (200, "alone", alone)
    assert (await set_live(edge, split__private_alone=False))[0] == 200


async def test_a_partner_that_is_killed_in_mid_answer_costs_no_word_and_the_next_answer_is_exact(
    partner: Machine, edge: Machine
) -> None:
    expected = await ask(partner.daemon, PROMPTS[2], max_tokens=64)
    device = (await partner.daemon.state())["endpoints"]["device"]["pid"]
    [host] = await children(partner, "disco_daemon.engine.worker") - {device}
    starter, killed = psutil.Process(host).parent(), list[str]()
    assert starter is not None

    def kill(heard: Heard) -> None:
        if not killed and len(heard.text) > 40:
            killed.append(heard.text)
            starter.suspend()  # or it may have started another one before the edge goes on alone, after 1 s
            os.kill(host, signal.SIGKILL)
            asyncio.get_running_loop().call_later(1.1, starter.resume)

    try:
        heard = await ask(edge.daemon, PROMPTS[2], max_tokens=600, on_piece=kill)
    finally:
        starter.resume()
    split = heard.disco["split"]
    assert killed
    assert expected.text.startswith(killed[0])
    assert heard.text.startswith(killed[0])
    assert (split["quality"], split["alone_from"] > 0) == ("alone", True)
    n_before = split["alone_from"] + split["alone"]
    assert n_before < heard.disco["tokens"]["device"], "it was exact again before the answer's end"
    await edge.in_state("up")
    again = await ask(edge.daemon, PROMPTS[2], max_tokens=64)
    assert expected.text.startswith(again.text)
    assert again.disco["split"]["quality"] == "whole"


async def joining(partner: Machine, folder: Path, *words: str) -> tuple[int, str]:
    """Type `disco machines join` on a machine without a daemon; return the exit code and what it says."""
    folder.mkdir(exist_ok=True)
    code = (await partner.json("machines", "pair", "--as", "split"))["code"]
    env = {f"XDG_{name}_HOME": str(folder) for name in ("CONFIG", "DATA", "CACHE")}
    argv = ["machines", "join", code, "--name", folder.name, "--url", "http://127.0.0.1:1", *words]
    status, out, err = await disco(*argv, home=folder, env=env)
    return status, out + err


def doctored(source: Path, target: Path) -> Path:
    """The same model with another word in its vocabulary."""
    data = bytearray(source.read_bytes())
    at = data.index(b"lighthouse") if b"lighthouse" in data[:4_000_000] else data.index("Ġhouse".encode())
    data[at + 3 : at + 4] = b"X"
    target.write_bytes(data)
    return target


async def test_a_model_of_another_vocabulary_is_refused_with_the_reason(
    partner: Machine, edge: Machine, good: Path, tmp_path: Path
) -> None:
    other = doctored(good, tmp_path / "other.gguf")
    status, said = await joining(partner, tmp_path / "second", "--draft", str(other))
    assert (status, "vocabularies differ" in said) == (1, True), said
    status, said = await joining(partner, tmp_path / "third", "--draft", str(tmp_path / "none.gguf"))
    assert (status, "no such file" in said) == (1, True), said
    status, said = await joining(partner, tmp_path / "third", "--draft", str(good), "--cut", "5")
    assert (status, "do not go together" in said) == (1, True), said


async def test_a_partner_serves_ids_or_rows_and_says_which(
    partner: Machine, edge: Machine, good: Path, tmp_path: Path
) -> None:
    status, said = await joining(partner, tmp_path / "rows", "--cut", "15")
    assert (status, "use --draft" in said) == (1, True), said
    status, said = await joining(partner, tmp_path / "ids", "--draft", str(good))
    assert (status, "drafts here" in said) == (0, True), said


async def test_leaving_makes_the_device_whole_again(edge: Machine) -> None:
    assert (await edge.json("machines", "leave", "--yes"))["told"]
    await edge.daemon.device_ready()
    assert (await edge.json("split", "status")) == {"state": "off"}
    found: dict[str, Any] = await edge.daemon.state()
    assert found["split"] is None
    assert (await ask(edge.daemon, PROMPTS[0], max_tokens=8)).text
