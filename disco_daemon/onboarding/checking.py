"""Checks a server with a key and a model: one list of models, at most one answer; blocking, for a thread.

The answer is asked for again where the server refuses the limit by its name.

A list alone proves nothing: some servers give it without a key. The key is in no result, message or `repr`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from ..endpoints.refusal_reason import reason_of_refusal
from ..endpoints.refused import LIMITS, refused_limit
from ..money.catalog import Catalog, ServerProfile, is_private
from ..plain import masked, one_line, plain, tells
from ..system.net import hostname, is_http_url, is_loopback, is_plain
from .asking import Reply, Said, ask_answer, ask_models, goes_nowhere_public

N_NEAR = 3  # names like the one asked for, in a hint
MAX_TEXT = 200  # characters of a server's text on an error
MAX_SAID = 4096  # characters of that text that are looked at
MAX_KEY = 4096  # characters; the longest known, those with claims inside, have about 1,500
MAX_NAME = 512  # characters of a model's name, and of an address
MAX_MODELS = 5000  # of a list; the longest we know of has a few hundred
_PAGES = ("/completions", "/models", "/responses")
_PORTS = {"http": 80, "https": 443}
# Models that answer no chat; they stand last in the list.
_NO_CHAT = ("embed", "whisper", "tts", "dall-e", "moderation", "transcribe", "image", "rerank", "realtime", "audio")


class Trouble(StrEnum):
    """The kind of a problem, by what has to be changed."""

    ADDRESS = "address"
    KEY = "key"
    CREDIT = "credit"
    MODEL = "model"
    NETWORK = "network"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    SERVER = "server"
    PRIVATE = "private"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem, and its mend."""

    code: Trouble
    text: str
    mend: str


@dataclass(frozen=True, slots=True)
class Cost:
    """A model's price, $ per million tokens. If not `known` it is the dearest one, and `mend` says where to put it."""

    input: float
    output: float
    known: bool
    source: str = ""
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check. `models`, best first, None if the server gives no list. `ttft_s` of the answer, s."""

    base_url: str
    model: str = ""
    models: tuple[str, ...] | None = None
    ttft_s: float | None = None
    price: Cost | None = None
    problem: Problem | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON, for the API and `disco setup --json`."""
        price, problem = self.price, self.problem
        return {
            "ok": problem is None,
            "base_url": self.base_url,
            "model": self.model,
            "models": None if self.models is None else list(self.models),
            "ttft_s": None if self.ttft_s is None else round(self.ttft_s, 3),
            "price": None if price is None else {
                "known": price.known, "input_usd_per_mtok": price.input, "output_usd_per_mtok": price.output,
                "source": price.source, "mend": price.mend,
            },
            "problem": None if problem is None else {
                "code": str(problem.code), "text": problem.text, "mend": problem.mend,
            },
            "notes": list(self.notes),
        }  # fmt: skip

    def sentences(self) -> list[str]:
        """Return what was found, in sentences."""
        lines = list(self.notes)
        if self.problem is not None:
            lines.append(f"{self.problem.text}: {self.problem.mend}.")
        if self.ttft_s is not None:
            lines.append(f"{self.model} at {self.base_url} answered after {self.ttft_s:.2f} s.")
        if (price := self.price) is not None:
            dollars = f"${price.input:g} and ${price.output:g} per million input and output tokens"
            if price.known and not (price.input or price.output):
                lines.append("It bills nothing per token.")
            elif price.known:
                lines.append(f"It charges {dollars} ({price.source}).")
            else:
                lines.append(f"What it charges is not known: it counts as {dollars} until you put into {price.mend}")
        return lines


NOBODY_ASKED = Problem(
    Trouble.PRIVATE,
    "nobody is asked anything while policy.private is on",
    "`disco config set policy.private false` turns it off; `disco setup --no-test` saves a server untested",
)


def check(
    base_url: str,
    api_key: str,
    model: str,
    catalog: Catalog,
    *,
    prices: str = "own.toml",
    own_port: int | None = None,
    insecure: bool = False,
    private: Callable[[], bool] = bool,
) -> Checked:
    """Ask for the models, and with a `model` for one short answer, which may cost some hundredths of a cent.

    `prices` is the file for the user's own prices; `own_port` the daemon's, which cannot be its own server. `insecure`:
    the key may go to any host by plain http. `private` says before each request whether nothing may leave this machine.
    """
    checked = Checked(base_url, model)
    problem = address_problem(base_url, own_port) or key_problem(api_key)
    if problem is None and private():
        problem = NOBODY_ASKED
    if problem is None and api_key and not insecure:
        problem = clear_problem(base_url)
    if problem is not None:
        return replace(checked, problem=problem)
    checked = replace(checked, notes=tuple(_notes(base_url, api_key)))
    reply = ask_models(base_url, api_key)
    checked = replace(checked, models=_order(reply, catalog.server(base_url), api_key))
    problem = _of_list(reply, api_key, with_model=bool(model))
    if problem is not None:
        return replace(checked, problem=problem)
    if not model:
        return checked if checked.models else replace(checked, notes=(*checked.notes, _no_list(reply)))
    profile = catalog.server(base_url)
    limit = "max_completion_tokens" if profile is not None and profile.name == "openai" else "max_tokens"
    for name in (limit, LIMITS[limit]):
        if private():
            return replace(checked, problem=NOBODY_ASKED)
        said = ask_answer(base_url, api_key, model, limit=name)
        if refused_limit(said.status, said.document, (name,)) is None:
            break
    problem = _of_answer(said, checked, api_key)
    if problem is not None:
        return replace(checked, problem=problem)
    return replace(checked, ttft_s=said.ttft_s, price=cost(catalog, base_url, model, prices))


def cost(catalog: Catalog, base_url: str, model: str, prices: str) -> Cost:
    """Return a model's price at a server, and where to put it if it is not known."""
    found = catalog.price(base_url, model)
    advice = catalog.advice(base_url, model, prices) or ""
    day = f", {found.as_of}" if found.as_of else ""
    return Cost(found.input, found.output, found.known, f"{found.entry}{day}", advice.partition(". Put into ")[2])


# --- before anything is asked -----------------------------------------------------------------------------------------


def address_problem(url: str, own_port: int | None = None) -> Problem | None:
    """Return the problem of an address by its text alone, None if there is none."""
    if not is_http_url(url) or len(url) > MAX_NAME or not url.isprintable():
        return _wrong_address("that is no address", "write it like https://api.openai.com/v1")
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        return _wrong_address("the address holds more than an address", "leave out user, password and what follows a ?")
    if parts.path.rstrip("/").endswith(_PAGES):
        return _wrong_address("that is one of the server's pages", "end the address before it, mostly with /v1")
    if own_port is not None and is_loopback(parts.hostname or "") and (parts.port or _PORTS[parts.scheme]) == own_port:
        return _wrong_address("that is this daemon itself", "give the address of another server")
    return None


def _wrong_address(text: str, mend: str) -> Problem:
    return Problem(Trouble.ADDRESS, text, mend)


def key_problem(key: str) -> Problem | None:
    """Return the problem of a key by its text alone, None if there is none."""
    if key == "" or (len(key) <= MAX_KEY and key.isascii() and key.isprintable() and not any(map(str.isspace, key))):
        return None
    return Problem(Trouble.KEY, "the key has white space or odd characters in it", "copy it once more, all of it")


def clear_problem(url: str) -> Problem | None:
    """Return why a key may not be sent: by plain http it goes to private addresses only. Looks the name up."""
    if not is_plain(url) or goes_nowhere_public(url):
        return None
    mend = "use https if the server has it, or `disco config set server.insecure true` first if you own the way there"
    return Problem(Trouble.ADDRESS, "the key would go through public networks in the clear", mend)


def _notes(url: str, key: str) -> Iterable[str]:
    if urlsplit(url).scheme == "http" and not is_private(hostname(url)):
        yield "Whoever is on the way can read key and prompts: use https if the server has it."
    if not key and not is_private(hostname(url)):
        yield "No key is given."


# --- what it answered -------------------------------------------------------------------------------------------------


def _of_list(reply: Reply, key: str, *, with_model: bool) -> Problem | None:
    """Return the problem that ends the check at the list; a missing list alone is none."""
    if reply.problem:
        mend = "check the address, and the network"
        return Problem(Trouble.TIMEOUT if reply.late else Trouble.NETWORK, _line(reply.problem, key), mend)
    if reply.status == 401 or (reply.status == 403 and not (with_model or key)):
        return _wrong_key(reply.status, with_key=bool(key))
    if reply.status == 403 and not with_model:
        return _not_allowed(" (403)")
    if 300 <= reply.status < 400:
        return _elsewhere(reply.status, _line(reply.elsewhere, key))
    return None


def _no_list(reply: Reply) -> str:
    said = "an empty one" if reply.models is not None else f"HTTP {reply.status}"
    return f"It gives no list of models ({said}): write the model's name. The address mostly ends with /v1."


def _wrong_key(status: int, *, with_key: bool) -> Problem:
    if not with_key:
        return Problem(Trouble.KEY, f"the server wants a key ({status})", "give one")
    return Problem(Trouble.KEY, f"the server refuses the key ({status})", "check it, and that it is this server's")


def _not_allowed(detail: str) -> Problem:
    return Problem(Trouble.KEY, f"the key may not do that{detail}", "give it the right to, or use another one")


def _elsewhere(status: int, where: str) -> Problem:
    to = f" to {where}" if where else ""
    return _wrong_address(f"the server points elsewhere ({status}{to})", "give the address that it really has")


def _of_answer(said: Said, checked: Checked, key: str) -> Problem | None:
    """Return why there was no token; None if there was one."""
    if said.ttft_s is not None:
        return None
    if said.problem:
        mend = "try again, or choose another model" if said.late else "check the address, and the network"
        return Problem(Trouble.TIMEOUT if said.late else Trouble.NETWORK, _line(said.problem, key), mend)
    if 300 <= said.status < 400:
        return _elsewhere(said.status, _line(said.elsewhere, key))
    text = _line(said.text or (said.raw if said.raw.startswith("{") else ""), key)
    detail = f" ({said.status}{': ' if text else ''}{text})"
    return _by_words(said, detail, checked, with_key=bool(key)) or _by_status(said.status, detail)


def _by_words(said: Said, detail: str, checked: Checked, *, with_key: bool) -> Problem | None:
    """Return the kind of a problem by the error's words: servers use one status for different things.

    The question is one that nobody refuses, so where the words tell of a model at all, the model is at fault.
    """
    status, words = said.status, f"{' '.join(said.codes)} {said.text}".casefold()
    reason = reason_of_refusal(status, said.codes, said.text, said.raw, said.after_s)
    if reason == "unauthorized":
        return _wrong_key(status, with_key=with_key)
    if reason == "no_credit":
        return Problem(Trouble.CREDIT, f"the account has no credit for it{detail}", "add some at the provider's site")
    if reason == "forbidden":
        return _not_allowed(detail)
    if status == 404 and checked.models is None and "model" not in words:
        return _wrong_address(f"nothing answers questions there{detail}", "check the address; it mostly ends with /v1")
    if status == 404 or reason == "not_found" or (status in (200, 400, 422) and "model" in words):
        return _no_model(detail, checked)
    return None


def _by_status(status: int, detail: str) -> Problem:
    if status == 200:
        return _wrong_address(f"what came is no answer of an OpenAI server{detail}", "check the address")
    if status == 429:
        return Problem(Trouble.SERVER, f"the server asks to wait{detail}", "try again in a minute, or another model")
    if 400 <= status < 500:
        return Problem(Trouble.REFUSED, f"the server refuses the question{detail}", "choose another model")
    return Problem(Trouble.SERVER, f"the server is in trouble{detail}", "try again later, or choose another model")


def _no_model(detail: str, checked: Checked) -> Problem:
    plain = {name.casefold(): name for name in checked.models or ()}
    near = [plain[name] for name in get_close_matches(checked.model.casefold(), plain, N_NEAR, 0.5)]
    mend = f"choose another{', such as ' if near else ''}{', '.join(near)}"
    return Problem(Trouble.MODEL, f"{checked.model} does not answer{detail}", mend)


def _any(words: Iterable[str], text: str) -> bool:
    return any(word in text for word in words)


def _line(text: str, key: str) -> str:
    """Return a server's text as one line that a terminal can show, without any piece of the key."""
    return one_line(masked(text[:MAX_SAID], key), MAX_TEXT)


def _order(reply: Reply, profile: ServerProfile | None, key: str = "") -> tuple[str, ...] | None:
    """Return the listed models: first those with a known price, last those that answer no chat."""
    if reply.models is None or reply.status != 200:
        return None
    own = {} if profile is None else profile.models

    def rank(name: str) -> tuple[int, str]:
        plain = name.casefold().removeprefix("models/")
        return (0 if plain in own else 2 if _any(_NO_CHAT, plain) else 1), plain

    names = {name for name in reply.models if plain(name) == name and len(name) <= MAX_NAME and not tells(name, key)}
    return tuple(sorted(names, key=rank)[:MAX_MODELS])
