"""Whether two machines compute the same bits, by what each says of its build."""

from __future__ import annotations

import msgspec
import pytest

from disco_daemon.link.protocol import FAST, Build
from disco_daemon.link.trust.refusals import LinkEndedError, check_builds


def test_two_machines_give_the_same_bits_only_if_both_round_exactly_on_the_same_build() -> None:
    here = Build(disco="1", llama="0.3.36 AVX2", model="", n_layers=2, n_embd=2, n_vocab=2)
    assert here.same_bits("0.3.36 AVX2")
    assert not here.same_bits("0.3.36 AVX512")
    assert not here.same_bits("0.3.36 AVX2" + FAST)
    fast = msgspec.structs.replace(here, llama=here.llama + FAST)
    assert not fast.same_bits(fast.llama), "what a row gives depends on the rows beside it"


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
