"""The ready-made sets on 200 requests such as people send: each goes where the set's sentence says."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.conductor import AnswerContext
from disco_daemon.conductor.ruling import Ruling
from disco_daemon.config.layers import load
from disco_daemon.config.policy_sets import policy_sets
from disco_daemon.config.rule_settings import effective_rules
from disco_daemon.config.schema import Config
from disco_daemon.dispatch.request_facts import RequestFacts, Surroundings
from disco_daemon.dispatch.rules import Standing
from disco_daemon.errors import DiscoError, EndpointError
from disco_daemon.types import (
    Capabilities,
    Finish,
    GenerationRequest,
    Grade,
    PromptLength,
    Readiness,
    Relation,
    Side,
    Unequal,
    relation,
)
from tests.fixtures.jumping import in_jumps
from tests.unit.conductor.test_answer_run import Page, Scripted, Step, context, played, words

DEVICE, SERVER = Side.DEVICE, Side.SERVER
N_REQUESTS = 200
LENGTHS = Path(__file__).parents[3] / "benchmarks/eval/recorded/common/lengths.csv"
CODE = "```python\ndef f(x):\n    return x + 1\n```\nWhat is wrong with this program?"
LANGUAGES = {
    "de": "Warum ist der Himmel am Abend rot?",
    "fr": "Quelle est la capitale de la France ?",
    "ja": "日本の首都はどこですか",
}
INSTRUCTIONS = Path(__file__).parents[2] / "fixtures" / "instructions.jsonl"
SMALL, LARGE = Grade(20.0, "set", chosen=True), Grade(80.0, "set", chosen=True)
N_CTX = 4096  # tokens of the device's context; one request in 50 is longer
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
CAN = Capabilities(images=False, context_length=N_CTX)
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


class Counting(Scripted):
    """A device that counts a token for four characters."""

    async def count(self, request: GenerationRequest) -> PromptLength:
        return PromptLength(max(1, request.n_chars // 4))


@dataclass
class Asked:
    """One request, and which of the two it can be for."""

    request: GenerationRequest
    here: bool = True


def recorded_like() -> list[Asked]:
    """Instructions by people, with as much to read as recorded prompts have; some are in other languages or have code.

    Some call tools or want data, some have pictures, and some are books.
    """
    read = [json.loads(line)["prompt"] for line in INSTRUCTIONS.read_text("utf-8").splitlines()]
    with LENGTHS.open(newline="", encoding="utf-8") as file:
        n_words = [int(row["prompt_tokens"]) for row in csv.DictReader(file)]
    texts = islice(cycle([*read, CODE, *LANGUAGES.values()]), N_REQUESTS)
    found = []
    for i, (text, n) in enumerate(zip(texts, n_words, strict=False)):
        extra: dict[str, Any] = {}
        content: Any = "\n".join([text] * (1 + n // len(text.split())))
        if i % 7 == 3:
            extra = {"tools": [TOOL]}
        elif i % 11 == 5:
            extra = {"response_format": {"type": "json_object"}}
        has_picture, is_book = i % 20 == 9, i % 50 == 17
        if has_picture:
            content = [{"type": "text", "text": text}, PICTURE]
        if is_book:
            content = "word " * (2 * N_CTX)
        asked = GenerationRequest(
            f"q{i}", ({"role": "user", "content": content},), extra=extra, text_only=not has_picture
        )
        found.append(Asked(asked, here=not (has_picture or is_book)))
    return found


def under(name: str, tmp_path: Path) -> Config:
    path = tmp_path / "config.toml"
    path.write_text(f'[policy]\nset = "{name}"\n')
    return load(path, {})


def says(side: Side, *before: Step, **more: Any) -> Scripted:
    kind = Counting if side is DEVICE else Scripted
    return kind(side, [*before, *words(f"{side}"), Finish("stop")], **more)


def sides(config: Config, ttft_s: dict[Side, float], grades: tuple[Grade, Grade]) -> AnswerContext:
    device = says(DEVICE, ttft_s[DEVICE], ready=Readiness(n_ctx=N_CTX), capabilities=CAN)
    on = context(device, says(SERVER, ttft_s[SERVER]), policy=config.policy.name, budget=config.policy.budget)
    on.privacy.on = config.policy.private
    found = relation(*grades, Unequal(config.policy.unequal))
    on.relation = lambda: found
    return on


def ruling(config: Config, on: AnswerContext) -> Ruling:
    around = Surroundings(lambda: pytest.fail("no set asks for the time"), lambda: None, lambda: 0.0)
    return Ruling(effective_rules(config), around, lambda _request, _rule: Standing(on.relation()))


async def winners(config: Config, on: AnswerContext, asked: Sequence[Asked]) -> list[tuple[Asked, str]]:
    """Who gave each answer; an error is written as its first words."""
    found = []
    for one in asked:
        request, model = await ruling(config, on).apply(one.request, "disco", {}, on)
        assert not model
        try:
            text, _ = await played(on, request, Page())
        except (DiscoError, IndexError) as e:
            text = "refused" if isinstance(e, DiscoError) else "failed"
        found.append((one, text))
    return found


def started(on: AnswerContext, side: Side) -> int:
    endpoint = on.endpoints[side]
    assert isinstance(endpoint, Scripted)
    return len(endpoint.asked)


QUICK_HERE, QUICK_THERE = {DEVICE: 0.05, SERVER: 0.4}, {DEVICE: 0.4, SERVER: 0.05}


@pytest.mark.parametrize(("ttft_s", "first"), [(QUICK_HERE, DEVICE), (QUICK_THERE, SERVER)])
@in_jumps
async def test_fast_has_both_begin_and_the_first_token_win_whoever_is_better(
    tmp_path: Path, ttft_s: dict[Side, float], first: Side
) -> None:
    config = under("fast", tmp_path)
    on = sides(config, ttft_s, (SMALL, LARGE))
    found = await winners(config, on, recorded_like())
    assert len(found) == N_REQUESTS
    for one, who in found:
        assert who == (first if one.here else SERVER)
    assert started(on, SERVER) == N_REQUESTS
    assert started(on, DEVICE) == sum(one.here for one, _ in found)


@pytest.mark.parametrize(("grades", "better"), [((SMALL, LARGE), SERVER), ((LARGE, SMALL), DEVICE)])
@pytest.mark.parametrize("ttft_s", [QUICK_HERE, QUICK_THERE])
@in_jumps
async def test_best_has_the_better_model_answer_alone_however_slow_it_is(
    tmp_path: Path, grades: tuple[Grade, Grade], better: Side, ttft_s: dict[Side, float]
) -> None:
    config = under("best", tmp_path)
    on = sides(config, ttft_s, grades)
    for one, who in await winners(config, on, recorded_like()):
        assert who == (better if one.here else SERVER)
    if better is SERVER:
        assert started(on, DEVICE) == 0


@in_jumps
async def test_frugal_asks_the_server_only_for_what_this_machine_cannot_do(tmp_path: Path) -> None:
    config = under("frugal", tmp_path)
    on = sides(config, QUICK_THERE, (SMALL, LARGE))
    found = await winners(config, on, recorded_like())
    assert Counter(who for _, who in found) == {"device": 186, "server": 14}
    assert all((who == DEVICE) is one.here for one, who in found)
    assert started(on, SERVER) == 14
    assert config.policy.hedge == 0


@pytest.mark.parametrize("name", ["best", "frugal"])
@in_jumps
async def test_the_other_side_answers_where_the_one_that_is_preferred_fails(tmp_path: Path, name: str) -> None:
    config = under(name, tmp_path)
    on = sides(config, QUICK_HERE, (SMALL, LARGE))
    failing = SERVER if name == "best" else DEVICE
    endpoint = on.endpoints[failing]
    assert isinstance(endpoint, Scripted)
    endpoint.script = [0.01, EndpointError(failing, "unreachable", "gone")]
    able = [one for one in recorded_like() if one.here]
    assert {who for _, who in await winners(config, on, able)} == {failing.other.value}


@in_jumps
async def test_private_asks_no_server_and_says_what_it_cannot_do(tmp_path: Path) -> None:
    config = under("private", tmp_path)
    on = sides(config, QUICK_THERE, (SMALL, LARGE))
    found = await winners(config, on, recorded_like())
    assert started(on, SERVER) == 0
    assert {(one.here, who) for one, who in found} == {(True, "device"), (False, "refused")}


@in_jumps
async def test_balanced_is_what_there_is_without_a_set(tmp_path: Path) -> None:
    config = under("balanced", tmp_path)
    assert config == Config()
    assert effective_rules(config) == ()
    on = sides(config, QUICK_HERE, (SMALL, LARGE))
    for one in recorded_like():
        assert (await played(on, replace(one.request)))[0] == SERVER, "the far better model goes before the other one"
    assert started(on, DEVICE) == 0


def test_the_requests_are_of_all_kinds() -> None:
    around = Surroundings(lambda: pytest.fail("nobody asks for the time"), lambda: None, lambda: 0.0)
    facts = [RequestFacts(one.request, "disco", {}, around) for one in recorded_like()]
    for kind in ("tools", "images", "schema", "code", "numbers"):
        assert 0 < sum(getattr(one, kind) for one in facts) < N_REQUESTS / 2, kind
    assert {one.language for one in facts} >= {"en", *LANGUAGES}


def test_all_sets_are_tried_here() -> None:
    assert set(policy_sets()) == {"fast", "balanced", "best", "frugal", "private"}
    assert isinstance(relation(SMALL, LARGE), Relation)
