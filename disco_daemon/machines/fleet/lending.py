"""A machine that lends its home hosts: it fetches its own layers, and keeps a process for home that computes them.

`disco machines join` runs this in the foreground. The relay alone talks with home while answers are written; each of
its connections there is one life of a host, whose process sees a socket pair only.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from ...config.layers import data_path
from ...link.protocol import Build
from ...link.relay.handshake import (
    N_REASON,
    AskSegments,
    OfferHost,
    TellLoad,
    TheSegments,
)
from ...link.relay.join import ask_machine
from ...link.relay.orders import HomeEnded, HomeReached, HostOffered, LendHosts, LinkDown, RelayEvent, TellHome
from ...link.relay.relay_process import RelayLost, RelayProcess
from ...link.trust.pairing import PairedPartner
from ...link.trust.pairing_code import PairingError
from ...plain import reason_of
from ...system.tasks import TaskSet, cancel_all
from ..owner import OwnerTerms
from .host_processes import ENDED_S
from .lend_terms import TermsFolder
from .lent_process import LentProcess
from .lent_segments import LentSegments
from .monitor import FleetMonitor
from .offered_hosts import own_llama

log = logging.getLogger("disco.fleet")

SAY_S = 2.0  # between two times that home hears how this machine is
LEAVE_S = 15.0  # for home to move its layers away, after the owner has wanted that nothing is lent any more
LESS_S = 25.0  # for home to move away what is beyond new terms; a process that has more of memory then ends
TERMS_S = 1.0  # between two looks whether the owner wants other terms
LOOK_S = 5.0  # between two looks whether the owner lends anything just now
AGAIN_S = 1.0  # between two questions to home, which layers are whose
AGAIN_MAX_S = 15.0  # the longest pause between two of them while home does not answer
ENDS_IT = frozenset({"revoked", "no_certificate", "certificate", "protocol"})  # reasons that no waiting mends


def lent_folder() -> Path:
    """Return the folder of the segments that this machine computes for another one."""
    return data_path() / "fleet" / "lent"


class FleetLending:
    """Lends `home` hosts from the segments in `folder`, by the owner's `terms`; `say` gets a line for the user.

    `ray` is the version of the Ray that this machine is a node of, "" if it is of none; home only shows it.

    All mutable state: the relay, the terms, hosts' processes and their tasks, what says that a life's connection has
    ended, whether home is to be asked again, the files of `_segments`, and what home is told of this machine.
    """

    def __init__(
        self, home: PairedPartner, folder: Path, terms: OwnerTerms, say: Callable[[str], None], ray: str = ""
    ) -> None:
        self._home, self._folder, self._terms, self._say, self._ray = home, folder, terms, say, ray
        self._kept, self._agreed_at = TermsFolder(folder), float("-inf")
        self._relay = RelayProcess(self._hear, self._reached)
        self._hosts = TaskSet()
        self._lives: dict[int, asyncio.Event] = {}
        self._asks = asyncio.Event()
        self._over = ""
        self._said = ""
        self._segments = LentSegments(home, folder, self._tell)
        self._monitor, self._looking = FleetMonitor(), asyncio.Lock()
        self._processes, self._leaving = set[LentProcess](), ""

    async def run(self) -> str:
        """Lend until it is cancelled, or until home refuses for good; return why. Raises ConfigError, OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with await self._kept.alone():
            await asyncio.to_thread(self._kept.take_wish)  # of somebody who has not seen what lent before end
            await asyncio.to_thread(self._kept.keep, self._terms)
            self._relay.start()
            self._asks.set()
            tasks = [
                asyncio.create_task(self._keep_telling(), name="how this machine is"),
                asyncio.create_task(self._keep_to_terms(), name="what the owner allows"),
            ]
            try:
                return await self._follow()
            finally:
                await cancel_all(*tasks)
                await self._relay.close()
                self._end_lives()
                await asyncio.gather(*self._hosts, return_exceptions=True)

    async def _keep_to_terms(self) -> None:
        """Go by what the owner wishes, as soon as it is wished; and let each process have no more than that."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TERMS_S)  # a file tells nobody that it is there
            wish = await asyncio.to_thread(self._kept.take_wish)
            if wish is not None:
                self._terms, self._agreed_at = wish, loop.time()
                try:
                    await asyncio.to_thread(self._kept.keep, wish)
                except OSError as e:
                    self._tell(f"the new terms cannot be kept: {reason_of(e)}")
                self._tell(f"from now on: {wish}")
                self._asks.set()  # home hears of it with the next offer, which comes at once
            is_late = loop.time() > self._agreed_at + LESS_S
            for lent in tuple(self._processes):
                if not await lent.go_by(self._terms) and is_late and not lent.over.is_set():
                    self._tell("a host ends: its layers were not moved away, and it has more memory than it may")
                    lent.over.set()

    async def _follow(self) -> str:
        """Do as owner and home say, until that is over."""
        pause_s, is_lent = AGAIN_S, False
        while not self._over:
            why_not = await asyncio.to_thread(self._terms.why_not)
            if why_not:
                if is_lent and not await self._is_left(why_not):
                    continue
                if is_lent:
                    self._relay.stop()
                    is_lent = False
                self._tell(f"nothing is lent now: {why_not}")
            elif self._asks.is_set() or not is_lent:
                self._asks.clear()
                try:
                    if not await self._offer_if_allowed():
                        self._asks.set()
                        continue
                    is_lent, pause_s = True, AGAIN_S
                except PairingError as e:
                    if e.reason in ENDS_IT:
                        return str(e)
                    self._tell(str(e))
                    self._asks.set()
                    pause_s = min(2 * pause_s, AGAIN_MAX_S)
            await asyncio.sleep(pause_s)  # home is asked once in that time, whatever happens
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._asks.wait()
        return self._over

    async def _is_left(self, why: str) -> bool:
        """Let home move its layers away, since the owner wants this machine back; return whether they do still.

        What has not left within LEAVE_S is computed elsewhere again: home replaces a host that has gone.
        """
        self._tell(f"its layers leave this machine: {why}")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LEAVE_S
        self._leaving = why[:N_REASON]
        try:
            await self._tell_home()
            while loop.time() < deadline:
                await asyncio.sleep(AGAIN_S)  # home cannot say by itself that nothing is left
                if not await asyncio.to_thread(self._terms.why_not):
                    return False
                if not (await ask_machine(self._home, AskSegments(), TheSegments)).segments:
                    break
        except PairingError:
            return True  # home has gone
        finally:
            self._leaving = ""
        return bool(await asyncio.to_thread(self._terms.why_not))

    async def _keep_telling(self) -> None:
        """Let home know how this machine is, for as long as it lends."""
        async with self._looking:
            await asyncio.to_thread(self._monitor.look, {})  # shares are of the time since the look before
        while True:
            await asyncio.sleep(SAY_S)
            await self._tell_home()

    async def _tell_home(self) -> None:
        async with self._looking:
            pids = {lent.child.pid: lent.child.pid for lent in self._processes}
            machine = await asyncio.to_thread(self._monitor.look, pids)
        hosts = machine.processes.values()
        load = TellLoad(
            n_cpus=machine.n_cpus, others_share=machine.others_share, memory_bytes=machine.memory_bytes,
            memory_free_bytes=machine.memory_free_bytes, cpu_got=sum(one.cpu_got for one in hosts),
            cpu_wanted=sum(one.cpu_wanted for one in hosts), rss_bytes=sum(one.rss_bytes for one in hosts),
            leaving=self._leaving,
        )  # fmt: skip
        if self._relay.pid is not None:
            self._relay.send(TellHome(load=load))

    async def _offer_if_allowed(self) -> bool:
        """Offer a host with the layers that are ours; return False if the owner wants this machine back meanwhile.

        To fetch them may take long. Raises PairingError.
        """
        offering = asyncio.create_task(self._offer(), name="offer")
        try:
            while not (await asyncio.wait((offering,), timeout=LOOK_S))[0]:
                if await asyncio.to_thread(self._terms.why_not):
                    return False
            offering.result()
            return True
        finally:
            await cancel_all(offering)

    async def _offer(self) -> None:
        """Ask home which layers are ours, fetch what is missing, and offer a host with them. Raises PairingError."""
        found = await ask_machine(self._home, AskSegments(), TheSegments)
        self._segments.needed = frozenset(fact.name for fact in found.segments)
        for fact in found.segments:
            await self._segments.have(fact)
        self._segments.prune(self._segments.needed)
        self._relay.join(await asyncio.to_thread(self._role, found.build, await own_llama()))
        layers = " and ".join(f"{one.first}-{one.last}" for one in found.segments)
        self._tell(f"lending a host to {self._home.name}: {f'layers {layers}' if layers else 'no layers yet'}")

    def _role(self, build: Build, llama: str) -> LendHosts:
        offer = OfferHost(
            build=replace(build, llama=llama),
            has=self._segments.names,
            memory_bytes=self._terms.memory_bytes,
            n_threads=self._terms.n_threads,
            python=platform.python_version(),
            ray=self._ray,
        )
        home = self._home
        return LendHosts(identity=home.identity, name=home.name, addresses=home.addresses, offer=offer)

    def _tell(self, line: str) -> None:
        if line != self._said:  # once, not at each attempt
            self._said = line
            self._say(line)

    # --- what the relay says ------------------------------------------------------------------------------------------

    def _hear(self, event: RelayEvent | RelayLost) -> None:
        match event:
            case LinkDown(reason=reason, message=message):
                self._tell(message)
                if reason in ENDS_IT:
                    self._over = message
                self._asks.set()  # another model, or other layers
            case HomeEnded(life=life):
                if (over := self._lives.pop(life, None)) is not None:
                    over.set()
                self._asks.set()
            case RelayLost():
                self._end_lives()
                self._asks.set()

    def _end_lives(self) -> None:
        """All connections have ended: the relay has gone."""
        for over in self._lives.values():
            over.set()
        self._lives.clear()

    def _reached(self, event: HostOffered | HomeReached, sock: socket.socket) -> None:
        over = self._lives[event.life] = asyncio.Event()
        self._hosts.begin(self._live(sock, over), "host for another machine")

    async def _live(self, sock: socket.socket, over: asyncio.Event) -> None:
        """Let a process compute behind a socket, fetch what it lacks, and see to its end, soon after life is `over`.

        A process that hangs, or was stopped, does not see that its socket has ended.
        """
        with sock:
            try:
                lent = await LentProcess.begin(sock.fileno(), self._folder, self._terms, over)
            except OSError as e:
                self._tell(f"no process of a host can be started: {reason_of(e)}")
                return
        self._processes.add(lent)
        serving, ended = asyncio.create_task(lent.serve(self._segments.have)), asyncio.create_task(over.wait())
        try:
            await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            await lent.child.end(ENDED_S)
            self._processes.discard(lent)
            await asyncio.gather(serving, return_exceptions=True)
        if lent.child.process.returncode:
            self._tell(f"a host {lent.child.ending}{lent.child.last_words}")
