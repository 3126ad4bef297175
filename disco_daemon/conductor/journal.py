"""The journal of one answer: one emitter for the log, the energy observer, the record and the timeline."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from types import TracebackType

from ..delivery.trace import Trace
from ..errors import EndpointError
from ..types import GenerationRequest, Outcome, Plan, Side
from .context import AnswerContext
from .endpoint_run import EndpointRun

log = logging.getLogger("disco.answer")


class Journal:
    """Emits started, complete and failed of one answer and of its runs.

    `record` takes the outcome into history, ledger and metrics. Messages that may repeat words of a private prompt are
    left out.
    """

    def __init__(self, context: AnswerContext, request: GenerationRequest) -> None:
        self._context, self._request = context, request

    @property
    def is_private(self) -> bool:
        """Whether nothing of the answer may be written down, on disk or into the log."""
        return self._request.private or self._context.private

    def started(self, plan: Plan, n_prompt: int) -> None:
        """The answer begins by this plan."""
        log.debug("answer.plan %s %s l=%d", self._request.request_id, plan, n_prompt)

    def moved(self, text: str) -> None:
        """A handoff is done."""
        log.info("answer.handoff %s %s", self._request.request_id, text)

    def failed(self, bugs: ExceptionGroup) -> None:
        """Errors of ours have ended the answer; what an exception says may be words of the prompt."""
        if not self.is_private:
            log.error("answer.failed %s", self._request.request_id, exc_info=bugs)
            return
        for bug in bugs.exceptions:
            where = "".join(traceback.format_tb(bug.__traceback__))
            log.error("answer.failed %s %s\n%s", self._request.request_id, type(bug).__name__, where)

    def complete(self, outcome: Outcome, trace: Trace, record: Callable[[Outcome], None]) -> None:
        """The answer has ended, well or not: keep its outcome and its timeline."""
        record(outcome)
        self._context.traces.keep(trace)

    def running(self, run: EndpointRun) -> RunSpan:
        """Return the span of a run: its start and its end are made known."""
        return RunSpan(self, run)

    def run_started(self, run: EndpointRun) -> None:
        """An endpoint begins to work."""
        log.debug("answer.%s.started %s after=%d tokens", run.side, self._request.request_id, run.n_before)
        if run.side is Side.DEVICE:
            self._context.energy.begin(id(run), run.started)

    def hedged(self, run: EndpointRun) -> None:
        """An endpoint has been silent for so long that it is asked again."""
        log.info("answer.%s.hedged %s", run.side, self._request.request_id)

    def run_prefilled(self, run: EndpointRun, now: float) -> None:
        """An endpoint has read the prompt: its first token is there."""
        if run.side is Side.DEVICE:
            self._context.energy.observe_prefill(id(run), now, run.usage.prompt_tokens)

    def run_failed(self, run: EndpointRun, error: EndpointError) -> None:
        """An endpoint cannot go on. Why the device refuses a request may quote it, which no log does."""
        is_quoting = self.is_private or (error.your_fault and run.side is Side.DEVICE)
        log.warning("%s failed (%s)%s", run.side, error.reason, "" if is_quoting else f": {error}")

    def run_complete(self, run: EndpointRun) -> None:
        """An endpoint works no more: it has finished, failed, or was stopped."""
        if run.side is Side.DEVICE:
            now = self._context.clock.now()
            if run.first_at is None:
                self.run_prefilled(run, now)
            self._context.energy.end(id(run), now, run.usage.completion_tokens)


class RunSpan:
    """From the start of a run to its end."""

    def __init__(self, journal: Journal, run: EndpointRun) -> None:
        self._journal, self._run = journal, run

    def __enter__(self) -> None:
        self._journal.run_started(self._run)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._journal.run_complete(self._run)
