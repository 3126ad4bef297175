"""The format of a chat template is found by what it writes, and by nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.engine.llama.template import PLAIN_TEMPLATE, ChatTemplate
from disco_daemon.tools.detect import TemplateTools, detect
from disco_daemon.tools.format import Tool
from disco_daemon.tools.formats import GENERIC

FOLDER = Path(__file__).parents[2] / "fixtures" / "templates" / "tools"
FOUND = {
    "HuggingFaceTB-SmolLM3-3B": "generic",  # this one, by Unsloth, shows no tools
    "LFM2-8B-A1B": "lfm2",
    "LFM2.5-8B-A1B": "lfm2",
    "LFM2.5-Instruct": "lfm2",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral-id",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3-coder",
    "Qwen3.5-4B": "qwen3-coder",
    "deepseek-ai-DeepSeek-V3.1": "framed",  # it writes calls, and shows no tools
    "google-gemma-2-2b-it": "generic",
    "google-gemma-4-31B-it": "gemma",
    "meta-llama-Llama-3.1-8B-Instruct": "llama-3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama-3",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral-list",
    "openai-gpt-oss-120b": "gpt-oss",
}
WRITE_NO_CALLS = {"LFM2-8B-A1B", "LFM2.5-Instruct"}
SHOW_NO_TOOLS = {"deepseek-ai-DeepSeek-V3.1"}
PROBE = Tool("probe", "A probe.", {"type": "object"})


def found_in(source: str) -> TemplateTools:
    template = ChatTemplate(source, "<s>", "</s>")

    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        return template.render(messages, {} if tools is None else {"tools": tools})

    return detect(render)


def source_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text("utf-8")


def test_every_template_here_is_in_the_table() -> None:
    assert set(FOUND) == {path.stem for path in FOLDER.glob("*.jinja")}


@pytest.mark.parametrize("name", FOUND)
def test_the_format_of_a_models_template_is_found(name: str) -> None:
    found = found_in(source_of(name))
    assert found.format.name == FOUND[name]
    is_known = found.format is not GENERIC
    assert found.shows_tools is (is_known and name not in SHOW_NO_TOOLS)
    told = found.format.instructions([PROBE])
    assert bool(told) is not found.shows_tools, "what the model is told of tools has to be of its format"
    assert '"name": "probe"' in told or not told
    assert found.writes_calls is (is_known and name not in WRITE_NO_CALLS)
    assert found.writes_results or not is_known


# What Google's documentation shows of FunctionGemma's prompts; its own template is under Gemma's terms, and not here.
FUNCTION_GEMMA = """{{ bos_token }}{% if tools %}<start_of_turn>developer
{% for t in tools %}<start_function_declaration>declaration:{{ t.function.name }}{description:<escape>
{{- t.function.description }}<escape>}<end_function_declaration>{% endfor %}<end_of_turn>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<start_function_response>response:{{ m.name }}{value:<escape>
{{- m.content }}<escape>}<end_function_response>{% else %}<start_of_turn>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls %}<start_function_call>call:{{ c.function.name }}{
{%- for k, v in c.function.arguments.items() %}{{ ',' if not loop.first }}{{ k }}:
{%- if v is string %}<escape>{{ v }}<escape>{% else %}{{ v | tojson }}{% endif %}{% endfor -%}
}<end_function_call>{% endfor %}{{ '<start_function_response>' if m.tool_calls else '<end_of_turn>\n' }}
{%- endif %}{% endfor %}"""


def test_function_gemmas_calls_are_found_by_the_documented_prompt() -> None:
    found = found_in(FUNCTION_GEMMA)
    assert found.format.name == "function-gemma"
    assert (found.shows_tools, found.writes_calls, found.writes_results) == (True, True, True)


def test_a_models_name_says_nothing() -> None:
    for name, word in (("Qwen3-Coder", "Qwen"), ("meta-llama-Llama-3.2-3B-Instruct", "Llama")):
        assert found_in(source_of(name).replace(word, "Model")).format.name == FOUND[name]
    mark = source_of("Qwen-Qwen2.5-7B-Instruct").replace("tool_call>", "call>")
    assert found_in(mark).format.name == "framed", "with other marks it is another format, which is read off it"
    assert found_in(mark).format.opening == ("<call>",)


@pytest.mark.parametrize(
    "source",
    [
        PLAIN_TEMPLATE,
        "",
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson if tools }}",
        "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls else m.content }}{% endfor %}{{ tools }}",
        "{{ messages[99].content }}",
    ],
)
def test_a_template_that_writes_calls_as_nobody_does_has_the_generic_format(source: str) -> None:
    assert found_in(source).format is GENERIC
    assert not found_in(source).shows_tools
