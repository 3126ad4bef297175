"""What the split benchmark asks, and how it compares what it hears. Pure, but for reading a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from disco_daemon.bench.child import BenchError
from disco_daemon.models.gguf import Header

PACKAGED = Path(__file__).with_name("split_prompts.jsonl")
Z_95 = 1.959964  # standard deviations on either side that hold 95 % of a normal distribution


@dataclass(frozen=True, slots=True)
class SplitPrompt:
    """A prompt, and the kind of data it belongs to: its results are listed apart."""

    data: str
    text: str


def read_prompts(path: Path = PACKAGED) -> list[SplitPrompt]:
    """Read JSON lines with `prompt`, and `data` if there are several kinds. Raises BenchError."""
    found = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                row = json.loads(line)
                found.append(SplitPrompt(str(row.get("data", path.stem)), str(row["prompt"])))
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as e:
        msg = f"{path} is no file of JSON lines with a prompt each: {e!r} behind {len(found)} prompts"
        raise BenchError(msg) from e
    if not found:
        msg = f"{path} has no prompt"
        raise BenchError(msg)
    return found


def choose(prompts: Sequence[SplitPrompt], n: int) -> list[SplitPrompt]:
    """Return up to `n` prompts of each kind of data, the first ones."""
    kinds = dict.fromkeys(prompt.data for prompt in prompts)
    return [prompt for kind in kinds for prompt in [p for p in prompts if p.data == kind][:n]]


def is_base_model(header: Header) -> bool:
    """Whether a model has no chat template, and so is no model to chat with: it goes on with raw text."""
    return not header.text("tokenizer.chat_template")


def question_of(prompt: str, *, raw: bool) -> tuple[str, dict[str, Any]]:
    """Return the route that a prompt is asked over, and what its body has of it: a chat's message, or the text."""
    if raw:
        return "/v1/completions", {"prompt": prompt}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}


def text_of(choice: Mapping[str, Any]) -> str:
    """Return the text of a chunk's choice, of either route; "" if it has none."""
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


def naive_bytes(n_prompt: int, n_tokens: int, n_embd: int) -> int:
    """Return what a naive split sends: for each token the rows of the whole context, in float32 (CE-CoLLM, Table 2)."""
    return 4 * n_embd * sum(n_prompt + at for at in range(n_tokens))


@dataclass(frozen=True, slots=True)
class TokenAgreement:
    """How many tokens were compared where all before them were the whole model's, and how many of them differ.

    Each answer has at most one that differs, and ends the comparison: so the share rests on a handful of them.
    """

    n_tokens: int
    n_different: int

    @property
    def share(self) -> float:
        """Return the share of tokens that agree; 1 if none was compared."""
        return 1 - self.n_different / self.n_tokens if self.n_tokens else 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """Return the interval of 95 % around the share (E. B. Wilson, 1927); from 0 to 1 if no token was compared.

        It takes a token's chance to differ as the same everywhere, whatever came before it.
        """
        if not self.n_tokens:
            return 0.0, 1.0
        n, p, z = self.n_tokens, self.share, Z_95
        middle, more = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low, high = ((middle + sign * more) / (1 + z * z / n) for sign in (-1, 1))
        return max(0.0, min(low, p)), min(1.0, max(high, p))


def token_agreement(pairs: Sequence[tuple[Sequence[str], str]]) -> TokenAgreement:
    """Return how often a token is the whole model's where all before it were, of its pieces beside another's text.

    Behind the first token that differs the two write different texts: it counts, and nothing after it.
    """
    same = other = 0
    for pieces, text in pairs:
        n = next((i for i, said in enumerate(accumulate(pieces)) if not text.startswith(said)), len(pieces))
        same += n
        other += n < len(pieces)
    return TokenAgreement(same + other, other)


def flop_share(header: Header, cut: int, n_layers: int, n_rows: int, n_logits: int, whole: tuple[int, int]) -> float:
    """Return what the layers above a cut compute, in shares of the whole model's FLOP for the same answers.

    Both compute rows, of some of which the output head: `n_rows` and `n_logits` here, and those two of the `whole`
    model. Each number of a matrix counts once a row; attention, which grows with the text, is left out.
    """
    layers, head = [0] * n_layers, 0
    for tensor in header.tensors:
        kind, _, rest = tensor.name.partition(".")
        number = rest.partition(".")[0]
        if kind == "blk" and number.isdigit() and int(number) < n_layers:
            layers[int(number)] += math.prod(tensor.shape)
        elif tensor.name == "output.weight" or (tensor.name == "token_embd.weight" and not head):
            head = math.prod(tensor.shape)
    return (n_rows * sum(layers[cut:]) + n_logits * head) / (whole[0] * sum(layers) + whole[1] * head)
