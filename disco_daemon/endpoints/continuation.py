"""The ways to ask a server to continue an answer that another endpoint began.

There is no standard for it. Each method is a body and a path; which of them a server knows, `probe` finds out.
Pure: values in, values out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ..continuations import METHODS, RAW_METHODS
from ..system.net import without_credentials
from ..types import Continuation, GenerationRequest, Json, Treatment, field_of
from .base import Resumption

CHAT = "/chat/completions"
COMPLETIONS = "/completions"

UNPROBED = "continue_final_message"  # what an unknown server is asked with until it is probed, checked at the seam
RAW_DEFAULT = 16  # tokens of a raw completion without a limit, as OpenAI defines it
OVERLAP_WORDS = 8  # words of the answer that an instructed server repeats, so that the seam finds the place

_EXACT, _GUARDED, _NONE = Continuation.EXACT, Continuation.GUARDED, Continuation.NONE
_KNOWN_HOSTS: Mapping[str, tuple[str, Continuation]] = {
    "openai.com": ("none", _NONE),
    "anthropic.com": ("none", _NONE),
    "openai.azure.com": ("none", _NONE),
    "deepseek.com": ("prefix", _EXACT),  # under /beta only
    "mistral.ai": ("prefix", _GUARDED),  # says the prefix again before it goes on
    "openrouter.ai": ("assistant", _GUARDED),  # as the model behind it does
}


def _travels(name: str) -> bool:
    """Whether a parameter of the client's is for the server, however it is spelled."""
    return field_of(name).server is Treatment.PASSED_ON


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one method: `exact`, `echoes`, `restarts`, `differs`, `refused`, `failed` or `untried`."""

    result: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """The result of probing one server. `probed_at` in Unix time, s; `tokens` is what the probe processed there.

    `method` is the best one that works, `fallback` the best one that needs no tokenizer of ours; both may be `none`.
    `vocab`: token ids of the device's model mean the same there.
    """

    server: str
    probed_at: float
    method: str
    fallback: str
    vocab: bool
    tokens: int
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)

    @property
    def trust(self) -> Continuation:
        """A method that echoes is good behind the guard of the seam; one guarded way makes all of them so."""
        used = {self.verdicts[m].result for m in (self.method, self.fallback) if m in self.verdicts}
        if not used:
            return _NONE
        return _EXACT if used == {"exact"} else _GUARDED

    @property
    def complete(self) -> bool:
        """Whether every better method was tried; token ids need a device that has loaded its model."""
        return all(verdict.result != "untried" for verdict in self.verdicts.values())

    def to_json(self) -> dict[str, Any]:
        """For the store; `from_json` reads it."""
        return asdict(self) | {"verdicts": {name: asdict(verdict) for name, verdict in self.verdicts.items()}}

    @staticmethod
    def from_json(state: Json) -> Profile:
        """Raises ValueError for what is no profile, or one of methods that this version does not know."""
        try:
            verdicts = {str(k): Verdict(str(v["result"]), str(v["note"])) for k, v in state["verdicts"].items()}
            profile = Profile(
                str(state["server"]), float(state["probed_at"]), state["method"], state["fallback"],
                bool(state["vocab"]), int(state["tokens"]), verdicts,
            )  # fmt: skip
            known = {profile.method, profile.fallback} <= {*verdicts, "none"} and {*verdicts} <= {*METHODS}
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"this is no profile: {e!r}") from e
        if not known:
            raise ValueError(f"this profile names unknown methods: {profile.method}, {profile.fallback}")
        return profile


@dataclass(frozen=True, slots=True)
class Way:
    """How one server is asked to continue: `method`, and `fallback` where ours cannot give what `method` needs."""

    method: str
    fallback: str
    trust: Continuation
    vocab: bool = False
    known: bool = True  # by the user, the host's name or a probe; else it is worth a probe

    @staticmethod
    def from_setting(setting: str, base_url: str) -> Way:
        """The user is believed; `auto` knows some hosts, and tries the common way elsewhere."""
        if setting != "auto":
            trust = {"none": _NONE, "instruct": _GUARDED}.get(setting, _EXACT)
            fallback = "none" if setting in RAW_METHODS else setting
            return Way(setting, fallback, trust, vocab=setting == "token_ids")
        host = urlsplit(base_url).hostname or ""
        if host.endswith("deepseek.com") and "beta" not in urlsplit(base_url).path:
            return Way("none", "none", _NONE)
        for known, (method, trust) in _KNOWN_HOSTS.items():
            if host == known or host.endswith("." + known):
                return Way(method, method, trust)
        return Way(UNPROBED, UNPROBED, Continuation.UNTRIED, known=False)

    @staticmethod
    def of(profile: Profile) -> Way:
        """The result of a probe."""
        return Way(profile.method, profile.fallback, profile.trust, profile.vocab)


def profile_name(base_url: str, model: str) -> str:
    """Return the key of a server's profile: address and model, no credentials."""
    return f"{without_credentials(base_url)} {model}"


def resumption(way: Way, *, is_tried: bool) -> Resumption:
    """Return how sure it is that a server goes on exactly this way; `is_tried`: by a probe, or the user's word."""
    if not is_tried or way.trust is not Continuation.EXACT:
        return Resumption.UNSURE
    return Resumption.HELPED if way.fallback == "none" else Resumption.ALONE


def known_resumption(setting: str, base_url: str, profile: Profile | None) -> Resumption:
    """Return the same by the setting of a server, and by what a probe has found where that leaves it open."""
    if setting == "auto" and profile is not None:
        return resumption(Way.of(profile), is_tried=True)
    return resumption(Way.from_setting(setting, base_url), is_tried=setting != "auto")


@dataclass(frozen=True, slots=True)
class Ask:
    """One HTTP request to a server, but for its model and `stream`."""

    path: str
    body: dict[str, Any]

    @property
    def unlimited(self) -> bool:
        """Whether a raw completion was asked to have no limit: some take that for their default all the same."""
        return self.path == COMPLETIONS and self.body["max_tokens"] is None


def chat(request: GenerationRequest, method: str, *, ids_back: bool = False) -> Ask:
    """Ask with chat messages; `method` is one of CHAT_METHODS or `instruct` if there is an answer to go on with."""
    s = request.sampling
    body = _sampling(request) | {name: value for name, value in request.extra.items() if _travels(name)}
    if s.max_tokens is not None:
        body[request.max_tokens_key] = s.max_tokens
    messages = [dict(m) for m in request.messages]
    if request.answer_so_far:
        more, parameters = _partial(request.answer_so_far, method)
        messages += more
        body |= parameters
    if ids_back:
        body["return_token_ids"] = True
    return Ask(CHAT, body | {"messages": messages})


def completion(request: GenerationRequest, prompt: str | tuple[int, ...], *, ids_back: bool = False) -> Ask:
    """Ask for what follows `prompt`: the rendered prompt and the answer so far, as text or as token ids.

    Of the client's fields it has those that say how tokens are drawn; the others are about messages.
    """
    body = _sampling(request) | {k: v for k, v in request.extra.items() if _travels(k) and field_of(k).draws}
    # Absent it would be RAW_DEFAULT; null means no limit to vLLM, llama-server and llama-cpp-python.
    body["max_tokens"] = request.sampling.max_tokens
    if ids_back:
        body["return_token_ids"] = True
    return Ask(COMPLETIONS, body | {"prompt": prompt if isinstance(prompt, str) else list(prompt)})


def _sampling(request: GenerationRequest) -> dict[str, Any]:
    s = request.sampling
    every = {
        "temperature": s.temperature, "top_p": s.top_p, "seed": s.seed,
        "stop": [text for text in s.stop if text] or None,
        "frequency_penalty": s.frequency_penalty, "presence_penalty": s.presence_penalty,
    }  # fmt: skip
    return {k: v for k, v in every.items() if v is not None}


def _partial(answer: str, method: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages and parameters that say "go on with this". Raises ValueError for a method without messages."""
    partial: dict[str, Any] = {"role": "assistant", "content": answer}
    match method:
        case "continue_final_message":
            return [partial], {"continue_final_message": True, "add_generation_prompt": False}
        case "prefix":
            return [partial | {"prefix": True}], {}
        case "assistant":
            return [partial], {}
        case "instruct":
            return [partial, {"role": "user", "content": INSTRUCTION.format(last_words(answer).strip())}], {}
    raise ValueError(f"{method} continues no chat")


INSTRUCTION = (
    "Your last message was cut off. Continue it exactly where it stopped, in the same language, style and format. "
    "Begin by repeating its last words, which are given between the marks, and go straight on from them. Do not start "
    "again, do not apologise, and add no comment.\n<<<{}>>>"
)


def last_words(answer: str) -> str:
    """The suffix of the answer with its last OVERLAP_WORDS words, from the first of them on; "" if it has none."""
    words = list(re.finditer(r"\S+", answer))
    return answer[words[-OVERLAP_WORDS:][0].start() :] if words else ""
