"""Who decides a token on a device over two machines: what settings, request and exit come to. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...types import GenerationRequest, Refusal, SplitMode, SplitWish

LEAST_COVERAGE = 0.3  # of unseen tokens that may leave at theta 0.8: fewer spare too few round trips
TRAIN = "train one on the partner (`disco exits train`), and join again with a new code"


@dataclass(frozen=True, slots=True)
class SplitRules:
    """The settings that hold for the next request.

    `theta` is for the mode `confident`. `goes_on`: the exit goes on alone while the partner is gone. `private_alone`:
    it makes private answers. `drafts`: in place of an exit there is a whole small model, which nobody has calibrated.
    """

    mode: SplitMode = "exact"
    theta: float = 0.9
    goes_on: bool = True
    private_alone: bool = False
    drafts: bool = False


def why_not(mode: SplitMode, coverage: float | None, *, drafts: bool = False) -> str | None:
    """Return why an exit of this `coverage` (None: there is no exit) does not allow a mode; None if it does.

    `drafts` as in `SplitRules`.
    """
    if mode == "exact":
        return None
    if coverage is None:
        return f"the mode {mode!r} needs an early exit, and the layers on this machine came without one: {TRAIN}"
    if mode == "confident" and drafts:
        return (
            "the mode 'confident' takes an early exit that was calibrated before, and here a whole small model drafts, "
            "of which nobody knows how often it is right: use 'exact', or 'alone' for the small model's own answer"
        )
    if mode == "confident" and coverage < LEAST_COVERAGE:
        return (
            f"the mode 'confident' takes an exit by which {LEAST_COVERAGE:.0%} of the tokens may leave at theta 0.8, "
            f"and by this one {coverage:.0%} may (`disco exits show` there says why): {TRAIN}, or use 'exact'"
        )
    return None


def resolve(request: GenerationRequest, rules: SplitRules, coverage: float | None) -> GenerationRequest | Refusal:
    """Return a request with the mode, theta and leave to go on that it is answered by, or why it cannot be.

    A private one is alone, or refused: nothing of it may reach the partner.
    """
    has_exit = coverage is not None
    if request.private:
        private = "a private request is not sent to the partner that has the upper layers of the device's model"
        if not has_exit:
            return Refusal(f"{private}, and this machine alone cannot answer: it has no early exit; {TRAIN}", "disco")
        if not rules.private_alone:
            by = "small model" if rules.drafts else "exit"
            hint = f"with split.private_alone = true this machine answers it alone, by its {by}, and less well"
            return Refusal(f"{private}: {hint}", "disco")
        return replace(request, split=SplitWish("alone"))
    wish = request.split
    mode = wish.mode or rules.mode
    if wish.theta is not None and mode != "confident":
        return Refusal(f"theta is of the mode 'confident', and this request is answered in {mode!r}", "disco")
    if why := why_not(mode, coverage, drafts=rules.drafts):
        return Refusal(why, "disco")
    theta = (wish.theta or rules.theta) if mode == "confident" else None
    return replace(request, split=SplitWish(mode, theta, rules.goes_on and has_exit))
