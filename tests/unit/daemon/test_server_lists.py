"""What a server tells of its models is taken as far as it is fit to be shown, and bounded."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.daemon.server_lists import MAX_NAME, MOST_LISTED, listed

LONG = "n" * MAX_NAME
names = st.text(max_size=8) | st.sampled_from(["m", "owner/large", "a\x1b[2J", f"{LONG}n", " ", "\u202etxet", LONG])


@given(st.lists(st.fixed_dictionaries({"id": names | st.none() | st.integers()}) | st.text(max_size=3), max_size=9))
def test_every_name_can_be_shown_and_typed(entries: list[Any]) -> None:
    told = listed(msgspec.json.encode({"data": entries}))
    for name in told:
        assert name.isprintable()
        assert 0 < len(name.strip()) <= len(name) <= MAX_NAME
    wanted = {one["id"] for one in entries if isinstance(one, dict)} & {"m", "owner/large", LONG}
    assert wanted <= told.keys()


def test_a_list_without_an_end_is_cut() -> None:
    entries = [{"id": "bad\n"}] * MOST_LISTED + [{"id": f"m{n}"} for n in range(2 * MOST_LISTED)]
    assert list(listed(msgspec.json.encode(entries))) == [f"m{n}" for n in range(MOST_LISTED)]
