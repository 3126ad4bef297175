"""Whether two machines compute the same bits, by what each says of its build."""

from __future__ import annotations

import zlib

import msgspec
import pytest

import disco_daemon.link.relay.handshake  # its messages are there once it is imported
from disco_daemon.engine.hosts.messages import HostMessage
from disco_daemon.link.protocol import FAST, PROTOCOL, Build, PeerMessage
from disco_daemon.link.trust.refusals import LinkEndedError, check_builds


def test_two_machines_give_the_same_bits_only_if_both_round_exactly_on_the_same_build() -> None:
    here = Build(disco="1", llama="0.3.36 AVX2", model="", n_layers=2, n_embd=2, n_vocab=2)
    assert here.same_bits("0.3.36 AVX2")
    assert not here.same_bits("0.3.36 AVX512")
    assert not here.same_bits("0.3.36 AVX2" + FAST)
    fast = msgspec.structs.replace(here, llama=here.llama + FAST)
    assert not fast.same_bits(fast.llama), "what a row gives depends on the rows beside it"


def test_whoever_changes_what_machines_say_to_each_other_raises_the_version_of_the_protocol() -> None:
    kinds = [kind for base in (PeerMessage, HostMessage) for kind in base.__subclasses__()]
    kinds = [kind for kind in kinds if kind.__module__.startswith(disco_daemon.__name__)]  # tests may have some, too
    said = sorted(f"{kind.__struct_config__.tag}({', '.join(kind.__struct_fields__)})" for kind in kinds)
    assert (PROTOCOL, zlib.crc32("\n".join(said).encode())) == (5, 4014814071), (
        "a machine of before is refused by that number"
    )


def test_token_ids_are_taken_only_where_both_models_mean_the_same_by_them() -> None:
    large = Build(disco="1", llama="a", model="m", n_layers=30, n_embd=8, n_vocab=9, vocabulary="v")
    small = msgspec.structs.replace(large, llama="b")
    check_builds(large, small, 0, 0)
    for other in ("", "w"):
        with pytest.raises(LinkEndedError, match="another vocabulary") as refused:
            check_builds(large, msgspec.structs.replace(small, vocabulary=other), 0, 0)
        assert refused.value.reason == "vocabulary"
        check_builds(large, msgspec.structs.replace(small, vocabulary=other), 24, 24)  # rows ask for none
    for cuts in ((0, 24), (24, 0)):
        with pytest.raises(LinkEndedError, match="nowhere, for token ids") as refused:
            check_builds(large, small, *cuts)
        assert refused.value.reason == "cut"
