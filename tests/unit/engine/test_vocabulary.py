"""Whether two models mean the same by their token ids, by what their files say."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.config.schema import Config, DeviceSettings, SplitSettings
from disco_daemon.errors import ConfigError
from disco_daemon.exits.calibrate import Calibration
from disco_daemon.machines.split.drafter import choose_draft, draft_path, own_certainty, require_drafter
from disco_daemon.models.gguf import read_header
from disco_daemon.models.vocabulary import vocabulary_file, vocabulary_mark
from tests.fixtures.gguf import array, encoded, header, pair, tensor

words = st.lists(st.text(max_size=4), min_size=1, max_size=12)


def file_of(tokens: list[str], **more: object) -> bytes:
    keys = {"general.architecture": "llama", "tokenizer.ggml.tokens": tokens, **more}
    return header(*(encoded(key, value) for key, value in keys.items()))


def mark(data: bytes) -> str:
    return vocabulary_mark(data, read_header(data))


@given(words, words)
def test_two_files_have_one_mark_if_and_only_if_their_tokens_are_the_same(one: list[str], other: list[str]) -> None:
    assert (mark(file_of(one)) == mark(file_of(other))) == (one == other)


@given(words, st.sampled_from(["eos_token_id", "bos_token_id", "add_space_prefix"]), st.integers(0, 9))
def test_what_ends_a_text_and_what_becomes_of_one_counts_and_other_keys_do_not(
    tokens: list[str], name: str, value: int
) -> None:
    plain = file_of(tokens)
    assert mark(file_of(tokens, **{f"tokenizer.ggml.{name}": value})) != mark(plain)
    assert mark(file_of(tokens, **{"tokenizer.chat_template": "x", "llama.block_count": value})) == mark(plain)


def kinds_of(kinds: list[int]) -> bytes:
    return pair("tokenizer.ggml.token_type", 9, array(5, len(kinds), struct.pack(f"<{len(kinds)}i", *kinds)))


@given(words, st.data())
def test_unused_tokens_at_the_end_do_not_count_and_all_others_do(tokens: list[str], data: st.DataObject) -> None:
    kinds = [*data.draw(st.lists(st.sampled_from([1, 5, 6]), min_size=len(tokens) - 1, max_size=len(tokens) - 1)), 1]
    n = data.draw(st.integers(1, 5))

    def padded(kind: int) -> str:
        found = encoded("tokenizer.ggml.tokens", [*tokens, *(f"[PAD{i}]" for i in range(n))])
        return mark(header(encoded("general.architecture", "llama"), found, kinds_of([*kinds, *([kind] * n)])))

    plain = mark(
        header(encoded("general.architecture", "llama"), encoded("tokenizer.ggml.tokens", tokens), kinds_of(kinds))
    )
    assert padded(5) == plain
    assert padded(1) != plain


@given(words)
def test_the_file_of_a_vocabulary_has_its_mark_and_all_keys(tokens: list[str]) -> None:
    data = file_of(tokens, **{"tokenizer.chat_template": "{{ messages }}"})
    found = vocabulary_file(data, read_header(data))
    assert mark(found) == mark(data)
    assert read_header(found).keys == read_header(data).keys
    assert read_header(found).whole


def test_a_file_without_a_vocabulary_has_no_mark_and_drafts_for_nobody(tmp_path: Path) -> None:
    data = header(encoded("general.architecture", "llama"))
    assert mark(data) == ""
    path = tmp_path / "mute.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="vocabularies differ"):
        require_drafter(path, "", 9, "large")


def test_a_small_model_with_more_tokens_than_the_large_one_does_not_draft_for_it(tmp_path: Path) -> None:
    data, path = file_of(["a", "b", "c"], **{"llama.embedding_length": 8}), tmp_path / "small.gguf"
    path.write_bytes(data)
    for n_vocab in (3, 4):
        require_drafter(path, mark(data), n_vocab, "large")
    with pytest.raises(ConfigError, match="vocabularies differ"):
        require_drafter(path, mark(data), 2, "large")


def test_a_recurrent_model_does_not_draft(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(header(encoded("general.architecture", "llama"), tensors=[tensor("blk.0.ssm_in.weight", (4,))]))
    with pytest.raises(ConfigError, match="recurrent"):
        require_drafter(path, "any", 9, "large")


def test_the_small_model_is_the_one_that_is_named_or_the_devices(tmp_path: Path) -> None:
    small, own = tmp_path / "small.gguf", tmp_path / "own.gguf"
    for path in (small, own):
        path.write_bytes(file_of(["a"]))
    config = Config(device=DeviceSettings(model=str(own)))
    assert choose_draft(config, "") == draft_path(config) == own
    assert choose_draft(config, str(small)) == small
    named = Config(device=DeviceSettings(model=str(own)), split=SplitSettings(draft_model=str(small)))
    assert draft_path(named) == small
    with pytest.raises(ConfigError, match="no such file"):
        choose_draft(config, str(tmp_path / "none.gguf"))


@given(st.floats(-30, 30), st.floats(0, 20), st.floats(0, 9))
def test_a_small_model_is_first_as_sure_as_the_probability_that_it_gives(odds: float, gap: float, nats: float) -> None:
    said = own_certainty()
    sure = Calibration(*map(np.array, (said.coefficients, said.scores, said.shares)))
    p = 1 / (1 + np.exp(-odds))
    assert sure.confidence(np.array([[odds, gap, nats]]))[0] == pytest.approx(p, abs=0.01)
    assert said.coverage == 0.0, "by what nobody has measured no token may leave"
