"""Conversations on disk: what is found there, what is believed, and what there is room for."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disco_daemon.engine import wire
from disco_daemon.engine.kv import spill as spill_module
from disco_daemon.engine.kv.cells import Cells
from disco_daemon.engine.kv.host_cache import HostCache
from disco_daemon.engine.kv.spill import Spill, fingerprint_of
from disco_daemon.engine.llama.state import State
from tests.unit.engine.test_batch import FakeLlama

MADE_BY = bytes(range(32))
A, B = list(range(1, 41)), list(range(101, 141))
PATIENCE_S = 60.0
TraceFunction: TypeAlias = Callable[[FrameType, str, Any], Any]


class Clock:
    """Time that stands still."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def opened(
    folder: Path, max_bytes: int = 2**20, made_by: bytes = MADE_BY, idle_s: float = 60.0, token_s: float = 1.0
) -> Iterator[tuple[Spill, Clock]]:
    """A spill, and its clock; another may open the folder afterwards, as if the process had ended."""
    clock = Clock()
    spill = Spill(folder, max_bytes, made_by, token_s, idle_s, clock)
    try:
        yield spill, clock
    finally:
        if spill._guard is not None:
            os.close(spill._guard)


def key(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def written(spill: Spill, *texts: list[int]) -> None:
    """Write the texts, with a copy of themselves as what was saved."""
    for text in texts:
        assert spill.put(key(text), bytes(text))
        assert spill._flush(PATIENCE_S)


def read(spill: Spill, tokens: list[int], have: int = 0) -> tuple[list[int], bytes | None] | None:
    found = spill.find(tokens, have)
    return None if found is None else (found.tokens, spill.read(found))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"))


def test_what_was_written_is_read_by_the_next_process(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as (spill, _):
        written(spill, A, B)
    with opened(tmp_path / "kv") as (spill, _):
        assert len(spill) == 2
        assert read(spill, [*A, 7, 8]) == (A, bytes(A))
        assert read(spill, B[:35]) == (B, bytes(B)), "its beginning is wanted"
        assert read(spill, [9] * 40) is None
        assert spill.n_bytes == sum(path.stat().st_size for path in files(tmp_path / "kv"))


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o755)
    with opened(folder) as (spill, _):
        written(spill, A)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600] * 2


def test_what_saves_too_little_is_left_on_disk(tmp_path: Path) -> None:
    with opened(tmp_path, token_s=1e-9) as (spill, _):
        written(spill, A)
        assert spill.find(A, 0) is None, "to compute it is quicker than to read it"
    with opened(tmp_path) as (spill, _):
        assert spill.find(A, 40 - spill_module.LEAST_GAIN) is not None
        assert spill.find(A, 40 - spill_module.LEAST_GAIN + 1) is None


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def only_begun(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:10])


def grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def with_a_wrong_token(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(spill_module.MAGIC) + 32 + 16 + 4] ^= 1
    path.write_bytes(data)


def with_another_name(path: Path) -> None:
    path.rename(path.with_name("0" * 32 + ".kv"))


@pytest.mark.parametrize("damage", [cut_short, only_begun, grown, with_a_wrong_token, with_another_name])
def test_a_damaged_file_is_removed_when_it_is_found(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with opened(tmp_path) as (spill, _):
        written(spill, A)
    damage(files(tmp_path)[0])
    with opened(tmp_path) as (spill, _):
        assert (len(spill), spill.n_bytes, files(tmp_path)) == (0, 0, [])
        written(spill, A)
        assert read(spill, A) == (A, bytes(A))


def test_keys_and_values_that_changed_are_not_believed(tmp_path: Path) -> None:
    with opened(tmp_path) as (spill, _):
        written(spill, A, B)
    path = next(path for path in files(tmp_path) if path.read_bytes().endswith(bytes(A)))
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with opened(tmp_path) as (spill, _):
        assert read(spill, A) == (A, None)
        assert spill.find(A, 0) is None
        assert (len(spill), len(files(tmp_path))) == (1, 1)
        assert read(spill, B) == (B, bytes(B))


def test_a_file_that_somebody_removed_is_forgotten(tmp_path: Path) -> None:
    with opened(tmp_path) as (spill, _):
        written(spill, A)
        files(tmp_path)[0].unlink()
        assert read(spill, A) == (A, None)
        assert (len(spill), spill.n_bytes) == (0, 0)


def test_what_another_model_has_made_is_removed(tmp_path: Path) -> None:
    with opened(tmp_path) as (spill, _):
        written(spill, A)
    with opened(tmp_path, made_by=bytes(32)) as (spill, _):
        assert (len(spill), files(tmp_path)) == (0, [])


def test_what_was_being_written_when_the_process_ended_is_removed(tmp_path: Path) -> None:
    half = tmp_path / f"{'a1' * 16}.new"
    half.write_bytes(b"half")
    with opened(tmp_path):
        assert not half.exists()


def test_what_is_not_ours_stays_in_the_folder(tmp_path: Path) -> None:
    names = ("abc.new", "notes.kv", "my.kv", f"{'A1' * 16}.kv", f"{'a1' * 16}.txt")
    for name in names:
        (tmp_path / name).write_text(name)
    for max_bytes in (2**20, 0):
        with opened(tmp_path, max_bytes=max_bytes) as (spill, _):
            assert len(spill) == 0
        assert [(tmp_path / name).read_text() for name in names] == list(names)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=30, deadline=None
)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), min_size=1, max_size=6), st.data())
def test_the_text_with_most_in_common_is_found(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], data: st.DataObject
) -> None:
    def n_common(a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    wanted = data.draw(st.sampled_from(texts)) + data.draw(st.lists(st.integers(0, 2), max_size=3))
    with opened(tmp_path_factory.mktemp("kv")) as (spill, _):
        written(spill, *texts)
        most = max(n_common(text, wanted) for text in texts)
        found = spill.find(wanted, 0)
        assert (found.n if found else 0) == (most if most >= spill_module.LEAST_GAIN else 0)
        assert all(spill.has(key(text)) for text in texts)
        assert len(spill) == len({tuple(t) for t in texts if not any(o != t and o[: len(t)] == t for o in texts)})


def test_the_bound_holds_and_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    texts = [[k] * 40 for k in range(1, 6)]
    with opened(tmp_path) as (spill, _):
        written(spill, texts[0])
        size = spill.n_bytes
    with opened(tmp_path, 3 * size + 10) as (spill, _):
        written(spill, *texts[1:3])
        assert read(spill, texts[0]) is not None
        written(spill, texts[3])
        assert [spill.has(key(text)) for text in texts] == [True, False, True, True, False]
        assert spill.n_bytes == sum(path.stat().st_size for path in files(tmp_path)) == 3 * size
        written(spill, [9] * 4000)
        assert len(spill) == 3, "what alone is too large is not kept"
    for path, age in zip(files(tmp_path), (3, 1, 2), strict=True):
        os.utime(path, (age, age))
    youngest = files(tmp_path)[0]
    with opened(tmp_path, size) as (spill, _):
        assert files(tmp_path) == [youngest]
    with opened(tmp_path, 0) as (spill, _):
        assert files(tmp_path) == [], "nothing is wanted on disk any more"
        assert not spill.active
        assert not spill.put(key(A), b"")


def test_it_is_remembered_what_was_used_last(tmp_path: Path) -> None:
    with opened(tmp_path, idle_s=0) as (spill, clock):
        spill.note_unused(key(A))
        clock.now = 1000
        assert spill.write_idle(lambda _: b"kv") is not None
        assert spill._flush(PATIENCE_S)
        (old,) = files(tmp_path)
        assert old.stat().st_mtime < time.time() - 900
        written(spill, B)
        size = old.stat().st_size
        assert read(spill, A) is not None
    with opened(tmp_path, size) as (spill, _):
        assert files(tmp_path) == [old]


def test_at_the_end_what_was_used_last_gets_the_room(tmp_path: Path) -> None:
    with opened(tmp_path) as (spill, _):
        written(spill, A)
        size = spill.n_bytes
        spill.remove(key(A))
    with opened(tmp_path, size) as (spill, clock):
        for text in (A, B):
            spill.note_unused(key(text))
            clock.now += 10
        assert spill.write_all(lambda _: bytes(40), PATIENCE_S)
        assert spill.has(key(B))


def test_what_was_used_before_all_that_there_is_room_for_is_not_written(tmp_path: Path) -> None:
    with opened(tmp_path) as (spill, _):
        written(spill, A)
        size = spill.n_bytes
    with opened(tmp_path, size) as (spill, _):
        assert spill.put(key(B), bytes(B), age_s=1000)
        assert spill._flush(PATIENCE_S)
        assert spill.has(key(A))
        assert not spill.has(key(B))
        written(spill, B)
        assert (spill.has(key(A)), spill.has(key(B))) == (False, True)


def test_a_text_that_goes_on_takes_the_place_of_its_beginning(tmp_path: Path) -> None:
    with opened(tmp_path) as (spill, _):
        written(spill, A, A + B, A)
        assert len(files(tmp_path)) == len(spill) == 1
        assert read(spill, A) == (A + B, bytes(A + B))


def test_a_process_killed_at_any_line_of_a_write_leaves_the_text_or_its_beginning(tmp_path: Path) -> None:
    there: list[bool] = []

    def look(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        if frame.f_code.co_filename != spill_module.__file__:
            return None
        there.append(bool(files(tmp_path)))
        return look

    with opened(tmp_path) as (spill, _):
        written(spill, A)
        before = sys.gettrace()
        sys.settrace(look)
        try:
            spill._write(key([*A, 7]), bytes(A), time.time_ns())
        finally:
            sys.settrace(before)
        assert len(there) > 20
        assert all(there)
        assert [spill.find([*A, 7, 8], 0)] == [spill_module.SpilledText(key([*A, 7]), 41)]
        assert len(spill) == len(files(tmp_path)) == 1


def test_a_text_that_cannot_be_written_keeps_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as (spill, _):
        written(spill, A)
        monkeypatch.setattr(spill_module, "SPARE_DISK_BYTES", 2**62)
        written(spill, [*A, 7])
        assert "less than" in spill.error
        assert read(spill, [*A, 7]) == (A, bytes(A))


def test_a_folder_belongs_to_one_engine_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path) as (first, _):
        written(first, A)
        with opened(tmp_path, 0) as (second, _):
            assert "another engine has it" in second.error
            assert not second.active
            assert second.find(A, 0) is None
        assert read(first, A) == (A, bytes(A)), "nor does one that wants none remove them"
    with opened(tmp_path) as (third, _):
        assert third.error == ""


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with opened(tmp_path / "file") as (spill, _):
        assert str(tmp_path / "file") in spill.error
        spill.note_unused(key(A))
        assert spill.write_idle(lambda _: pytest.fail("there is nowhere to write to")) is None


def test_the_end_of_the_disk_is_left_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as (spill, _):
        monkeypatch.setattr(spill_module, "SPARE_DISK_BYTES", 2**62)
        written(spill, A)
        assert (len(spill), list(tmp_path.glob("*.*"))) == (0, [])
        assert "1 GiB" in spill.error
        monkeypatch.undo()
        written(spill, A)
        assert (len(spill), spill.error) == (1, "")


def test_what_comes_faster_than_it_can_be_written_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_module, "MAX_QUEUED_BYTES", 100)
    with opened(tmp_path) as (spill, _):
        with spill._lock:  # the thread that writes cannot go on meanwhile
            assert spill.put(key(A), bytes(200)), "one text may wait, whatever its size"
            assert not spill.put(key(B), bytes(1))
        assert spill.n_dropped == 1
        assert spill.put(key(B), bytes(1), PATIENCE_S), "but there is time to wait"
        assert spill._flush(PATIENCE_S)
        assert len(spill) == 2


def test_a_text_is_written_when_nobody_has_used_it_for_long(tmp_path: Path) -> None:
    copied: list[bytes] = []

    def copy(text: bytes) -> bytes:
        copied.append(text)
        return b"kv"

    with opened(tmp_path, idle_s=60.0) as (spill, clock):
        assert spill.write_idle(copy) is None
        spill.note_unused(key(A))
        clock.now = 30
        spill.note_unused(key(B))
        assert spill.write_idle(copy) == 30
        spill.note_unused(key([*A, 9]))  # its second turn
        clock.now = 90
        assert spill.write_idle(copy) == spill_module.POLL_S
        assert copied == [key(B)]
        assert spill._flush(PATIENCE_S)
        assert spill.write_idle(copy) == spill_module.POLL_S
        assert copied == [key(B), key([*A, 9])]
        assert spill._flush(PATIENCE_S)
        spill.note_unused(key(A))
        clock.now = 200
        assert spill.write_idle(copy) is None
        assert len(copied) == 2, "it is there already"


def test_at_the_end_the_newest_is_written_first_and_only_while_there_is_time(tmp_path: Path) -> None:
    copied: list[bytes] = []
    with opened(tmp_path) as (spill, clock):

        def copy(text: bytes) -> bytes:
            copied.append(text)
            clock.now += 1
            return bytes(spill_module.MAX_QUEUED_BYTES)

        for text in (A, B, [7] * 40):
            spill.note_unused(key(text))
        with spill._lock:
            assert not spill.write_all(copy, 1.5)
    assert copied == [key([7] * 40), key(B)]


def test_the_model_file_the_build_and_what_changes_bits_are_told_apart(tmp_path: Path) -> None:
    model, adapter = tmp_path / "m.gguf", tmp_path / "a.gguf"
    model.write_bytes(b"weights")
    load = wire.Load(model_path=str(model), n_ctx=512, n_threads=1, n_gpu_layers=0)

    def made(build: str = "1", **changes: Any) -> bytes:
        fields = {name: getattr(load, name) for name in load.__struct_fields__}
        return fingerprint_of(wire.Load(**(fields | changes)), build)

    first = made()
    assert len(first) == 32
    assert (
        made(n_ctx=1024, n_cells=99, n_threads=2, scheduler="fcfs", disk=wire.Disk(folder="x", max_bytes=1, idle_s=2))
        == first
    )
    with_adapter = [
        made(adapters=(wire.AdapterFile(name="a", path=str(adapter), scale=scale),)) for scale in (1.0, 0.5)
    ]
    adapter.write_bytes(b"trained")
    with_adapter.append(made(adapters=(wire.AdapterFile(name="a", path=str(adapter)),)))
    others = [made("2"), made(exact=False), made(n_gpu_layers=3), *with_adapter]
    os.utime(model, (1, 1))
    others.append(made())
    assert len({first, *others}) == 1 + len(others)


# --- with the KV cache in front of it ---------------------------------------------------------------------------------


@contextmanager
def made(
    folder: Path,
    n_cells: int = 200,
    n_seqs: int = 4,
    spare_bytes: int = 2**20,
    skip_s: float = 0.0,
    max_bytes: int = 2**20,
    *,
    divisible: bool = True,
) -> Iterator[tuple[FakeLlama, Cells, Spill, Clock]]:
    """Cells over a new cache and what is in the folder."""
    llama = FakeLlama(n_ctx=n_cells, n_cells=n_cells, skip_s=skip_s, divisible=divisible)
    with opened(folder, max_bytes) as (spill, clock):
        ticks = iter(range(10**6)).__next__
        yield llama, Cells(cast(Any, llama), n_seqs, n_cells, ticks, spare_bytes, spill), spill, clock


def answered(llama: FakeLlama, cells: Cells, tokens: list[int], *, private: bool = False) -> int:
    """Compute what is not there of a text, and leave it; how many tokens were there."""
    taken = cells.take(tokens, private=private)
    assert taken is not None
    seq, n = taken
    cells.advance(len(tokens) - n)
    assert llama.decode([(tokens[i], i, seq, False) for i in range(n, len(tokens))]) == 0
    cells.grow(seq, tokens[n:])
    assert llama.tokens(seq) == tokens
    cells.leave(seq)
    return n


def idle(cells: Cells, spill: Spill, clock: Clock) -> None:
    """All that is not used becomes idle."""
    clock.now += 100
    while spill.write_idle(cells.copy) is not None:
        assert spill._flush(PATIENCE_S)


def test_a_conversation_goes_on_in_a_new_process(tmp_path: Path) -> None:
    with made(tmp_path) as (llama, cells, spill, clock):
        answered(llama, cells, A)
        idle(cells, spill, clock)
    with made(tmp_path) as (llama, cells, spill, clock):
        assert cells.count_cached(A + B) == 40
        assert cells.n_used == 0, "to ask changes nothing"
        assert answered(llama, cells, A + B) == 40
        assert cells.count_cached(A + B) == 80
        assert cells.n_reused == 40
        idle(cells, spill, clock)
        assert len(spill) == 1, "the second turn stands in the place of the first"
    with made(tmp_path) as (llama, cells, _, _):
        assert answered(llama, cells, [*A, *B, 7]) == 80


def test_a_conversation_with_a_recurrent_state_goes_on_in_a_new_process_also_where_it_is_edited(tmp_path: Path) -> None:
    with made(tmp_path, divisible=False) as (llama, cells, spill, clock):
        answered(llama, cells, A)
        answered(llama, cells, A + B)
        idle(cells, spill, clock)
        assert len(spill) == 1
    with made(tmp_path, divisible=False) as (llama, cells, spill, _):
        assert cells.count_cached([*A, *B, 7]) == 80
        assert answered(llama, cells, [*A, *B, 7]) == 80, "and its state has read just what its cells hold"
    with made(tmp_path, divisible=False) as (llama, cells, spill, _):
        assert cells.count_cached(A + [7] * 40) == 0, "what is in the file is not known yet"
        assert answered(llama, cells, A + [7] * 40) == 40
    with made(tmp_path, spare_bytes=0, divisible=False) as (llama, cells, spill, _):
        assert answered(llama, cells, [*A, *B, 7]) == 0, "there is no room for a state"


def test_at_the_end_all_is_written_even_of_answers_that_run(tmp_path: Path) -> None:
    with made(tmp_path) as (llama, cells, spill, _):
        answered(llama, cells, A)
        taken = cells.take(B)
        assert taken is not None
        cells.grow(taken[0], B[:36])
        llama.decode([(token, i, taken[0], False) for i, token in enumerate(B[:36])])
        cells.leave_all()
        assert cells.n_taken == 0
        assert spill.write_all(cells.copy, PATIENCE_S)
    with made(tmp_path) as (_, cells, _, _):
        assert (cells.count_cached(A), cells.count_cached(B)) == (40, 36)


def test_what_has_no_room_in_memory_goes_to_disk(tmp_path: Path) -> None:
    with made(tmp_path, skip_s=1e-6, spare_bytes=50) as (llama, cells, spill, _):
        for text in (A, B, [7] * 40):
            answered(llama, cells, text)
        cells.tidy()
        assert spill._flush(PATIENCE_S)
        assert len(spill) == 2, "the host cache has room for one"
        assert [cells.count_cached(text) for text in (A, B, [7] * 40)] == [40] * 3
        assert answered(llama, cells, [*A, 9]) == 40


def test_what_is_evicted_goes_to_disk(tmp_path: Path) -> None:
    with made(tmp_path, n_cells=100, spare_bytes=0) as (llama, cells, spill, _):
        for text in (A, B, [7] * 40, [8] * 40):
            answered(llama, cells, text)
        assert spill._flush(PATIENCE_S)
        assert all(spill.has(key(text)) for text in (A, B)), "whole, though only a part of the second was in the way"
        assert answered(llama, cells, [*A, 9]) == 40


def test_what_gives_up_its_id_goes_to_disk(tmp_path: Path) -> None:
    with made(tmp_path, n_seqs=2, spare_bytes=0) as (llama, cells, spill, _):
        for text in (A, B, [7] * 40):
            answered(llama, cells, text)
        assert spill._flush(PATIENCE_S)
        assert cells.count_cached(A) == 40
        assert llama.n_used == cells.n_used == 80


@pytest.mark.parametrize("way", ["idle", "tidy", "evict", "swap", "host cache and back"])
def test_what_is_private_is_never_written(tmp_path: Path, way: str) -> None:
    spare = 50 if way == "tidy" else 2**20
    with made(tmp_path, n_cells=100, spare_bytes=spare, skip_s=1e-6) as (llama, cells, spill, clock):
        answered(llama, cells, A, private=True)
        if way == "tidy":
            cells.tidy()
            answered(llama, cells, B, private=True)
            cells.tidy()
        elif way == "evict":
            answered(llama, cells, [9] * 90, private=True)
        elif way == "swap":
            taken = cells.take([*A, 9], private=True)
            assert taken is not None
            saved = cells.swap_out(taken[0], 1e9)
            assert saved is not None
            seq = cells.swap_in(saved, [*A, 9], private=True)
            assert seq is not None
            cells.leave(seq)
        elif way == "host cache and back":
            cells.tidy()
            assert answered(llama, cells, [*A, 9], private=True) == 40
            cells.tidy()
            cells._bring([*A, 9])
        idle(cells, spill, clock)
        cells.leave_all()
        assert spill.write_all(cells.copy, PATIENCE_S)
        assert files(tmp_path) == []
        assert answered(llama, cells, [3] * 40) == 0
        idle(cells, spill, clock)
        assert len(files(tmp_path)) == 1, "but others are"


def test_what_comes_back_from_the_host_cache_is_still_private(tmp_path: Path) -> None:
    with made(tmp_path, n_cells=100, spare_bytes=50) as (llama, cells, spill, _):
        answered(llama, cells, A, private=True)
        cells.tidy()
        answered(llama, cells, [7] * 20)  # in the sequence that was the private one's
        cells._bring([*A, 9])
        assert cells.n_used == 60
        cells.tidy()
        answered(llama, cells, B)
        cells.tidy()
        assert spill._flush(PATIENCE_S)
        assert len(spill) == 1
        assert not spill.has(key(A))


def test_a_damaged_text_is_computed_again(tmp_path: Path) -> None:
    with made(tmp_path) as (llama, cells, spill, clock):
        answered(llama, cells, A)
        idle(cells, spill, clock)
    path = files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with made(tmp_path) as (llama, cells, spill, clock):
        assert answered(llama, cells, A + B) == 0
        assert files(tmp_path) == []
        idle(cells, spill, clock)
        assert cells.count_cached(A + B) == 80


def test_what_llama_does_not_take_back_is_removed_and_computed(tmp_path: Path) -> None:
    with made(tmp_path) as (llama, cells, spill, clock):
        answered(llama, cells, A)
        idle(cells, spill, clock)
    with made(tmp_path) as (llama, cells, _, _):
        llama.restore = lambda seq, data: False  # type: ignore[method-assign]
        assert answered(llama, cells, A + B) == 0
        assert files(tmp_path) == []
        assert len(cells._free) == 3


def test_a_text_for_which_there_is_no_room_stays_where_it_is(tmp_path: Path) -> None:
    with made(tmp_path) as (llama, cells, spill, clock):
        answered(llama, cells, A + B)
        idle(cells, spill, clock)
    with made(tmp_path, n_cells=100) as (llama, cells, _, _):
        taken = cells.take([5] * 30)
        assert taken is not None
        assert answered(llama, cells, A[:35]) == 0
        assert len(files(tmp_path)) == 1


def test_a_text_stays_in_the_host_cache_when_there_is_no_room_for_it(tmp_path: Path) -> None:
    with made(tmp_path, n_cells=100) as (llama, cells, _, _):
        answered(llama, cells, A + B)
        cells.tidy()
        assert cells.take([5] * 30) is not None
        assert cells.take([*A, *B, 7]) is None
        assert cells.count_cached(A + B) == 80


def test_a_text_that_goes_on_is_not_taken_for_its_beginning(tmp_path: Path) -> None:
    with made(tmp_path) as (llama, cells, spill, clock):
        answered(llama, cells, A)
        seq, n = cells.take(A + B) or (0, 0)
        assert n == 40
        assert llama.decode([(token, i, seq, False) for i, token in enumerate(B, 40)]) == 0
        cells.grow(seq, B)
        idle(cells, spill, clock)
        assert len(spill) == 0


def test_the_host_cache_gives_away_what_it_has_no_room_for() -> None:
    given: dict[bytes, State] = {}
    cache = HostCache(2, given.__setitem__)
    cache.put([1], b"a", private=True)
    cache.put([2], b"b")
    cache.put([3], b"c")
    cache.put([4], b"d")
    assert given == {key([2]): b"b"}
    assert cache.take([3, 3]) == ([3], b"c", False)
    cache.put([4, 5], b"e", private=True)
    assert cache.take([4, 5]) == ([4, 5], b"e", True)
    assert given == {key([2]): b"b"}, "what is taken out or has become longer is not given away"
    cache.put([4, 5], b"e")
    cache.put([6], b"too much")
    assert key([4, 5]) in given, "this time it was not private"


WHOLE = 5  # bytes that a token takes in a file: four, and one of what was saved
BLOCK = spill_module.LEAST_GAIN  # texts differ by at least as much as it takes to be read
public = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3)
secret = st.lists(st.sampled_from([1, 2]), max_size=1).map(lambda blocks: [*blocks, 9])
ops: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.just("answer"), st.one_of(public, secret)),
    st.tuples(st.just("answer"), public),
    st.tuples(st.just("run"), st.one_of(public, secret)),
    st.tuples(st.sampled_from(["leave", "swap", "tidy", "idle", "end", "kill"]), st.just([])),
)


class Steps:
    """Random steps over one folder, and what must hold after each of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[tuple[int, list[int], bool]] = []

    def run(self, steps: list[tuple[Any, ...]]) -> None:
        left = list(steps)
        while left:
            self.running.clear()
            with made(self.folder, 6 * BLOCK, spare_bytes=4 * BLOCK, max_bytes=10 * BLOCK * WHOLE) as (
                self.llama, self.cells, self.spill, self.clock,
            ):  # fmt: skip
                while left:
                    op, blocks = left.pop(0)
                    if op == "kill":
                        break
                    if op == "end":
                        self.cells.leave_all()
                        self.running.clear()
                        assert self.spill.write_all(self.cells.copy, PATIENCE_S)
                        break
                    self.step(op, [block for block in blocks for _ in range(BLOCK)], 9 in blocks)
                    self.check()
                self.check()

    def step(self, op: str, tokens: list[int], private: bool) -> None:
        match op:
            case "answer" | "run" if not self.computed(tokens, private):
                pass
            case "answer" | "leave" if self.running:
                self.cells.leave(self.running.pop()[0])
            case "swap" if self.running:
                seq, tokens, private = self.running.pop()
                saved = self.cells.swap_out(seq, 1e9)
                assert saved is not None
                back = self.cells.swap_in(saved, tokens, private=private)
                if back is None:
                    self.cells.forget(saved)
                else:
                    self.running.append((back, tokens, private))
            case "tidy":
                self.cells.tidy()
            case "idle":
                idle(self.cells, self.spill, self.clock)

    def computed(self, tokens: list[int], private: bool) -> bool:
        taken = self.cells.take(tokens, private=private)
        if taken is None:
            return False
        seq, n = taken
        self.cells.advance(len(tokens) - n)
        assert self.llama.decode([(tokens[i], i, seq, False) for i in range(n, len(tokens))]) == 0
        self.cells.grow(seq, tokens[n:])
        self.running.append((seq, tokens, private))
        return True

    def check(self) -> None:
        index = self.cells._index
        for seq in range(self.cells.n_seqs):
            assert self.llama.tokens(seq) == index.tokens(seq).tolist()
            assert (seq in self.cells._free) == (not index.length(seq))
        assert self.llama.n_used == self.cells.n_used
        assert self.llama.n_placed == self.cells.n_used + self.cells.n_garbage
        assert self.cells.n_taken == len(self.running)
        assert self.cells.n_free >= 0
        assert self.spill._flush(PATIENCE_S)
        data = [path.read_bytes() for path in files(self.folder)]
        assert sum(map(len, data)) <= 10 * BLOCK * WHOLE
        assert not any(key([9]) in text for text in data), "a private text is on disk"


@settings(max_examples=60, deadline=None)
@given(st.lists(ops, max_size=25))
def test_whatever_happens_no_cell_is_lost_and_nothing_private_is_written(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]]
) -> None:
    Steps(tmp_path_factory.mktemp("kv")).run(steps)


def test_the_lock_is_given_back_with_the_process(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    descriptor = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
