"""What the simulation of a fleet assumes, each number with its source: written down before the simulation first ran.

The machine is the one of the CoCoServe paper (EuroSys '26): four A100 of 40 GB on PCIe, Llama-2-13B and -70B in bf16. A
number that nobody has published is marked `assumed`; one that was not looked up again is marked `from memory`. The
benchmark gives each of its figures once more with each of these numbers 30 % lower and higher.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

SEEDS = (1, 2, 3, 4, 5)  # of the arrivals and lengths: the paper repeats each run five times
RATES_LOW = (3.0, 10.0, 20.0, 30.0)  # requests/s; the paper's low load is 3 to 30
RATES_HIGH = (31.0, 40.0, 50.0)  # requests/s; its high load is 31 to 50
HORIZON_S = 60.0  # requests arrive for this long, then those that wait are answered: assumed
MAX_NEW_TOKENS = 256  # of an answer (paper, section 6.1)
MAX_PROMPT_TOKENS = 512  # a longer one is cut; Alpaca's longest instructions: assumed
N_GPUS = 4  # paper, section 6.1
VARIATION = 0.3  # how far each constant is moved, down and up
MOVED_SEEDS = (1,)  # of the runs with moved constants; `--full` takes all
MIB = 1024 * 1024

# What the paper reports, for the table beside ours.
PAPER_MEMORY_MIB = {"hft_2": 58_786.68, "hft_4": 119_573.34, "cocoserve_2": 64_015.44}  # section 6.3
EXTRA_LAYERS = 8.6  # replicated by its two instances: (64,015.44 - 58,786.68) MiB / 608 MB a layer (Table 2)
FLOW_EXTRA_LAYERS = 10  # a GPU, replicated or moved, on each of three more: flow against scatter and gather
N_FLIGHTS_PER_HOST = 2  # batches under way at once, by host of a route: one is computed while the other travels


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A model's sizes, from its config.json and Table 1 of the Llama 2 paper; weights and KV cache in bf16."""

    name: str
    n_layers: int
    d_model: int
    d_ff: int
    n_heads: int
    n_kv_heads: int
    n_vocab: int

    @property
    def layer_bytes(self) -> int:
        """Weights of one layer, bytes: 605 MiB for 13B, as the paper's Table 1."""
        return 2 * self.layer_parameters

    @property
    def layer_parameters(self) -> int:
        kv = self.d_model * self.n_kv_heads // self.n_heads
        return 2 * self.d_model * self.d_model + 2 * self.d_model * kv + 3 * self.d_model * self.d_ff

    @property
    def head_bytes(self) -> int:
        """Weights of the output head, bytes; the embedding has as many."""
        return 2 * self.d_model * self.n_vocab

    @property
    def weight_bytes(self) -> int:
        return self.n_layers * self.layer_bytes + 2 * self.head_bytes

    @property
    def kv_bytes_per_layer(self) -> int:
        """A token's key and value in one layer, bytes."""
        return 2 * 2 * self.d_model * self.n_kv_heads // self.n_heads


LLAMA_13B = LlamaShape("13b", 40, 5120, 13824, 40, 40, 32000)
LLAMA_70B = LlamaShape("70b", 80, 8192, 28672, 64, 8, 32000)


def constant(value: float, source: str) -> float:
    """Return a field whose value has a source; `Constants` reads it."""
    return field(default=value, metadata={"source": source})


@dataclass(frozen=True, slots=True)
class Constants:
    """All numbers that are moved by 30 %. Times in s, rates in bytes/s and FLOP/s, lengths in tokens."""

    memory_bytes_per_s: float = constant(1.555e12, "NVIDIA's data sheet of the A100 40 GB, PCIe: 1,555 GB/s")
    memory_efficiency: float = constant(
        0.685, "gpt-fast, README: 1,397 GB/s decoding Llama-2-7B in bf16 on an A100 80 GB, of its 2,039 GB/s"
    )
    flops_per_s: float = constant(312e12, "NVIDIA's data sheet of the A100: bf16 in tensor cores, dense")
    compute_efficiency: float = constant(
        0.5, "Narayanan et al. 2021 (Megatron-LM): 44 to 52 % of an A100's peak in large products; from memory"
    )
    usable_bytes: float = constant(
        37.5e9, "paper, section 6.2: 37.5 GB of a GPU's 40 GB serve the model; given to the baselines as well"
    )
    eager_layer_s: float = constant(
        1.2e-3,
        "time to launch a layer's kernels one by one: 25.5 token/s of Llama-2-7B (32 layers) on an A100 before "
        "compilation, in the blog on gpt-fast; from memory",
    )
    step_overhead_s: float = constant(
        2e-3, "scheduling and sampling of an iteration in a serving engine with graphs (ours, vLLM-like); assumed"
    )
    link_bytes_per_s: float = constant(
        25e9, "PCIe 4.0 x16: 31.5 GB/s each way by its data sheet, of which copies reach about 80 %; assumed"
    )
    crossing_s: float = constant(
        5e-5, "rows from one GPU's host process to the next: two round trips of TLS on one machine, 19 to 51 us; ours"
    )
    all_reduce_s: float = constant(
        5e-5, "start of an all-reduce over four GPUs: 24 to 82 us by gpt-fast's table of tensor parallelism, on NVLink"
    )
    mean_prompt_tokens: float = constant(19.31, "Alpaca in the vLLM paper (SOSP '23), Figure 11; from memory")
    mean_answer_tokens: float = constant(58.45, "Alpaca in the vLLM paper (SOSP '23), Figure 11; from memory")
    prompt_variation: float = constant(0.7, "standard deviation / mean of a prompt's length, lognormal; assumed")
    answer_variation: float = constant(1.0, "standard deviation / mean of an answer's length, lognormal; assumed")
    max_sequences: float = constant(256, "vLLM 0.8's default of max_num_seqs; ours takes the same for each GPU")
    kv_reserve: float = constant(
        0.05, "share of the KV cache that admission leaves free for running answers to grow; assumed"
    )
    ttft_expected_s: float = constant(1.0, "Andes (Liu et al. 2024): what readers expect of the first token")
    reading_tokens_per_s: float = constant(4.8, "Andes: mean reading speed; an answer is late if it ends after that")

    def moved(self, name: str, factor: float) -> Constants:
        """Return these with one of them changed."""
        return replace(self, **{name: factor * float(getattr(self, name))})

    @staticmethod
    def names() -> list[str]:
        return [one.name for one in fields(Constants)]

    @staticmethod
    def sources() -> dict[str, str]:
        return {one.name: str(one.metadata["source"]) for one in fields(Constants)}


# Static batches of the HFT-like baseline: as many answers as fit the memory if every prompt is of mean length and every
# answer as long as allowed, which is what an operator counts; nothing looks at the memory when a batch is taken ("no
# admission"). The paper's own figure of a batch, 15, is run beside it, and the better one is the baseline.
HFT_PAPER_BATCH = 15
SLO_HOLDS = 0.95  # share of answers in time; a rate below it is where a system begins to fail: assumed
