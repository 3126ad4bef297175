"""What a host that is lent to another machine takes of home's orders: its own files, its own threads, its own memory.

Home names a segment by a path of its own. Here only the base name counts, in the one folder of this host. A file that
is not there is asked for on stdout, `first last name`, by whoever has started this process, and may open connections;
the answer on stdin is `there`, or `missing` and the reason why it is not. A line `terms` with threads and bytes of
memory comes there as well, whenever the owner allows something else.
"""

from __future__ import annotations

import queue
import resource
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ...link.relay.handshake import is_segment_name
from ..llama.refusals import ModelError
from ..wire import Load


@dataclass(slots=True)
class LentHost:
    """The folder of this host's files, and what its owner allows; `memory_bytes` 0 = as much as there is."""

    folder: Path
    n_threads: int
    memory_bytes: int = 0
    _asking: threading.Lock = field(default_factory=threading.Lock)
    _answers: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    def limit_memory(self) -> None:
        """Let llama.cpp get no more memory than the owner allows, besides the weights that are mapped from files.

        The owner may allow more later, so it is the soft limit.
        """
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (self.memory_bytes or most, most))

    def listen(self, changed: Callable[[int], None]) -> None:
        """Hear what comes on stdin from now on; `changed` gets the threads that the owner allows by then."""
        threading.Thread(target=self._listen, args=(changed,), name="terms", daemon=True).start()

    def _listen(self, changed: Callable[[int], None]) -> None:
        for line in sys.stdin:
            word, *values = line.split()
            if word == "terms":
                self.n_threads, self.memory_bytes = map(int, values)
                self.limit_memory()
                changed(self.n_threads)
            else:
                self._answers.put(line.strip())
        self._answers.put("missing the program that fetches files has gone")

    def take(self, load: Load) -> Load:
        """Return how a segment is loaded here, once its file is there. Raises ModelError, with the reason."""
        name = load.model_path.replace("\\", "/").rpartition("/")[2]
        if not is_segment_name(name):
            msg = f"{name[:60]!r} is no name of a segment's file"
            raise ModelError(msg)
        path = self.folder / name
        if not path.is_file():
            first, last, _ = load.layers
            self._fetch(f"{first} {last} {name}")
        if not path.is_file():
            msg = f"the file {name} is not there"
            raise ModelError(msg)
        n_bytes = path.stat().st_blocks * 512
        if self.memory_bytes and n_bytes > self.memory_bytes:
            msg = f"it takes {n_bytes / 1e9:.2f} GB, and its owner allows {self.memory_bytes / 1e9:.2f} GB (--memory)"
            raise ModelError(msg)
        return msgspec.structs.replace(
            load, model_path=str(path), n_threads=self.n_threads, n_threads_batch=self.n_threads, n_gpu_layers=0,
            draft_path="", adapters=(), disk=None,
        )  # fmt: skip

    def _fetch(self, wanted: str) -> None:
        """Let the file be fetched. Raises ModelError."""
        with self._asking:
            sys.stdout.write(wanted + "\n")
            sys.stdout.flush()
            answer, _, why = self._answers.get().partition(" ")
        if answer != "there":
            raise ModelError(why)
