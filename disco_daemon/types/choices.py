"""Several answers to one question, OpenAI's `n`: how many, and what each of them is. Pure."""

from __future__ import annotations

import zlib
from dataclasses import replace

from .fields import Json
from .request import GenerationRequest


def n_choices(parameters: Json) -> int:
    """Return how many answers the client wants."""
    n = parameters.get("n")
    return n if isinstance(n, int) and n > 1 else 1


def most_tokens(request: GenerationRequest) -> int | None:
    """Return how many tokens all choices together may have; None without a limit."""
    limit = request.sampling.max_tokens
    return None if limit is None else limit * n_choices(request.extra)


def choice_of(request: GenerationRequest, index: int) -> GenerationRequest:
    """Return the request for one of the choices alone.

    The first one is the answer to the same request without `n`; the others draw with seeds made of its seed.
    """
    seed = request.sampling.seed
    if seed is not None and index:
        seed = zlib.crc32(f"choice {index} {seed}".encode())
    return replace(
        request,
        sampling=replace(request.sampling, seed=seed),
        extra={name: value for name, value in request.extra.items() if name != "n"},
    )
