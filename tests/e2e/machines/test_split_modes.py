"""Who decides a token of a model over two engines: the partner, the exit where it is sure, or the exit alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import accumulate, count, takewhile
from pathlib import Path

import pytest
import pytest_asyncio

from disco_daemon.engine import wire
from disco_daemon.engine.llama.model import AbortFlag, load_model, quiet
from disco_daemon.engine.llama.refusals import FormatError
from disco_daemon.engine.llama.segment import SegmentModel
from disco_daemon.engine.supervisor import Engine
from disco_daemon.link.protocol import (
    AnswerClosed,
    BeginDrawing,
    CloseAnswer,
    DraftVerdict,
    JudgeDrafts,
    OpenAnswer,
    PeerFrame,
    SendRows,
)
from disco_daemon.models.default import default_model_path
from disco_daemon.models.segment_files import SegmentFiles
from disco_daemon.types import GenerationRequest, SplitMode, SplitWish
from tests.e2e.api.test_thinking import OPENS, TAUGHT
from tests.e2e.machines.test_split_engines import N_CTX, RANGES, Pair, exit_segment, paired, question, told

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
]

SURE = wire.ExitCalibration(coefficients=(0.0, 0.0, 0.0, 0.0), scores=(0.0, 1.0), shares=(0.7, 0.7))
TEXT = "Write a poem about a lighthouse."


@pytest.fixture(scope="module")
def lower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exit_segment(tmp_path_factory.mktemp("exit"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(lower: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    [upper] = SegmentFiles(tmp_path_factory.mktemp("upper"), 1 << 30).write(default_model_path(), RANGES[1:])
    async with paired([lower, upper], exit_=SURE) as both:
        yield both


def by(
    mode: SplitMode, n: int, theta: float | None = None, text: str = TEXT, *, goes_on: bool = False
) -> GenerationRequest:
    return replace(question(text, n), split=SplitWish(mode, theta, goes_on))


async def usage_of(engine: Engine, request: GenerationRequest) -> tuple[str, wire.Done, wire.SplitUsage]:
    text, done = await told(engine.open(request))
    assert done.split is not None
    return text, done, done.split


async def test_alone_the_exit_says_what_it_finds_most_likely_and_nothing_reaches_the_partner(
    pair: Pair, lower: Path
) -> None:
    request = replace(by("alone", 8), private=True)
    n_frames = len(await pair.wire.settle())
    text, done, use = await usage_of(pair.edge, request)
    assert (use.alone_from, use.n_left, use.round_trips, use.partner_rows, use.bytes_up) == (0, 0, 0, 0, 0)
    assert use.n_alone in (done.n_completion, done.n_completion + 1)  # the end of the text is drawn, too
    quiet()
    model = SegmentModel(wire.Load(model_path=str(lower), n_ctx=N_CTX, n_threads=1, n_gpu_layers=0), RANGES[0])
    try:
        prompt = await pair.edge.count(request, ids=True)
        assert prompt is not None
        _, logits = model.run_with_exit([(id_, i, 0, i == len(prompt.ids) - 1) for i, id_ in enumerate(prompt.ids)])
        expected = [int(logits[-1].argmax())]
        while len(expected) < 8:
            _, logits = model.run_with_exit([(expected[-1], len(prompt.ids) + len(expected) - 1, 0, True)])
            expected.append(int(logits[-1].argmax()))
    finally:
        model.close()
    again, drawn = "", list[int]()
    async for message in pair.edge.open(request):
        if isinstance(message, wire.TextPiece):
            again, drawn = again + message.text, drawn + list(message.ids)
    assert again == text
    assert drawn == expected[: len(drawn)]
    assert drawn
    await usage_of(pair.edge, by("exact", 1))  # whatever the answers before it had sent would be seen before its frames
    seen = await pair.wire.settle()
    assert isinstance(seen[n_frames], OpenAnswer)
    assert sum(isinstance(message, OpenAnswer) for message in seen[n_frames:]) == 1


async def test_a_private_answer_that_is_not_alone_is_refused_by_the_engine(pair: Pair) -> None:
    n_frames = len(await pair.wire.settle())
    with pytest.raises(AssertionError, match="not sent to a partner"):
        await told(pair.edge.open(replace(question(TEXT, 4), private=True)))
    await usage_of(pair.edge, by("exact", 1))  # whatever was sent before it would be seen before its frames
    seen = await pair.wire.settle()
    assert isinstance(seen[n_frames], OpenAnswer)
    assert sum(isinstance(message, OpenAnswer) for message in seen[n_frames:]) == 1


async def test_with_theta_one_each_token_is_the_partners(pair: Pair) -> None:
    expected, _, _ = await usage_of(pair.edge, by("exact", 32))
    got, _, use = await usage_of(pair.edge, by("confident", 32, 1.0))
    assert got == expected
    assert (use.n_left, use.n_alone, use.alone_from) == (0, 0, None)


async def test_sure_tokens_leave_and_go_up_in_batches_and_some_are_judged_all_the_same(pair: Pair) -> None:
    start = len(await pair.wire.settle())
    _, done, use = await usage_of(pair.edge, by("confident", 80, 0.6))
    assert use.n_left > 0.8 * done.n_completion > 0
    assert 0 < use.round_trips <= 1 + done.n_completion // 16
    assert use.drafted > 0  # the probes
    sent = (await pair.wire.settle())[start:]
    left = [message.left for message in sent if isinstance(message, JudgeDrafts)]
    rows = {m.pos + i: id_ for m in sent if isinstance(m, SendRows) for i, id_ in enumerate(m.tokens)}
    asked = [message for message in sent if isinstance(message, JudgeDrafts)]
    assert any(left)
    for message in asked:  # the partner's sampler is told the very tokens whose rows it has
        assert message.left == tuple(rows[at] for at in range(message.start + 1 - len(message.left), message.start + 1))


async def test_a_confident_answer_holds_to_its_grammar_and_its_penalties(pair: Pair) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes yes yes yes", "no no no no no"]}}}
    request = by("confident", 40, 0.6, "Yes or no?")
    request = replace(request, extra={"response_format": schema})
    for theta in (0.6, 1.0):
        text, _, _ = await usage_of(pair.edge, replace(request, split=SplitWish("confident", theta)))
        assert text in ('"yes yes yes yes"', '"no no no no no"')
    hard = replace(request.sampling, frequency_penalty=1.5, temperature=0.7, seed=3, max_tokens=24)
    plain = replace(by("exact", 24), sampling=hard)
    exact, _, _ = await usage_of(pair.edge, plain)
    got, _, _ = await usage_of(pair.edge, replace(plain, split=SplitWish("confident", 1.0)))
    assert got == exact


async def test_a_thought_that_the_partner_draws_is_closed_behind_its_budget(lower: Path, tmp_path: Path) -> None:
    [upper] = SegmentFiles(tmp_path, 1 << 30).write(default_model_path(), RANGES[1:])
    async with paired([lower, upper], exit_=SURE, chat_template=OPENS) as both:  # the partner has its own template
        modes = (SplitWish("exact"), SplitWish("confident", 1.0), SplitWish("confident", 0.6), SplitWish("alone"))
        for wish in modes:
            for n_tokens in (2, 0):
                request = replace(question("", 16), messages=tuple(TAUGHT), thinking_tokens=n_tokens)
                thought = text = ""
                n_thought = 0
                async for message in both.edge.open(replace(request, split=wish)):
                    match message:
                        case wire.TextPiece(thought=True):
                            thought += message.text
                            n_thought += message.n_tokens
                        case wire.TextPiece():
                            text += message.text
                        case wire.Failed() as failed:
                            raise AssertionError(failed)
                assert n_thought <= n_tokens + 1, (wish, thought)
                assert thought == "The word"[: 8 if n_tokens else 0] or wish.mode != "exact", (wish, thought)
                assert text, wish
        drawn = [message for message in await both.wire.settle() if isinstance(message, BeginDrawing)]
        limits = [one.sampling.thought for one in drawn if one.sampling.thought is not None]
        told = {(one.n_tokens, one.is_begun) for one in limits}
        assert told == {(2, True), (0, False)}, "without any the prompt has closed the thought"


async def cut_in_mid_answer(pair: Pair) -> tuple[list[wire.TextPiece], wire.SplitUsage, int, list[PeerFrame]]:
    """Cut the link behind the eighth verdict, and join it four tokens later.

    Return the answer's pieces, its usage, how many tokens had been decided at the cut, and the frames seen.
    """
    start, n_verdicts = len(await pair.wire.settle()), count(1)
    pair.wire.cut_behind = lambda message: isinstance(message, DraftVerdict) and next(n_verdicts) == 8
    answer = pair.edge.open(by("exact", 160, goes_on=True))
    pieces, n_cut, n_received = list[wire.TextPiece](), 0, 0
    async for message in answer:
        match message:
            case wire.TextPiece(n_tokens=n):
                pieces.append(message)
                n_received += n
                if not pair.wire.up and not n_cut:
                    n_cut = sum(len(m.tokens) for m in pair.wire.seen[start:] if isinstance(m, DraftVerdict))
                if not pair.wire.up and n_received >= n_cut + 4:
                    pair.wire.join()
            case wire.Failed() as failed:
                raise AssertionError(failed)
    pair.wire.cut_behind = None
    assert answer.done is not None
    assert answer.done.split is not None
    return pieces, answer.done.split, n_cut, (await pair.wire.settle())[start:]


async def test_an_answer_goes_on_alone_and_is_exact_again_when_the_partner_is_back(pair: Pair) -> None:
    for _ in range(3):  # for an edge whose machine was held up, a verdict may be late without a cut
        pieces, use, n_cut, seen = await cut_in_mid_answer(pair)
        opened = [message for message in seen if isinstance(message, OpenAnswer)]
        if use.alone_from == n_cut and len(opened) == 2 and not pieces[-1].alone:
            break
        pair.wire.cut()
        pair.wire.join()
    assert n_cut >= 8
    assert use.alone_from == n_cut
    ends = accumulate(piece.n_tokens for piece in pieces)
    at_cut = "".join(piece.text for piece, end in zip(pieces, ends, strict=True) if end <= n_cut)
    assert at_cut
    # How many tokens eight verdicts decide depends on how far the edge drafts while it waits for one.
    expected, _, _ = await usage_of(pair.edge, by("exact", n_cut))
    assert expected.startswith(at_cut)
    assert use.n_alone >= 4
    assert abs(sum(piece.n_tokens for piece in pieces if piece.alone) - use.n_alone) <= 1  # text may wait for its end
    assert not pieces[0].alone
    assert not pieces[-1].alone
    assert len(opened) == 2
    n_alone_at_first = len(opened[1].tokens) - len(opened[0].tokens) - use.alone_from
    assert 4 <= n_alone_at_first <= use.n_alone  # it goes on alone until the partner has caught up
    assert use.round_trips > 8
    assert [type(message) for message in seen if isinstance(message, CloseAnswer | AnswerClosed)][-2:] == [
        CloseAnswer,
        AnswerClosed,
    ]


async def test_an_answer_goes_on_alone_while_the_partner_is_back_and_says_nothing_yet(pair: Pair) -> None:
    expected, _, _ = await usage_of(pair.edge, by("exact", 160))
    start, n_verdicts = len(await pair.wire.settle()), count(1)
    pair.wire.cut_behind = lambda message: isinstance(message, DraftVerdict) and next(n_verdicts) == 8

    async def come_back() -> None:
        while pair.wire.up:
            await asyncio.sleep(0.001)  # a cut link has no event to wait for
        pair.wire.verdicts.clear()
        pair.wire.join()

    answer, pieces = pair.edge.open(by("exact", 160, goes_on=True)), list[wire.TextPiece]()
    coming = asyncio.create_task(come_back())
    try:
        async for message in answer:
            assert not isinstance(message, wire.Failed)
            if isinstance(message, wire.TextPiece):
                pieces.append(message)
                if message.alone:
                    pair.wire.verdicts.set()
        await coming
    finally:
        coming.cancel()
        pair.wire.verdicts.set()
    assert answer.done is not None
    assert (use := answer.done.split) is not None
    exact = "".join(piece.text for piece in takewhile(lambda piece: not piece.alone, pieces))
    assert exact
    assert expected.startswith(exact)
    assert 0 < use.n_alone < 150
    assert not pieces[-1].alone
    seen = (await pair.wire.settle())[start:]
    [first, second] = [message for message in seen if isinstance(message, OpenAnswer)]
    assert len(second.tokens) - len(first.tokens) == use.alone_from  # it was the partner's when that came back


async def test_while_the_partner_is_gone_answers_begin_alone_or_wait_as_they_say(pair: Pair) -> None:
    alone, _, _ = await usage_of(pair.edge, by("alone", 12))
    pair.wire.cut()
    got, _, use = await usage_of(pair.edge, by("exact", 12, goes_on=True))
    assert (got, use.alone_from, use.partner_rows) == (alone, 0, 0)
    waiting = pair.edge.open(by("exact", 12))
    pair.wire.join()
    _, done = await told(waiting)
    assert done.split is not None
    assert done.split.alone_from is None


async def test_a_mode_that_needs_an_exit_is_refused_without_one(pair: Pair, tmp_path: Path) -> None:
    paths = SegmentFiles(tmp_path, 1 << 30).write(default_model_path(), RANGES)
    async with paired(paths) as both:
        with pytest.raises(AssertionError, match="early exit"):
            await told(both.edge.open(by("alone", 4)))


async def test_an_answer_so_far_that_breaks_its_grammar_is_refused_and_ends_no_process() -> None:
    quiet()
    load = wire.Load(model_path=str(default_model_path()), n_ctx=256, n_threads=1, n_gpu_layers=0)
    llama = load_model(load, AbortFlag())
    request = wire.Generate(id="r", messages=[])
    yes, no = (llama.vocabulary.raw_tokens(text) for text in ("yes", "no"))
    grammar = 'root ::= "yes" | "now"'
    llama.sampler(request, yes, grammar).close()
    sampler = llama.sampler(request, no, grammar)
    with pytest.raises(FormatError, match="does not hold"):
        sampler.follow(yes)  # llama.cpp would end the process
    sampler.close()
    with pytest.raises(FormatError, match="does not hold"):
        llama.sampler(request, [*yes, *no], grammar)
