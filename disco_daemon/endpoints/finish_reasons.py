"""Why an answer ended, as servers say it, and what that means. Pure.

An end that is not in the table is no end: a new word of a server may mean that it was cut, and half an answer is never
given out as a whole one. Ends that say so themselves are in no table either, but for the words in `CUTS`, which tell
the reader what happened. Where each provider tells its words (Gemini's, Mistral's, watsonx's and OpenRouter's page were
looked at on 2026-11-28):

- OpenAI, Azure, Groq, Fireworks, xAI, llama-server: platform.openai.com/docs/api-reference/chat-streaming
- Anthropic, and gateways that pass its words on: docs.anthropic.com/en/api/handling-stop-reasons
- Gemini, Vertex: ai.google.dev/api/generate-content#FinishReason
- Mistral: the enum FinishReason of docs.mistral.ai/api (docs.rs/crate/mistral-openapi-client)
- DeepSeek: api-docs.deepseek.com/api/create-chat-completion
- GLM (Zhipu, Z.ai): docs.z.ai/api-reference/llm/chat-completion
- Cohere: docs.cohere.com/reference/chat
- Bedrock: docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_Converse.html#stopReason
- watsonx: ibm.github.io/watsonx-ai-node-sdk, TextChatResultChoice.FinishReason, and TextGenResult.StopReason
- vLLM: vllm/v1/engine/__init__.py FinishReason; SGLang: sglang/srt/managers/schedule_batch.py FINISH_*
- Ollama: ollama/llm/server.go DoneReason; TGI, Together: huggingface/text-generation-inference FinishReason
- OpenRouter: openrouter.ai/docs/api-reference/overview#finish-reason
"""

from __future__ import annotations

from ..types import FinishReason

_STOP, _LENGTH, _CALLS = FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS
_FILTER = FinishReason.CONTENT_FILTER

REPEATED = "repetition"  # a server has stopped an answer that said the same again and again

# By the word as servers write it, in small letters and without a prefix of its enum; whose word it is, behind it.
ENDS: dict[str, FinishReason] = {
    "stop": _STOP,  # OpenAI, Gemini (as STOP), Ollama, vLLM, SGLang
    "end_turn": _STOP,  # Anthropic, Bedrock
    "stop_sequence": _STOP,  # Anthropic, Bedrock, Cohere (as STOP_SEQUENCE), TGI, watsonx
    "complete": _STOP,  # Cohere (as COMPLETE)
    "completed": _STOP,  # gateways in front of the Responses API
    "eos": _STOP,  # Together, Nebius
    "eos_token": _STOP,  # TGI, watsonx
    "length": _LENGTH,  # OpenAI, Ollama, vLLM, SGLang, TGI
    "max_tokens": _LENGTH,  # Anthropic, Bedrock, Gemini, Cohere, watsonx
    "max_output_tokens": _LENGTH,  # gateways in front of the Responses API
    "max_length": _LENGTH,  # older gateways of Hugging Face's models
    "token_limit": _LENGTH,  # watsonx
    "model_length": _LENGTH,  # Mistral: the context is full
    "model_context_window_exceeded": _LENGTH,  # Anthropic, Bedrock; GLM
    REPEATED: _LENGTH,  # vLLM, where it is asked to: as this program ends an answer itself
    "tool_calls": _CALLS,  # OpenAI
    "tool_call": _CALLS,  # Cohere (as TOOL_CALL)
    "tool_use": _CALLS,  # Anthropic, Bedrock
    "function_call": FinishReason.FUNCTION_CALL,  # OpenAI, before tools
    "content_filter": _FILTER,  # OpenAI, Azure, DeepSeek
    "content_filtered": _FILTER,  # Bedrock
    "guardrail_intervened": _FILTER,  # Bedrock
    "refusal": _FILTER,  # Anthropic
    "sensitive": _FILTER,  # GLM
    "safety": _FILTER,  # Gemini
    "recitation": _FILTER,  # Gemini
    "blocklist": _FILTER,  # Gemini
    "prohibited_content": _FILTER,  # Gemini
    "spii": _FILTER,  # Gemini
    "image_safety": _FILTER,  # Gemini
    "error_toxic": _FILTER,  # Cohere (as ERROR_TOXIC)
}

# Ends that are failures of the server by its own word, and what they say.
CUTS: dict[str, str] = {
    "insufficient_system_resource": "it had no room to go on",  # DeepSeek
    "network_error": "it failed inside",  # GLM
    "error": "it failed",  # Mistral, OpenRouter, Cohere, watsonx, vLLM
    "error_limit": "its context was full",  # Cohere, at Oracle
    "timeout": "it ran out of time",  # Cohere
    "time_limit": "it ran out of time",  # watsonx
    "abort": "it gave the answer up",  # vLLM, SGLang
    "cancelled": "it gave the answer up",  # watsonx
    "user_cancel": "it gave the answer up",  # Cohere
    "load": "it loaded its model and said nothing",  # Ollama
    "unload": "it unloaded its model",  # Ollama
    "not_finished": "it was not done",  # watsonx
    "pause_turn": "it paused",  # Anthropic: to be asked to go on
    "language": "it does not know the language",  # Gemini
    "other": "it does not say why",  # Gemini
    "unspecified": "it does not say why",  # Gemini
    "malformed_function_call": "it wrote a call that is none",  # Gemini, Bedrock as malformed_tool_use
    "malformed_tool_use": "it wrote a call that is none",  # Bedrock
    "malformed_model_output": "it wrote what is no answer",  # Bedrock
    "unexpected_tool_call": "it called a tool that it was not given",  # Gemini
}

MAX_WORD = 32  # characters of a reason that are told; the longest known has 29
_NONE = ("", "null", "none", "undefined")  # words for no reason, as some gateways write it
_PREFIXES = ("finishreason.", "finish_reason_")  # of an enum's members in Python, and in protocol buffers


def word(told: object) -> str:
    """Return a server's reason as the table has it; "" for none. What is no text is a word that nobody knows."""
    if told is None:
        return ""
    text = told.strip().lower().replace("-", "_") if isinstance(told, str) else type(told).__name__
    for prefix in _PREFIXES:
        text = text.removeprefix(prefix)
    return "" if text in _NONE else text[:MAX_WORD]


def failed(reason: str) -> str:
    """Return what to say of a reason that is no end."""
    return CUTS.get(reason, "which is no end that is known")
