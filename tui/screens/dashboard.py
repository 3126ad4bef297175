"""The dashboard: what the daemon has learned, what it spends, and the recent requests, every two seconds."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, cast

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Vertical
from textual.reactive import reactive
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Label, Static

from disco_daemon.client.once import DaemonError

from ..data.model import FILTERS, DashboardSnapshot, HostApp, RequestRow, filter_requests
from ..draw import pictures
from ..draw.theme import fit
from ..widgets.words import PlainLabel, PlainStatic
from .timeline import TimelineScreen

POLL_S = 2.0
ROWS = 200  # requests in the table
PLAN_TOKENS = 120  # of the prompt whose plan is shown
DAYS = 14  # of the ledger


class DashboardScreen(Screen[None]):
    """A function of one snapshot, which a worker fetches."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "filter('all')", "All"),
        Binding("d", "filter('device')", "Device"),
        Binding("s", "filter('server')", "Server"),
        Binding("m", "filter('moved')", "Moved"),
        Binding("e", "filter('errors')", "Errors"),
        Binding("escape", "back", "Back"),
    ]
    snapshot: reactive[DashboardSnapshot | None] = reactive[DashboardSnapshot | None](None)
    chosen: reactive[str] = reactive("all")

    def compose(self) -> ComposeResult:
        yield PlainLabel("", id="banner")
        yield PlainLabel("asking the daemon", id="summary")
        with Grid():
            for name in ("server", "starts", "spend", "wins"):
                yield PlainStatic(id=name)
        with Vertical():
            yield PlainLabel("", id="filter")
            yield DataTable[Text](cursor_type="row", zebra_stripes=False, id="requests")
        yield Footer()

    def on_mount(self) -> None:
        self.set_class(self._plain, "plain")
        table = self._table
        for name, width in (("when", 8), *pictures.COLUMNS):
            table.add_column(name, key=name, width=width)
        table.focus()
        self._poll_again()
        self.set_interval(POLL_S, self._poll_again)

    @property
    def _plain(self) -> bool:
        return bool(getattr(self.app, "plain", False))

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one("#requests", DataTable)

    def _poll_again(self) -> None:
        if self.is_current:
            self.run_worker(cast("Any", self._poll), group="poll", exclusive=True)

    async def _poll(self) -> None:
        """Fetch a snapshot; after a failure the last pictures stay, and a banner says why."""
        link = cast(HostApp, self.app).link
        asked = (link.state(), link.plan(PLAN_TOKENS), link.ledger(DAYS), link.history(ROWS))
        try:
            state, plan, ledger, rows = await asyncio.gather(*asked)
        except DaemonError as e:
            self._tell(str(e))
            return
        if not self.query("#requests"):
            return  # the screen is being closed
        self._tell("")
        self.snapshot = DashboardSnapshot(state, plan, ledger, rows)

    def _tell(self, message: str) -> None:
        for banner in self.query("#banner").results(Label):
            banner.update(message)
            banner.display = bool(message)

    # --- what is shown -----------------------------------------------------------------------------------------------

    def watch_snapshot(self) -> None:
        """Draw the new snapshot."""
        if self.snapshot is not None:
            with self.app.batch_update():
                self._draw(self.snapshot)
                self._fill(self.snapshot)

    def watch_chosen(self) -> None:
        """Fill the table by the new filter."""
        if self.snapshot is not None:
            self._fill(self.snapshot)

    def on_resize(self) -> None:
        """Draw the pictures as wide as their places are now."""
        self.set_class(self.size.height >= 34, "high")
        self.call_after_refresh(self.watch_snapshot)

    def _draw(self, snapshot: DashboardSnapshot) -> None:
        state, plan = snapshot.state, snapshot.plan
        self.query_one("#summary", Label).update(pictures.summary(state))
        requests, money = snapshot.requests, snapshot.money
        width = max(30, self.query_one("#server").size.width)
        height = max(4, self.query_one("#server").size.height - 3)
        learned = [pictures.server_words(state), pictures.device_words(state), pictures.link_words(state)]
        said = f"{pictures.starts_words(plan)}\nx not started, d device TTFT"
        pictured = not self._plain
        below = [line for line in learned if line]
        high = max(4, height + 2 - len(below))
        self._show("#server", "\n".join(below), pictures.server_ttft(state, width, high) if pictured else None)
        both = len(state["endpoints"]) > 1
        starts = pictures.starts(plan, width, height) if pictured and both else None
        self._show("#starts", said if both else pictures.ALONE, starts)
        spent = pictures.spend(money, snapshot.ledger, width, plain=self._plain)
        self.query_one("#spend", Static).update(spent + "\n" + pictures.power(state))
        self.query_one("#wins", Static).update(pictures.wins(requests, width, plain=self._plain))

    def _show(self, name: str, words: str, picture: Any) -> None:
        self.query_one(name, Static).update(words if picture is None else picture + f"\n{fit(words)}")

    # --- the table ---------------------------------------------------------------------------------------------------

    def _fill(self, snapshot: DashboardSnapshot) -> None:
        """Fill the table, and leave it alone if nothing is new or gone, so that the cursor stays."""
        requests = filter_requests(snapshot.requests, self.chosen)
        table, wanted = self._table, [r.request_id for r in requests]
        there = [str(key.value) for key in table.rows]
        if wanted != there:
            self._rebuild(requests)
        counts = f"{len(requests)} of {len(snapshot.requests)} requests"
        self.query_one("#filter", Label).update(f"{counts}: {FILTERS[self.chosen]}   (a d s m e, Enter = timeline)")

    def _rebuild(self, requests: list[RequestRow]) -> None:
        table = self._table
        under = self._under_cursor()
        table.clear()
        for request in requests:
            cells = [Text(fit(cell), no_wrap=True, end="") for cell in pictures.cells(request)]
            table.add_row(Text(_clock(request.created), no_wrap=True, end=""), *cells, key=request.request_id)
        if under is not None and under in table.rows:
            table.move_cursor(row=table.get_row_index(under))

    def _under_cursor(self) -> str | None:
        table = self._table
        if not table.is_valid_row_index(table.cursor_row):
            return None
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value

    # --- keys --------------------------------------------------------------------------------------------------------

    def action_filter(self, chosen: str) -> None:
        self.chosen = chosen

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show the timeline of the request."""
        if self.snapshot is not None:
            wanted = event.row_key.value
            row = next((row for row in self.snapshot.rows if row["request_id"] == wanted), None)
            if row is not None:
                self.app.push_screen(TimelineScreen(row=row))

    def action_back(self) -> None:
        if len(self.app.screen_stack) > 1:
            self.app.pop_screen()


def _clock(created: float) -> str:
    """Return a Unix time as the local time of day."""
    from datetime import datetime

    return datetime.fromtimestamp(created).astimezone().strftime("%H:%M:%S")
