"""Of a file no more is read than its header takes."""

from __future__ import annotations

import io

import pytest

from disco_daemon.models import gguf_file
from disco_daemon.models.gguf import read_header
from disco_daemon.models.gguf_file import FIRST_BYTES, read_file_header
from tests.fixtures.gguf import array, header, pair, tensor, text

WORDS = pair("tokenizer.ggml.tokens", 9, array(8, 60_000, text("<unk>") * 60_000))


@pytest.mark.parametrize("is_long", [False, True])
def test_the_whole_header_is_found_and_little_is_read_where_it_is_short(is_long: bool) -> None:
    head = header(*([WORDS] if is_long else []), tensors=[tensor("w", (8,))])
    assert (len(head) > FIRST_BYTES) == is_long
    file = io.BytesIO(head + bytes(4 * FIRST_BYTES))
    read, found = read_file_header(file)
    assert found.whole
    assert found == read_header(head)
    assert read.startswith(head)
    assert (file.tell() == FIRST_BYTES) == (not is_long)


def test_a_header_that_is_longer_than_most_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MORE_BYTES", 2 * FIRST_BYTES)
    head = header(WORDS, tensors=[tensor("w", (8,))])
    read, found = read_file_header(io.BytesIO(head))
    assert (read, found, found.whole) == (head, read_header(head), True)


def test_what_is_no_header_is_refused_and_one_that_ends_early_is_not_whole() -> None:
    with pytest.raises(ValueError, match="GGUF"):
        read_file_header(io.BytesIO(bytes(FIRST_BYTES)))
    head = header(WORDS, tensors=[tensor("w", (8,))])
    for n in (FIRST_BYTES // 2, FIRST_BYTES, len(head) - 1):
        read, found = read_file_header(io.BytesIO(head[:n]))
        assert (read, found.whole) == (head[:n], False)
