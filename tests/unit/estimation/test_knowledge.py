"""What was learned of a side holds as long as the side is the same one, whatever becomes of the other."""

from __future__ import annotations

import pytest

from disco_daemon.estimation.knowledge import Knowledge


def known(n: int, ttft_s: float = 0.5) -> Knowledge:
    """Return what `n` answers of each side have taught."""
    found = Knowledge()
    for i in range(n):
        found.device.add(100 + i, 0.1 + 0.002 * i)
        found.server.add(ttft_s + 0.001 * i, censored=False)
        found.prompts.add(100 + i)
    return found


@pytest.mark.parametrize(("device", "server"), [(True, False), (False, True), (False, False), (True, True)])
def test_a_side_that_stays_keeps_what_was_learned_of_it(device: bool, server: bool) -> None:
    before, now = known(14), Knowledge()
    now.take_over(before, device=device, server=server)
    assert (now.device.n > 0, now.server.n > 0) == (device, server)
    assert now.prompts.n == before.prompts.n
    if device:
        assert now.device.to_json() == before.device.to_json()
        assert now.device is not before.device, "it goes on by itself"


def test_what_is_known_better_already_is_kept() -> None:
    before, now = known(3), known(20, ttft_s=2.0)
    kept = now.to_json()
    now.take_over(before, device=True, server=True)
    assert now.to_json() == kept
