"""`benchmarks.split`: its prompts, how it compares texts, what it sums up, and the network that it puts between."""

from __future__ import annotations

import asyncio
import json
import time
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.split.asked import asked_figures, asked_table
from benchmarks.split.edges import rows_from
from benchmarks.split.proxy import SlowProxy
from benchmarks.split.run import AskedPrompt, codec_rows, naive_rows
from benchmarks.split.tables import SplitAnswer, document, summarize, table
from benchmarks.split.text import (  # fmt: skip
    PACKAGED,
    SplitPrompt,
    TokenAgreement,
    choose,
    naive_bytes,
    read_prompts,
    token_agreement,
)
from disco_daemon.bench.child import BenchError
from disco_daemon.exits.quality import length_until_repeat, rouge_l
from disco_daemon.link.protocol import SendRows

words = st.lists(st.sampled_from(["a", "b", "c"]), max_size=12)


# --- texts ------------------------------------------------------------------------------------------------------------


def test_rouge_l_is_what_its_author_computes() -> None:
    assert rouge_l("the cat was found under the bed", "the cat was under the bed") == pytest.approx(12 / 13)
    assert rouge_l("police killed the gunman", "the gunman kill police") == pytest.approx(0.5)
    assert rouge_l("The CAT.", "the cat") == 1.0
    assert rouge_l("", "the cat") == 0.0
    assert rouge_l("", "") == 1.0


@given(words, words)
def test_rouge_l_is_symmetrical_and_one_for_the_same_words_only(a: list[str], b: list[str]) -> None:
    one, other = " ".join(a), " ".join(b)
    assert rouge_l(one, other) == rouge_l(other, one)
    assert 0 <= rouge_l(one, other) <= 1
    assert (rouge_l(one, other) == 1) == (a == b)


@given(words, st.integers(1, 4))
def test_an_answer_counts_up_to_what_it_repeats(tokens: list[str], n: int) -> None:
    end = length_until_repeat(tokens, n)
    runs = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    assert len(set(runs[:end])) == len(runs[:end])
    assert end == len(tokens) or runs[end] in runs[:end]


def test_a_circle_of_twenty_words_counts_once() -> None:
    assert length_until_repeat([*range(20)] * 3) == 20
    assert length_until_repeat([*range(15)] * 3) == 15
    assert length_until_repeat([*range(40)]) == 40


def test_a_naive_split_sends_its_context_for_each_token_again() -> None:
    assert naive_bytes(10, 3, 576) == 4 * 576 * (10 + 11 + 12)
    assert 100 * naive_bytes(28, 90, 4096) == pytest.approx(10.95e9, rel=0.03)  # the paper's volume for Alpaca


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_the_packaged_prompts_are_of_two_kinds_and_no_exit_was_trained_on_them() -> None:
    prompts = read_prompts()
    assert [sum(p.data == kind for p in prompts) for kind in ("plain", "summary")] == [24, 6]
    assert len({p.text for p in prompts}) == 30
    assert all(250 < len(p.text.split()) < 320 for p in prompts if p.data == "summary")
    trained = tomllib.loads((Path(PACKAGED).parents[2] / "profiles" / "exit_prompts.toml").read_text("utf-8"))
    patterns = [text for pattern in trained["pattern"] for text in pattern["texts"]]
    starts = {tuple(text.lower().split("{")[0].split()[:5]) for text in patterns}
    assert not [p.text for p in prompts if tuple(p.text.lower().split()[:5]) in starts]


def test_the_first_prompts_of_each_kind_are_chosen() -> None:
    chosen = choose(read_prompts(), 2)
    assert [p.data for p in chosen] == ["plain", "plain", "summary", "summary"]


def test_prompts_of_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": 1, "prompt": "Hi"}\n\n{"prompt": "Ho", "data": "x"}\n')
    assert [(p.data, p.text) for p in read_prompts(path)] == [("mine", "Hi"), ("x", "Ho")]


@pytest.mark.parametrize("text", ["", "no json\n", '{"prompt": "a"}\n{"text": "b"}\n', '["prompt"]\n', "3\n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"bad\.jsonl"):
        read_prompts(path)
    with pytest.raises(BenchError, match="nowhere"):
        read_prompts(tmp_path / "nowhere")


# --- figures ----------------------------------------------------------------------------------------------------------


def answer(text: str, **more: float) -> SplitAnswer:
    return SplitAnswer(text, **{"n_tokens": 10, "took_s": 2.0} | more)  # type: ignore[arg-type]


def test_answers_are_summed_up_beside_the_whole_models() -> None:
    answers = [
        answer("a b c d", edge_s=0.5, partner_s=0.7, round_trips=4, drafted=9, accepted=6, bytes_up=3_000_000),
        answer("a b x y", edge_s=0.5, partner_s=0.3, round_trips=6, drafted=5, accepted=4, bytes_down=1_000),
    ]
    row = summarize("plain", "exact", answers, ["a b c d", "a b c d"], cut=24, codec="f32")
    assert (row.answers, row.tokens, row.total_s, row.edge_s, row.partner_s) == (2, 20, 4.0, 1.0, 1.0)
    assert (row.comm_s, row.request_rate, row.tokens_per_round_trip) == (2.0, 0.5, 2.0)
    assert (row.mb_up, row.mb_down, row.wasted_drafts) == (3.0, 0.001, 0.2)
    assert (row.rouge_l, row.equal) == (0.75, 0.5)


def test_what_one_answer_does_not_say_is_not_summed_up() -> None:
    row = summarize("plain", "exact", [answer("a", round_trips=3), answer("a")], ["a", "a"])
    assert (row.request_rate, row.partner_s, row.comm_s, row.wasted_drafts) == (None, None, None, None)
    with pytest.raises(ValueError, match="1 answers beside 2"):
        summarize("plain", "cloud", [answer("a")], ["a", "b"])


def test_the_document_has_the_names_that_other_programs_read() -> None:
    rows = [
        summarize("plain", "cloud", [answer("a", partner_s=1.5)], ["a"]),
        summarize(
            "plain", "confident", [answer("a", partner_s=0.5, edge_s=0.5)], ["a"], theta=0.9, cut=24, codec="f32"
        ),
    ]
    figures = document("m.gguf", 30, 24, None, {"rtt_ms": 20.0, "mbit_s": 100.0}, rows)
    assert list(figures) == [
        "model", "n_layer", "cut", "head", "link", "deployments", "edges", "ttft", "cuts", "added_ms_p50",
        "loop_lag_p99_ms", "codecs", "shares", "plan", "ablations",
    ]  # fmt: skip
    assert list(figures["deployments"][0]) == [
        "data", "name", "theta", "cut", "codec", "answers", "tokens", "total_s", "edge_s", "partner_s", "comm_s",
        "request_rate", "mb_up", "mb_down", "rouge_l", "equal", "tokens_per_round_trip", "wasted_drafts",
    ]  # fmt: skip
    assert json.loads(json.dumps(figures)) == figures
    lines = table(figures).splitlines()
    assert len(lines) == 4
    assert "confident 0.9" in lines[2]
    assert "round trip 20 ms, 100 Mbit/s" in lines[3]


# --- the network ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """A server that sends back what it gets; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_bytes_arrive_in_order_after_the_round_trip_at_the_rate_of_the_line() -> None:
    data = bytes(i % 251 for i in range(1_000_000))
    async with echo() as port, SlowProxy(port, rtt_s=0.1, mbit_s=40) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        started = time.perf_counter()
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        assert time.perf_counter() - started >= 0.1
        started = time.perf_counter()
        writer.write(data)
        assert await reader.readexactly(len(data)) == data
        assert time.perf_counter() - started >= 0.1 + 8 * len(data) / 40e6
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
    assert (proxy.n_up, proxy.n_down) == (1_000_001, 1_000_001)


async def test_a_cut_ends_slow_connections_and_a_stall_holds_them() -> None:
    async with echo() as port, SlowProxy(port, rtt_s=0.01) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"x")
        await reader.readexactly(1)
        async with proxy.stalled():
            writer.write(b"y")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.readexactly(1), 0.2)
        writer.write(b"z")
        assert (await asyncio.wait_for(reader.read(9), 30))[-1:] in (b"y", b"z")
        proxy.cut()
        with suppress(ConnectionError):
            while await asyncio.wait_for(reader.read(9), 30):
                pass
        assert reader.at_eof() or reader.exception() is not None
        writer.close()


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_a_token_agrees_where_all_before_it_did() -> None:
    pieces = ["a", " b", " c", " d"]
    assert token_agreement([(pieces, "a b c d")]).share == 1.0
    assert token_agreement([(pieces, "a b x y z"), (pieces, "a b c d")]) == TokenAgreement(7, 1)
    assert token_agreement([(pieces, "a b")]).share == pytest.approx(2 / 3)


def test_an_agreement_has_wilsons_interval() -> None:
    assert TokenAgreement(10, 2).interval == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert TokenAgreement(100, 0).interval == pytest.approx((0.9630, 1.0), abs=1e-4)
    assert TokenAgreement(0, 0).interval == (0.0, 1.0)


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_an_agreement_lies_in_its_interval_which_more_tokens_make_narrower(n: int, share: float) -> None:
    found = TokenAgreement(n, round(share * n))
    more = TokenAgreement(10 * n, 10 * round(share * n))
    (low, high), (more_low, more_high) = found.interval, more.interval
    assert 0 <= low <= found.share <= high <= 1
    assert more_high - more_low < high - low


def asked_prompt(text: str) -> AskedPrompt:
    one = AskedPrompt(SplitPrompt("plain", "?"), 8, 10, answer("a b", n_tokens=2), ["a", " b"])
    one.answers["cut 24 f32 exact"] = answer(text, n_tokens=2, bytes_up=1000, edge_rows=11, partner_rows=3)
    return one


def test_a_codecs_bytes_stand_beside_naives_for_the_same_answers() -> None:
    [row] = codec_rows([asked_prompt("a b"), asked_prompt("a x")], "cut 24 f32", 24, "f32", 576)
    assert row["naive_times"] == pytest.approx(naive_bytes(10, 2, 576) / 1000)
    assert row["agreement"] == pytest.approx(3 / 4)
    assert (row["compared"], row["differences"]) == (4, 1)
    assert row["agreement_95"][0] < 3 / 4 < row["agreement_95"][1]


def test_naive_times_are_scaled_from_the_answers_that_were_written() -> None:
    asked = [asked_prompt("a b"), asked_prompt("a b")]
    asked[0].answers["naive"] = answer("a b", n_tokens=2, edge_s=0.25, partner_s=0.5)
    [row] = naive_rows(asked, 576, 24)
    assert (row.edge_s, row.partner_s, row.equal, row.answers) == (0.5, 1.0, 1.0, 2)
    assert row.mb_up == pytest.approx(2 * naive_bytes(10, 2, 576) / 1e6)


def test_what_is_asked_stands_beside_what_was_found() -> None:
    rows = [summarize("plain", "cloud", [answer("a", partner_s=1.0)], ["a"])]
    for cut, n_trips in ((24, 5), (15, 4)):
        said = answer("a", n_tokens=10, partner_s=0.25, edge_s=0.5, round_trips=n_trips, drafted=8, accepted=4)
        rows.append(summarize("plain", "exact", [said], ["a"], cut=cut, codec="f32"))
    figures = document("m", 30, 24, "mlp", {}, rows)
    found = {one.what: one.is_met for one in asked_figures(figures)}
    assert found == {
        "plain, exact, cut 24: equal answers": True,
        "plain, exact, cut 24: requests a token": False,
        "plain, exact, cut 24: wasted drafts a token": True,
        "plain, exact, cut 24: partner's compute": True,
        "plain, exact, cut 15: equal answers": True,
        "plain, exact, cut 15: requests a token": True,
        "plain, exact, cut 15: wasted drafts a token": True,
    }
    assert asked_table(figures).count("NOT MET") == 1


def test_a_recorded_edge_leaves_out_rows_that_the_partner_has() -> None:
    sent = SendRows(id="a", turn=0, pos=4, tokens=(7, 8, 9))
    assert rows_from(0, sent, b"aabbcc") == (sent, b"aabbcc")
    assert rows_from(6, sent, b"aabbcc") == (SendRows(id="a", turn=0, pos=6, tokens=(9,)), b"cc")
    assert rows_from(9, sent, b"aabbcc") == (SendRows(id="a", turn=0, pos=7, tokens=()), b"")
