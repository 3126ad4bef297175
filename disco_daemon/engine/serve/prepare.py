"""Preparing a request in the intake's thread: its tokens and its grammar.

A request that cannot be served is refused before it reaches the batcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..wire import Generate

if TYPE_CHECKING:
    from ..llama.model import Llama


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with the tokens of its prompt and of the answer so far, and the grammar that its answer holds to.

    `salt` keeps what its adapter computes apart from others' (`llama.adapters`). `rearranged`: its template refuses the
    order of the messages, and turns were joined or filled in.
    """

    request: Generate
    prompt: list[int]
    given: list[int]
    grammar: str
    salt: int
    rearranged: bool


def prepare(llama: Llama, request: Generate) -> Prepared:
    """Prepare a request. Raises TemplateError, PromptError."""
    llama.vocabulary.check_drawing(request.drawing)
    prompt = llama.vocabulary.prompt_tokens(request)
    given = llama.vocabulary.answer_tokens(request.answer_so_far, request.answer_ids)
    rearranged = llama.vocabulary.rearranges(request)
    return Prepared(request, prompt, given, llama.grammar(request), llama.salt(request.adapter), rearranged)
