"""The joining side: pair this machine with the one that printed a code, and fetch its part of the model.

Both are for a program with a loop of its own: a verb of the command line, or the daemon. Nothing is kept of a pairing
that fails, and a fetch that breaks goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..protocol import Build
from ..trust import tls
from ..trust.pairing import PairedPartner
from ..trust.pairing_code import PairingCode, PairingError, check_name
from ..trust.refusals import LinkEndedError
from .connector import RefusedError, Reply, ask, connect, connect_first
from .frame_stream import FrameStream
from .handshake import (
    FIRST_FRAMES,
    MAX_MEMORY,
    AskAuthority,
    AskFile,
    AskPair,
    FileFollows,
    First,
    LeavePartner,
    LinkMeasured,
    MeasureLink,
    MemberLeft,
    PairGranted,
    TheAuthority,
    decode_reply,
    first_frame,
)
from .orders import Address, Identity

STALLED_S = 30.0  # without a byte of a file: the other side gives up after as long
GRANTED_S = 25.0  # for the certificate: as long as the other relay waits for its daemon
FOLLOWS_S = 150.0  # for the first byte: the other machine may have to write the layers first
TAKEN = 1 << 18  # bytes of a file that are taken at once
WRITTEN = 1 << 20  # bytes that are written at once
SPARE_BYTES = 64 << 20  # that stay free on the disk
MEASURE_S = 20.0  # for measuring the way: half a megabyte each way takes 8 s at 1 Mbit/s
MEASURE_BYTES = 1 << 19  # that go each way: long enough to fill a link of 100 Mbit/s over a round trip of 20 ms
ROUND_TRIPS = 8  # of which the shortest counts
LEAST_S = 1e-4  # nothing is measured to be faster: half a megabyte on loopback takes about a millisecond
ATTEMPTS = 5  # in a row that bring not one byte more

Progress = Callable[[int, int], None]


async def pair(
    code: PairingCode, name: str, wall: Callable[[], float] = time.time
) -> tuple[PairedPartner, Build | None]:
    """Get a certificate for this machine, to be called `name`, from the one that printed the code.

    Returns what `pairing.Membership` keeps, and the model that the other one serves, if one is in memory. The secret is
    sent only after the other side has proved to be the one of the code. Raises PairingError.
    """
    from ..trust.certificates import check_authority, check_certificate, new_request

    check_name(name)
    try:
        address, ca = await _find(code)
        partner = check_authority(ca, code.fingerprint)
        if partner == name:
            raise PairingError("bad_name", f"{name!r} is the other machine's own name: choose another one (--name)")
        key, csr = new_request(name)
        stream = await connect(address, tls.stranger_context(ca), tls.tls_name(partner))
        try:
            asked = AskPair(secret=code.secret, csr=csr, name=name)
            granted = await ask(stream, first_frame(asked), PairGranted, GRANTED_S)
        finally:
            await stream.close()
    except LinkEndedError as e:
        raise PairingError(e.reason, e.message) from e
    identity = Identity(certificate=granted.certificate, key=key, ca=ca)
    check_certificate(identity, name, wall())
    first = (address, *(other for other in code.addresses if other != address))
    return PairedPartner(name=partner, own_name=name, addresses=first, identity=identity), granted.build


async def _find(code: PairingCode) -> tuple[Address, str]:
    """Return the first address where something answers as a relay does, and the authority (PEM) that it names."""
    stream, address = await connect_first(code.addresses, tls.unchecked_context(), None)
    try:
        return address, (await ask(stream, first_frame(AskAuthority()), TheAuthority)).certificate
    finally:
        await stream.close()


# --- questions -----------------------------------------------------------------------------------------------------


async def ask_machine(machine: PairedPartner, message: First, kind: type[Reply], timeout_s: float = FOLLOWS_S) -> Reply:
    """Ask a machine that this one has joined; return its answer, of this `kind`. Raises PairingError."""
    try:
        stream = await _connect(machine)
        try:
            return await ask(stream, first_frame(message), kind, timeout_s)
        finally:
            await stream.close()
    except LinkEndedError as e:
        raise PairingError(e.reason, e.message) from e


async def leave(machine: PairedPartner) -> None:
    """Tell a machine that this one leaves: it revokes the certificate and forgets it. Raises PairingError."""
    await ask_machine(machine, LeavePartner(), MemberLeft, GRANTED_S)


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The way to a partner: there and back, s, and bytes/s up and down; its clock is `ahead_s` of ours, s.

    `build` is what computes there; None if no model is in memory.
    """

    rtt_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    ahead_s: float
    build: Build | None = None


async def measure_link(partner: PairedPartner, wall: Callable[[], float] = time.time) -> MeasuredLink:
    """Measure the way to a partner within MEASURE_S, by half a megabyte each way. Raises PairingError."""
    try:
        async with asyncio.timeout(MEASURE_S):
            stream = await _connect(partner)
            try:
                return await _measure(stream, wall)
            finally:
                stream.abort()
    except LinkEndedError as e:
        raise PairingError(e.reason, e.message) from e
    except TimeoutError as e:
        raise PairingError("silent", f"the link could not be measured within {MEASURE_S:g} s") from e


async def _measure(stream: FrameStream, wall: Callable[[], float]) -> MeasuredLink:
    loop, trips = asyncio.get_running_loop(), list[tuple[float, float]]()
    build: Build | None = None

    async def exchange(n_up: int, n_down: int) -> tuple[float, float]:
        """Return how long it took, s, and by how much the clock there was ahead in the middle of it."""
        nonlocal build
        up = os.urandom(n_up)
        begun, began = loop.time(), wall()
        stream.write(first_frame(MeasureLink(n_up=n_up, n_down=n_down)) + up)
        body, _, _ = await stream.read(FIRST_FRAMES)
        measured = decode_reply(body)
        if not isinstance(measured, LinkMeasured):
            raise LinkEndedError("malformed", f"{type(measured).__name__} is no answer to this")
        build = measured.build
        await stream.read_exactly(n_down)
        took_s = loop.time() - begun
        return took_s, measured.now - began - took_s / 2

    for _ in range(ROUND_TRIPS):
        trips.append(await exchange(0, 0))
    rtt_s, ahead_s = min(trips)
    (up_s, _), (down_s, _) = await exchange(MEASURE_BYTES, 0), await exchange(0, MEASURE_BYTES)
    up, down = (MEASURE_BYTES / max(LEAST_S, took_s - rtt_s) for took_s in (up_s, down_s))
    return MeasuredLink(rtt_s, up, down, ahead_s, build)


# --- fetching ------------------------------------------------------------------------------------------------------


async def fetch(
    partner: PairedPartner,
    cut: int,
    target: Path,
    progress: Progress = lambda _done, _all: None,
    first: int = 0,
    most_bytes: int = MAX_MEMORY,
) -> None:
    """Fetch the model's layers from `first` up to `cut` as the file `target`, which is whole or not there.

    A former attempt goes on where it ended. `progress` is called with the bytes that are there, and all. It may have
    `most_bytes`. Raises PairingError: unreachable, no_file, no_space, damaged, busy, or why the other side refuses.
    """
    part = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as e:
        raise PairingError("no_file", f"{part} cannot be written: {e.strerror or e}") from e
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise PairingError("busy", f"another program is fetching {target.name}: let it end first") from e
        await _fetch(_Fetching(partner, (first, cut), handle, part.with_suffix(".sum"), most_bytes), progress)
        os.fsync(handle)
        part.replace(target)
        part.with_suffix(".sum").unlink(missing_ok=True)
    except OSError as e:
        raise PairingError("no_file", f"{part} cannot be written: {e.strerror or e}") from e
    finally:
        os.close(handle)


class _Fetching:
    """One fetch: the part that is there, and the checksum of the file that it is of, which is kept beside it."""

    def __init__(
        self, partner: PairedPartner, layers: tuple[int, int], handle: int, note: Path, most_bytes: int
    ) -> None:
        self.partner, self.layers, self.handle = partner, layers, handle
        self._note, self._most_bytes = note, most_bytes

    @property
    def n_bytes(self) -> int:
        """The bytes that are there."""
        return os.fstat(self.handle).st_size

    @property
    def sha256(self) -> str:
        """The checksum of the whole file of which the part is; "" if none has begun."""
        return self._note.read_text("ascii") if self._note.exists() and self.n_bytes else ""

    def begin(self, follows: FileFollows) -> None:
        """Drop what is of another file, or beyond what follows. Raises PairingError (no_space)."""
        offset = follows.offset if follows.sha256 == self.sha256 else 0
        if follows.offset > offset or follows.n_bytes < follows.offset:
            raise PairingError("damaged", "the other machine sent another part of the file than was asked for")
        if follows.n_bytes > self._most_bytes:
            msg = f"the file has {follows.n_bytes / 1e9:.1f} GB, and {self._most_bytes / 1e9:.1f} GB may be fetched"
            raise PairingError("no_space", msg)
        os.ftruncate(self.handle, offset)
        os.lseek(self.handle, offset, os.SEEK_SET)
        self._note.write_text(follows.sha256, "ascii")
        free = shutil.disk_usage(self._note.parent).free
        if follows.n_bytes - offset + SPARE_BYTES > free:
            need_mb, free_mb = (follows.n_bytes - offset + SPARE_BYTES) / 1e6, free / 1e6
            msg = f"the file needs {need_mb:.0f} MB, {self._note.parent} has {free_mb:.0f} MB free"
            raise PairingError("no_space", msg)


async def _fetch(fetching: _Fetching, progress: Progress) -> None:
    """Fetch until the file is whole, by one connection after the other as long as each brings something."""
    left, before = ATTEMPTS, -1
    while True:
        try:
            await _take(fetching, progress)
            return
        except RefusedError as e:
            raise PairingError(e.reason, e.message) from e
        except LinkEndedError as e:
            left = ATTEMPTS if fetching.n_bytes > before else left - 1
            before = max(before, fetching.n_bytes)
            if left <= 0 or e.reason in ("unreachable", "certificate"):
                raise PairingError(e.reason, e.message) from e


async def _take(fetching: _Fetching, progress: Progress) -> None:
    """Take the rest of the file by one connection, and check it whole. Raises LinkEndedError, PairingError, OSError."""
    stream = await _connect(fetching.partner)
    try:
        first, cut = fetching.layers
        asked = AskFile(first=first, cut=cut, offset=fetching.n_bytes, sha256=fetching.sha256)
        follows = await ask(stream, first_frame(asked), FileFollows, FOLLOWS_S)
        fetching.begin(follows)
        await _write_rest(stream, fetching, follows.n_bytes, progress)
    finally:
        stream.abort()
    if await asyncio.to_thread(_sha256, fetching.handle) != follows.sha256:
        os.ftruncate(fetching.handle, 0)
        raise PairingError("damaged", "the file arrived damaged, and was removed: fetch it again")


async def _connect(partner: PairedPartner) -> FrameStream:
    try:
        context = tls.client_context(partner.identity)
    except ssl.SSLError as e:
        raise LinkEndedError("certificate", tls.meaning(e)[1]) from e
    stream, _ = await connect_first(partner.addresses, context, tls.tls_name(partner.name))
    return stream


async def _write_rest(stream: FrameStream, fetching: _Fetching, n_bytes: int, progress: Progress) -> None:
    done, waiting = fetching.n_bytes, bytearray()
    try:
        while done + len(waiting) < n_bytes:
            try:
                async with asyncio.timeout(STALLED_S):
                    data = await stream.read_some(min(TAKEN, n_bytes - done - len(waiting)))
            except TimeoutError as e:
                raise LinkEndedError("silent", f"nothing came for {STALLED_S:.0f} s") from e
            if not data:
                raise LinkEndedError("closed", "the other machine has ended the connection before the file was whole")
            waiting += data
            if len(waiting) >= WRITTEN:
                await asyncio.to_thread(_write, fetching.handle, bytes(waiting))
                done += len(waiting)
                waiting.clear()
                progress(done, n_bytes)
    finally:
        if waiting:  # what came before the connection broke is kept, too
            _write(fetching.handle, bytes(waiting))
            progress(done + len(waiting), n_bytes)


def _write(handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _sha256(handle: int) -> str:
    digest = hashlib.sha256()
    at = 0
    while data := os.pread(handle, WRITTEN, at):
        digest.update(data)
        at += len(data)
    return digest.hexdigest()
