"""What becomes of each field of a request, at the device and at a server: one table. Pure.

Code, tests and docs/reference/api.md are made of it. A field that is not in it may mean anything: it goes to a server,
and as long as one can take the request, the device is not asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .capabilities import Capability

Json = Mapping[str, Any]


class Treatment(StrEnum):
    """What an endpoint makes of a field."""

    HONOURED = "honoured"
    PASSED_ON = "passed on"
    HARMLESS = "harmless here"  # it changes nothing of an answer by this endpoint
    REFUSED = "refused"  # a request with it is not for this endpoint
    FORM = "refused: a form that it cannot keep"
    AWAY = "keeps it away"  # a server is asked; where none can be, it is answered without, and the field is named
    IGNORED = "ignored, and named"  # disco does not do it, nor may the client have a server do it


_H, _N, _R, _F, _A, _I = (
    Treatment.HONOURED,
    Treatment.HARMLESS,
    Treatment.REFUSED,
    Treatment.FORM,
    Treatment.AWAY,
    Treatment.IGNORED,
)


@dataclass(frozen=True, slots=True)
class Field:
    """One field: what becomes of it at each endpoint.

    `own`: this daemon reads it, and puts it into the server's request itself. `draws`: it says how tokens are drawn, so
    it belongs to a raw continuation as well. `renders`: it is for the chat template. `stays`: an answer under it is
    never continued by the other side. `ids`: it has token ids, which mean something else in another vocabulary.
    `nothing` are values that ask for nothing, as null always does. `capability` is what an endpoint has to have to take
    it (`types.wanted`). `note` is for the documents.
    """

    name: str
    device: Treatment
    server: Treatment = Treatment.PASSED_ON
    own: bool = False
    draws: bool = False
    renders: bool = False
    stays: bool = False
    ids: bool = False
    nothing: tuple[Any, ...] = ()
    capability: Capability | None = None
    note: str = ""

    def asks(self, value: Any) -> bool:
        """Whether a value asks for something."""
        return value is not None and not any(type(value) is type(none) and value == none for none in self.nothing)

    @property
    def binds(self) -> bool:
        """Whether an answer under it is not plain text that either side may go on with."""
        return self.stays or self.device in (Treatment.REFUSED, Treatment.FORM)


def _all(names: str, device: Treatment, server: Treatment = Treatment.PASSED_ON, **more: Any) -> tuple[Field, ...]:
    return tuple(Field(name, device, server, **more) for name in names.split())


_OFF = (False, "")
_WHOSE = "ids of the vocabulary of the model that answers: a server's, if one can be asked"
_TABLE = (
    # Read by this daemon itself.
    *_all("model messages prompt", _H, own=True),
    *_all("stream stream_options return_token_ids continue_final_message", _H, _H, own=True),
    *_all("max_tokens max_completion_tokens", _H, own=True, nothing=(-1,), note="-1: no limit"),
    *_all("temperature top_p seed stop frequency_penalty presence_penalty", _H, own=True),
    Field("disco", _H, _H, own=True, note="stays here"),
    Field("add_generation_prompt", _R, nothing=(True,), note="honoured with `continue_final_message`"),
    # How tokens are drawn.
    *_all("top_k min_p", _H, draws=True),
    *_all("typical_p typ_p", _H, draws=True, note="one and the same"),
    Field("repeat_penalty", _H, draws=True, note="over the last `repeat_last_n` tokens (64), the prompt's too"),
    Field("repetition_penalty", _H, draws=True, note="the same over all tokens, unless there is `repeat_last_n`"),
    Field("repeat_last_n", _H, draws=True, note="-1: all; holds for the other two penalties, too"),
    *_all("xtc_probability xtc_threshold", _H, draws=True),
    *_all("dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers", _H, draws=True),
    Field(
        "mirostat", _H, draws=True, stays=True, nothing=(0,),
        note="in place of `top_k`, `top_p`, `min_p`, `typical_p` and `xtc_*`, as in llama.cpp; a device over two "
        "machines refuses it",
    ),
    *_all("mirostat_tau mirostat_eta", _H, draws=True),
    Field("min_tokens", _H, draws=True, nothing=(0,), note="not with a form; a `stop` text still ends the answer"),
    Field("ignore_eos", _H, draws=True, nothing=(False,), note="not with a form"),
    Field("stop_token_ids", _H, draws=True, stays=True, ids=True, nothing=([],), note=_WHOSE),
    Field("logit_bias", _H, draws=True, stays=True, ids=True, nothing=({},), note=_WHOSE),
    Field(
        "n_indent", _H, draws=True, stays=True, nothing=(0,),
        note="the answer ends at a line that is indented less; not beside tools",
    ),
    Field(
        "t_max_predict_ms", _H, draws=True, stays=True, nothing=(0, -1),
        note="ms from the first token on; then the answer ends with its line",
    ),
    # The form of the answer.
    Field(
        "response_format", _H, stays=True, nothing=({"type": "text"},), capability=Capability.JSON_SCHEMA,
        note="`json_object`, perhaps with `schema`, `json_schema`; what contains itself nests up to 24 levels",
    ),
    *_all("json_schema guided_json", _H, stays=True, capability=Capability.JSON_SCHEMA),
    Field("guided_choice", _H, stays=True),
    Field(
        "structured_outputs", _H, stays=True, capability=Capability.JSON_SCHEMA,
        note="`json`, `json_object` and `choice`; the device refuses others",
    ),
    *_all("grammar regex ebnf structural_tag guided_regex guided_grammar", _F, nothing=_OFF),
    *_all("bad_words allowed_token_ids", _F, draws=True, nothing=([],)),
    *_all("guided_decoding_backend guided_whitespace_pattern", _N),
    # Thinking.
    *_all("chat_template_kwargs reasoning_effort enable_thinking", _H, renders=True),
    Field("think", _H, _N, renders=True, note="Ollama's word, which servers of OpenAI's API do not know"),
    Field("reasoning", _H, renders=True, note="`effort`, `enabled`, `max_tokens`; other keys keep the device away"),
    Field("thinking", _H, renders=True, note="`type`, `budget_tokens`; other keys keep the device away"),
    *_all(
        "thinking_budget_tokens reasoning_budget_tokens thinking_token_budget thinking_budget", _H, renders=True,
        nothing=(-1,), note="tokens, behind which a thought is closed; `disco.thinking_tokens` goes to no server",
    ),
    # How many answers, and what is told of the tokens.
    Field(
        "n", _H, draws=True, stays=True, nothing=(1,), capability=Capability.N,
        note="up to 8; not for an answer that the client has begun; a device over two machines refuses it, unless it "
        "has the whole model too",
    ),
    Field(
        "logprobs", _H, stays=True, nothing=(False,), capability=Capability.LOGPROBS,
        note="of the model's own distribution, before anything that draws tokens by it; a device over two machines: "
        "as `n`",
    ),
    Field(
        "top_logprobs", _H, stays=True, nothing=(0,), capability=Capability.LOGPROBS,
        note="with `logprobs`; up to 20",
    ),
    # Tools; the device refuses some: docs/reference/tools.md.
    Field(
        "tools", _H, renders=True, stays=True, nothing=([],), capability=Capability.TOOLS,
        note='functions; harmless with `tool_choice: "none"`',
    ),
    Field(
        "tool_choice", _H, renders=True, stays=True, nothing=("none", "auto"), capability=Capability.FORCED_TOOLS,
        note="also `required`, one function, `allowed_tools`; the device refuses others",
    ),
    Field("parallel_tool_calls", _H, renders=True, nothing=(True,)),
    # What the device cannot do.
    Field("functions", _R, nothing=([],), capability=Capability.TOOLS, note='harmless with `function_call: "none"`'),
    Field("function_call", _R, nothing=("none", "auto"), capability=Capability.FORCED_TOOLS),
    Field("prompt_logprobs", _R, nothing=(False,)),
    Field("modalities", _R, nothing=(["text"], [])),
    *_all("audio web_search_options", _R, nothing=(False,)),
    Field("echo", _R, nothing=_OFF),
    Field(
        "suffix", _R, nothing=_OFF, capability=Capability.FIM,
        note="of a chat; what stands in front of it is asked for by text completions and `/infill`",
    ),
    Field("best_of", _R, nothing=(1,)),
    # What changes nothing of a device's answer.
    *_all(
        "metadata store service_tier prompt_cache_key prompt_cache_retention prompt_cache_options "
        "safety_identifier prediction cache_prompt id_slot t_max_prompt_ms timings_per_token return_progress "
        "provider models route transforms usage request_id keep_alive", _N,
    ),
    *_all("user priority", _N, draws=True),
    # What would change it, and is unknown to the device.
    Field("top_n_sigma", _A, draws=True, nothing=(-1, -1.0)),
    *_all("top_a dynatemp_range length_penalty", _A, draws=True, nothing=(0, 0.0)),
    *_all("dynatemp_exponent samplers", _A, draws=True),
    *_all("skip_special_tokens spaces_between_special_tokens", _A, draws=True, nothing=(True,)),
    *_all("include_stop_str_in_output use_beam_search", _A, draws=True, nothing=(False,)),
    *_all("verbosity n_predict documents search_parameters plugins data_sources", _A),
    Field("include_reasoning", _A, nothing=(True,)),
    # By these a proxy (LiteLLM, and what is built on it) lets a client say whom to ask, as whom, and how: they would
    # take our key, or the prompt, somewhere else. What the user has configured is not the client's to change.
    *_all(
        "api_key api_base base_url api_version api_type organization project deployment_id model_list fallbacks "
        "context_window_fallback_dict custom_llm_provider region_name user_config credentials proxy_server_request "
        "callbacks success_callback failure_callback logger_fn input_callback client http_client proxy proxies "
        "ssl_verify verify headers default_headers extra_headers default_query extra_query extra_body timeout "
        "request_timeout stream_timeout max_retries num_retries authorization access_token auth slack_webhook "
        "webhook_url gcs_bucket_name s3_bucket_name", _I, _I,
    ),
)  # fmt: skip

FIELDS = {field.name: field for field in _TABLE}
WITHHELD_PREFIXES = (
    "aws_", "azure_", "vertex_", "watsonx_", "litellm_", "langfuse_", "langsmith_", "mock_", "x_api_",
)  # fmt: skip
FORM_PREFIX = "guided_"  # the forms of older vLLMs begin so

# Of these objects the keys that the device reads; and what others are.
_READ = {
    "reasoning": (frozenset({"effort", "enabled", "max_tokens"}), Treatment.AWAY),
    "thinking": (frozenset({"type", "budget_tokens"}), Treatment.AWAY),
    "structured_outputs": (frozenset({"json", "json_object", "choice"}), Treatment.FORM),
}


def field_of(name: str) -> Field:
    """Return the row of a field, also of one that the table does not have."""
    if (found := FIELDS.get(name)) is not None:
        return found
    plain = name.casefold().replace("-", "_")
    known = FIELDS.get(plain)
    if plain.startswith(WITHHELD_PREFIXES) or (known is not None and known.server is Treatment.IGNORED):
        return Field(name, Treatment.IGNORED, Treatment.IGNORED)
    if name.startswith(FORM_PREFIX):
        return Field(name, Treatment.FORM, nothing=_OFF)
    return Field(name, Treatment.AWAY)


def asked(parameters: Json) -> Iterator[Field]:
    """Yield the row of each field that asks for something, and of some objects those of their keys, dotted.

    Tools that may not be called, and how to call none, ask for nothing.
    """
    for name, value in parameters.items():
        row = field_of(name)
        if row.asks(value) and not _calls_nothing(name, parameters):
            yield row
            if name in _READ and isinstance(value, Mapping):
                read, cell = _READ[name]
                yield from (Field(f"{name}.{key}", cell) for key in value if key not in read and value[key] is not None)


def _calls_nothing(name: str, parameters: Json) -> bool:
    """Whether a field tells of tools that are not to be called."""
    return (name == "tools" and parameters.get("tool_choice") == "none") or (
        name == "functions" and parameters.get("function_call") == "none"
    )
