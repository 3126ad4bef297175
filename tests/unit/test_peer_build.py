"""Whether two machines compute the same bits, by what each says of its build."""

from __future__ import annotations

import msgspec

from disco_daemon.peer.messages import FAST, Build


def test_two_machines_give_the_same_bits_only_if_both_round_exactly_on_the_same_build() -> None:
    here = Build(disco="1", llama="0.3.36 AVX2", model="", n_layers=2, n_embd=2, n_vocab=2)
    assert here.same_bits("0.3.36 AVX2")
    assert not here.same_bits("0.3.36 AVX512")
    assert not here.same_bits("0.3.36 AVX2" + FAST)
    fast = msgspec.structs.replace(here, llama=here.llama + FAST)
    assert not fast.same_bits(fast.llama), "what a row gives depends on the rows beside it"
