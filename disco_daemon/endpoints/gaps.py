"""Gaps that a server is to fill: a prompt with a `suffix`, as OpenAI's text completions have it. Pure."""

from __future__ import annotations

from ..types import Capabilities, GenerationRequest, Infill, Refusal
from ..types.fields import asked
from .continuation import Ask, completion


def refuses_gap(request: GenerationRequest, capabilities: Capabilities) -> Refusal | None:
    """Return why a server is not asked to fill a gap.

    Many servers leave a `suffix` unread, and go on with the prompt: only one that is known to read it is asked.
    """
    gap = request.prompt
    if not capabilities.fim:
        msg = "the server is not known to fill in the middle (server.capabilities says if it does)"
        return Refusal(msg, "suffix")
    if isinstance(gap, Infill) and gap.extra:
        return Refusal("a server takes no text of other files for filling in the middle", "input_extra")
    beyond = (row.name for row in asked(request.extra) if row.binds and not row.draws)
    if (name := next(beyond, None)) is not None:
        return Refusal(f"a server is not asked to fill in the middle with '{name}'", name)
    return None


def fill(request: GenerationRequest, gap: Infill, *, ids_back: bool = False) -> Ask:
    """Ask for what stands in a gap."""
    asked_for = completion(request, gap.prefix + gap.begun + request.answer_so_far, ids_back=ids_back)
    return Ask(asked_for.path, asked_for.body | {"suffix": gap.suffix})
