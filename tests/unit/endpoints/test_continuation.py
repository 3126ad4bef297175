from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.continuations import CHAT_METHODS, CONTINUATIONS, METHODS
from disco_daemon.endpoints.base import Resumption
from disco_daemon.endpoints.chunks import Reader
from disco_daemon.endpoints.continuation import (
    CHAT,
    COMPLETIONS,
    OVERLAP_WORDS,
    Profile,
    Verdict,
    Way,
    chat,
    completion,
    last_words,
)
from disco_daemon.endpoints.probe import MIN_AGREED, MIN_BEFORE, N_REST, cut, judge
from disco_daemon.endpoints.server import Server, ServerConfig
from disco_daemon.types import Continuation, GenerationRequest, Sampling, Token

URL = "http://127.0.0.1:1/v1"
UNSURE, HELPED, ALONE = Resumption
BEFORE = "Once upon a time there was a fox"
REST = " who lived by the river and sang all night."
REQUEST = GenerationRequest(
    "r",
    ({"role": "user", "content": "Tell me a story."},),
    Sampling(max_tokens=9, temperature=0.5, top_p=0.9, seed=7, stop=("END",), frequency_penalty=0.1),
    extra={"top_k": 3, "tool_choice": "none", "metadata": {"a": "b"}},
    answer_so_far=BEFORE,
    max_tokens_key="max_completion_tokens",
)


def profile(verdicts: dict[str, str], method: str, fallback: str, server: str = f"{URL} m") -> Profile:
    found = {name: Verdict(result) for name, result in verdicts.items()}
    return Profile(server, 1.0, method, fallback, method == "token_ids", 10, found)


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_the_answer_so_far_is_the_last_message_and_each_method_says_so_in_its_own_way() -> None:
    partial = {"role": "assistant", "content": BEFORE}
    bodies = {method: chat(REQUEST, method).body for method in CHAT_METHODS}
    assert bodies["continue_final_message"]["messages"][-1] == partial
    assert bodies["continue_final_message"]["continue_final_message"] is True
    assert bodies["continue_final_message"]["add_generation_prompt"] is False
    assert bodies["prefix"]["messages"][-1] == partial | {"prefix": True}
    assert bodies["assistant"]["messages"][-1] == partial
    for method in ("prefix", "assistant"):
        assert "continue_final_message" not in bodies[method]


@pytest.mark.parametrize(("stop", "sent"), [(("",), None), (("", "END"), ["END"]), ((), None)])
def test_an_empty_stop_string_is_not_passed_on(stop: tuple[str, ...], sent: list[str] | None) -> None:
    """Some servers refuse it, others would end at once; here it means nothing."""
    request = replace(REQUEST, sampling=replace(REQUEST.sampling, stop=stop))
    for asked in (chat(request, "assistant"), completion(request, "x")):
        assert asked.body.get("stop") == sent


def test_a_chat_keeps_the_parameters_and_the_client_s_name_of_the_limit() -> None:
    asked = chat(REQUEST, "assistant")
    assert asked.path == CHAT
    assert asked.body["max_completion_tokens"] == 9
    assert asked.body["tool_choice"] == "none"
    assert (asked.body["seed"], asked.body["stop"], asked.body["frequency_penalty"]) == (7, ["END"], 0.1)


def test_a_raw_completion_carries_over_how_tokens_are_drawn_and_nothing_about_messages() -> None:
    asked = completion(REQUEST, (1, 2, 3), ids_back=True)
    assert asked.path == COMPLETIONS
    assert asked.body == {
        "prompt": [1, 2, 3], "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["END"],
        "frequency_penalty": 0.1, "top_k": 3, "return_token_ids": True,
    }  # fmt: skip


def test_a_raw_completion_without_a_limit_says_so_since_the_default_is_sixteen_tokens() -> None:
    asked = completion(replace(REQUEST, sampling=Sampling()), "text")
    assert json.loads(json.dumps(asked.body))["max_tokens"] is None


def test_without_an_answer_so_far_it_is_a_plain_chat_whatever_the_method() -> None:
    fresh = replace(REQUEST, answer_so_far="")
    assert all(chat(fresh, method).body["messages"] == list(REQUEST.messages) for method in (*METHODS, "none"))


def test_an_instruction_is_a_message_of_its_own_and_quotes_the_last_words() -> None:
    messages = chat(REQUEST, "instruct").body["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert last_words(BEFORE) in messages[-1]["content"]


@given(st.text())
def test_the_overlap_is_a_suffix_of_at_most_so_many_words(answer: str) -> None:
    overlap = last_words(answer)
    assert answer.endswith(overlap)
    assert len(overlap.split()) <= OVERLAP_WORDS
    assert bool(overlap) == bool(answer.split())


def test_only_an_instructed_server_has_an_overlap() -> None:
    told, others = (Server(ServerConfig(URL, "m", "", continuation=c)) for c in ("instruct", "prefix"))
    assert told.overlap_of(replace(REQUEST, answer_so_far=f"So it was. {BEFORE}\n")) == f"{BEFORE}\n"
    assert told.overlap_of(replace(REQUEST, answer_so_far=" ")) is None
    assert others.overlap_of(REQUEST) is None
    assert told.continuation is Continuation.GUARDED


# --- which way --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "method", "trust"),
    [
        ("https://api.openai.com/v1", "none", Continuation.NONE),
        ("https://api.anthropic.com/v1", "none", Continuation.NONE),
        ("https://me.openai.azure.com/openai/v1", "none", Continuation.NONE),
        ("https://api.deepseek.com/beta", "prefix", Continuation.EXACT),
        ("https://api.deepseek.com/v1", "none", Continuation.NONE),
        ("https://api.mistral.ai/v1", "prefix", Continuation.GUARDED),
        ("https://openrouter.ai/api/v1", "assistant", Continuation.GUARDED),
        ("https://openai.com.evil.example/v1", "continue_final_message", Continuation.UNTRIED),
    ],
)
def test_known_hosts_have_their_way_and_only_unknown_ones_are_probed(url: str, method: str, trust: object) -> None:
    server = Server(ServerConfig(url, "m", ""))
    assert server.status()["continuation"] == method
    assert server.continuation is trust
    assert server.should_probe == ("evil" in url)
    assert (server.refuses(REQUEST) is not None) == (method == "none")


@pytest.mark.parametrize("setting", CONTINUATIONS[1:])
def test_what_the_user_sets_is_believed_and_no_probe_changes_it(setting: str) -> None:
    server = Server(ServerConfig(URL, "m", "", continuation=setting))
    assert not server.should_probe
    server.adopt(profile({"prefix": "exact"}, "prefix", "prefix"))
    assert server.status()["continuation"] == setting
    assert server.profile is None


def test_a_profile_of_another_server_is_ignored() -> None:
    server = Server(ServerConfig(URL, "m", ""))
    server.adopt(profile({"prefix": "exact"}, "prefix", "prefix", server="http://elsewhere/v1 m"))
    assert (server.should_probe, server.continuation) == (True, Continuation.UNTRIED)
    server.adopt(profile({"prefix": "exact"}, "prefix", "prefix"))
    assert (server.should_probe, server.continuation) == (False, Continuation.EXACT)


@pytest.mark.parametrize(
    ("verdicts", "method", "fallback", "trust"),
    [
        ({"token_ids": "exact", "prefix": "exact"}, "token_ids", "prefix", Continuation.EXACT),
        ({"token_ids": "exact", "prefix": "echoes"}, "token_ids", "prefix", Continuation.GUARDED),
        ({"token_ids": "exact", "prefix": "refused"}, "token_ids", "none", Continuation.EXACT),
        ({"prefix": "echoes"}, "prefix", "prefix", Continuation.GUARDED),
        ({"prefix": "restarts"}, "none", "none", Continuation.NONE),
    ],
)
def test_one_way_that_needs_the_guard_makes_all_guarded(
    verdicts: dict[str, str], method: str, fallback: str, trust: Continuation
) -> None:
    assert profile(verdicts, method, fallback).trust is trust
    assert Way.of(profile(verdicts, method, fallback)).trust is trust


def test_a_profile_survives_the_store_and_nonsense_is_refused() -> None:
    one = profile({"token_ids": "untried", "prefix": "exact"}, "prefix", "prefix")
    stored = json.loads(json.dumps(one.to_json()))
    assert Profile.from_json(stored) == one
    assert not one.complete
    assert profile({"prefix": "exact"}, "prefix", "prefix").complete
    nonsense: tuple[dict[str, Any], ...] = (
        {},
        stored | {"method": "telepathy"},
        stored | {"method": []},
        stored | {"verdicts": 3},
        stored | {"verdicts": {"telepathy": {"result": "exact", "note": ""}}},
    )
    for wrong in nonsense:
        with pytest.raises(ValueError):
            Profile.from_json(wrong)


def test_a_server_is_sure_to_resume_where_its_exact_way_was_tried_or_the_user_says_so() -> None:
    known = "https://api.deepseek.com/beta"
    assert Server(ServerConfig(known, "m", "")).continuation is Continuation.EXACT
    assert Server(ServerConfig(known, "m", "")).resumption is UNSURE, "a table of hosts is no trial"
    said = {"prefix": ALONE, "token_ids": HELPED, "text": HELPED, "instruct": UNSURE, "none": UNSURE, "auto": UNSURE}
    for setting, sure in said.items():
        assert Server(ServerConfig(URL, "m", "", continuation=setting)).resumption is sure
    for tried, sure in (
        ({"assistant": "exact"}, ALONE),
        ({"assistant": "echoes"}, UNSURE),
        ({"token_ids": "exact", "assistant": "exact"}, ALONE),
        ({"token_ids": "exact", "assistant": "echoes"}, UNSURE),
        ({"token_ids": "exact"}, HELPED),
    ):
        server, fallback = Server(ServerConfig(URL, "m", "")), "assistant" if "assistant" in tried else "none"
        verdicts = {method: Verdict(result) for method, result in tried.items()}
        server.adopt(Profile(server.name, 0.0, next(iter(tried)), fallback, vocab=False, tokens=0, verdicts=verdicts))
        assert server.resumption is sure


def test_a_server_takes_no_raw_prompt_and_cannot_be_held() -> None:
    server = Server(ServerConfig(URL, "m", ""))
    assert server.refuses(GenerationRequest("r", (), prompt=(1, 2))) is not None
    assert server.refuses(replace(REQUEST, answer_so_far="")) is None
    assert not server.can_hold
    assert server.methods == CHAT_METHODS


# --- what comes back --------------------------------------------------------------------------------------------------


def test_chunks_of_both_kinds_are_the_same_tokens() -> None:
    reader = Reader()
    assert reader.token({"index": 0, "delta": {"role": "assistant", "content": "a"}}) == Token("a")
    assert reader.token({"index": 0, "text": " a", "finish_reason": None}) == Token(" a")
    assert reader.token({"index": 0, "text": "", "finish_reason": "stop"}) is None
    assert reader.token({"index": 0, "delta": {"content": ""}}) is None
    with pytest.raises(TypeError):
        reader.token({"text": [3]})


def test_ids_are_read_only_where_they_were_asked_for() -> None:
    choice = {"delta": {"content": "a"}, "token_ids": [5]}
    assert Reader().token(choice) == Token("a")
    assert Reader(ids_back=True).token(choice) == Token("a", ids=(5,))


def test_ids_of_a_character_cut_in_two_come_with_its_text() -> None:
    reader = Reader(ids_back=True)
    assert reader.token({"text": "", "token_ids": [1]}) is None
    assert reader.token({"text": "", "token_ids": [2]}) is None
    assert reader.token({"text": "é", "token_ids": [3]}) == Token("é", 3, ids=(1, 2, 3))


@pytest.mark.parametrize("ids", [None, 3, "ab", ["1"], [True], [-1], [1.5], {}])
def test_ids_that_are_none_do_not_break_the_answer(ids: Any) -> None:
    assert Reader(ids_back=True).token({"text": "a", "token_ids": ids}) == Token("a")


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=20))
def test_no_token_is_counted_twice_where_ids_come_late(chunks: list[list[int]]) -> None:
    """A piece without ids stands for one token, and the next piece carries the ids of all since."""
    reader = Reader(ids_back=True)
    tokens: list[Token] = []
    late: list[int] = []
    for i, ids in enumerate(chunks):
        late += [i, *ids]
        tell = len(ids) != 1
        token = reader.token({"text": "x", "token_ids": late if tell else None})
        assert token is not None
        tokens.append(token)
        if tell:
            late = []
            assert sum(t.n_tokens for t in tokens) == sum(len(t.ids) for t in tokens)


# --- how it is judged -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "result"),
    [
        (REST, "exact"),
        (REST[:20], "exact"),
        (REST[:MIN_AGREED] + " and then", "exact"),
        (BEFORE + REST[:10], "echoes"),
        ("\n" + BEFORE + REST[:10], "echoes"),
        (BEFORE, "restarts"),
        (BEFORE[:MIN_AGREED], "restarts"),
        (BEFORE[:20] + " bear", "restarts"),
        (REST.lstrip(), "differs"),
        (" " + REST, "differs"),
        ("The fox was old.", "differs"),
        (BEFORE[:8] + " more, a wolf", "differs"),
        (BEFORE + " The fox was old.", "restarts"),
        ("", "differs"),
        (" ", "differs"),
    ],
)
def test_what_a_server_says_is_judged_by_what_it_said_before(said: str, result: str) -> None:
    assert judge(BEFORE, REST, said).result == result


def test_the_last_few_characters_of_an_answer_are_enough() -> None:
    assert judge(BEFORE, ".", ".").result == "exact"


@given(st.text("ab ", min_size=MIN_BEFORE, max_size=60), st.text("ab ", min_size=20, max_size=60), st.integers(1, 59))
def test_an_answer_begun_again_is_never_taken_for_a_continuation(before: str, rest: str, n: int) -> None:
    """Unless the story itself repeats its beginning at the cut."""
    said = (before + rest)[: min(n, len(before))]
    if rest.startswith(said[:8]):
        return
    assert judge(before, rest, said).result in ("restarts", "differs")


words = st.lists(st.text("abcdef", min_size=1, max_size=9), min_size=1, max_size=40)


@given(words, st.integers(1, 3))
def test_an_answer_is_cut_between_words_with_enough_on_both_sides(found: list[str], per_chunk: int) -> None:
    pieces = [found[0], *(f" {word}" for word in found[1:])]
    chunks = ["".join(pieces[i : i + per_chunk]) for i in range(0, len(pieces), per_chunk)]
    whole = "".join(chunks)
    before = cut(chunks)
    if before is None:
        return
    rest = whole[len(before) :]
    assert whole.startswith(before)
    assert rest.startswith(" ")
    assert len(before) >= MIN_BEFORE
    assert len(rest) >= MIN_AGREED
    n_before = sum(1 for end in itertools.accumulate(map(len, chunks)) if end <= len(before))
    assert n_before > N_REST or len(chunks) <= N_REST + 2, "an answer begun again must not get past the cut"


def test_an_answer_of_one_large_chunk_is_cut_too_and_a_short_one_is_not() -> None:
    assert cut([BEFORE + REST]) == BEFORE + " who lived"
    assert cut(["Hello", " there", "!"]) is None
    assert cut([]) is None
