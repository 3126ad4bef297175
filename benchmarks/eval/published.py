"""What the paper prints: its figures, to be put beside ours, and its own prices, to reckon costs as it does.

Sun, Wang, Lai: "DiSCo", Findings of ACL 2025, arXiv 2502.11417. Nothing here is used by the daemon.
"""

from __future__ import annotations

from dataclasses import dataclass

from disco_daemon.types import Side

# The paper's services and the recorded traces nearest to them; there is no public trace of DeepSeek.
SERVICES = {
    "GPT": "gpt-4o-mini-2024-07-18@240811",
    "LLaMA": "firefunction-v2-FC@240706",
    "DeepSeek~": "gemini-1.5-pro-preview-0514@240706",
    "Command": "command-r-plus@240706",
}
PHONES = ("pixel7pro-bloom1.1b", "pixel7pro-bloom560m", "xiaomi14-qwen0.5b")

# Table 1: Pearson's coefficient between prompt length and TTFT.
PEARSON = {"Command": 0.0142, "GPT": 0.0236, "DeepSeek": -0.0273, "LLaMA": 0.0402}
# Table 4: time to load and to the first token, s, of Qwen-2.5 in 16 bit, prompt "How to use GitHub?".
COLD_STARTS = {
    "0.5B, RTX 3060": (1.29, 0.051),
    "1.5B, RTX 3060": (2.48, 0.105),
    "3B, RTX 3060": (4.45, 0.145),
    "0.5B, A40": (1.53, 0.025),
    "1.5B, A40": (3.12, 0.026),
    "3B, A40": (5.72, 0.033),
    "7B, A40": (13.43, 0.033),
}
# Table 2: average reduction of the P99 of the TTFT against Stoch over the whole range of budgets, %.
REDUCTIONS = {
    (service, side, device): percent
    for (service, side), columns in {
        ("GPT", "server"): (23.85, 37.41, 44.04),
        ("GPT", "device"): (26.39, 21.48, 16.32),
        ("LLaMA", "server"): (11.08, 23.09, 26.29),
        ("LLaMA", "device"): (35.67, 29.30, 21.29),
        ("DeepSeek~", "server"): (0.00, 3.88, 15.53),
        ("DeepSeek~", "device"): (30.91, 28.01, 25.08),
        ("Command", "server"): (47.93, 50.93, 52.23),
        ("Command", "device"): (34.78, 31.53, 24.42),
    }.items()
    for device, percent in zip(PHONES, columns, strict=True)
}
# Table 3: tokens delayed by a migration, mean and P99, and the P99 of the time between tokens, s.
DELAYED = {
    ("GPT", "server"): (4.21, 9.40, 0.209),
    ("GPT", "device"): (6.59, 6.59, 0.217),
    ("LLaMA", "server"): (5.53, 11.00, 0.209),
    ("LLaMA", "device"): (10.01, 10.01, 0.217),
    ("DeepSeek~", "server"): (8.13, 11.00, 0.209),
    ("DeepSeek~", "device"): (17.17, 17.17, 0.217),
    ("Command", "server"): (3.25, 8.00, 0.209),
    ("Command", "device"): (8.54, 8.54, 0.217),
}
# Table 5: error of predicted TTFTs, %, and s, in the order Command, DeepSeek, GPT, LLaMA.
PREDICTORS = {
    "moving average": ((39.40, 0.0899), (27.80, 0.3959), (24.55, 0.0995), (42.18, 0.3312)),
    "exponential smoothing": ((53.51, 0.1047), (27.39, 0.3771), (20.88, 0.0844), (40.27, 0.3154)),
    "random forest": ((39.33, 0.0966), (32.97, 0.4745), (28.68, 0.1128), (49.67, 0.3875)),
    "XGBoost": ((35.43, 0.0905), (27.51, 0.4001), (24.83, 0.0997), (43.94, 0.3451)),
}
# Fig. 7: "up to" so much of the cost, by migration, %.
MOST_SAVED = {Side.DEVICE: 72.7, Side.SERVER: 83.6}
# Fig. 9: refit times on a MacBook Pro with an M1 by number of samples, ms.
REFIT_MS = {
    "device": {1_000: 0.486, 10_000: 1.741, 100_000: 14.856},
    "server": {1_000: 0.128, 10_000: 0.969, 100_000: 9.082},
}

# --- its prices -----------------------------------------------------------------------------------------------------

MAX_TOKENS = 128  # of an answer, in its experiments on cost (Appendix E)
# Its `energy_to_money`, read as $ a million tokens for each GFLOP of a token: the printed unit cannot be meant.
ENERGY_TO_USD = {Side.DEVICE: 5.0, Side.SERVER: 0.3}
# Table 6: GFLOP of a token, in a prefill of 32 tokens and in decoding.
GFLOP = {
    "pixel7pro-bloom1.1b": (0.85, 0.82),
    "pixel7pro-bloom560m": (0.45, 0.42),
    "xiaomi14-qwen0.5b": (0.39, 0.37),
}
# Table 8: $ a million tokens, in and out; LLaMA at Hyperbolic.
SERVER_USD_PER_M = {"GPT": (0.15, 0.60), "LLaMA": (0.40, 0.40), "DeepSeek~": (0.14, 0.28), "Command": (1.25, 2.00)}


def token_usd(trace: str, phone: str, constrained: Side) -> tuple[float, float, float, float]:
    """Return the paper's $ of a token: prefill and decoding of the device, then of the server. Raises KeyError.

    Which side is constrained decides what energy is worth, so that the regime is as the paper wants it.
    """
    service = next(service for service, name in SERVICES.items() if name == trace)
    prefill, decode = (1e-6 * ENERGY_TO_USD[constrained] * gflop for gflop in GFLOP[phone])
    server_in, server_out = (1e-6 * usd for usd in SERVER_USD_PER_M[service])
    return prefill, decode, server_in, server_out


@dataclass(frozen=True, slots=True)
class PublishedShape:
    """The shape of a model as the paper states it; the real models are others (`profiles/devices`)."""

    hidden: int
    n_heads: int
    ffn: int
    vocabulary: int
    n_layers: int = 24


SHAPES = {
    "pixel7pro-bloom1.1b": PublishedShape(1024, 16, 4096, 250_880),
    "pixel7pro-bloom560m": PublishedShape(512, 8, 2048, 250_880),
    "xiaomi14-qwen0.5b": PublishedShape(768, 12, 2048, 151_936),
}


def published_flops(shape: PublishedShape, length: int, *, prefill: bool) -> float:
    """Return the paper's FLOPs of a token at a length, by its Equations 7 to 9, as its tables were reckoned.

    A multiplication with its addition counts 1, the embedding as a full product. Tables 6 and 7 come out for decoding
    with 4 d^2 + 2 L d for attention, and in a prefill with L^2 d where Equation 8 has L^2 d / n_heads: the cost of a
    whole prompt, not of a token.
    """
    d = shape.hidden
    attention = shape.n_layers * (4 * d * d + 2 * length * d + (length * length * d if prefill else 0))
    ffn = shape.n_layers * 2 * d * shape.ffn
    norms = 2 * shape.n_layers * 2 * d
    return attention + ffn + norms + 2 * shape.vocabulary * d
