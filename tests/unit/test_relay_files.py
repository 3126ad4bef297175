"""The files that a relay keeps open for whoever fetches layers: no more than it may."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from disco_daemon.peer.control import OfferFile
from disco_daemon.peer.offers import MAX_FILES, Offers


def test_the_latest_files_alone_stay_open_however_often_layers_move(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"x")
    offers = Offers(lambda *_: None)
    descriptors = [os.open(tmp_path / "m.gguf", os.O_RDONLY) for _ in range(MAX_FILES + 2)]
    for first, descriptor in enumerate(descriptors, start=1):
        offers.offer(OfferFile(first=first, cut=first + 1, member="attic", n_bytes=1, sha256=""), descriptor)
    for descriptor in descriptors[:2]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    for descriptor in descriptors[2:]:
        assert os.pread(descriptor, 1, 0) == b"x"
    offers.drop_files()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[-1])
