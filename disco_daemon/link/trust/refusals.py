"""Why a machine is not served: the reasons, and whether two machines can work together at all. Pure."""

from __future__ import annotations

from ...plain import plain
from ..protocol import AnswerFailed, Build, Refused

# What `Refused.reason` may be, and what it says. Those of RETRIED pass by themselves.
REASONS = {
    "no_certificate": "it showed no certificate",
    "revoked": "its certificate is not, or no longer, among those of the members",
    "protocol": "it speaks another version of the link's protocol",
    "model": "it has another model",
    "cut": "its layers do not meet those here",
    "build": "its llama.cpp rounds in another way than the one here, and answers are to be exact",
    "vocabulary": "its tokens are not those of the model here",
    "malformed": "it sent what is no message of the protocol, or what is not its to send",
    "too_large": "it sent a frame beyond the limits",
    "flood": "it sent more than can be of use",
    "slow": "it does not take what is sent to it",
    "late": "it did not say in time what it wants",
    "crowded": "too many strangers are asking at a time",
    "not_ready": "no model is in memory here yet",
    "no_code": "no code to pair with is valid",
    "wrong_code": "the secret is not that of the code",
    "used_code": "the code was used already",
    "expired_code": "the code has expired",
    "bad_name": "its name cannot be used",
    "bad_request": "its request for a certificate is not valid",
    "no_file": "there is no such file",
}
REVOKED = "this machine has been revoked: pair it again"
ENDS = frozenset({"closed", "silent", "engine_gone", "replaced", "stopped"})  # of links, that nobody is to blame for
MAX_TOLD = 500  # characters of the other side's sentence; ours have 200
# Why a partner cannot go on with one answer: `AnswerFailed.reason`.
OF_ANSWERS = frozenset({"overloaded", "context", "bad_rows", "bad_grammar", "engine_error"})
RETRIED = frozenset({"not_ready", "crowded", "slow", "late", "flood"})


class LinkEndedError(Exception):
    """A link has ended, or is to be ended. `tell`: the other side is told by `Refused`, since it is at fault."""

    def __init__(self, reason: str, message: str, *, tell: bool = False) -> None:
        super().__init__(message)
        self.reason, self.message, self.tell = reason, message, tell


def told_by(refused: Refused) -> LinkEndedError:
    """Return what the other side says, fit to be shown: it may say anything, and at any length."""
    reason = refused.reason if refused.reason in REASONS or refused.reason in ENDS else "refused"
    return LinkEndedError(reason, plain(refused.message[:MAX_TOLD]))


def failure_told(failed: AnswerFailed) -> tuple[str, str]:
    """Return reason and sentence of an answer that a partner ends, fit to be acted upon and shown."""
    reason = failed.reason if failed.reason in OF_ANSWERS else "engine_error"
    return reason, plain(failed.message[:MAX_TOLD])


def check_builds(ours: Build, theirs: Build, our_cut: int, their_cut: int) -> None:
    """Check that two machines can compute one model, whose text ends up in the message of the other side.

    Another build of llama.cpp is no reason: it computes other bits, but the same model. Raises LinkEndedError.
    """
    if ours.protocol != theirs.protocol:
        newer, older = (ours, theirs) if ours.protocol > theirs.protocol else (theirs, ours)
        where = "the machine that asks" if older is theirs else "the machine that was asked"
        msg = (
            f"disco {newer.disco} speaks version {newer.protocol} of the link's protocol, disco {older.disco} version "
            f"{older.protocol}: upgrade disco at {where}, which has {older.disco}"
        )
        raise LinkEndedError("protocol", msg, tell=True)
    shapes = [(build.model, build.n_layers, build.n_embd, build.n_vocab) for build in (ours, theirs)]
    if shapes[0] != shapes[1]:
        msg = (
            f"the model here is {_describe(ours)}, there it is {_describe(theirs)}: both have to be the same file; "
            "join again with a new code to fetch it"
        )
        raise LinkEndedError("model", msg, tell=True)
    if our_cut != their_cut:
        here, there = (f"at layer {cut}" if cut else "nowhere, for token ids," for cut in (our_cut, their_cut))
        msg = f"the model is cut {here} here, and {there} there: join again with a new code"
        raise LinkEndedError("cut", msg, tell=True)
    if our_cut == 0 and ours.vocabulary != theirs.vocabulary:
        msg = (
            "the small model that drafts has another vocabulary than the large one, in which token ids mean other "
            "words: join again with a small model of the same family"
        )
        raise LinkEndedError("vocabulary", msg, tell=True)


def _describe(build: Build) -> str:
    return f"{build.model[:16]} ({build.n_layers} layers of {build.n_embd}, {build.n_vocab} tokens)"
