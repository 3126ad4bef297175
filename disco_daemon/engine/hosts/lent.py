"""What a host that is lent to another machine takes of home's orders: its own files, its own threads, its own memory.

Home names a segment by a path of its own. Here only the base name counts, in the one folder of this host. A file that
is not there is asked for, by a SegmentFact to the program that has started this process, and may open connections.
"""

from __future__ import annotations

import queue
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ...link.relay.handshake import SegmentFact, is_segment_name
from ...system.control_socket import BlockingControl
from ..lent_messages import FileAnswer, HostTerms, from_lender
from ..llama.refusals import ModelError
from ..wire import Load

GONE = "the program that fetches files has gone"


@dataclass(slots=True)
class LentHost:
    """The folder of this host's files, what its owner allows, and the socket to the program that lends it."""

    folder: Path
    terms: HostTerms
    lender: BlockingControl
    _asking: threading.Lock = field(default_factory=threading.Lock)
    _answers: queue.SimpleQueue[FileAnswer] = field(default_factory=queue.SimpleQueue)

    def limit_memory(self) -> None:
        """Let llama.cpp get no more memory than the owner allows, besides the weights that are mapped from files.

        The owner may allow more later, so it is the soft limit.
        """
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (self.terms.memory_bytes or most, most))

    def listen(self, changed: Callable[[int], None]) -> None:
        """Hear the lender from now on; `changed` gets the threads that the owner allows by then."""
        threading.Thread(target=self._listen, args=(changed,), name="terms", daemon=True).start()

    def _listen(self, changed: Callable[[int], None]) -> None:
        with suppress(OSError):
            while True:
                said = from_lender.decode(self.lender.receive()[0])
                if isinstance(said, HostTerms):
                    self.terms = said
                    self.limit_memory()
                    changed(said.n_threads)
                else:
                    self._answers.put(said)
        self._answers.put(FileAnswer(GONE))

    def take(self, load: Load) -> Load:
        """Return how a segment is loaded here, once its file is there. Raises ModelError, with the reason."""
        name = load.model_path.replace("\\", "/").rpartition("/")[2]
        if not is_segment_name(name):
            raise ModelError(f"{name[:60]!r} is no name of a segment's file")
        path = self.folder / name
        if not path.is_file():
            first, last, _ = load.layers
            self._fetch(SegmentFact(first=first, last=last, name=name))
        if not path.is_file():
            raise ModelError(f"the file {name} is not there")
        n_bytes = path.stat().st_blocks * 512
        n_threads, allowed = self.terms.n_threads, self.terms.memory_bytes
        if allowed and n_bytes > allowed:
            raise ModelError(f"it takes {n_bytes / 1e9:.2f} GB, and its owner allows {allowed / 1e9:.2f} GB (--memory)")
        return msgspec.structs.replace(
            load, model_path=str(path), n_threads=n_threads, n_threads_batch=n_threads, n_gpu_layers=0,
            draft_path="", adapters=(), disk=None,
        )  # fmt: skip

    def _fetch(self, wanted: SegmentFact) -> None:
        """Let the file be fetched. Raises ModelError."""
        with self._asking:
            try:
                self.lender.send(wanted)
            except OSError as e:
                raise ModelError(GONE) from e
            missing = self._answers.get().missing
        if missing:
            raise ModelError(missing)
