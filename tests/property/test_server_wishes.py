"""What a client says of whom to ask narrows the servers that may be asked, and never widens them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.dispatch.server_wishes import Offer, ServerWishes

NAMES = ("box", "Router", "b")
MODELS = ("m", "owner/large")
offers = st.builds(
    lambda server, model, usd, keeps: Offer(server, f"{server}/{model}", usd, keeps_wishes=keeps),
    st.sampled_from(NAMES),
    st.sampled_from(MODELS),
    st.none() | st.tuples(st.sampled_from((0.0, 1.0, 5.0)), st.sampled_from((0.0, 2.0, 9.0))),
    st.booleans(),
)
names = st.sampled_from((*NAMES, "BOX", "box/m", "router/owner/large", "Azure", "openai"))
wishes = st.fixed_dictionaries(
    {},
    optional={
        "order": st.lists(names, max_size=4),
        "only": st.lists(names, max_size=3),
        "ignore": st.lists(names, max_size=2),
        "allow_fallbacks": st.booleans(),
        "data_collection": st.sampled_from(("allow", "deny", "a word of tomorrow", None)),
        "zdr": st.booleans() | st.none(),
        "max_price": st.fixed_dictionaries(
            {}, optional={"prompt": st.sampled_from((0, 1, "2")), "completion": st.just(3)}
        ),
    },
)
anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | names, inner, max_size=3),
    max_leaves=6,
)


def narrowed(provider: object, members: list[Offer]) -> list[list[Offer]]:
    return ServerWishes.of(provider).narrow(members, lambda one: one)


@given(wishes, st.lists(offers, max_size=6))
def test_each_one_left_was_there_once_and_nothing_forbids_it(provider: dict[str, Any], members: list[Offer]) -> None:
    groups = narrowed(provider, members)
    left = [one for group in groups for one in group]
    assert all(groups)
    assert len({id(one) for one in left}) == len(left)
    assert {id(one) for one in left} <= {id(one) for one in members}
    ignored = {name.casefold() for name in provider.get("ignore", ())}
    most = provider.get("max_price", {})
    for one in left:
        if provider.get("zdr") or provider.get("data_collection") not in (None, "allow"):
            assert one.keeps_wishes
        assert not ignored & {one.server.casefold(), one.key.casefold()}
        if most:
            assert one.usd is not None
            assert one.usd[0] <= float(most.get("prompt", "inf"))
            assert one.usd[1] <= float(most.get("completion", "inf"))


@given(st.lists(offers, max_size=6), st.lists(st.sampled_from(("Azure", "openai", "together")), max_size=3))
def test_names_of_nobody_here_narrow_nothing(members: list[Offer], foreign: list[str]) -> None:
    """They are of providers behind a server that routes itself."""
    assert narrowed({"order": foreign, "only": foreign, "ignore": foreign}, members) == ([members] if members else [])


@given(st.lists(offers, max_size=6), st.lists(names, min_size=1, max_size=4))
def test_an_order_comes_first_and_without_fallbacks_nobody_comes_behind_it(
    members: list[Offer], order: list[str]
) -> None:
    said = {"order": order}
    left = [one for group in narrowed(said, members) for one in group]
    assert {id(one) for one in left} == {id(one) for one in members}
    wanted = [name.casefold() for name in order]
    known = {name for one in members for name in (one.server.casefold(), one.key.casefold())}
    named = [one for one in members if {one.server.casefold(), one.key.casefold()} & set(wanted)]
    assert {id(one) for one in left[: len(named)]} == {id(one) for one in named}
    only = [one for group in narrowed(said | {"allow_fallbacks": False}, members) for one in group]
    assert [id(one) for one in only] == [id(one) for one in (left[: len(named)] if known & set(wanted) else left)]


@given(anything, st.lists(offers, max_size=4))
def test_whatever_a_client_sends_is_no_error(provider: object, members: list[Offer]) -> None:
    for group in narrowed(provider, members):
        assert set(map(id, group)) <= set(map(id, members))


@pytest.mark.parametrize("price", [None, "cheap", [], {"prompt": "nan?"}, {"prompt": -1}])
def test_a_price_that_is_none_is_no_limit(price: object) -> None:
    one = Offer("box", "box/m", None)
    assert narrowed({"max_price": price}, [one]) == [[one]]
