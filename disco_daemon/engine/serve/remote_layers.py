"""What a batcher asks about layers that are elsewhere, and the answers for a model that is whole here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .. import wire
from .iteration import Batch, DecodedRows
from .sequence import Sequence

if TYPE_CHECKING:
    from .batch import Batcher


class RemoteUsage(NamedTuple):
    """How many tokens were guessed, how many of them were right, and what a partner or hosts did."""

    n_drafted: int
    n_accepted: int
    split: wire.SplitUsage | None = None
    fleet: wire.FleetUsage | None = None


@dataclass(slots=True)
class RemoteLayers:
    """Where the layers are that are not here: for this class, nowhere. `batcher` is the one that asks.

    An iteration asks `begin`, `candidates`, `drafts`, `compute` and, for each sequence of a batch, `use`.
    """

    batcher: Batcher = field(init=False, repr=False)

    def attach(self, batcher: Batcher) -> None:
        """Answer this batcher from now on."""
        self.batcher = batcher

    # --- an iteration, in this order -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Take in what has come, before the scheduler decides."""

    def candidates(self) -> list[Sequence]:
        """Return the sequences that may have rows in the next batch."""
        return self.batcher.admission.resident

    def drafts(self, decoding: list[Sequence], prefilling: list[Sequence]) -> dict[Sequence, list[int]]:
        """Return the guessed tokens to compute behind the last ones; none while a prompt needs the rows."""
        batcher, speculator = self.batcher, self.batcher.speculator
        if speculator is None or prefilling:
            return {}
        drafts = speculator.drafts(decoding, batcher.counters.iterations)
        batcher.counters.busy_s += speculator.took_s
        return drafts

    def compute(self, batch: Batch) -> bool:
        """Compute a batch, or send it off; return False if there was nothing to compute."""
        return self.batcher.run(batch)

    def use(self, s: Sequence, rows: DecodedRows) -> None:
        """Make of a sequence's rows its next tokens, or what leads to them."""
        self.batcher.draw_next(s, rows)

    # --- between iterations --------------------------------------------------------------------------------------

    @property
    def wait_s(self) -> float | None:
        """How long to wait for a message at most before `look` is due, s; None while nothing is."""
        return None

    def look(self) -> bool:
        """Look at what has been waited for; return whether there is something to compute now."""
        return False

    def settle(self) -> None:
        """Bring in all that is under way: an order is to find every sequence here."""

    def obey(self, order: wire.ToFleet) -> None:
        """Carry out an order about layers or answers of a fleet. Raises TypeError for a model that is none."""
        raise TypeError(f"{type(order).__name__} is for a fleet's home")

    def usage(self) -> RemoteUsage:
        """Return what was guessed so far, and what was done elsewhere, of hosts since the last call."""
        speculator = self.batcher.speculator
        return RemoteUsage(0, 0) if speculator is None else RemoteUsage(speculator.n_drafted, speculator.n_accepted)

    # --- the life of an answer -----------------------------------------------------------------------------------

    def refusal(self, request: wire.Generate) -> wire.Failed | None:
        """Return why an answer cannot begin; None if it can."""
        return None

    def opened(self, s: Sequence) -> None:
        """Prepare for a new answer, before anything of it is computed."""

    def rewound(self, s: Sequence) -> None:
        """Take note that an answer begins again behind what it was given."""

    def begin_drawing(self, s: Sequence) -> None:
        """Make ready to draw the tokens of an answer behind those it has."""
        s.draw.sampler = s.new_sampler(self.batcher.llama)

    def give_up(self, s: Sequence, error: str = "") -> None:
        """End an answer of which nothing more can be computed: there is no room for it, or there was an `error`."""
        if error:
            self.batcher.fail(s, error)
        else:
            self.batcher.finish(s, wire.FULL)

    def ended(self, s: Sequence, *, failed: bool) -> wire.SplitUsage | None:
        """Forget an answer that ends; return what a partner did for it."""
