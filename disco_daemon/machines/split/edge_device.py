"""The device of a machine that has joined a partner: its own layers in the engine, and the link to the rest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace as replace_fields

from ... import __version__
from ...clock import Clock
from ...config.schema import Config
from ...engine import wire
from ...engine.supervisor import Engine
from ...errors import ConfigError
from ...link.protocol import IDS, N_ID, Build, Hello
from ...link.relay.orders import Address, JoinPartner, LinkDown, LinkStats, LinkUp, RelayEvent
from ...link.relay.relay_process import RelayLost, RelayProcess
from ...link.rows.codec import choose_codec
from ...link.trust.roles import Role
from ...models.segment_files import read_head
from ...models.vocabulary import vocabulary_mark
from ..range_engine import RangeEngine
from ..trust_store import membership
from .drafter import draft_path, own_certainty, require_drafter
from .hosted_range import range_config
from .joined_model import JoinedFolder, shape_of
from .split_device import PartnerPower, SplitDevice, rules_of
from .trained_exits import mark_of, read_calibration

log = logging.getLogger("disco.link")

HELD = "policy.private is on: nothing leaves this machine"
MOST_WATTS = 1e5  # that a partner may say to draw; more is no machine's
PATIENCE_S = 1.0  # that an answer waits for a partner that has gone, before it moves to the server
LAST_PATIENCE_S = 5.0  # where there is no server: an engine that has fallen is back within a few seconds


class EdgeLink:
    """The link of this machine to its partner: the relay that connects, and what it says; `PartnerLink` of the device.

    All mutable state: the build of both sides, once known, the last figures of the link, and why it is down.
    """

    def __init__(self, config: wire.Load, clock: Clock, role: JoinPartner, shown: Mapping[str, Any]) -> None:
        self._relay = RelayProcess(self._hear)
        self._host = RangeEngine(config, clock, self._relay, self._join)
        self._role, self._shown = role, shown
        self._up: LinkUp | None = None
        self._stats: LinkStats | None = None
        self._why = "the lower layers are being loaded"
        self._power: PartnerPower | None = None
        self._n_ctx: int | None = None
        self._final = self._started = self._held = False

    @property
    def engine(self) -> Engine:
        """The engine of the lower layers."""
        return self._host.engine

    @property
    def is_up(self) -> bool:
        """Whether rows reach the partner now."""
        return self._up is not None

    @property
    def why_down(self) -> str:
        """Why they do not; empty while they do."""
        return "" if self._up is not None else self._why

    @property
    def n_ctx(self) -> int | None:
        """How many tokens a text may have at the partner, as it said when the link came up; None if it never did."""
        return self._n_ctx

    @property
    def power(self) -> PartnerPower | None:
        """What the partner draws while it computes, as it said when the link came up; None if it does not know."""
        said = self._up.welcome if self._up is not None else None
        if said is not None:  # an answer that ends behind the link counts as well
            known = 0 < said.watts <= MOST_WATTS
            self._power = PartnerPower(said.watts, said.watts_from[:N_ID]) if known else None
        return self._power

    def status(self) -> dict[str, Any]:
        """Return the link for `disco status`."""
        up, info, rtt_ms = self._up, self.engine.info, self._stats.rtt_ms if self._stats else None
        codec, same = self._shown["codec"], False
        if up is not None and info is not None and codec in ("f32", IDS):  # with ids the partner computes it all
            same = up.build.same_bits(up.build.llama if codec == IDS else info.build)
        return {
            "state": "up" if up is not None else "refused" if self._final else "down",
            "partner": self._role.name,
            **self._shown,
            "rtt_ms": None if rtt_ms is None or up is None else round(rtt_ms, 2),
            "same_bits": same if up is not None else None,
            "error": self.why_down or None,
        }

    async def start(self) -> None:
        """Start the relay; it connects when the engine has loaded its layers."""
        self._started = True
        if not self._held:
            self._relay.start()

    async def hold(self, *, private: bool) -> None:
        """End the relay while `private`, and with it the only way to the network; the engine outlives it."""
        if private == self._held:
            return
        self._held = private
        if private:
            self._up, self._why = None, HELD
            await self._relay.close()
        elif self._started:
            self._why = "the partner has not answered yet"
            self._relay.start()
            self._host.replace_socket()

    async def close(self) -> None:
        """Stop the relay, behind the engine; idempotent."""
        await self._host.close()
        await self._relay.close()

    def is_same(self, other: object) -> bool:
        """Whether another link would be this one: to the same machine, by the same codec and cut."""
        return isinstance(other, EdgeLink) and (self._role, self._shown) == (other._role, other._shown)

    def _join(self, info: wire.Loaded) -> None:
        """Have the relay connect, and say by which build this machine computes."""
        hello = self._role.hello
        build = replace_fields(hello.build, disco=__version__, llama=info.build)
        self._why = HELD if self._held else "the partner has not answered yet"
        self._relay.join(
            JoinPartner(
                identity=self._role.identity,
                name=self._role.name,
                addresses=self._role.addresses,
                hello=Hello(build=build, cut=hello.cut, codecs=hello.codecs),
            )
        )

    def _hear(self, event: RelayEvent | RelayLost) -> None:
        """Take an event of the relay."""
        match event:
            case LinkUp(welcome=welcome):
                self._n_ctx = welcome.n_ctx if welcome is not None and welcome.n_ctx > 0 else self._n_ctx
                self._up, self._stats, self._final = event, None, False
                log.info("linked to %s at %s", event.name, event.address)
                self._compare_exits(event)
            case LinkDown(message=message, final=final):
                self._up, self._why, self._final = None, message, final
                log.warning("no link to %s: %s", event.name, message)
            case LinkStats():
                self._stats = event
            case RelayLost(why=why):
                self._up, self._why = None, f"the relay process has died: {why}"
                self._host.replace_socket()
            case _:
                pass

    def _compare_exits(self, up: LinkUp) -> None:
        """Say that the partner has trained a better exit since this machine joined."""
        theirs = up.welcome.exit if up.welcome is not None else ""
        if theirs and theirs != mark_of(self._host.engine.config.exit):
            log.info("%s has a newer exit: `disco machines join` with a new code fetches it", up.name)


def make_edge(config: Config, clock: Clock) -> SplitDevice:
    """Return the device of a machine that has joined a partner.

    Raises ConfigError if it has not, if it has joined with another cut, if its layers are damaged, if they have no exit
    for `split.mode`, or if the small model that drafts is of another vocabulary.
    """
    folder, settings = JoinedFolder(), config.split
    joined, paired = folder.load(), membership(Role.SPLIT).partner()
    if paired is None or paired.name != joined.partner or joined.cut != settings.cut:
        msg = f"the layers up to {settings.cut} of the partner's model are not here: join again with a new code"
        raise ConfigError(msg)
    segment = folder.segment(joined.cut)
    n_embd, n_vocab = shape_of(segment)
    vocabulary, shown = vocabulary_mark(*read_head(segment)), dict[str, Any](cut=joined.cut)
    if joined.cut:
        engine = range_config(config, segment, joined.layers)
        codec = choose_codec(settings.codec, n_embd, joined.bytes_per_s, exact=engine.exact)
        engine = replace_fields(engine, exit=read_calibration(segment))
    else:
        small, codec = draft_path(config), IDS
        require_drafter(small, vocabulary, n_vocab, joined.model)
        template = read_head(segment)[1].text("tokenizer.chat_template")  # the prompt is to be the large model's own
        engine = replace_fields(range_config(config, small, None), exit=own_certainty(), chat_template=template)
        shown["draft_model"] = str(small)
    shown["codec"] = codec
    patience_s = PATIENCE_S if config.server.base_url else LAST_PATIENCE_S
    engine = replace_fields(engine, codec=codec, patience_s=patience_s)
    host, _, port = settings.partner.rpartition(":")
    first = Address(host=host.strip("[]"), port=int(port))
    build = Build(
        disco=__version__, llama="", model=joined.fingerprint, n_layers=joined.n_layers, n_embd=n_embd, n_vocab=n_vocab,
        vocabulary=vocabulary,
    )  # fmt: skip
    role = JoinPartner(
        identity=paired.identity,
        name=paired.name,
        addresses=(first, *(address for address in paired.addresses if address != first)),
        hello=Hello(build=build, cut=joined.cut, codecs=(codec,)),
    )
    link, layers = EdgeLink(engine, clock, role, shown), (joined.cut, joined.n_layers - joined.cut)
    device = SplitDevice(link.engine, link, joined.model, layers, tuple(config.device.adapters), rules_of(config))
    device.check(config)
    return device
