"""What has to be changed where a server refuses: key, credit, model, or nothing but waiting. Pure.

Servers use one status for different things, and one thing has many statuses: a key is refused with 401, 400 (Google,
xAI) or 403, an empty account with 402, 429, 400 (Anthropic) or 403 (xAI). So their words count too. A refusal may say
the request back: of a 400 only its own message is looked at, for whole phrases, never for single words.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from .retry import MAX_RETRY_S

MAX_SAID = 4096  # characters of a refusal that are looked at
SOON_S = 600.0  # a 429 that names a shorter wait is a rate limit, whatever else it says
_CODES = {
    **dict.fromkeys(("invalid_api_key", "authentication_error", "api_key_invalid"), "unauthorized"),
    **dict.fromkeys(
        (
            "insufficient_quota", "insufficient_balance", "insufficient_credits", "billing_hard_limit_reached",
            "billing_not_active", "exceeded_current_quota_error",
        ),
        "no_credit",
    ),
    **dict.fromkeys(("model_not_found", "invalid_model", "model_decommissioned", "unknown_model"), "not_found"),
}  # fmt: skip
_BAD_KEY = r"(?:not valid|invalid|incorrect|expired|missing|wrong|revoked|disabled|leaked|not found|required|refused)"
_PHRASES = {
    # Google: API key not valid; xAI: Incorrect API key provided
    "unauthorized": rf"\bAPI key\b.{{0,40}}?\b{_BAD_KEY}\b|\b{_BAD_KEY}\b.{{0,24}}?\bAPI key\b"
    r"|\bauthentication (?:failed|fails|error)|\bauthorization header",
    # Anthropic: Your credit balance is too low; xAI: doesn't have any credits yet; DeepSeek: Insufficient Balance
    "no_credit": r"\b(?:credits?|balance|funds)\b.{0,24}?\b(?:too low|exhausted|insufficient|used up|depleted)\b"
    r"|\b(?:insufficient|not enough|no|any|out of) (?:account )?(?:credits?|balance|quota|funds)\b"
    r"|\bexceeded your (?:current )?quota|\bbilling (?:hard limit|(?:is )?not active)|\bpayment required",
    # OpenRouter: x is not a valid model ID; DeepSeek: Model Not Exist; OpenAI: does not have access to model x
    "not_found": r"\bnot a valid model\b|\b(?:invalid|unknown|unsupported|no such) model\b|\baccess to (?:the )?model\b"
    r"|\bmodel:? (?:\S{1,120} )?(?:(?:does|do|is|was) )?not (?:exist|found|available)\b"
    r"|\bmodel:? (?:\S{1,120} )?has been (?:decommissioned|deprecated|retired|removed)\b",
}
_SAID = {reason: re.compile(phrases, re.IGNORECASE) for reason, phrases in _PHRASES.items()}
_FLAGGED = re.compile(r"\bflagged\b|\bmoderation\b|\bcontent[ _](?:policy|filter)", re.IGNORECASE)
_OF_CREDIT = ("credit", "billing", "balance", "payment")  # words of a 429 that no waiting mends; a quota is of anything
_OF_USE = "resource_exhausted"  # Google's code for all limits, which are of a time
_OF_RATE = re.compile(r"rate[ -]?limit|too many requests", re.IGNORECASE)
_PERIOD = re.compile(r"per[ _-]?(?:second|minute|hour|day)", re.IGNORECASE)  # Google: "quotaId": "RequestsPerMinute"
# Groq, OpenAI: try again in 7m12.5s; Azure: retry after 2 seconds; Google: retry in 35.1s, "retryDelay": "35s"
_WAIT = re.compile(
    r"(?:(?:try again|retry) (?:in|after)|\"retryDelay\":) ?\"?(?:(\d{1,3})h)?(?:(\d{1,4})m(?!s))?"
    r"(?:(\d{1,6}(?:\.\d{1,9})?) ?(ms|millisecond|s|second|minute|hour)s?\b)?",
    re.IGNORECASE,
)
_UNITS = {"ms": 0.001, "millisecond": 0.001, "s": 1.0, "second": 1.0, "minute": 60.0, "hour": 3600.0}


def error_of(document: object) -> tuple[tuple[str, ...], str]:
    """Return codes and message of an error document in any of the usual shapes; nothing where it has none."""
    if isinstance(document, list) and document:  # Google wraps it in a list
        document = document[0]
    error = document.get("error", document) if isinstance(document, Mapping) else None
    if isinstance(error, str):
        return (), error
    if not isinstance(error, Mapping):
        return (), ""
    codes = tuple(str(code) for name in ("code", "type", "status") if (code := error.get(name)))
    return codes, next((told for name in ("message", "detail") if isinstance(told := error.get(name), str)), "")


def named_wait_s(raw: str) -> float | None:
    """Return the wait that a refusal's text names, s; None where it names none."""
    for hours, minutes, number, unit in _WAIT.findall(raw[:MAX_SAID]):
        if hours or minutes or number:
            s = float(number or 0) * _UNITS.get(unit.lower(), 1.0)
            return min(int(hours or 0) * 3600.0 + int(minutes or 0) * 60.0 + s, MAX_RETRY_S)
    return None


def reason_of_refusal(
    status: int, codes: Collection[str], message: str, raw: str = "", after_s: float | None = None
) -> str | None:
    """Return why a server refuses, as an EndpointError's reason; None where nothing of it is sure.

    `message` is its own, whole; `raw` all that it sent, `after_s` the wait that it named, s.
    """
    message, raw = message[:MAX_SAID], raw[:MAX_SAID]
    if status in (401, 402):
        return "unauthorized" if status == 401 else "no_credit"
    named = next((reason for code in codes if (reason := _CODES.get(code.lower()))), None)
    if status == 429:
        return "no_credit" if named == "no_credit" or _is_broke(codes, message or raw, raw, after_s) else "rate_limited"
    if status == 404:  # it may be the path, or a wish of the request that nobody behind a router meets
        return "not_found" if names_model(codes, message) else None
    if status not in (200, 400, 403, 422):
        return None
    if status == 403 and _FLAGGED.search(message):
        return "refused"
    said = next((reason for reason, phrases in _SAID.items() if phrases.search(message)), None)
    return named or said or ("forbidden" if status == 403 else None)


def names_model(codes: Collection[str], message: str) -> bool:
    """Whether a refusal says that its server does not have the model."""
    named = any(_CODES.get(code.lower()) == "not_found" for code in codes)
    return named or _SAID["not_found"].search(message[:MAX_SAID]) is not None


def _is_broke(codes: Collection[str], message: str, raw: str, after_s: float | None) -> bool:
    """Whether a 429 without a clear code is of an empty account: per-minute limits speak of quota and billing too."""
    if (after_s is not None and after_s < SOON_S) or _OF_RATE.search(message) or _PERIOD.search(raw or message):
        return False
    if any(code.lower() == _OF_USE for code in codes):
        return False
    return any(word in message.lower() for word in _OF_CREDIT) or _SAID["no_credit"].search(message) is not None
