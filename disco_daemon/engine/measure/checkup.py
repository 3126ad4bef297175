"""Run by `disco doctor`: check if llama.cpp works on this machine, with enough memory for a model, and on what GPU.

A process of its own: bindings built for another processor crash at the first instruction that it lacks. The
model itself is not opened: the job has its shape.
"""

from __future__ import annotations

import re

from ...system.confine import Access, confine, try_forbidden
from ...system.job import JobSocket
from ..llama import gpu, mtp
from ..llama import model as llama
from ..llama.library import FAULT
from ..llama.memory import available_bytes
from .checkup_messages import Bindings, CheckupJob, Confined, Examined
from .predicted_memory import fit


def bindings() -> Bindings:
    """Report llama.cpp's version, features and GPUs."""
    version, _, system = (build := llama.build()).partition(" ")
    backends = re.findall(r"(?:^|\| )(\w+) : ", system)
    features = [*re.findall(r"(\w+) = 1\b", system), *(["MTP"] if mtp.is_there() else [])]
    return Bindings(version, features, gpu.free_bytes(), backends, FAULT, build)


def main() -> None:
    """Do the job of the inherited socket."""
    home = JobSocket()
    job, confinement = home.job(CheckupJob, lambda _: confine(Access(), gpu.free_bytes))
    confined = Confined(confinement.in_force, confinement.missing, try_forbidden())
    found, available = bindings(), available_bytes()
    fits = tuple(fit(one, available, found.gpu_bytes) for one in job.models)
    home.done(Examined(found, fits, confined=confined))


if __name__ == "__main__":
    main()
