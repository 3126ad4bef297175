"""All formats that are known, in the order in which a chat template's is looked for. Pure."""

from __future__ import annotations

from .format import ToolFormat
from .gemma import FUNCTION_GEMMA, Gemma
from .gpt_oss import GptOss
from .json_calls import Generic, Hermes, Llama3
from .lfm2 import Lfm2
from .mistral import Mistral, MistralList, MistralWithIds
from .tagged import QWEN_CODER

GENERIC: ToolFormat = Generic()
LFM2: ToolFormat = Lfm2()
FORMATS: tuple[ToolFormat, ...] = (
    Hermes(), QWEN_CODER, Llama3(), MistralList(), Mistral(), MistralWithIds(), Gemma(),
    Gemma("function-gemma", FUNCTION_GEMMA), GptOss(), LFM2,
)  # fmt: skip
BY_NAME = {known.name: known for known in (*FORMATS, GENERIC)}
