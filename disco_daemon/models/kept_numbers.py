"""What a model keeps of the texts that it reads, by its header: cells, windows and states of its layers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .gguf import Value

# Which layers look at a window only: (period, whether the one that sees all is the first of a period). llama.cpp has
# these numbers in its code, `load_swa_pattern` in src/models/*.cpp, and counts layers by them.
WINDOW_PERIODS = {
    "afmoe": (4, False), "cohere2": (4, False), "exaone4": (4, False), "gemma2": (2, False), "gemma3": (6, False),
    "olmo2": (4, False), "gpt-oss": (2, False), "plamo3": (8, False), "smallthinker": (4, True),
}  # fmt: skip
# Of these the last of every so many layers has cells, and the others a state (src/models/qwen*.cpp).
_INTERVALS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
_WITH_BOTH = ("falcon-h1",)  # each layer has cells, and a state
# Whose states llama.cpp can keep snapshots of (`llm_arch_supports_rs_rollback`), and tried here.
GOING_BACK = ("lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe")
MOST_LAYERS = 4096  # the deepest models have some hundred
_STATE_BYTES = 4  # of a number in a state


@dataclass(frozen=True, slots=True)
class KeptNumbers:
    """How many numbers each token leaves in layers that see all tokens, and in those that see a window of `window`.

    `state_bytes` is what all recurrent layers carry through one text.
    """

    per_token: int
    window: int = 0
    in_window: int = 0
    state_bytes: int = 0


def kept_numbers(keys: Mapping[str, Value | list[Value]]) -> KeptNumbers:
    """Return what a model of these GGUF keys keeps: as llama.cpp's src/llama-hparams.cpp has it.

    Raises ValueError for more layers than any model has.
    """
    arch = keys.get("general.architecture")

    def number(key: str, default: int = 0) -> int:
        value = keys.get(f"{arch}.{key}", default)
        return value if isinstance(value, int) else default

    n_layers = number("block_count")
    if n_layers > MOST_LAYERS:
        raise ValueError("its header tells of a shape that no model has")

    def of_layers(key: str, default: list[int]) -> list[int]:
        value = keys.get(f"{arch}.{key}")
        if isinstance(value, list) and len(value) >= n_layers:
            return [one if isinstance(one, int) else 0 for one in value[:n_layers]]
        return [value] * n_layers if isinstance(value, int) else default

    heads = of_layers("attention.head_count", [1] * n_layers)
    kv_heads = of_layers("attention.head_count_kv", heads)
    size = number("embedding_length") // max([1, *heads])
    key, value = number("attention.key_length", size), number("attention.value_length", size)
    key_swa, value_swa = number("attention.key_length_swa", key), number("attention.value_length_swa", value)
    state = _state_numbers(number, max(heads, default=0))
    interval = number("full_attention_interval", _INTERVALS.get(str(arch), 0))
    window = number("attention.sliding_window")
    sees_window = of_layers("attention.sliding_window_pattern", [])
    if str(arch) in WINDOW_PERIODS and not isinstance(keys.get(f"{arch}.attention.sliding_window_pattern"), list):
        period, begins_dense = WINDOW_PERIODS[str(arch)]
        period = number("attention.sliding_window_pattern") or period
        sees_window = [int(layer % period != (0 if begins_dense else period - 1)) for layer in range(n_layers)]
    n_own = n_layers - number("attention.shared_kv_layers")  # the last ones read the cells of others
    per_token = in_window = n_states = 0
    for layer in range(n_layers):
        is_recurrent = state and ((layer + 1) % interval != 0 if interval else not kv_heads[layer])
        n_states += bool(state and (is_recurrent or arch in _WITH_BOTH))
        if is_recurrent or layer >= n_own:
            continue
        if window and sees_window and sees_window[layer]:
            in_window += kv_heads[layer] * (key_swa + value_swa)
        else:
            per_token += kv_heads[layer] * (key + value)
    return KeptNumbers(per_token, window if in_window else 0, in_window, _STATE_BYTES * n_states * state)


def _state_numbers(number: Callable[[str], int], n_heads: int) -> int:
    """Return how many numbers one recurrent layer carries: what its convolution has seen last, and its state."""
    if cached := number("shortconv.l_cache"):
        return number("embedding_length") * (cached - 1)
    n_seen = max(0, number("ssm.conv_kernel") - 1)
    if size := number("kda.head_dim"):
        return (3 * (n_seen or 3) + size) * n_heads * size
    inner, state = number("ssm.inner_size"), number("ssm.state_size")
    return n_seen * (inner + 2 * number("ssm.group_count") * state) + inner * state
