"""What holds for all tests."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

# No test of ours asserts how long something takes; on a busy machine one example may take seconds.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

WHOLE_MACHINE = {"e2e", "faults"}  # they start processes that compute, and look at the clock


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with real processes run one after the other, in one of xdist's workers; the rest beside them."""
    for item in items:
        if Path(item.path).parent.name in WHOLE_MACHINE:
            item.add_marker(pytest.mark.xdist_group("machine"))
