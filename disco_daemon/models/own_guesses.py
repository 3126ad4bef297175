"""Whether a model has a layer of its own that guesses the next token but one (MTP), by its header. Pure."""

from __future__ import annotations

from .gguf import Header

N_GUESSING = "nextn_predict_layers"
# What the layer needs beside `nextn.*`, of each architecture whose layer is tried: without one of these llama.cpp ends
# the process, by an assert in `graph_mtp` of src/models/*.cpp.
_EXPERTS = ("ffn_gate_inp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ffn_down_exps")
_NEEDED = {
    "glm4moe": ("attn_norm", *_EXPERTS),
    "deepseek2": ("attn_q_a", "attn_q_a_norm", "attn_q_b", "attn_kv_a_mqa", "attn_kv_a_norm", "attn_k_b", *_EXPERTS),
}
_NUMBERS = {"deepseek2": ("attention.q_lora_rank", "attention.key_length_mla", "attention.value_length_mla")}
_OWN = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")


def why_no_guesses(header: Header) -> str | None:
    """Return why a model's own layer guesses nothing here; "" if it does, None if the model has no such layer."""
    arch = header.architecture
    n_guessing = header.number(f"{arch}.{N_GUESSING}") or 0
    if not n_guessing:
        return None
    n_layers = header.number(f"{arch}.block_count") or 0
    layer = f"blk.{n_layers - 1}."
    found = {tensor.name for tensor in header.tensors if tensor.name.startswith(layer)}
    if not any(f"{layer}{name}.weight" in found for name in _OWN):
        return "the file was written without it"
    if arch not in _NEEDED:
        return f"disco does not use it in models of the architecture {arch}"
    if n_guessing > 1:
        return "disco uses it only where there is one such layer"
    missing = [name for name in (*_OWN, *_NEEDED[arch]) if f"{layer}{name}.weight" not in found]
    missing += [name for name in _NUMBERS.get(arch, ()) if not header.number(f"{arch}.{name}")]
    is_dense = (header.number(f"{arch}.leading_dense_block_count") or 0) >= n_layers
    if missing or is_dense or header.keys.get(f"{arch}.attention.temperature_scale"):
        return "it is not of the shape that llama.cpp computes"
    return ""
