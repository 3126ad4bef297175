from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_daemon.errors import ConfigError
from disco_daemon.models import quants
from disco_daemon.models.quants import RemoteFile, Variant, choose, label, parse, variants


def files(*names: str) -> list[RemoteFile]:
    return [RemoteFile(name, 1000 * (n + 1), "0" * 64) for n, name in enumerate(names)]


def taken(wanted: str | None, *names: str) -> str:
    return choose("a/b", variants(files(*names)), wanted).name


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("maker/tiny-GGUF", ("maker/tiny-GGUF", None)),
        ("maker/tiny-GGUF:Q8_0", ("maker/tiny-GGUF", "Q8_0")),
        ("hf.co/maker/tiny:x.gguf", ("maker/tiny", "x.gguf")),
        (" https://huggingface.co/maker/tiny.v2 ", ("maker/tiny.v2", None)),
    ],
)
def test_what_is_to_be_pulled(spec: str, meant: tuple[str, str | None]) -> None:
    assert parse(spec) == meant


@pytest.mark.parametrize("spec", ["", "tiny", "a/b/c", "a/b:", "/b", "a/", "../b", "a b/c", "https://example.com/a/b"])
def test_what_is_no_repository(spec: str) -> None:
    with pytest.raises(ConfigError, match="USER/REPO"):
        parse(spec)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("gemma-3-270m-q4_k_m.gguf", "Q4_K_M"),
        ("Qwen3-0.6B-IQ2_XXS.gguf", "IQ2_XXS"),
        ("Qwen3-30B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("phi-2_Q5_0.gguf", "Q5_0"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("m-fp16.gguf", "F16"),
        ("BF16/Big-00001-of-00002.gguf", "BF16"),
        ("Q8_0/Big-Q6_K-00001-of-00002.gguf", "Q6_K"),
        ("ggml-model.gguf", ""),
        ("Qwen3-Q.gguf", ""),
    ],
)
def test_a_name_tells_its_quantization(path: str, told: str) -> None:
    assert label(path) == told


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-Q2_K.gguf"], "m-Q4_K_M.gguf"),
        (["m-Q8_0.gguf", "m-Q4_K_S.gguf", "m-Q3_K_L.gguf", "m-IQ4_XS.gguf"], "m-Q4_K_S.gguf"),
        (["m-Q8_0.gguf", "m-Q3_K_XL.gguf", "m-Q2_K.gguf"], "m-Q3_K_XL.gguf"),
        (["m-F16.gguf", "m-Q5_K_M.gguf"], "m-Q5_K_M.gguf"),
        (["m-Q8_0.gguf", "m-UD-Q4_K_XL.gguf"], "m-UD-Q4_K_XL.gguf"),
        (["m.gguf"], "m.gguf"),
        (["m-Q4_K_M.gguf", "mmproj-Q4_K_M.gguf", "m-imatrix.gguf", "README.md"], "m-Q4_K_M.gguf"),
    ],
)
def test_by_default_it_is_the_usual_one_or_the_nearest_smaller(names: list[str], expected: str) -> None:
    assert taken(None, *names) == expected


def test_what_is_asked_for_is_taken_or_what_there_is_is_told() -> None:
    names = ["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-UD-Q2_K_XL.gguf", "odd.gguf"]
    assert taken("q8_0", *names) == "m-Q8_0.gguf"
    assert taken("ud-q2_k_xl", *names) == "m-UD-Q2_K_XL.gguf"
    assert taken("odd.gguf", *names) == "odd.gguf"
    assert taken("ODD", *names) == "odd.gguf"
    with pytest.raises(ConfigError, match=r"there is no Q6_K in a/b: there are Q8_0 \(0\.00 GB\), Q4_K_M .*odd\.gguf"):
        taken("Q6_K", *names)


@pytest.mark.parametrize("wanted", [None, "Q4_K_M"])
def test_several_models_of_one_quantization_have_to_be_named(wanted: str | None) -> None:
    names = ["base-Q4_K_M.gguf", "chat-Q4_K_M.gguf"]
    with pytest.raises(ConfigError, match=r"name one as a/b:FILE, of base-Q4_K_M\.gguf, chat-Q4_K_M\.gguf"):
        taken(wanted, *names)
    assert taken("chat-Q4_K_M", *names) == "chat-Q4_K_M.gguf"


def test_without_a_gguf_there_is_no_model() -> None:
    with pytest.raises(ConfigError, match="has no GGUF model"):
        taken(None, "model.safetensors", "mmproj-F16.gguf")


def test_parts_belong_together_and_a_lack_of_one_is_a_lack_of_all() -> None:
    parts = files(*(f"Q8_0/big-0000{n}-of-00003.gguf" for n in (3, 1, 2)))
    [found] = variants(parts)
    assert [file.name for file in found.files] == [f"big-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert (found.label, found.n_bytes) == ("Q8_0", 6000)
    assert variants(parts[1:]) == []


def test_variants_are_told_with_their_sizes() -> None:
    assert str(Variant("Q8_0", (RemoteFile("m.gguf", 1_500_000_000, ""),))) == "Q8_0 (1.50 GB)"


@given(st.text(max_size=40))
def test_any_name_has_a_label_and_bits(name: str) -> None:
    assert isinstance(label(name), str)
    assert quants.bits(name) > 0
