"""Layers that are to move to another machine: which files it gets, what is known of it, and what is done then."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from disco_daemon.cli.fleet import step_line
from disco_daemon.clock import SystemClock
from disco_daemon.config.schema import Config, FleetSettings
from disco_daemon.engine import wire
from disco_daemon.engine.supervisor import Engine, EngineState
from disco_daemon.fleet.control import COOLDOWN_S, FleetController, FleetSeen
from disco_daemon.fleet.forecast import FleetForecast, FleetLoad
from disco_daemon.fleet.layout import FleetLayout, PlacedRange
from disco_daemon.fleet.steps import FleetStep, StepKind
from disco_daemon.link.relay.handshake import SegmentFact, TellLoad, TheSegments, decode_first, first_frame
from disco_daemon.link.relay.orders import Address, HostEnded, Identity
from disco_daemon.link.trust.pairing import PairedPartner
from disco_daemon.link.trust.pairing_code import PairingError
from disco_daemon.machines.fleet import lending, offered_hosts, operator
from disco_daemon.machines.fleet.host_places import Borrower, LentLife, LentMachine, RangePath, files_of
from disco_daemon.machines.fleet.host_processes import HostProcesses
from disco_daemon.machines.fleet.layer_files import FleetLayers
from disco_daemon.machines.fleet.lending import FleetLending
from disco_daemon.machines.fleet.machine_speeds import WAY_KEPT_S, MachineBook
from disco_daemon.machines.fleet.observations import GIB, FleetMoment, HostElsewhere, seen_of
from disco_daemon.machines.fleet.offered_hosts import HostOffers
from disco_daemon.machines.fleet.operator import FleetOperator
from disco_daemon.machines.fleet.range_costs import condensed
from disco_daemon.machines.owner import OwnerTerms
from disco_daemon.models.segment_files import SegmentFiles
from disco_daemon.system.frames import HEADER, BadFrameError
from tests.fixtures.gguf import model_file
from tests.fixtures.peers import BUILD
from tests.unit.machines.test_fleet_offers import offered
from tests.unit.machines.test_fleet_seen import CALM, GIVEN, LAYER_BYTES, MODEL, MOMENT, PROCESS_BYTES, played

SAID = TellLoad(n_cpus=4, others_share=0.1, memory_bytes=int(8e9), memory_free_bytes=int(6e9), rss_bytes=int(2e8))
ATTIC = LentMachine("attic", 2, 0, SAID)
AUTO = FleetSettings(enabled=True, hosts=1, cuts=(5, 12, 22), mode="auto")


def with_attic(machine: LentMachine | None = ATTIC, moment: FleetMoment = MOMENT, compute: float = 1.0) -> FleetMoment:
    """A fleet whose second host is another machine's."""
    return replace(moment, elsewhere={2: HostElsewhere(machine, compute)})


# --- what is seen of it -----------------------------------------------------------------------------------------------


def test_another_machine_counts_with_its_own_memory_and_processors() -> None:
    seen = seen_of(with_attic(), replace(CALM, others_share=0.7))
    attic = seen.fleet.hosts[2]
    assert attic.room_bytes == pytest.approx(0.85 * 8e9 - (2e9 - 2e8) - PROCESS_BYTES)
    assert (attic.cpu_used, attic.accepts) == (0.1, True)
    assert seen.vacancy(2) == pytest.approx(1 - 0.25 / 0.85)
    assert seen.vacancy(1) < 0.3
    busy = replace(ATTIC, said=msgspec.structs.replace(SAID, cpu_got=0.5, cpu_wanted=2.0))
    assert seen_of(with_attic(busy), CALM).vacancy(2) == 0.0, "it would take both threads that its owner allows"


def test_a_machine_that_has_said_nothing_lately_is_not_vacant_and_gets_nothing() -> None:
    seen = seen_of(with_attic(replace(ATTIC, said=None)), CALM)
    assert (seen.vacancy(2), seen.fleet.hosts[2].accepts) == (0.0, False)
    assert (seen.excess[2], seen.leaving) == (0.0, frozenset()), "what it has stays"


def test_what_an_owner_allows_of_the_memory_bounds_a_machine_and_what_is_beyond_it_moves_away() -> None:
    n_fit = 6
    allowed = int(PROCESS_BYTES + (n_fit + 0.5) * LAYER_BYTES)
    for machine in (replace(ATTIC, memory_bytes=allowed), replace(ATTIC, memory_bytes=allowed, said=None)):
        moment = with_attic(machine)
        assert seen_of(moment, CALM).excess[2] == pytest.approx(10 * LAYER_BYTES - allowed + PROCESS_BYTES, abs=2)
        layout, steps = played(moment, 10, may_scale=False)
        assert {step.source for step in steps} == {2}
        assert sum(layers.n_layers for layers in layout.on(2)) == n_fit
    less = replace(MOMENT, settings=FleetSettings(enabled=True, hosts=1, memory_gib=0.2))
    assert seen_of(with_attic(moment=less), CALM).fleet.hosts[2].room_bytes == pytest.approx(0.2 * GIB - PROCESS_BYTES)


@pytest.mark.parametrize("machine", [None, replace(ATTIC, stood_in=True)])
def test_a_stand_in_keeps_what_it_has_and_gets_nothing(machine: LentMachine | None) -> None:
    moment = with_attic(machine, replace(MOMENT, drained=frozenset((1,))))
    seen = seen_of(moment, CALM)
    assert [host.accepts for host in seen.fleet.hosts] == [True, False, False]
    layout, _ = played(moment, 5, may_scale=False)
    assert (layout.on(1), [layers.n_layers for layers in layout.on(2)]) == ([], [10])


def test_a_stand_in_has_no_more_than_the_machine_may_have_that_it_stands_in_for() -> None:
    allowed = int(PROCESS_BYTES + 4.5 * LAYER_BYTES)
    moment = with_attic(replace(ATTIC, memory_bytes=allowed, stood_in=True))
    assert not seen_of(moment, CALM).fleet.hosts[2].accepts
    layout, steps = played(moment, 10, may_scale=False)
    assert ({step.source for step in steps}, sum(one.n_layers for one in layout.on(2))) == ({2}, 4)
    back = with_attic(replace(ATTIC, stood_in=True, said=msgspec.structs.replace(SAID, leaving="x")))
    assert seen_of(replace(back, settings=AUTO), CALM).leaving == frozenset()


def test_layers_leave_a_machine_that_is_drained_or_whose_owner_is_back() -> None:
    layout, steps = played(with_attic(moment=replace(MOMENT, drained=frozenset((2,)))), 5, may_scale=False)
    assert ([step.source for step in steps], layout.on(2)) == ([2], [])
    leaving = with_attic(replace(ATTIC, said=msgspec.structs.replace(SAID, leaving="somebody works there")))
    layout, steps = played(leaving, 5, may_scale=False)
    assert steps == [], "where nothing brings them back, a process stands in for a while"
    layout, steps = played(replace(leaving, settings=AUTO), 5, may_scale=False)
    assert ([step.source for step in steps], layout.on(2)) == ([2], [])


def test_who_works_at_home_bars_no_host_of_another_machine() -> None:
    settings = FleetSettings(enabled=True, hosts=1, only_idle=True)
    moment = with_attic(moment=replace(MOMENT, settings=settings))
    assert seen_of(moment, replace(CALM, owner_at_work=True)).leaving == frozenset((1,))


def test_a_drained_host_s_layers_go_to_another_machine_where_that_is_least_busy() -> None:
    moment = with_attic(moment=replace(MOMENT, drained=frozenset((1,))), compute=4.0)
    layout, [step] = played(moment, 5, may_scale=False)
    assert (step.kind, step.source, step.target) == (StepKind.MOVE, 1, 2)
    assert sum(layers.n_layers for layers in layout.on(2)) == 17


def test_a_fleet_grows_by_itself_into_another_machine_if_the_way_there_does_not_cost_more_than_it_gains() -> None:
    layout = FleetLayout.of_cuts((2, 28), 30)
    costs, given = condensed(GIVEN.costs, layout), replace(GIVEN, n_lent=1)
    near = replace(MOMENT, layout=layout, costs=costs, settings=AUTO, n_answers=1, given=given)
    there, _ = played(with_attic(moment=near, compute=4.0), 60)
    assert there.n_away((2,)) > 0
    far = replace(near, elsewhere={2: HostElsewhere(ATTIC, 4.0, delay_s=0.5)})
    assert played(far, 60)[0].n_away((2,)) == 0


ALL_HOME = FleetLayout(30, (PlacedRange(2, 28, (0,)),))
SHARED = FleetLayout(30, (PlacedRange(2, 5, (0,)), PlacedRange(5, 21, (2,)), PlacedRange(21, 28, (0,))))


def over_a_line(layout: FleetLayout, n: int, delay_s: float, mbit_s: float) -> FleetMoment:
    """Home, which could compute all layers itself, and one other machine, under `n` answers; its line is measured."""
    rate, row, book = mbit_s * 1e6 / 8, MODEL.row_bytes, MachineBook()
    book.observe(0.0, [], [way(rows, 2 * delay_s + 2 * rows * row / rate) for rows in (2, 64)], [2])
    given = replace(GIVEN, n_lent=1)
    costs = condensed(given.costs, layout)
    hosts = book.hosts({2: ATTIC}, given, costs, 1.0)
    settings = FleetSettings(enabled=True, hosts=0, mode="auto", keep_home=True)
    return replace(
        MOMENT, layout=layout, given=given, costs=costs, settings=settings, load=FleetLoad(float(n), 60.0), batch=n,
        full_batch=n, drained=frozenset((1,)), elsewhere=hosts,
    )  # fmt: skip


def forecast_of(moment: FleetMoment, layout: FleetLayout) -> FleetForecast:
    """What is expected of these layers there."""
    there = replace(moment, layout=layout, costs=condensed(moment.given.costs, layout))
    return seen_of(there, CALM).fleet.forecast(layout.placement)


@pytest.mark.parametrize(
    ("n", "delay_s", "mbit_s", "pays"),
    [(8, 0.001, 1000, True), (8, 0.01, 50, True), (8, 0.04, 20, False), (2, 0.01, 50, False), (1, 0.001, 1000, False)],
)
def test_over_a_line_where_a_fleet_is_slower_than_home_alone_the_layers_stay_at_home_or_come_back(
    n: int, delay_s: float, mbit_s: float, pays: bool
) -> None:
    begin = over_a_line(ALL_HOME, n, delay_s, mbit_s)
    alone = forecast_of(begin, ALL_HOME).tokens_per_s
    layout, steps = played(begin, 60)
    found = forecast_of(begin, layout)
    assert (layout.n_away((2,)) > 0, bool(steps)) == (pays, pays)
    assert (found.tokens_per_s > 1.02 * alone) is pays
    # Where they lie there at first, as an owner's cuts may have it, none goes there any more where it does not pay.
    begin = over_a_line(SHARED, n, delay_s, mbit_s)
    slower = forecast_of(begin, SHARED).tokens_per_s < alone
    layout, _ = played(begin, 60)
    found = forecast_of(begin, layout)
    assert found.tokens_per_s >= alone * (1 - 1e-9)
    assert slower or pays
    if not pays:
        assert found.shares[:, 2].sum() == pytest.approx(0.0), "what is still there is a copy, and no answer goes there"


# --- what is learned of it --------------------------------------------------------------------------------------------


def run(host: int, layers: int, batch: int, seconds: float) -> wire.RunSample:
    return wire.RunSample(host=host, first=12, last=12 + layers, batch=batch, n=1, seconds=seconds)


def way(rows: int, seconds: float, host: int = 2) -> wire.WaySample:
    return wire.WaySample(host=host, rows=rows, seconds=seconds)


def test_a_machine_is_as_fast_as_its_runs_and_before_them_as_its_threads_are_many() -> None:
    book, costs = MachineBook(), MOMENT.costs
    [before] = book.hosts({2: ATTIC}, replace(GIVEN, n_threads=8), costs, 1.0).values()
    assert before == HostElsewhere(ATTIC, 0.25)
    expected = 10 * costs.layer.at(4) + costs.call.at(4)
    book.observe(0.0, [run(2, 10, 4, expected / 3), run(1, 10, 4, 9.0)], [], [2])
    assert book.speed(2, costs) == pytest.approx(3.0)
    assert book.speed(1, costs) is None, "this machine's own are not"
    [measured] = book.hosts({2: ATTIC}, GIVEN, costs, 0.5).values()
    assert measured.compute == pytest.approx(1.5)
    book.observe(1.0, [], [], [])
    assert book.speed(2, costs) is None, "another machine may have its place by now"
    assert book.hosts({2: None}, GIVEN, costs, 1.0) == {2: HostElsewhere(None)}


def test_the_way_s_delay_and_rate_come_of_small_and_large_flights() -> None:
    book, delay_s, rate, row = MachineBook(), 0.004, 1e7, MODEL.row_bytes
    assert book.way(2, row) == (0.0, float("inf"))
    times = {n: 2 * delay_s + 2 * n * row / rate for n in (2, 64)}
    book.observe(0.0, [], [way(2, times[2] + 1.0)], [2])
    book.observe(1.0, [], [way(2, times[2])], [2])
    assert [*book.way(2, row)] == pytest.approx([times[2] / 2, float("inf")])
    book.observe(2.0, [], [way(64, times[64]), way(2, times[2] + 5.0), way(0, 1.0), way(9, 9.0, host=1)], [2])
    assert [*book.way(2, row)] == pytest.approx([delay_s, rate])
    book.observe(3.0 + WAY_KEPT_S, [], [way(2, times[2] + 1.0), way(64, times[64] + 1.0)], [2])
    assert book.way(2, row)[0] == pytest.approx(delay_s + 0.5), "the way may have become a longer one"


@pytest.mark.parametrize(
    "damage", [{"others_share": float("nan")}, {"memory_free_bytes": -1}, {"cpu_got": float("inf")}, {"n_cpus": 0}]
)
def test_what_a_machine_says_of_itself_is_checked(damage: dict[str, float]) -> None:
    assert decode_first(first_frame(SAID)[HEADER.size :]) == SAID
    with pytest.raises(BadFrameError):
        decode_first(first_frame(msgspec.structs.replace(SAID, **damage))[HEADER.size :])


# --- what it gets -----------------------------------------------------------------------------------------------------


class Places:
    """Another machine as the hosts of an engine know it; `staged` are the files that it was told to fetch."""

    def __init__(self, machine: LentMachine | None = ATTIC) -> None:
        self.machine, self.staged, self.fetched = machine, list[set[str]](), asyncio.Event()
        self.asked = list[set[str]]()

    def borrow_for(self, borrower: Borrower) -> None:
        """Nobody is told of offers."""

    end = borrow_for

    async def take(self, place: int, names: Collection[str]) -> tuple[LentLife, socket.socket] | None:
        self.asked.append(set(names))
        return None

    async def stage(self, place: int, names: Collection[str]) -> None:
        self.staged.append(set(names))
        await self.fetched.wait()

    def machine_at(self, place: int) -> LentMachine | None:
        return self.machine

    def name_of(self, place: int) -> str:
        return "attic"

    def is_there(self, place: int) -> bool:
        return self.machine is not None


def fleet_of(folder: Path, places: Places) -> tuple[FleetLayers, HostProcesses]:
    """Layers 1 to 4 of 8 at a host of this machine, and a second host that is another machine's, with none."""
    model = model_file(folder / "m.gguf", llama__block_count=8)
    layers = FleetLayers(model, SegmentFiles(folder / "segments", 1 << 30), FleetLayout.of_cuts((1, 5), 8))
    return layers, HostProcesses(2, layers.write, 1, layers.files_of, places, layers.coming_to)


def numbers(found: Sequence[RangePath]) -> list[tuple[int, int]]:
    return [(layers.first, layers.last) for layers, _ in found]


async def test_a_machine_may_fetch_what_is_to_come_to_it_until_the_move_has_ended(tmp_path: Path) -> None:
    layers, hosts = fleet_of(tmp_path, Places())
    wanted = FleetLayout.of_cuts((1, 3, 5), 8)
    assert numbers(hosts.files_of(0)) == []
    with layers.moving_to(wanted):
        assert numbers(hosts.files_of(0)) == [(3, 5)]
        assert [(one.first, one.last) for one in files_of([hosts], 0)] == [(3, 5)]
        layers.layout = wanted
        assert numbers(hosts.files_of(0)) == [(3, 5)], "once, also where it is there"
    assert numbers(hosts.files_of(0)) == [(3, 5)]
    with layers.moving_to(FleetLayout.of_cuts((1, 5), 8)):
        assert numbers(hosts.files_of(0)) == [(3, 5)]
        assert not hosts.keeps(0), "its process is let go as soon as its layers have left, before anybody is told"
    assert hosts.keeps(0)
    layers.layout = FleetLayout.of_cuts((1, 5), 8)
    assert (numbers(hosts.files_of(0)), hosts.keeps(0)) == ([], False)


@pytest.mark.parametrize(("allowed", "is_asked"), [(0, True), (1000, True), (999, False)])
async def test_a_machine_is_asked_for_no_host_that_would_have_more_than_its_owner_allows(
    tmp_path: Path, allowed: int, is_asked: bool
) -> None:
    places = Places(replace(ATTIC, memory_bytes=allowed))
    layers, _ = fleet_of(tmp_path, places)
    layers.layout = FleetLayout.of_cuts((1, 3, 5), 8)
    hosts = HostProcesses(2, layers.write, 1, layers.files_of, places, layers.coming_to, lambda n: 500.0 * n)
    assert await hosts._borrow(hosts.hosts[1]) is None
    assert bool(places.asked) is is_asked


async def test_layers_are_fetched_before_they_move_and_only_where_the_machine_is_there(tmp_path: Path) -> None:
    places = Places()
    layers, hosts = fleet_of(tmp_path, places)
    await hosts.stage()
    assert places.staged == [], "nothing moves"
    with layers.moving_to(FleetLayout.of_cuts((1, 3, 5), 8)):
        places.fetched.set()
        await hosts.stage()
        assert places.staged == [{path.name for _, path in layers.coming_to(2) or ()}]
        places.machine = None
        with pytest.raises(OSError, match="attic is not there just now"):
            await hosts.stage()
        with pytest.raises(OSError, match="attic is not there just now"):
            await hosts._borrow(hosts.hosts[1])
    layers.layout = FleetLayout.of_cuts((1, 3, 5), 8)
    assert await hosts._borrow(hosts.hosts[1]) is None, "what it has already, a process here may stand in for"
    hosts.stay_here()
    assert hosts.elsewhere() == {}


async def test_a_machine_is_sent_to_fetch_once_and_offers_itself_again_when_it_has_the_files() -> None:
    offers = HostOffers(lambda _: None)
    ends, closed = list[socket.socket](), list[bool]()

    def add(life: int, *has: str) -> socket.socket:
        event, ours, theirs = offered(life, *has)
        ends.extend((ours, theirs))
        theirs.setblocking(False)
        offers.add(event, ours)
        return theirs

    def is_closed(sock: socket.socket) -> bool:
        try:
            return sock.recv(1) == b""
        except BlockingIOError:
            return False

    first = add(1, "a")
    staging = asyncio.create_task(offers.stage("attic", ["a", "b"]))
    await asyncio.sleep(0)
    closed.append(is_closed(first))
    second = add(2, "a")  # at once, while it fetches
    await asyncio.sleep(0)
    closed.append(is_closed(second))
    assert closed == [True, False]
    assert offers.is_there("attic"), "meanwhile it can be had for what it has"
    add(3, "a", "b")
    await staging
    assert offers.has("attic", ["b"])
    offers.clear()
    for one in ends:
        one.close()


async def test_a_machine_that_goes_while_it_fetches_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offered_hosts, "GONE_S", 0.01)
    offers = HostOffers(lambda _: None)
    event, ours, theirs = offered(1, "a")
    with ours, theirs:
        offers.add(event, ours)
        with pytest.raises(OSError, match="attic has gone"):
            await offers.stage("attic", ["b"])
    event, ours, theirs = offered(2, "a")
    monkeypatch.setattr(offered_hosts, "STAGE_S", 0.01)
    monkeypatch.setattr(offered_hosts, "GONE_S", 60.0)
    with ours, theirs:
        offers.add(event, ours)
        with pytest.raises(OSError, match=r"attic has not fetched its layers within 0\.01 s"):
            await offers.stage("attic", ["b"])


async def test_a_machine_that_says_how_it_is_has_not_gone_though_it_is_slow_to_offer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offered_hosts, "GONE_S", 0.01)
    offers = HostOffers(lambda _: None)
    event, ours, theirs = offered(1, "a")
    with ours, theirs:
        offers.add(event, ours)
        offers.hear("attic", SAID)
        staging = asyncio.create_task(offers.stage("attic", ["b"]))
        done, _ = await asyncio.wait((staging,), timeout=0.1)
        assert not done, "it has been without a host for ten times as long as one that is silent may be"
        monkeypatch.setattr(offered_hosts, "SAID_S", 0.0)
        with pytest.raises(OSError, match="attic has gone"):
            await staging


async def test_a_host_that_is_let_go_is_no_bad_one_and_the_next_one_still_counts() -> None:
    offers = HostOffers(lambda _: None)
    ends = list[socket.socket]()
    for life in (1, 2, 3):
        event, ours, theirs = offered(life, "a")
        ends += [ours, theirs]
        offers.add(event, ours)
        assert await offers.take("attic", ["a"]) is not None
        event, ours, theirs = offered(life + 10, "a")
        ends += [ours, theirs]
        offers.add(event, ours)
        ended = HostEnded(name="attic", life=life, message="", n_bytes=300, given_up=True)
        offers.end(ended, is_let_go=True)
        assert offers.is_there("attic")
    for one in ends:
        one.close()


async def test_what_a_machine_has_said_is_old_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = HostOffers(lambda _: None)
    assert offers.machine("attic") is None
    event, ours, theirs = offered(1)
    with ours, theirs:
        offers.add(event, ours)
        assert offers.machine("attic") == LentMachine("attic", 2, 0)
        offers.hear("attic", SAID)
        assert offers.machine("attic") == ATTIC
        monkeypatch.setattr(offered_hosts, "SAID_S", 0.0)
        assert offers.machine("attic") == LentMachine("attic", 2, 0)
        offers.clear()
        assert offers.machine("attic") is None


# --- the step ---------------------------------------------------------------------------------------------------------


class Moved:
    """An engine's orders, of which nothing is carried out: the layouts that were asked for."""

    def __init__(self) -> None:
        self.ranges = list[tuple[wire.RangeFile, ...]]()

    async def move(self, ranges: tuple[wire.RangeFile, ...]) -> wire.LayersMoved:
        self.ranges.append(ranges)
        return wire.LayersMoved(id="1", seconds=0.1)


def operator_of(folder: Path, places: Places, monkeypatch: pytest.MonkeyPatch) -> tuple[FleetOperator, Moved]:
    monkeypatch.setattr(operator, "LOOK_S", 0.01)
    layers, hosts = fleet_of(folder, places)
    engine, moved = (
        Engine(wire.Load(model_path=str(folder / "m.gguf"), n_ctx=64, n_threads=1), SystemClock(), hosts=hosts),
        Moved(),
    )
    engine.state = EngineState.READY
    monkeypatch.setattr(engine, "fleet", moved)
    return FleetOperator(engine, hosts, layers, GIVEN, Config(fleet=AUTO)), moved


STEP = FleetStep(StepKind.MOVE, 3, 5, 1, 2)  # modules 3 and 4 are the layers 3 and 4: home's first range is one


@pytest.mark.parametrize(
    "change",
    [
        lambda owner, _: owner.drain("local-1"),
        lambda owner, _: owner.follow(Config(fleet=FleetSettings(memory_gib=1.0))),
        lambda _, places: setattr(places, "machine", replace(ATTIC, said=msgspec.structs.replace(SAID, leaving="x"))),
    ],
)
async def test_a_fetch_that_takes_long_gives_way_to_what_owners_want(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[FleetOperator, Places], None]
) -> None:
    places = Places()
    fleet, moved = operator_of(tmp_path, places, monkeypatch)
    moving = asyncio.create_task(fleet._move(STEP, seen_of(MOMENT, CALM)))
    while not places.staged:
        await asyncio.sleep(0.001)
    change(fleet, places)
    report = await moving
    assert "owners want something else" in report.error
    assert moved.ranges == []
    assert fleet._layers.coming_to(2) is None


async def test_a_step_fetches_then_moves_and_the_layout_is_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places()
    places.fetched.set()
    fleet, moved = operator_of(tmp_path, places, monkeypatch)
    report = await fleet._move(STEP, seen_of(MOMENT, CALM))
    assert report.error == ""
    [ranges] = moved.ranges
    assert [(one.first, one.last, one.hosts) for one in ranges] == [
        (0, 1, (0,)), (1, 3, (1,)), (3, 5, (2,)), (5, 8, (0,)),
    ]  # fmt: skip
    assert numbers(fleet._layers.files_of(2)) == [(3, 5)]
    shown = fleet._shown(STEP, "", 0.3, wire.LayersMoved(id="1", seconds=0.1, load_s=0.05, copy_s=0.02))
    assert (shown.target, shown.stage_s, shown.load_s, shown.copy_s) == ("attic", 0.2, 0.05, 0.02)
    assert "0.30 s (files 0.200, load 0.050, copy 0.020)" in step_line(msgspec.to_builtins(shown))
    refused = fleet._shown(STEP, "", 0.3, wire.LayersMoved(id=""))
    assert (refused.stage_s, refused.load_s, refused.copy_s) == (None, None, None)
    assert "0.30 s, 0.000 s" in step_line(msgspec.to_builtins(refused))


def test_what_a_step_has_brought_is_measured_after_it_has_ended_however_long_it_took() -> None:
    controller, seen = FleetController(), seen_of(replace(MOMENT, drained=frozenset((1,)), tokens_per_s=10.0), CALM)

    def look(now: float) -> FleetSeen:
        found = replace(seen, tokens_per_s=20.0)
        controller.decide(now, found, may_scale=False)
        return found

    assert controller.decide(0.0, seen)
    controller.carried_out(60.0)
    look(60.5)
    assert controller.records[0].measured is None
    look(60.0 + COOLDOWN_S)
    assert controller.records[0].measured == 2.0


# --- at the machine ---------------------------------------------------------------------------------------------------


def lending_by(folder: Path, at_work: list[bool], said: list[str]) -> FleetLending:
    home = PairedPartner(
        identity=Identity(certificate="", key="", ca=""), name="home", addresses=(Address(host="127.0.0.1", port=1),),
        own_name="attic",
    )  # fmt: skip
    terms = OwnerTerms(
        1, only_idle=True, nobody_at_work=lambda: not (at_work.pop(0) if len(at_work) > 1 else at_work[0])
    )
    return FleetLending(home, folder, terms, said.append)


@pytest.mark.parametrize(
    ("left", "at_work", "stops"),
    [([1, 1, 0], [True], True), ([1, 1, 1], [True, True, False], False), ([], [True], True)],
)
async def test_a_machine_whose_owner_is_back_waits_until_its_layers_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: list[int], at_work: list[bool], stops: bool
) -> None:
    monkeypatch.setattr(lending, "AGAIN_S", 0.001)

    async def ask(*_: object) -> TheSegments:
        if not left:
            raise PairingError("unreachable", "home has gone")
        return TheSegments(build=BUILD, segments=(SegmentFact(3, 5, "a.gguf"),) * left.pop(0))

    monkeypatch.setattr(lending, "ask_machine", ask)
    said = list[str]()
    lender = lending_by(tmp_path, at_work, said)
    assert await lender._is_left("somebody works here") is stops
    assert said == ["its layers leave this machine: somebody works here"]
    assert lender._leaving == ""


async def test_a_fetch_ends_when_the_owner_of_the_machine_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "LOOK_S", 0.001)
    was_cancelled = asyncio.Event()

    async def fetch(*_: object) -> TheSegments:
        try:
            return await asyncio.Future[TheSegments]()  # for ever
        finally:
            was_cancelled.set()

    monkeypatch.setattr(lending, "ask_machine", fetch)
    assert not await lending_by(tmp_path, [False, False, True], [])._offer_if_allowed()
    assert was_cancelled.is_set()
