"""A layout of layers and a policy's placement of modules say the same, whatever steps lead from one to the next."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.fleet.layout import FleetLayout, PlacedRange
from disco_daemon.fleet.placement import ModelModules, Placement
from disco_daemon.fleet.steps import FleetStep, StepKind
from disco_daemon.types import LayerRange

N_HOSTS = 4


@st.composite
def layouts(draw: st.DrawFn) -> FleetLayout:
    n = draw(st.integers(3, 40))
    first, last = draw(st.tuples(st.integers(1, n - 2), st.integers(2, n - 1)).filter(lambda ends: ends[0] < ends[1]))
    masks = draw(st.lists(st.integers(1, 2**N_HOSTS - 1), min_size=last - first, max_size=last - first))
    begin = FleetLayout(n, (PlacedRange(first, last, (0,)),))
    return begin.after(Placement((1, *masks, 1)))


@given(layouts())
def test_placement_and_ranges_say_the_same_in_as_few_ranges_as_can_be(layout: FleetLayout) -> None:
    ranges = layout.ranges
    assert [layers.first for layers, _ in ranges[1:]] == [layers.last for layers, _ in ranges[:-1]]
    assert (ranges[0][0].first, ranges[-1][0].last) == (0, layout.n_layers)
    assert ranges[0][1] == ranges[-1][1] == (0,), "home's own"
    inner = [hosts for _, hosts in ranges[1:-1]]
    assert all(before != after for before, after in pairwise(inner))
    assert layout.after(layout.placement) == layout
    assert len(layout.parallelism) == layout.n_layers
    assert layout.parallelism[layout.first : layout.last] == list(layout.placement.parallelism[1:-1])
    for host in range(N_HOSTS):
        there = {layer for layers in layout.on(host) for layer in range(layers.first, layers.last)}
        modules = {layout.first + module - 1 for module in layout.placement.on(host) if 0 < module < layout.last}
        assert there - set(range(layout.first)) - set(range(layout.last, layout.n_layers)) == {
            layer for layer in modules if layout.first <= layer < layout.last
        }


@given(layouts(), st.data())
def test_a_step_s_modules_are_the_layers_that_change(layout: FleetLayout, data: st.DataObject) -> None:
    n = layout.last - layout.first
    a = data.draw(st.integers(1, n))
    b = data.draw(st.integers(a + 1, n + 1))
    target = data.draw(st.integers(0, N_HOSTS - 1))
    step = FleetStep(StepKind.REPLICATE, a, b, None, target)
    after = layout.after(step.apply(layout.placement))
    first, last = layout.layers_of(step)
    assert layout.first <= first < last <= layout.last
    before_hosts = [set(hosts) for layers, hosts in layout.ranges for _ in range(layers.n_layers)]
    hosts_after = [set(hosts) for layers, hosts in after.ranges for _ in range(layers.n_layers)]
    for layer, (before, now) in enumerate(zip(before_hosts, hosts_after, strict=True)):
        assert now == (before | {target} if first <= layer < last else before)


@given(layouts(), st.integers(0, 4096))
def test_all_that_modules_take_is_what_the_model_and_its_cells_take(layout: FleetLayout, n_cells: int) -> None:
    model = ModelModules((7, *range(100, 100 + layout.n_layers), 9), 3, 64)
    modules = layout.modules(model, n_cells)
    assert len(modules.weights) == len(layout.placement.masks)
    assert sum(modules.weights) == sum(model.weights) + 3 * n_cells * layout.n_layers
    assert modules.kv_bytes == 0


def test_home_keeps_its_own_and_ranges_are_one_behind_the_other() -> None:
    layout = FleetLayout.of_cuts((5, 12, 22), 30)
    assert [(one.first, one.last, one.hosts) for one in layout.inner] == [(5, 12, (1,)), (12, 22, (2,))]
    assert (layout.n_away((1,)), layout.n_away((0, 1, 2)), layout.n_away(())) == (7, 17, 0)
    own = layout.sample(LayerRange(0, 5, 30), 4, 0.1), layout.sample(LayerRange(22, 30, 30), 4, 0.1)
    assert [(one.has_embedding, one.n_layers, one.has_head) for one in own] == [(True, 0, False), (False, 0, True)]
    assert layout.sample(LayerRange(5, 12, 30), 4, 0.1).n_layers == 7
    with pytest.raises(ValueError, match="own ranges"):
        layout.after(Placement((3, *layout.placement.masks[1:])))
    for inner in ((), ((0, 3, (1,)),), ((5, 30, (1,)),), ((5, 7, (1,)), (8, 9, (1,))), ((5, 7, ()),), ((5, 5, (1,)),)):
        with pytest.raises(ValueError, match=r"layer|range"):
            FleetLayout(30, tuple(PlacedRange(*one) for one in inner))
