"""The timeline of one answer."""

from __future__ import annotations

from typing import ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Label, Static

from disco_daemon.client import DaemonError

from .model import HasDaemon, Json
from .story import Story, delivery, lanes, words

RECENT = 1000  # rows of the history that are searched for the answer's own
LEGEND = "- waits for its first token   = writes   x stopped before it   | answered too late"
DELIVERY = "tokens over time: * delivered (a straight line: no time of each token is kept)  . as read  H handoff"


class TimelineScreen(ModalScreen[None]):
    """What happened to one answer, from its `disco` object, its row of the history, or both."""

    CSS = """
    TimelineScreen { align: center middle; }
    #story { width: 96%; height: 96%; border: round $accent; padding: 0 1; background: $surface;
      scrollbar-gutter: stable; }
    TimelineScreen.plain #story { border: none; width: 100%; height: 100%; padding: 0; }
    #story Static { margin-bottom: 1; }
    #title { text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,ctrl+t", "close", "Close"),
        Binding("up", "scroll('up')", "Up", show=False),
        Binding("down", "scroll('down')", "Down", show=False),
    ]

    def __init__(self, disco: Json | None = None, row: Json | None = None) -> None:
        super().__init__(id="timeline")
        self._disco, self._row = disco, row
        self._pace_tps, self._expected_s = 4.8, 1.0

    def compose(self) -> ComposeResult:
        """A title, the lanes, the delivery, and all of it in words."""
        with VerticalScroll(id="story"):
            yield Label("", id="title")
            yield Static(id="lanes")
            yield Static(id="delivery")
            yield Static(id="words")
        yield Footer()

    def on_mount(self) -> None:
        """Show what is here, then what the daemon adds."""
        self.set_class(self._plain, "plain")
        self.query_one("#story", VerticalScroll).focus()
        self.run_worker(self._complete(), group="timeline", exclusive=True)

    @property
    def _plain(self) -> bool:
        return bool(getattr(self.app, "plain", False))

    async def _complete(self) -> None:
        """The reader's pace, and the row that goes with the object; the story stands without them, too."""
        link = cast(HasDaemon, self.app).link
        try:
            told = (await link.settings())["settings"]["delivery"]
            self._pace_tps, self._expected_s = told["pace_tps"], told["expected_ttft_s"]
            if self._row is None and self._disco is not None:
                wanted = self._disco["request_id"]
                rows = await link.history(RECENT)
                self._row = next((row for row in rows if row["request_id"] == wanted), None)
        except DaemonError:
            pass  # what is known without it is shown
        self._show()

    def on_resize(self) -> None:
        """The pictures are as wide as the window."""
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        if not self.query("#words"):
            return  # the screen is being taken down
        story = Story.of(self._disco, self._row)
        self.query_one("#title", Label).update(f"answer {story.request_id}: {story.winner or 'nobody'} was first")
        self.query_one("#words", Static).update("\n".join(words(story)), layout=True)
        pictures = not self._plain
        for name in ("#lanes", "#delivery"):
            self.query_one(name).display = pictures
        if pictures:
            self._draw(story)

    def _draw(self, story: Story) -> None:
        width = max(30, self.query_one("#lanes").size.width)
        height = 8 if self.size.height < 32 else 14
        self.query_one("#lanes", Static).update(lanes(story, width) + f"\n{LEGEND}")
        curve = delivery(story, self._pace_tps, self._expected_s, width, height)
        self.query_one("#delivery", Static).update(
            "no tokens were delivered" if curve is None else curve + f"\n{DELIVERY}"
        )

    def action_close(self) -> None:
        """Back to where it was opened."""
        self.dismiss()

    def action_scroll(self, way: str) -> None:
        """A line up or down."""
        story = self.query_one("#story", VerticalScroll)
        story.scroll_up() if way == "up" else story.scroll_down()
