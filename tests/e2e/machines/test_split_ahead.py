"""An edge that drafts on while its partner judges says what the whole model says, and counts what it did in vain."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from disco_daemon.clock import SystemClock
from disco_daemon.engine import wire
from disco_daemon.engine.supervisor import Engine
from disco_daemon.link.protocol import DraftVerdict, JudgeDrafts, SendRows
from disco_daemon.models.default import default_model_path
from disco_daemon.models.segment_files import SegmentFiles
from disco_daemon.types import Drawing, GenerationRequest, LayerRange
from tests.e2e.machines.test_split_engines import Pair, config, exit_segment, paired, question, told

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
]

N, CUT = 30, 29  # behind 29 layers an exit that nobody has trained is right often
RANGES = [LayerRange(0, CUT, N), LayerRange(CUT, N, N)]
SURE = wire.ExitCalibration(coefficients=(0.0, 0.0, 0.0, 0.0), scores=(0.0, 1.0), shares=(0.85, 0.85))
DELAY_S = 0.05  # of a verdict: enough for some rows, also of a machine that has other work


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("upper")
    [upper] = SegmentFiles(folder, 1 << 30).write(default_model_path(), RANGES[1:])
    lower = exit_segment(tmp_path_factory.mktemp("exit"), RANGES[0])
    async with paired([lower, upper], exit_=SURE, ranges=RANGES) as both:
        both.wire.delay_s = DELAY_S
        yield both


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole() -> AsyncIterator[Engine]:
    engine = Engine(config(default_model_path(), None), SystemClock())
    engine.start()
    await engine.ready(60)
    yield engine
    await engine.close()


def requests() -> list[GenerationRequest]:
    """Answers of all kinds that the partner's sampler has to go on with as if nothing had been drafted."""
    count = question("Count from one to twenty.", 20)
    story = question("Tell me a story about the sea.", 12, temperature=0.7, seed=7)
    penalties = replace(story.sampling, frequency_penalty=1.2, presence_penalty=0.5)
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes yes yes yes", "no no no no no"]}}}
    return [
        count,
        story,
        replace(story, sampling=penalties),
        replace(story, drawing=Drawing(top_k=9, xtc_probability=0.3, repeat_penalty=1.3, dry_multiplier=1.0)),
        replace(count, drawing=Drawing(repeat_penalty=1.1, repeat_last_n=-1, min_tokens=18, logit_bias=((30, 9.0),))),
        replace(question("Yes or no?", 16), extra={"response_format": schema}),
        replace(count, sampling=replace(count.sampling, stop=("seven", "7"))),
    ]


async def test_what_is_drafted_while_a_verdict_is_awaited_never_changes_an_answer(pair: Pair, whole: Engine) -> None:
    expected = [(await told(whole.open(request)))[0] for request in requests()]
    n_made, n_wasted = 0, 0
    for request, text in zip(requests(), expected, strict=True):
        start = len(pair.wire.seen)
        got, done = await told(pair.edge.open(request))
        assert got == text
        use = done.split
        assert use is not None
        seen = pair.wire.seen[start:]
        n_judged = sum(message.end - message.start - 1 for message in seen if isinstance(message, JudgeDrafts))
        assert use.accepted <= n_judged
        n_made += use.drafted
        n_wasted += use.drafted - use.accepted
        sent = {(m.turn, m.pos + i) for m in seen if isinstance(m, SendRows) for i in range(len(m.tokens))}
        judged = {(m.turn, at) for m in seen if isinstance(m, JudgeDrafts) for at in range(m.start, m.end)}
        drawn = [message for message in seen if isinstance(message, DraftVerdict)]
        assert judged <= sent  # with its turn: nothing that was drafted on went up before its verdict
        assert len(drawn) == use.round_trips
    assert n_made > n_wasted > 0


async def test_each_row_is_computed_once_and_what_was_in_vain_is_counted(pair: Pair) -> None:
    request = question("Write down the alphabet, letter by letter.", 24)
    _, done = await told(pair.edge.open(request))
    use = done.split
    assert use is not None
    n_text = done.n_prompt + done.n_completion - (done.reason == "length")  # the last token has no row
    assert use.edge_rows == n_text + use.drafted - use.accepted


async def test_an_answer_that_drafts_on_may_be_cancelled_or_lose_its_link_at_any_time(
    pair: Pair, whole: Engine
) -> None:
    request = question("Write a poem about a lighthouse.", 32)
    expected, _ = await told(whole.open(request))
    for n_pieces in (1, 2, 4):
        answer = pair.edge.open(request)
        for _ in range(n_pieces):
            while not isinstance(await anext(answer), wire.TextPiece):
                pass
        await answer.close()
    text, answer, n_cuts = "", pair.edge.open(request), 0
    async for message in answer:
        assert not isinstance(message, wire.Failed)
        if isinstance(message, wire.TextPiece):
            text += message.text
            if len(text) > 25 * (n_cuts + 1):
                n_cuts += 1
                pair.wire.cut()
                pair.wire.join()
    assert n_cuts > 1
    assert text == expected
