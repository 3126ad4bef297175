"""Ranges of layers cut out of a model's file: together they hold each weight, and each is a whole GGUF file."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.models.default import default_model_path
from disco_daemon.models.gguf import Header, read_header
from disco_daemon.models.segments import FileSpan, NotCuttableError, Segment, Zeros, cut, n_layers, state_of
from disco_daemon.types import LayerRange
from tests.fixtures.gguf import Q8_0, array, encoded, header, number, pair, tensor

EMBD, WORDS = 32, 40
SIZES = {"attn_norm.weight": ((EMBD,), 0), "ffn_down.weight": ((EMBD, EMBD), Q8_0)}


def numbers(key: str, values: Sequence[int]) -> bytes:
    return pair(key, 9, array(4, len(values), struct.pack(f"<{len(values)}I", *values)))


def model(
    n: int, *, architecture: str = "llama", tied: bool = True, keys: Sequence[bytes] = (), more: Sequence[str] = ()
) -> bytes:
    """A model of `n` layers whose weights are all different."""
    tensors = [("token_embd.weight", (EMBD, WORDS), Q8_0), ("output_norm.weight", (EMBD,), 0)]
    tensors += [] if tied else [("output.weight", (EMBD, WORDS), Q8_0)]
    tensors += [(f"blk.{i}.{name}", *size) for i in range(n) for name, size in SIZES.items()]
    tensors += [(name, (EMBD,), 0) for name in more]
    infos, weights = [], b""
    for index, (name, shape, packing) in enumerate(tensors):
        infos.append(tensor(name, shape, packing, len(weights)))
        size = read_header(header(tensors=[tensor(name, shape, packing)])).tensors[0].n_bytes
        assert size is not None
        data = bytes((index * 7 + i) % 255 + 1 for i in range(size))
        weights += data + bytes(-size % 32)
    own = [encoded("general.architecture", architecture), number(f"{architecture}.block_count", n), *keys]
    words = [encoded("tokenizer.ggml.model", "gpt2"), encoded("tokenizer.ggml.tokens", ["a"] * WORDS)]
    head = header(*own, *words, tensors=infos)
    return head + bytes(-len(head) % 32) + weights


def file_of(whole: bytes, segment: Segment) -> bytes:
    """The file of a segment."""
    pieces = (
        whole[p.offset : p.offset + p.n_bytes] if isinstance(p, FileSpan) else bytes(p.n_bytes) for p in segment.pieces
    )
    return segment.header + b"".join(pieces)


def parts(whole: bytes, cuts: Sequence[int]) -> list[tuple[LayerRange, bytes, Header]]:
    head = read_header(whole)
    n = n_layers(head)
    ranges = [LayerRange(first, last, n) for first, last in pairwise([0, *cuts, n])]
    files = [file_of(whole, cut(whole, head, layers)) for layers in ranges]
    return [(layers, file, read_header(file)) for layers, file in zip(ranges, files, strict=True)]


def weights(file: bytes, head: Header) -> dict[str, bytes]:
    """The weights of each tensor of a file."""
    at = {t.name: head.data_at + t.offset for t in head.tensors}
    return {t.name: file[at[t.name] : at[t.name] + (t.n_bytes or 0)] for t in head.tensors}


@given(st.integers(2, 9), st.data())
def test_the_ranges_of_a_model_hold_each_layer_once_and_are_whole_files(n: int, data: st.DataObject) -> None:
    whole = model(n)
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=n - 1)))
    of_whole, seen = weights(whole, read_header(whole)), []
    for layers, file, head in parts(whole, cuts):
        assert head.whole
        assert head.least_bytes <= len(file)
        assert head.number("llama.block_count") == layers.n_layers + (not layers.is_last)
        found = weights(file, head)
        for layer in range(layers.first, layers.last):
            for name in SIZES:
                assert found[f"blk.{layer - layers.first}.{name}"] == of_whole[f"blk.{layer}.{name}"]
                seen.append(f"blk.{layer}.{name}")
        if not layers.is_last:
            assert not any(any(found[f"blk.{layers.n_layers}.{name}"]) for name in SIZES)
        assert len([name for name in found if name.startswith("blk.")]) == len(SIZES) * (
            layers.n_layers + (not layers.is_last)
        )
    assert sorted(seen) == sorted(name for name in of_whole if name.startswith("blk."))


def test_a_tail_is_a_hole_that_takes_no_disk() -> None:
    whole = model(4)
    segment = cut(whole, read_header(whole), LayerRange(0, 2, 4))
    [hole] = [piece for piece in segment.pieces if isinstance(piece, Zeros) and piece.n_bytes > 32]
    assert hole.n_bytes >= 4 * EMBD + EMBD * EMBD
    assert segment.n_bytes - segment.disk_bytes >= hole.n_bytes


@pytest.mark.parametrize("tied", [True, False])
def test_words_are_where_they_are_needed_only(tied: bool) -> None:
    whole = model(6, tied=tied)
    (_, first_file, first), (_, middle_file, middle), (_, last_file, last) = parts(whole, [2, 4])
    of_whole = weights(whole, read_header(whole))
    assert weights(first_file, first)["token_embd.weight"] == of_whole["token_embd.weight"]
    assert "output.weight" not in weights(first_file, first)
    assert not any(weights(middle_file, middle)["token_embd.weight"])
    assert middle.text("tokenizer.ggml.model") == "none"
    assert middle.number("llama.vocab_size") == 1
    assert not any(key.startswith("tokenizer.ggml.tokens") for key in middle.keys)
    assert first.keys["tokenizer.ggml.tokens.length"] == last.keys["tokenizer.ggml.tokens.length"] == WORDS
    found = weights(last_file, last)
    if tied:
        assert found["token_embd.weight"] == of_whole["token_embd.weight"]
    else:
        assert found["output.weight"] == of_whole["output.weight"]
        assert not any(found["token_embd.weight"])  # rows come in, but llama.cpp wants one for each word


def test_a_value_for_each_layer_is_cut_and_the_tail_has_its_neighbours() -> None:
    whole = model(4, keys=[numbers("llama.attention.head_count_kv", [1, 2, 3, 4]), number("llama.context_length", 99)])
    (_, _, first), (_, _, last) = parts(whole, [3])
    assert first.keys["llama.attention.head_count_kv"] == [1, 2, 3, 3]
    assert last.keys["llama.attention.head_count_kv"] == [4]
    assert first.number("llama.context_length") == last.number("llama.context_length") == 99


def test_as_many_numbers_that_are_of_no_layer_stay() -> None:
    whole = model(4, keys=[numbers("llama.rope.dimension_sections", [8, 4, 4, 0])])
    assert all(head.keys["llama.rope.dimension_sections"] == [8, 4, 4, 0] for _, _, head in parts(whole, [2]))


def test_leading_dense_layers_are_counted_from_the_ranges_first_one() -> None:
    whole = model(6, keys=[number("llama.leading_dense_block_count", 3)])
    assert [head.number("llama.leading_dense_block_count") for _, _, head in parts(whole, [2, 4])] == [3, 1, 0]


@given(st.integers(1, 17))
def test_a_window_that_llama_cpp_counts_by_layers_is_written_out(at: int) -> None:
    whole = model(18, architecture="gemma3", keys=[number("gemma3.attention.sliding_window", 512)])
    (_, _, first), (_, _, last) = parts(whole, [at])
    key = "gemma3.attention.sliding_window_pattern"
    one, other = first.keys[key], last.keys[key]
    assert isinstance(one, list)
    assert isinstance(other, list)
    assert [*one[:-1], *other] == [layer % 6 < 5 for layer in range(18)]


@pytest.mark.parametrize(
    ("whole", "reason"),
    [
        (model(4)[:200], "header is longer"),
        (model(4, keys=[number("split.count", 2)]), "several files"),
        (model(4, keys=[number("llama.nextn_predict_layers", 1)]), "predict further tokens"),
        (model(4, more=["per_layer_model_proj.weight"]), "an embedding of its own"),
        (model(4, more=["enc.blk.0.attn_q.weight"]), "encoder"),
        (model(4, more=["blk.0.ssm_in.weight"]), "recurrent"),
    ],
)
def test_a_model_that_would_compute_something_else_in_ranges_is_refused_with_the_reason(
    whole: bytes, reason: str
) -> None:
    with pytest.raises(NotCuttableError, match=reason):
        cut(whole, read_header(whole), LayerRange(0, 2, 4))


@pytest.mark.parametrize(
    ("whole", "state"),
    [
        (model(2, more=["blk.0.attn_k.weight"]), "kv"),
        (model(2, keys=[number("llama.attention.sliding_window", 512)]), "swa"),
        (model(2, more=["blk.0.ssm_in.weight"]), "recurrent"),
        (model(2, more=["blk.0.shortconv.conv.weight", "blk.1.attn_k.weight"]), "hybrid"),
    ],
)
def test_what_a_model_keeps_of_a_text_is_told_by_its_tensors(whole: bytes, state: str) -> None:
    assert state_of(read_header(whole)) == state


@pytest.mark.parametrize(
    "whole", [model(4, keys=[number("llama.nextn_predict_layers", 1)]), model(4, more=["per_layer_model_proj.weight"])]
)
def test_what_only_its_pieces_would_lack_a_whole_model_has(whole: bytes) -> None:
    found = cut(whole, read_header(whole), LayerRange(0, 4, 4))
    assert len(read_header(found.header).tensors) == len(read_header(whole).tensors)


def test_a_model_that_does_not_tell_its_layers_is_refused() -> None:
    with pytest.raises(NotCuttableError, match="how many layers"):
        n_layers(read_header(header(encoded("general.architecture", "llama"))))


def test_a_tensor_of_an_unknown_packing_is_refused_by_its_name() -> None:
    head = header(
        encoded("general.architecture", "llama"),
        number("llama.block_count", 2),
        tensors=[tensor("blk.0.w", (4,), 4711)],
    )
    with pytest.raises(NotCuttableError, match=r"blk\.0\.w"):
        cut(head, read_header(head), LayerRange(0, 1, 2))


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 1), (-1, 2), (0, 5), (4, 4)])
def test_no_layers_are_no_range(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="no range"):
        LayerRange(first, last, 4)


@pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched")
def test_the_default_model_falls_into_ranges_of_all_its_bytes() -> None:
    whole = default_model_path().read_bytes()
    found = parts(whole, [10, 20])
    sizes = [sum(len(data) for name, data in weights(file, head).items() if any(data)) for _, file, head in found]
    head = read_header(whole)
    shared = sum(t.n_bytes or 0 for t in head.tensors if not t.name.startswith("blk."))
    layers = sum(t.n_bytes or 0 for t in head.tensors if t.name.startswith("blk."))
    norm = next(t.n_bytes or 0 for t in head.tensors if t.name == "output_norm.weight")
    assert sum(sizes) == layers + 2 * (shared - norm) + 3 * norm
