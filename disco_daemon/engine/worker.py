"""The engine process: `python -m disco_daemon.engine.worker FD [DOOR_FD]`.

Three threads. The main thread owns llama.cpp's context and everything in `Batcher`. The reader thread takes frames off
the socket, and stops a decode in flight when a CancelRequest arrives. The intake makes tokens and grammars for the main
thread, and answers what needs no context (token counts).
When the daemon goes away, the socket ends and so does this process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    gc.disable()  # all that is loaded now stays: to look for what does not is a twentieth of a start

import msgspec

from ..link.protocol import FAST, BadFrameError, PeerLeft
from ..models.gguf import with_shards
from ..models.text_models import RANK
from ..scheduler.latency import IterationLatency
from ..system.confine import Access, Confinement, confine
from . import framing, wire
from .door import EngineDoor
from .kv.cells import Cells
from .kv.spill import Spill, fingerprint_of
from .llama import gpu
from .llama.draft import DraftModel
from .llama.embedder import LEAST_CELLS, MAX_PACKED, Embeddings
from .llama.memory import COPIES_SHARE, available_bytes
from .llama.model import AbortFlag, Llama, build
from .llama.refusals import ModelError
from .llama.template import TemplateError
from .llama.text_model import TextModel
from .llama.vocabulary import Vocabulary
from .peer_socket import PeerSocket, PresentRelay
from .serve.admission import SCHEDULERS, Admission
from .serve.batch import Batcher
from .serve.edge import SplitEdge
from .serve.engine_role import load_llama, make_batcher
from .serve.intake import Command, Intake, TextIntake
from .serve.next_turn import PAUSE_S
from .serve.partner import SplitPartner
from .serve.remote_layers import RemoteLayers
from .serve.stats import EngineStats
from .speculation.speculate import Speculator

LAST_S = 8.0  # for writing to disk when the daemon has gone; after supervisor.STOP_TIMEOUT_S we are killed
SLACK_S = 0.3  # until the decode in flight is stopped, and the process is gone


class Worker:
    """The process: socket, reader thread, intake and batcher."""

    def __init__(self, sock: socket.socket, door: socket.socket | None = None) -> None:
        """Through `door` come sockets that lead to the machines that have the other layers, or to a fleet's hosts."""
        self._sock, self._door = sock, EngineDoor(door) if door is not None else None
        self._stream = sock.makefile("rb")
        self._relay: PresentRelay | None = None
        self._send_lock = threading.Lock()
        self._abort = AbortFlag()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None: the daemon has gone
        self._cells: Cells | None = None
        self._spill: Spill | None = None
        self._embeddings: Embeddings | None = None
        self._intake: TextIntake | None = None
        self._warming = threading.Lock()
        self._is_warming = False
        self._loaded: wire.Loaded | None = None
        self._outbox: list[bytes] = []

    def send(self, message: wire.Message) -> None:
        """Send one message to the daemon at once."""
        self._write(framing.frame(message))

    def post(self, message: wire.Message) -> None:
        """Send a message with all others of this iteration; for the main thread."""
        self._outbox.append(framing.frame(message))

    def _flush(self) -> None:
        if self._outbox:
            data = b"".join(self._outbox)
            self._outbox.clear()
            self._write(data)

    def _write(self, data: bytes) -> None:
        with self._send_lock, contextlib.suppress(OSError):  # the daemon has gone, which the reader thread notices, too
            self._sock.sendall(data)

    def run(self) -> None:
        """Load the model, then compute until the daemon goes away."""
        first = framing.FRAMES.read(self._stream)
        if first is None:
            return
        load = wire.decode_to_engine(first[0])
        if not isinstance(load, wire.Load):
            raise TypeError(f"the first message must be Load, not {type(load).__name__}")
        if self._door is not None and not load.ranges:
            self._relay = PresentRelay()
        confined = _give_up_rights(load)
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        try:
            hosts = self._door if load.ranges else None
            llama = load_llama(load, self._abort, hosts, warm=self._door is not None)
            if isinstance(llama, TextModel):
                self._serve_texts(load, llama, confined)
                return
            if self._door is not None:
                _require_divisible(llama, load.model_path)
            small = DraftModel(load, llama, self._abort) if load.speculate and load.draft_path else llama.own_layer
        except ModelError as e:
            self.send(wire.LoadFailed(message=str(e)))
            return
        except TemplateError as e:
            self.send(wire.LoadFailed(message=f"{e}. Give it another one: device.chat_template names a file"))
            return
        latency = IterationLatency(llama.latency_prior)
        spill = self._spill = _spill(load, llama)
        spare_bytes = int(COPIES_SHARE * available_bytes())
        cells = self._cells = Cells(llama, llama.n_seqs, llama.n_cells, spare_bytes=spare_bytes, spill=spill)
        admission = Admission(cells, SCHEDULERS[load.scheduler](latency), latency)
        send_frame = None if self._relay is None else self._relay.send
        batcher = make_batcher(load, llama, self.post, admission, send_frame)
        if load.speculate and llama.n_retractable:  # else wrong guesses could not be cut
            batcher.speculator = Speculator(llama, latency, cells, small)
        read = llama.vocabulary.raw_tokens
        embeddings = Embeddings(llama.embedding_context, read, llama.n_ctx, llama.n_embd_out, self.post)
        intake = Intake(
            batcher=batcher, embeddings=embeddings, cells=cells, send=self.send, hand_on=self._put, abort=self._abort
        )
        self._begin_intake(intake, llama.vocabulary)
        self._embeddings = embeddings
        self._loaded = wire.Loaded(
            model=_name_of(load),
            n_ctx=llama.n_ctx,
            n_cells=llama.n_cells,
            n_seqs=llama.n_seqs,
            bytes_per_token=llama.bytes_per_token,
            load_s=llama.load_s,
            prefill_tps=llama.prefill_tps,
            adapters=llama.adapters.failures,
            n_gpu_layers=llama.n_gpu_layers,
            n_cpu_moe=llama.n_cpu_moe,
            kv_type=llama.kv_type,
            confined=confined.in_force,
            build=build() + ("" if load.exact else FAST),
            tool_format=llama.vocabulary.calling.name,
            fim=llama.vocabulary.infill.is_there,
            own_layer=small is not None and small is llama.own_layer,
            layer_failure=llama.layer_failure,
        )
        self.send(self._loaded)
        if self._door is not None and self._relay is not None:
            given = self._door, self._relay, batcher.remote, llama.vocabulary
            threading.Thread(target=self._read_peers, args=given, name="peers", daemon=True).start()
        if not llama.prefill_tps:
            self._warm_up(llama, latency)
        self._compute(batcher)

    def _begin_intake(self, intake: TextIntake, vocabulary: Vocabulary) -> None:
        """Have messages prepared from now on."""
        vocabulary.beat = intake.beat
        threading.Thread(target=intake.run, name="intake", daemon=True).start()
        self._intake = intake

    def _serve_texts(self, load: wire.Load, model: TextModel, confined: Confinement) -> None:
        """Compute the vectors of texts for ever, with a model that answers nothing. Raises ModelError."""
        if self._door is not None:
            raise ModelError(f"{load.model_path} makes vectors of texts, and is computed by one machine only")
        pair = model.pair if model.pooling == RANK else None
        read = model.vocabulary.raw_tokens
        embeddings = Embeddings(model.context, read, model.n_ctx, model.n_embd_out, self.post, pair=pair)
        intake = TextIntake(embeddings=embeddings, send=self.send, hand_on=self._commands.put, abort=self._abort)
        self._begin_intake(intake, model.vocabulary)
        self.send(
            wire.Loaded(
                model=_name_of(load), n_ctx=model.n_ctx, n_cells=model.n_ctx, n_seqs=MAX_PACKED, bytes_per_token=0,
                load_s=model.load_s, prefill_tps=model.prefill_tps, n_gpu_layers=model.n_gpu_layers,
                confined=confined.in_force, build=build(), pooling=model.pooling, n_at_once=model.n_at_once,
            )
        )  # fmt: skip
        busy = False
        while True:
            self._abort.clear()  # as in `_compute`
            while not busy or not self._commands.empty():
                if (command := self._commands.get()) is None:
                    os._exit(0)
                command()
                busy = True
            busy = embeddings.step(lambda: LEAST_CELLS)  # a text of so many may come in one anyway
            self._flush()

    def _put(self, command: Command) -> None:
        """Queue a command for the main thread, and end a warm-up: nobody waits for that."""
        self._commands.put(command)
        with self._warming:
            if self._is_warming:
                self._abort.set()

    def _warm_up(self, llama: Llama, latency: IterationLatency) -> None:
        """Warm the caches and measure, unless a request is there or comes: then its iterations teach as much."""
        self._is_warming = True  # before the look: what is queued after that ends the decode
        if self._commands.empty() and llama.warm_up():
            latency.begin(llama.latency_prior)
            self._tell_speed(llama.prefill_tps)
        with self._warming:  # what ends the warm-up must not end the decode of a request
            self._is_warming = False

    def _tell_speed(self, prefill_tps: float) -> None:
        """Tell how quickly prompts are read, token/s, once that is known."""
        assert self._loaded is not None
        self._loaded = msgspec.structs.replace(self._loaded, prefill_tps=prefill_tps)
        self.send(self._loaded)
        if self._spill is not None:
            self._spill.token_s = 1.0 / prefill_tps

    def _read_peers(self, door: EngineDoor, relay: PresentRelay, remote: RemoteLayers, vocabulary: Vocabulary) -> None:
        """Read peers' frames in a thread of its own, and queue them for the main thread; one relay follows another."""
        assert isinstance(remote, SplitEdge | SplitPartner)
        if isinstance(remote, SplitPartner):
            _ = (
                vocabulary.initials
            )  # of the first grammar: made here, so that the main thread never stands still for it

        def lose_relay() -> None:
            relay.use(None)
            for peer in remote.peers:
                remote.receive(peer, PeerLeft(reason="the relay has gone"), b"")

        try:
            for present in map(PeerSocket, door.sockets()):
                self._commands.put(partial(relay.use, present))
                for peer, message, payload in present.read():
                    self._commands.put(partial(remote.receive, peer, message, payload))
                self._commands.put(lose_relay)
                present.close()
        except BadFrameError as e:
            os.write(2, f"the relay sent what is no frame: {e}\n".encode())
            os._exit(1)

    def _compute(self, batcher: Batcher) -> None:
        """Iterate for ever, and carry out all queued commands in between; wait while there is nothing to compute."""
        stats = EngineStats(batcher)
        busy = False
        while True:
            self._abort.clear()  # before the queue is drained: a CancelRequest sets it again once it is queued
            while not busy or not self._commands.empty():
                self._next(stats)()
                busy = True
            self._flush()  # an answer that was cancelled ends now, and not with the iteration of the others
            with stats:
                busy = batcher.step()
                self._flush()
            if (due := stats.stats_if_due(busy=busy)) is not None:
                self.send(due)
                self._look_at_speed(batcher.admission.latency)
            if self._embeddings is not None and self._embeddings.step(batcher.spare, beside=busy):
                busy = True
                self._flush()

    def _look_at_speed(self, latency: IterationLatency) -> None:
        """Tell the speed that was learned, where a request came before it was measured."""
        if self._loaded is not None and not self._loaded.prefill_tps and latency.n and latency.coefficients[2]:
            self._tell_speed(1.0 / latency.coefficients[2])

    def _next(self, stats: EngineStats) -> Command:
        """Wait for the next command; meanwhile write idle cached prefixes to disk, and all of them at the end."""
        while True:
            wait_s = stats.batcher.remote.wait_s
            if self._spill is not None and self._cells is not None and self._commands.empty():
                wait_s = least(wait_s, self._spill.write_idle(self._cells.copy))
                if (due := stats.stats_if_due(busy=False)) is not None:
                    self.send(due)
            admission = stats.batcher.admission
            has_turns = self._door is None and bool(admission.next_turns.ended)
            try:
                command = self._commands.get(timeout=least(wait_s, PAUSE_S if has_turns else None))
            except queue.Empty:
                if has_turns:
                    admission.next_turns.compute(stats.batcher.llama, admission.cells)
                can_compute = stats.batcher.remote.look()
                self._flush()
                if can_compute:
                    return _do_nothing
                continue
            if command is not None:
                return command
            self._end()

    def _end(self) -> None:
        """End the process: the daemon has gone, and only conversations to come back to are worth saving."""
        if self._spill is not None and self._cells is not None:
            self._cells.leave_all()
            self._spill.write_all(self._cells.copy, LAST_S)
        os._exit(0)

    def _read(self) -> None:
        """Read frames in a thread of its own, and queue them to be prepared; a CancelRequest overtakes all others."""
        with self._end_process():
            while (frame := framing.FRAMES.read(self._stream)) is not None:
                message, intake = wire.decode_to_engine(frame[0]), self._intake
                if isinstance(message, wire.Load) or intake is None:
                    raise ValueError(f"{type(message).__name__} at the wrong time")
                if isinstance(message, wire.CancelRequest):
                    intake.cancel(message.id)
                else:
                    intake.put(message)

    @contextlib.contextmanager
    def _end_process(self) -> Iterator[None]:
        """End the process after the body: the daemon has gone, or has sent what is no valid message."""
        try:
            yield
        except (ValueError, OSError, msgspec.MsgspecError) as e:
            os.write(2, f"the reader thread ends: {type(e).__name__}\n".encode())
            os._exit(1)
        if self._spill is not None:
            self._commands.put(None)
            self._abort.set()
            threading.Event().wait(LAST_S + SLACK_S)  # `_end` is quicker
        os._exit(0)


def _require_divisible(llama: Llama, path: str) -> None:
    """Raise ModelError for a model whose text cannot be cut: wrong guesses, or what a lost host had."""
    if not llama.divisible:
        raise ModelError(f"{path} is a recurrent model: nothing that it has read can be taken back")


def _name_of(load: wire.Load) -> str:
    """Return the name that a model has by its file."""
    return os.path.basename(load.model_path).removesuffix(".gguf")  # noqa: PTH119


def _do_nothing() -> None:
    """Let the main thread compute."""


def least(*waits_s: float | None) -> float | None:
    """Return the shortest wait, s; None if all are without end."""
    return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)


def _give_up_rights(load: wire.Load) -> Confinement:
    """Give up all but the model's files and the folder for idle conversations, before any of them is opened."""
    named = [load.model_path, load.draft_path, *(adapter.path for adapter in load.adapters)]
    folders = []
    if load.disk is not None:
        folder = Path(load.disk.folder)
        if load.disk.max_bytes:
            with contextlib.suppress(OSError):  # the spill says so itself
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folders.append(folder)
    files = list(with_shards(Path(path) for path in named if path))
    files += {Path(part.path).parent for part in load.ranges}  # of ranges that are cut while it runs, too
    return confine(Access(files, folders), gpu.free_bytes)


def _spill(load: wire.Load, llama: Llama) -> Spill | None:
    """Open the folder for idle conversations; None if there is none, or the model's state cannot be shared."""
    disk = load.disk
    if disk is None:
        return None
    max_bytes = disk.max_bytes if llama.divisible or llama.resumes else 0
    kept = " and windows apart" if llama.windowed else ""
    on_gpu = f"{llama.n_gpu_layers} layers on a GPU, without the experts of {llama.n_cpu_moe}"
    made_by = fingerprint_of(msgspec.structs.replace(load, kv_type=llama.kv_type), f"{build()} {on_gpu}{kept}")
    spill = Spill(Path(disk.folder), max_bytes, made_by, llama.latency_prior[2], disk.idle_s)
    return spill if max_bytes else None


def main() -> None:
    """Run on the inherited sockets whose numbers are the arguments: the daemon's, and its door if there is one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's; it ends us by closing the socket
    gc.freeze()
    gc.enable()
    try:
        Worker(*(socket.socket(fileno=int(fd)) for fd in sys.argv[1:])).run()
    except BaseException:  # this process ends below, without the interpreter, which would have shown it
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # without the libraries' clean-up, in which threads that still run can wait for each other for ever


if __name__ == "__main__":
    main()
