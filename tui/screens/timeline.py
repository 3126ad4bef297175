"""The timeline of one answer."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Label, Static

from disco_daemon.client.once import DaemonError

from ..data.model import HostApp, Json
from ..draw.timeline_model import DELIVERY, LEGEND, LEVEL, STRAIGHT, TimelineModel, delivery, lanes, level, words
from ..widgets.words import PlainLabel, PlainStatic

RECENT = 1000  # rows of the history in which the answer's own is looked up


class TimelineScreen(ModalScreen[None]):
    """The timeline of an answer, by its `disco` object or its row of the history, and by its trace."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,ctrl+t", "close", "Close"),
        Binding("up", "scroll('up')", "Up", show=False),
        Binding("down", "scroll('down')", "Down", show=False),
    ]

    def __init__(self, disco: Json | None = None, row: Json | None = None) -> None:
        super().__init__(id="timeline")
        self._disco, self._row = disco, row
        self._trace: Json | None = None
        self._pace_tps, self._expected_s = 4.8, 1.0

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="pictures"):
            yield PlainLabel("", id="title")
            yield PlainStatic(id="lanes")
            yield PlainStatic(id="delivery")
            yield PlainStatic(id="level")
            yield PlainStatic(id="words")
        yield Footer()

    def on_mount(self) -> None:
        """Show what is known, then what the daemon adds."""
        self.set_class(self._plain, "plain")
        self.query_one("#pictures", VerticalScroll).focus()
        self.run_worker(cast("Any", self._complete), group="timeline", exclusive=True)

    @property
    def _plain(self) -> bool:
        return bool(getattr(self.app, "plain", False))

    async def _complete(self) -> None:
        """Ask for the trace, the reader's pace and the row of the history; the timeline shows without them, too."""
        link = cast(HostApp, self.app).link
        wanted = (self._disco or self._row or {})["request_id"]
        try:
            self._trace = await link.trace(wanted)
            wish = (await link.settings())["settings"]["delivery"]
            self._pace_tps, self._expected_s = wish["pace_tps"], wish["expected_ttft_s"]
            if self._row is None and self._trace is None:
                rows = await link.history(RECENT)
                self._row = next((row for row in rows if row["request_id"] == wanted), None)
        except DaemonError:
            pass  # the timeline shows what is known without it
        self._show()

    def on_resize(self) -> None:
        """Draw the pictures as wide as the window is now."""
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        if not self.query("#words"):
            return  # the screen is being closed
        model = TimelineModel.of(self._disco, self._row, self._trace)
        self.query_one("#title", Label).update(f"answer {model.request_id}: {model.winner or 'nobody'} was first")
        self.query_one("#words", Static).update("\n".join(words(model)), layout=True)
        pictures = not self._plain
        for name in ("#lanes", "#delivery", "#level"):
            self.query_one(name).display = pictures
        if pictures:
            self._draw(model)

    def _draw(self, model: TimelineModel) -> None:
        width = max(30, self.query_one("#lanes").size.width)
        small = self.size.height < 32
        self.query_one("#lanes", Static).update(lanes(model, width) + f"\n{LEGEND}")
        wish = self._pace_tps, self._expected_s
        curve = delivery(model, *wish, width, 8 if small else 14)
        legend = STRAIGHT if model.trace is None else DELIVERY
        said = "no tokens were delivered" if curve is None else curve + f"\n{legend}"
        self.query_one("#delivery", Static).update(said)
        held = level(model, *wish, width, 5 if small else 7)
        self.query_one("#level").display = held is not None
        if held is not None:
            self.query_one("#level", Static).update(held + f"\n{LEVEL}")

    def action_close(self) -> None:
        self.dismiss()

    def action_scroll(self, way: str) -> None:
        model = self.query_one("#pictures", VerticalScroll)
        model.scroll_up() if way == "up" else model.scroll_down()
