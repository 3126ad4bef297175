"""A Q8_0 copy of a model, made in a process of its own, which may write that file only."""

from __future__ import annotations

from pathlib import Path

from ...models.gguf import with_shards
from ...system.confine import Access, Confinement, confine
from ...system.control_groups import n_processors
from ...system.job import JobSocket
from ..llama.model import requantize
from ..llama.refusals import ModelError
from .tune_messages import Requantized, RequantizeJob


def main() -> None:
    """Do the job of the inherited socket: write the target whole or not at all."""
    home = JobSocket()
    job, _ = home.job(RequantizeJob, _confined, end=_give_up)
    try:
        with home.refusing(ModelError):
            requantize(job.source, job.unfinished, n_processors())
            Path(job.unfinished).replace(job.target)
            home.done(Requantized())
    finally:
        _give_up(job)


def _confined(job: RequantizeJob) -> Confinement:
    Path(job.unfinished).touch(mode=0o600, exist_ok=False)
    return confine(Access(read=with_shards([Path(job.source)]), replace=Path(job.unfinished)))


def _give_up(job: RequantizeJob) -> None:
    Path(job.unfinished).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
