from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.models import gguf
from disco_daemon.models.default import default_model_path
from disco_daemon.models.gguf import Header, Tensor, read_header, shard, shard_names
from tests.fixtures.gguf import F32, Q8_0, array, header, model_file, number, pair, tensor, text

VOCABULARY = pair("tokenizer.ggml.tokens", 9, array(8, 5000, text("<unk>") * 5000))
TEMPLATE = pair("tokenizer.chat_template", 8, text("{{ messages }}"))


def test_every_kind_of_value() -> None:
    head = header(
        pair("a", 5, struct.pack("<i", -7)),
        pair("b", 12, struct.pack("<d", 0.5)),
        pair("c", 7, b"\1"),
        pair("d", 9, array(4, 2, struct.pack("<II", 8, 4))),
        pair("e", 9, array(0, 5000, bytes(5000))),
        version=2,
    )
    assert read_header(head).keys == {
        "a": -7, "b": 0.5, "c": True, "d.length": 2, "d": [8, 4], "e.length": 5000
    }  # fmt: skip


def test_what_stands_behind_the_vocabulary_is_read_too() -> None:
    found = read_header(header(VOCABULARY, TEMPLATE, number("general.alignment", 64), tensors=[tensor("w", (8,))]))
    assert found.whole
    assert found.keys["tokenizer.ggml.tokens.length"] == 5000
    assert "tokenizer.ggml.tokens" not in found.keys
    assert found.text("tokenizer.chat_template") == "{{ messages }}"
    assert found.tensors == (Tensor("w", (8,), F32, 0),)
    assert found.data_at % 64 == 0


def test_the_tensors_tell_size_parameters_and_packing(tmp_path: Path) -> None:
    path = model_file(tmp_path / "m.gguf")
    found = read_header(path.read_bytes())
    assert (found.n_tensors, found.n_numbers) == (2, 64 * 100 + 64)
    assert found.least_bytes == path.stat().st_size
    assert [t.n_bytes for t in found.tensors] == [200 * 34, 256]
    assert found.packing == "Q8_0"
    assert (found.architecture, found.number("llama.context_length"), found.number("general.name")) == (
        "llama", 2048, None
    )  # fmt: skip


def test_the_packing_is_the_files_recipe_or_that_of_most_bytes() -> None:
    tensors = [tensor("a", (64, 64), Q8_0), tensor("b", (64,), F32), tensor("c", (9,), 4711)]
    assert read_header(header(number("general.file_type", 15), tensors=tensors)).packing == "Q4_K_M"
    assert read_header(header(number("general.file_type", 1024 + 15), tensors=tensors)).packing == "Q4_K_M"
    assert read_header(header(number("general.file_type", 999), tensors=tensors)).packing == "Q8_0"
    assert read_header(header()).packing == ""
    assert Tensor("c", (9,), 4711, 0).n_bytes is None


@pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")
def test_the_embedded_model_is_whole_to_the_byte() -> None:
    path = default_model_path()
    with path.open("rb") as f:
        found = read_header(f.read(1 << 23))
    assert found.whole
    assert found.least_bytes == path.stat().st_size
    assert found.packing == "Q4_1"
    assert found.n_numbers == pytest.approx(134.5e6, rel=1e-3)
    assert "<|im_start|>" in found.text("tokenizer.chat_template")


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"GGU",
        b"GGUF\3\0\0\0",
        b"<html>" * 10,
        header(version=1),
        header(keys=2**63),
        b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0),
        header(pair("a", 99, b"")),
        header(pair("a", 9, array(9, 3, bytes(64)))),
        header(pair("a", 9, array(9, 5000, bytes(64)))),
        header(struct.pack("<Q", 2**62) + b"a"),
        header(number("general.alignment", 0)),
        header(pair("general.alignment", 8, text("wide"))),
        header(tensors=[tensor("a", (1,) * 5)]),
        header(tensors=[tensor("a", (2**63, 2**63))]),
        # llama.cpp refuses these too: what reads a file in another way than it does may be told another story.
        header(number("general.architecture", 1), pair("general.architecture", 8, text("llama"))),
        header(TEMPLATE, number("x.block_count", 2), TEMPLATE),
        header(VOCABULARY, VOCABULARY),
        header(pair("a", 9, array(4, 1, bytes(4))), VOCABULARY, pair("a", 9, array(8, 5000, text("x") * 5000))),
        header(number("", 1), number("", 2)),
        header(number("x" * 5000, 1), number("x" * 5000, 2)),
        header(tensors=[tensor("w", (8,)), tensor("w", (8,), Q8_0, 64)]),
        header(tensors=[tensor("", (8,))] * 2),
        header(pair("general.alignment", 7, b"\1")),
        header(number("general.alignment", 24)),
        header(number("general.alignment", (1 << 20) + 1)),
        header(number("general.alignment", 1 << 21)),
        header(pair("general.alignment", 5, struct.pack("<i", -32))),
        header(pair("general.alignment", 6, struct.pack("<f", 32.0))),
        header(pair("general.alignment", 12, struct.pack("<d", float("nan")))),
        header(pair("general.alignment", 11, struct.pack("<q", -(2**63)))),
        header(pair("general.alignment", 9, array(4, 1, struct.pack("<I", 32)))),
        header(pair("a", 13, bytes(8))),
        header(pair("a", 2**32 - 1, bytes(8))),
        header(pair("a", 9, array(13, 0, b"") + array(13, 1, b""))),
        header(pair("a", 9, array(9, 1, array(9, 1, array(4, 1, bytes(4)))))),
        header(pair("a", 9, array(2**32 - 1, 2**40, b""))),
        header(pair("a", 8, struct.pack("<Q", 2**64 - 1))),
        header(struct.pack("<Q", (1 << 24) + 1) + bytes(64)),
        header(keys=10_001),
        b"GGUF" + struct.pack("<IQQ", 3, (1 << 17) + 1, 0),
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        b"FUGG" + struct.pack("<IQQ", 3, 0, 0),
        header(tensors=[text("a") + struct.pack("<I", 2**32 - 1) + bytes(64)]),
        header(tensors=[tensor("a", (1 << 12,) * 4)]),
    ],
)
def test_what_is_no_gguf_header_is_refused(head: bytes) -> None:
    with pytest.raises(ValueError, match="GGUF"):
        read_header(head)


@pytest.mark.parametrize(
    "lying",
    [
        pair("a", 9, array(8, 2**63, text("x") * 9)),
        pair("a", 9, array(8, 5000, struct.pack("<Q", 2**63))),
        pair("a", 9, array(8, 5000, text("x") * 4999 + struct.pack("<Q", 1 << 20))),
        pair("a", 9, array(10, 2**60, bytes(80))),
        pair("a", 8, struct.pack("<Q", 1 << 20) + b"short"),
        pair("a", 9, array(8, 4096, struct.pack("<Q", 1 << 24) * 4)),
        pair("a", 9, array(12, 2**64 - 1, bytes(80))),
        pair("a", 9, array(0, 5000, bytes(10))),
        pair("a", 9, array(8, 5000, text("x") * 4999 + struct.pack("<Q", 2**64 - 1))),
        struct.pack("<Q", 1 << 24) + b"a",
    ],
)
def test_a_length_beyond_the_end_ends_the_header_there(lying: bytes) -> None:
    found = read_header(header(number("before", 1), lying, number("behind", 2)))
    assert not found.whole
    assert found.keys["before"] == 1
    assert "behind" not in found.keys


@given(st.binary(max_size=64), st.integers(0, 400))
def test_damage_is_refused_or_cut_short_and_nothing_else(noise: bytes, at: int) -> None:
    whole = header(number("x.block_count", 24), TEMPLATE, tensors=[tensor("w", (8, 8), Q8_0)] * 3)
    looked_at(whole[:at] + noise + whole[at + len(noise) :])


@given(st.binary(max_size=400))
def test_any_bytes_behind_the_magic_are_refused_or_cut_short(noise: bytes) -> None:
    looked_at(b"GGUF" + struct.pack("<I", 3) + noise)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40))
def test_any_numbers_are_refused_or_cut_short(numbers: list[int]) -> None:
    looked_at(b"GGUF" + struct.pack(f"<I{len(numbers)}Q", 3, *numbers))


def looked_at(head: bytes) -> None:
    """All that is asked of a header raises ValueError or nothing, and stays within what was there."""
    try:
        found = read_header(head)
    except ValueError:
        return
    assert isinstance(found, Header)
    assert len(found.keys) + 33 * len(found.tensors) <= 2 * len(head)  # of a tensor, at least 24 bytes
    assert found.least_bytes >= (found.data_at if found.tensors else 0) >= 0
    assert isinstance(found.packing, str)
    assert isinstance(found.architecture, str)


def test_parts_of_a_model_are_known_by_their_names() -> None:
    assert shard("Big-Q4_K_M-00002-of-00003.gguf") == (2, 3)
    assert shard("Big-Q4_K_M.gguf") == (1, 1)
    assert shard_names("Big-00002-of-00003.gguf") == [f"Big-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert shard_names("Big.gguf") == ["Big.gguf"]
    assert gguf.shard("Big-00002-of-00003.gguf.part") == (1, 1)
