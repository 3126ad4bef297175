"""Which models make vectors of texts, and what their families were trained with."""

from __future__ import annotations

import pytest

from disco_daemon.models.gguf import Header
from disco_daemon.models.text_models import _families, family_of, text_kind


def header(architecture: str, name: str = "", **numbers: int) -> Header:
    keys = {f"{architecture}.{key}": value for key, value in numbers.items()}
    return Header(0, {"general.architecture": architecture, "general.name": name, **keys})


@pytest.mark.parametrize(
    ("found", "pooling"),
    [
        (header("bert", pooling_type=1), "mean"),
        (header("bert", pooling_type=2), "cls"),
        (header("qwen3", pooling_type=3), "last"),
        (header("bert", pooling_type=4), "rank"),
        (header("bert"), "mean"),  # as files of before the key was written
        (header("gemma-embedding"), "mean"),
        (header("qwen3"), None),
        (header("llama", pooling_type=0), None),
        (header(""), None),
    ],
)
def test_a_models_header_says_whether_it_makes_vectors(found: Header, pooling: str | None) -> None:
    kind = text_kind(found)
    assert (kind.pooling if kind else None) == pooling


@pytest.mark.parametrize(
    ("name", "query", "least"),
    [
        ("nomic-embed-text-v1", "search_query: ", None),
        ("Nomic Embed Text v1.5", "search_query: ", 64),
        ("nomic_embed_text_v1.5.Q8_0", "search_query: ", 64),
        ("multilingual-e5-large", "query: ", None),
        ("multilingual-e5-large-instruct", "Instruct: ", None),
        ("Qwen3 Embedding 0.6B", "Instruct: ", 32),
        ("snowflake-arctic-embed-l-v2.0", "query: ", 256),
        ("embeddinggemma-300m", "task: search result | query: ", 128),
        ("all-MiniLM-L6-v2", "", None),
        ("", "", None),
    ],
)
def test_a_family_is_known_by_the_longest_name_in_a_models(name: str, query: str, least: int | None) -> None:
    family = family_of([name])
    assert family.prefixes.get("query", "").startswith(query)
    assert bool(family.prefixes.get("query")) == bool(query)
    assert family.least_dimensions == least


def test_the_files_name_stands_in_for_a_header_that_says_nothing() -> None:
    kind = text_kind(header("bert", "model", pooling_type=2), ["bge-small-en-v1.5-q8_0"])
    assert kind is not None
    assert kind.family.prefixes["query"].startswith("Represent this sentence")


def test_a_model_that_rates_texts_has_no_prefixes() -> None:
    kind = text_kind(header("bert", "nomic-embed-text-v1.5", pooling_type=4))
    assert kind is not None
    assert kind.rates
    assert not kind.family.prefixes


def test_every_family_says_where_its_prefixes_are_from() -> None:
    purposes = {"query", "document", "classification", "clustering", "similarity"}
    for family in _families():
        assert family.source.startswith("https://")
        assert family.prefixes.keys() <= purposes
        assert all(name == name.casefold() and " " not in name and "_" not in name for name in family.names)
