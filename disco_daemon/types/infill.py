"""A gap in a text that is to be filled: what stands before it and behind it. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

# Those whose tokens llama.cpp knows by their names (src/llama-vocab.cpp).
WITH_TOKENS = "Qwen2.5-Coder, Qwen3-Coder, StarCoder2, CodeGemma, Code Llama, DeepSeek-Coder-V2 and Granite have them"
MAX_NAME = 4096  # characters of a file's name


class ExtraText(msgspec.Struct, frozen=True):
    """A piece of another file, for the model to know of; one without a name is called `tmp`, as by llama-server."""

    text: str
    filename: Annotated[str, Meta(max_length=MAX_NAME)] = "tmp"


class Infill(msgspec.Struct, frozen=True, kw_only=True):
    """What a model that fills in the middle is given in place of a prompt.

    The answer stands between `prefix` and `suffix`, and goes on from `begun`; `extra` comes before all of it. None of
    these texts holds a control token, whatever it spells. Where they are too long for the context, the end of the
    prefix, the begin of the suffix and the end of the extra texts are taken.
    """

    prefix: str
    suffix: str
    begun: str = ""
    extra: tuple[ExtraText, ...] = ()


RawPrompt = str | tuple[int, ...] | Infill  # in place of a conversation: text, token ids of a model, or a gap


def n_chars_of(prompt: RawPrompt | None) -> int:
    """Return the characters of text in a prompt."""
    if isinstance(prompt, Infill):
        texts = (prompt.prefix, prompt.suffix, prompt.begun, *(one.text for one in prompt.extra))
        return sum(map(len, texts))
    return len(prompt) if isinstance(prompt, str) else 0
