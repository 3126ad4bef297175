r"""Formats of strings as patterns: those that OpenAI's structured outputs know, and a few more. Pure.

A format that is not here is an annotation, as JSON Schema has it. Each pattern allows what the format allows, or less:
years of four digits, months with 28 days for February, and host names in ASCII.
"""

from __future__ import annotations

_DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,59}[A-Za-z0-9])?"  # 63 are allowed: four of these are within 253
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_DAYS = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_HOURS = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HEX = r"[0-9A-Fa-f]{1,4}"

FORMATS = {
    "date": rf"^(?!0000){_DATE}$",
    "time": rf"^{_TIME}$",
    "date-time": rf"^(?!0000){_DATE}T{_TIME}$",
    "duration": rf"^P(?:[0-9]+W|{_DAYS}(?:{_HOURS})?|{_HOURS})$",
    "email": rf"^[A-Za-z0-9_'+-]+(?:\.[A-Za-z0-9_'+-]+)*@(?:{_LABEL}\.){{1,3}}[A-Za-z]{{2,63}}$",
    "hostname": rf"^{_HOST}$",
    "ipv4": rf"^{_BYTE}(?:\.{_BYTE}){{3}}$",
    "ipv6": rf"^(?:(?:{_HEX}:){{7}}{_HEX}|(?:{_HEX}:){{1,6}}:{_HEX}|::(?:{_HEX}:){{0,5}}{_HEX}|::)$",
    "uuid": r"^[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}$",
    "uri": r"^[A-Za-z][A-Za-z0-9+.-]*:(?://)?(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*$",
}
