"""What an engine process is: a whole model, a part of one over two machines, or a fleet's home.

What only a home needs is imported for it alone: others start as quickly as without.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec

from ...link.rows.content import ContentManager, credits_for
from .. import wire
from ..door import MAX_HOSTS, EngineDoor
from ..llama.model import AbortFlag, Llama
from ..llama.refusals import ModelError
from ..llama.text_model import TextModel, load_either
from .admission import Admission
from .batch import Batcher
from .drafting import EdgeDrafting, ExitDrafter
from .edge import SplitEdge
from .partner import SendFrame, SplitPartner
from .partner_absence import PartnerAbsence


def load_llama(load: wire.Load, abort: AbortFlag, hosts: EngineDoor | None, *, warm: bool) -> Llama | TextModel:
    """Load the model; with `hosts` its inner layers are loaded by processes that are asked for. Raises ModelError.

    Without hosts it is measured only if `warm` says so, unless it makes vectors of texts.
    """
    if hosts is None:
        return load_either(load, abort, warm=warm)
    from ..hosts.home import HomeLlama
    from .home import ends_of

    parts = load.ranges
    if len(parts) < 3:
        raise ModelError(f"the model is in {len(parts)} ranges, where home and one host have three")
    openers = [partial(hosts.open, number) for number in range(MAX_HOSTS + 1)]
    began = time.perf_counter()
    home = HomeLlama(msgspec.structs.replace(load, ranges=()), ends_of(parts), abort, openers)
    home.load_s = time.perf_counter() - began  # of all ranges, the hosts' too
    return home


def make_batcher(
    load: wire.Load,
    llama: Llama,
    post: Callable[[wire.Message], None],
    admission: Admission,
    send_frame: SendFrame | None,
) -> Batcher:
    """Make the batcher; with `send_frame` the model, or a range of it, works with another machine.

    Raises ValueError for a range without a way to the others.
    """
    if send_frame is None:
        if load.ranges:
            from .home import FleetHome

            return Batcher(llama, post, admission, remote=FleetHome())
        if llama.layers is None:
            return Batcher(llama, post, admission)
        raise ValueError(f"the layers {llama.layers} are of no use without a way to the others")
    if llama.layers is None or not llama.layers.is_last:  # a small model drafts, or the lower layers with their exit
        drafting = EdgeDrafting(llama, None if load.exit is None else ExitDrafter(load.exit))
        absence = PartnerAbsence(load.patience_s)
        edge = SplitEdge(drafting=drafting, send_frame=send_frame, absence=absence, codec=load.codec)
        return Batcher(llama, post, admission, remote=edge)
    n_vocab, credits = llama.vocabulary.n_tokens, credits_for(load.max_answers)
    n_embd = 0 if llama.layers.is_first else llama.n_embd
    contents = ContentManager(n_embd, n_vocab, llama.n_ctx, load.max_answers, credits)
    partner = SplitPartner(contents=contents, send_frame=send_frame)
    return Batcher(llama, lambda _: None, admission, remote=partner)
