"""Who of several servers is tried after a failure, who is asked beside it, and what that uses of the hedges' share."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from disco_daemon.daemon import server_chooser
from disco_daemon.daemon.server_chooser import TRIAL_AFTER_S, MemberChooser, Trials
from disco_daemon.money.catalog import Price
from tests.fixtures.jumping import in_jumps
from tests.fixtures.several import Stage, asked, server

PRICE = Price(1.0, 0.5, 2.0)


@dataclasses.dataclass
class Scene:
    """Servers `a`, which has failed and may be tried, and those behind it."""

    stage: Stage
    trials: Trials

    def chooser(self) -> MemberChooser:
        stage = self.stage
        return MemberChooser(stage.pool, self.trials, stage.context, asked(), [stage.members])


@pytest.fixture
def one_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_chooser, "is_on_trial", lambda member: member.server == "a")


def scene(*prices: Price, share: float = 1.0) -> Scene:
    return Scene(Stage([(server(), price) for price in prices], hedge_share=share), Trials())


@pytest.mark.parametrize("n_others", [1, 2])
@in_jumps
async def test_the_best_one_beside_a_trial_counts_as_a_second_request(one_failed: None, n_others: int) -> None:
    on = scene(PRICE, *[PRICE] * n_others)
    chooser = on.chooser()
    assert chooser.first().server == "a"
    assert chooser.hedge is not None
    assert chooser.hedge.member.server != "a"
    assert chooser.hedge.take()
    assert on.stage.pool.hedges.n_taken == 1


@in_jumps
async def test_a_trial_waits_while_the_share_of_second_requests_is_used_up(one_failed: None) -> None:
    on = scene(PRICE, PRICE, share=0.01)
    tried = 0
    for _ in range(20):
        on.trials.end("a/m")
        chooser = on.chooser()
        if chooser.first().server == "a":
            assert chooser.hedge is not None
            tried += chooser.hedge.take()
    assert tried == on.stage.pool.hedges.n_taken == 2
    assert on.chooser().first().server == "b"


@pytest.mark.parametrize(
    ("its_s", "best_s", "least_s", "most_s"),
    [(0.2, 0.01, 0.2, 0.4), (0.01, 0.2, 0.2, 0.4), (30.0, 0.01, server_chooser.LATE_S, server_chooser.LATE_S)],
)
@in_jumps
async def test_a_slower_server_has_the_time_that_it_mostly_takes_to_show_that_it_is_back(
    one_failed: None, its_s: float, best_s: float, least_s: float, most_s: float
) -> None:
    """Else a quick and dear one would win each trial, and keep all answers; but nobody waits for it beyond LATE_S."""
    on = scene(PRICE, PRICE)
    for name, ttft_s in (("a/m", its_s), ("b/m", best_s)):
        for _ in range(20):
            on.stage.pool.observe(name, ttft_s, 0.0)
    chooser = on.chooser()
    assert chooser.first().server == "a"
    assert chooser.hedge is not None
    assert least_s <= chooser.hedge.after_s <= most_s


@pytest.mark.parametrize("more", [{"share": 0.0}, {"price": dataclasses.replace(PRICE, known=False)}])
@in_jumps
async def test_where_nobody_may_be_asked_beside_it_a_trial_goes_alone(one_failed: None, more: dict[str, Any]) -> None:
    on = scene(PRICE, more.get("price", PRICE), share=more.get("share", 1.0))
    chooser = on.chooser()
    assert (chooser.first().server, chooser.hedge) == ("a", None)


@in_jumps
async def test_no_second_request_goes_to_a_server_whose_price_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    on = scene(PRICE, dataclasses.replace(PRICE, known=False))
    for name, ttft_s in (("a/m", 0.1), ("b/m", 0.2)):
        for _ in range(40):
            on.stage.pool.observe(name, ttft_s, 0.0)
    for _ in range(100):
        chooser = on.chooser()
        chooser.first()
        assert chooser.hedge is None or chooser.hedge.member.server == "a"


@in_jumps
async def test_a_trial_begins_where_the_server_is_asked_and_not_where_it_is_chosen(one_failed: None) -> None:
    on, clock = scene(PRICE, PRICE), [0.0]
    on.stage.clock.now = lambda: clock[0]  # type: ignore[method-assign]
    for _ in range(10):  # the device has answered before its time
        assert on.chooser().first().server == "a"
        assert on.chooser().first().server == "b", "one trial at a time"
        clock[0] += TRIAL_AFTER_S
    waits = []
    for _ in range(3):
        chooser = on.chooser()
        chooser.asked(chooser.first())
        began = clock[0]
        while on.chooser().first().server != "a":
            clock[0] += TRIAL_AFTER_S
        waits.append(clock[0] - began)
        clock[0] += TRIAL_AFTER_S
    assert waits == [TRIAL_AFTER_S, 2 * TRIAL_AFTER_S, 4 * TRIAL_AFTER_S]


@in_jumps
async def test_a_plan_says_who_is_asked_and_what_the_others_would_be_and_counts_nothing() -> None:
    on = scene(PRICE, PRICE, dataclasses.replace(PRICE, known=False))
    on.stage.pool.observe("b/m", 0.2, 0.0)
    before = on.stage.pool.to_json()
    untried = on.chooser().explain()
    assert [one["asked"] for one in untried] == [True, False, False]
    for name, ttft_s in (("a/m", 0.4), ("b/m", 0.2)):
        for _ in range(40):
            on.stage.pool.observe(name, ttft_s, 0.0)
    assert on.stage.pool.to_json() != before
    before = on.stage.pool.to_json()
    rows = on.chooser().explain()
    assert on.stage.pool.to_json() == before
    assert [(one["name"], one["asked"]) for one in rows] == [("b", True), ("a", False), ("c", False)]
    assert rows[0]["ttft_p50_s"] == pytest.approx(0.2, rel=0.1)
    assert rows[1]["cost_s"] - rows[0]["cost_s"] > 0.1
    assert "worse" in rows[1]["why"]
    assert (rows[2]["ttft_p50_s"], rows[2]["usd"]) == (None, None)
    assert "not known yet" in rows[2]["why"]


@in_jumps
async def test_a_plan_says_why_a_server_cannot_be_asked(one_failed: None) -> None:
    on = scene(PRICE, PRICE)
    for name in ("a/m", "b/m"):
        for _ in range(40):
            on.stage.pool.observe(name, 0.1, 0.0)
    rows = {one["name"]: one for one in on.chooser().explain()}
    assert rows["b"]["asked"]
    assert not rows["a"]["asked"]
    assert "has failed" in rows["a"]["why"]
    (alone,) = MemberChooser(on.stage.pool, on.trials, on.stage.context, asked(), [on.stage.members[:1]]).explain()
    assert alone["asked"], "where no other one is left it is asked all the same"
