"""What a user asks of the daemon itself: changes to an answer, to settings, to the two sides. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...errors import RequestError
from ..http.bodies import convert, decoded
from ..openai.openai_request import MAX_PACE_TPS


class Adjustment(msgspec.Struct, forbid_unknown_fields=True):
    """A reader's change to a running answer."""

    delivery: Literal["reserve", "paced", "off"] | None = None
    pace_tps: Annotated[float, Meta(gt=0, le=MAX_PACE_TPS)] | None = None


class ServerWish(msgspec.Struct, forbid_unknown_fields=True):
    """A server to check or to write down, with a `name` one of several. Its key is never shown."""

    base_url: Annotated[str, Meta(max_length=512)]
    api_key: Annotated[str, Meta(max_length=4096)] | None = None
    model: Annotated[str, Meta(max_length=512)] | None = None
    name: Annotated[str, Meta(max_length=64)] | None = None

    def __repr__(self) -> str:
        return f"ServerWish({self.base_url!r}, model={self.model!r})"


class DeviceWish(msgspec.Struct, forbid_unknown_fields=True):
    """A model of this machine, by name or path ("" is the default one, "previous" the last one), or an offered one."""

    model: Annotated[str, Meta(max_length=4096)]


def parse_adjustment(body: bytes) -> Adjustment:
    """Decode a change to a running answer. Raises RequestError, also for an empty one."""
    found = convert(decoded(body), Adjustment)
    if found == Adjustment():
        raise RequestError("Nothing to change: give 'pace_tps' or 'delivery'.")
    return found


def parse_settings(body: bytes) -> dict[str, Any]:
    """Decode changes of settings, `section.name` to value. Raises RequestError, also for none."""
    changes = decoded(body)
    if not changes:
        raise RequestError('Nothing to change: give settings, such as {"device.usd_per_kwh": 2.5}.')
    return changes


def parse_device(body: bytes) -> str:
    """Decode a choice among the models on this machine. Raises RequestError."""
    return convert(decoded(body), DeviceWish).model.strip()


def parse_server(body: bytes) -> ServerWish:
    """Decode a server, without white space around its parts (a mistake of pasting). Raises RequestError."""
    wish = convert(decoded(body), ServerWish)
    api_key, model, name = ((part or "").strip() for part in (wish.api_key, wish.model, wish.name))
    return ServerWish(wish.base_url.strip(), api_key, model, name)
