"""The recorded traces of this checkout, and what makes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.eval.__main__ import make_parser
from benchmarks.eval.convert import KEPT, RECORDED, convert
from benchmarks.eval.traces import read_requests, read_traces
from disco_daemon.errors import ConfigError

MOST_BYTES = 1_000_000


def test_the_checkout_has_traces_and_lengths_and_they_are_played_by_default() -> None:
    assert make_parser().parse_args([]).traces == str(RECORDED)
    traces = read_traces(RECORDED)
    assert {f"ttft_{trace.source}.csv" for trace in traces} == set(KEPT)
    assert len({trace.name for trace in traces}) == len(traces), "the report goes by names"
    requests = read_requests(RECORDED)
    assert len(requests.prompt) == 1000
    assert sum(path.stat().st_size for path in RECORDED.rglob("*.csv")) < MOST_BYTES


def test_each_file_has_its_origin_and_licence_on_the_page_beside_it() -> None:
    page = (RECORDED / "README.md").read_text("utf-8")
    for path in RECORDED.rglob("*.csv"):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {path.relative_to(RECORDED)} |")]
        assert all(cell.strip() for cell in row.strip("|").split("|"))


def test_the_set_is_what_the_converter_makes_of_its_own_files(tmp_path: Path) -> None:
    convert(RECORDED, tmp_path)
    for path in RECORDED.rglob("*.csv"):
        assert (tmp_path / path.relative_to(RECORDED)).read_bytes() == path.read_bytes()


def test_other_columns_are_dropped_and_the_order_is_kept(tmp_path: Path) -> None:
    for name, column in KEPT.items():
        rows = "".join(f"service,{i},{9 - i}.5\n" for i in range(10))
        (tmp_path / name).write_text(f"trace,seq,{column}\n{rows}", "utf-8")
    convert(tmp_path, tmp_path / "made")
    for trace in read_traces(tmp_path / "made"):
        np.testing.assert_array_equal(trace.ttft_s, 9.5 - np.arange(10))


def test_a_file_without_its_column_is_named(tmp_path: Path) -> None:
    (tmp_path / next(iter(KEPT))).write_text("trace,seq\nservice,1\n", "utf-8")
    with pytest.raises(ConfigError, match="no column"):
        convert(tmp_path, tmp_path / "made")
