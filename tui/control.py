"""The control panel: the exchange rate, the budget, the pace and the caps; applied at once, undone with one key.

While a slider moves, the what-if on the user's own history is asked again and again, with the latest value only. What
the user changed goes to the daemon when the slider has stood still for a moment, and the daemon writes it down.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Mapping
from typing import Any, ClassVar, TypeVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Input, Label, Select, Static

from disco_daemon.client import DaemonError

from .latest import Latest
from .model import Daemon, HasDaemon, Money, Prediction
from .readers import Reader, presets
from .scale import BUDGET, RATE, dollars, factor_of, in_force, seconds
from .slider import Slider

T = TypeVar("T")

SETTLE_S = 0.25  # a slider that stands still for so long is where the user wants it
LOOK_S = 2.0  # between two looks at the battery, and at what others change
MAX_UNDO = 100
RATE_KEY, BUDGET_KEY, PACE_KEY = "device.usd_per_kwh", "policy.budget", "delivery.pace_tps"

RATE_WORDS = "Exchange rate: what a kWh of this machine's energy is worth to you, $/kWh"
BUDGET_WORDS = "Budget b: the share of all prompt tokens that the scarcer side may process"
PACE_WORDS = "Reading pace, token/s: paced answers come no faster, and QoE is measured by it"
CAP_WORDS = "Caps: a side that has reached one gives way to the other; empty = none"
PRIVACY = (
    "Privacy: nothing is sent to a server by an answer with the model disco/device. Choose it in the chat to keep a "
    "conversation on this machine; `disco up --device-only` keeps all of them here."
)
TOO_LITTLE = "What-if: too little history yet to say what another setting would do"
# Setting, what it is called here, and what a unit of the field is of the setting's.
CAPS: tuple[tuple[str, str, float], ...] = (
    ("caps.usd_per_day", "$ a day", 1.0),
    ("caps.usd_per_month", "$ a month", 1.0),
    ("caps.wh_per_day", "Wh a day", 1.0),
    ("caps.battery_floor", "battery floor, %", 100.0),
)


class ControlScreen(Screen[None]):
    """All live settings. The screen owns what is on it; the daemon owns the settings."""

    CSS = """
    ControlScreen VerticalScroll { padding: 0 1; }
    ControlScreen .words { color: $text-muted; width: 100%; }
    ControlScreen .block { height: auto; margin-bottom: 1; }
    ControlScreen.low .block { margin-bottom: 0; }
    ControlScreen .row { height: 1; }
    ControlScreen #budget-row { height: 2; }
    ControlScreen #budget-value { width: 8; text-align: right; }
    ControlScreen #effect { color: $foreground; }
    ControlScreen #prediction { background: $boost; height: auto; }
    ControlScreen #banner { background: $warning; color: $background; display: none; }
    ControlScreen.plain #banner { background: $background; color: $foreground; }
    ControlScreen #pace { width: 12; }
    ControlScreen #reader { width: 1fr; }
    ControlScreen .cap { width: 1fr; height: 2; }
    ControlScreen .caps { height: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+z", "undo", "Undo", priority=True),
        Binding("escape", "back", "Back"),
        Binding("down", "app.focus_next", "Next", show=False),
        Binding("up", "app.focus_previous", "Previous", show=False),
    ]

    AUTO_FOCUS = ""  # the first knob, as soon as it works

    def __init__(self) -> None:
        super().__init__()
        self._settings: dict[str, Any] = {}
        self._money = Money()
        self._undo: list[dict[str, Any]] = []
        self._undoing = asyncio.Lock()
        self._readers: list[Reader] = presets()
        self._pending: dict[str, Any] = {}
        self._changes: Latest[None] = Latest(self._apply, SETTLE_S)
        self._questions: Latest[tuple[float, float]] = Latest(self._predict)
        self._prediction: Prediction | None = None

    @property
    def _link(self) -> Daemon:
        return cast(HasDaemon, self.app).link

    @property
    def _plain(self) -> bool:
        return bool(getattr(self.app, "plain", False))

    # --- what is on it -----------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """Knobs from the one that matters most down; the prediction between them, always in sight."""
        yield Label("", id="banner")
        with VerticalScroll(can_focus=False):
            with Vertical(classes="block"):
                yield Label(RATE_WORDS, classes="words")
                yield Slider(RATE, 0.3, plain=self._plain, id="rate")
                yield Static(id="effect")
            with Vertical(classes="block"):
                yield Label(BUDGET_WORDS, classes="words")
                with Horizontal(id="budget-row"):
                    yield Slider(BUDGET, 0.5, plain=self._plain, id="budget")
                    yield Label("", id="budget-value")
            with Vertical(classes="block"):
                yield Static("What-if: asking the daemon", id="prediction")
            with Vertical(classes="block"):
                yield Label(PACE_WORDS, classes="words")
                with Horizontal(classes="row"):
                    yield Input(type="number", compact=True, id="pace", placeholder="token/s")
                    yield Select[int](
                        self._options(), prompt="presets: reading and listening", compact=True, id="reader"
                    )
            with Vertical(classes="block"):
                yield Label(CAP_WORDS, classes="words")
                with Horizontal(classes="caps"):
                    for key, name, _ in CAPS:
                        with Vertical(classes="cap"):
                            yield Label(name)
                            yield Input(type="number", compact=True, id=_id(key), placeholder="none")
            yield Label(PRIVACY, classes="words", id="privacy")
        yield Footer()

    def _options(self) -> list[tuple[str, int]]:
        return [(f"{reader.name}: {reader.pace_tps:g} token/s", i) for i, reader in enumerate(self._readers)]

    def on_mount(self) -> None:
        """Ask for everything, and go on looking."""
        self.set_class(self._plain, "plain")
        self._enable(False)  # a wish before it is known what is in force would be lost
        self.run_worker(self._load(), group="load")
        self.run_worker(self._changes.run(), group="changes")
        self.run_worker(self._questions.run(), group="questions")
        self.set_interval(LOOK_S, self._look_again)

    def on_resize(self) -> None:
        """On a low terminal nothing is wasted on empty lines."""
        self.set_class(self.size.height < 30, "low")

    def _look_again(self) -> None:
        if self.is_current and not self._pending:
            self.run_worker(self._look(), group="look", exclusive=True)

    # --- from the daemon ---------------------------------------------------------------------------------------------

    async def _ask(self, question: Awaitable[T]) -> T | None:
        """An answer of the daemon; None if there is none, which the banner says."""
        try:
            answer = await question
        except DaemonError as e:
            self._tell(str(e))
            return None
        self._tell("")
        return answer

    def _tell(self, message: str) -> None:
        self._say("#banner", message)
        self.query("#banner").set(display=bool(message))

    def _say(self, where: str, text: str) -> None:
        """Write it where there is such a place: an answer may come when the screen is being taken down."""
        for label in self.query(where).results(Static):
            label.update(text)

    @property
    def _there(self) -> bool:
        return len(self.query("Slider")) == 2

    async def _load(self) -> None:
        said = await self._ask(self._link.settings())
        if said is not None:
            self._settings = said["settings"]
            await self._look()
            self._enable(True)
            self._show_settings()
            self._wonder()

    def _enable(self, known: bool) -> None:
        """The knobs work once it is known where they stand."""
        self.query("Slider, Input, Select").set(disabled=not known)
        if known and self._there and self.focused is None:
            self.query_one("#rate", Slider).focus()

    async def _look(self) -> None:
        if not self._settings:
            await self._load()
            return
        state = await self._ask(self._link.state())
        if state is not None and not self._pending:
            self._money = Money.of(state["money"])
            self._show_effect()

    def _show_settings(self) -> None:
        """Put every knob where the daemon says it is, if it said so, without taking that for the user's wish."""
        if not self._settings or not self._there:
            return
        self.query_one("#rate", Slider).show(self._get(RATE_KEY))
        self.query_one("#budget", Slider).show(self._get(BUDGET_KEY))
        with self.prevent(Input.Changed, Input.Submitted, Select.Changed):
            self.query_one("#pace", Input).value = f"{self._get(PACE_KEY):g}"
            for key, _, unit in CAPS:
                value = self._get(key)
                self.query_one(f"#{_id(key)}", Input).value = "" if value is None else f"{value * unit:g}"
        self._show_effect()

    def _get(self, key: str) -> Any:
        section, name = key.split(".")
        return self._settings[section][name]

    # --- the figures beside the knobs --------------------------------------------------------------------------------

    @property
    def _rate(self) -> float:
        return self.query_one("#rate", Slider).value

    @property
    def _budget(self) -> float:
        return self.query_one("#budget", Slider).value

    @property
    def effective(self) -> float:
        """The rate that would count with the slider where it is, as things are now, $/kWh."""
        return in_force(self._rate, factor_of(self._money.rate, self._money.effective))

    def _show_effect(self) -> None:
        if not self._there:
            return
        money, counts = self._money, self.effective
        regime = _regime(money, counts, self._settings.get("policy", {}).get("scarcer", "auto"))
        value = f"set {dollars(self._rate)}, counts {dollars(counts)} {money.source}: {regime}"
        self._say("#effect", value)
        self._say("#budget-value", f"{self._budget:.2f}")

    def _wonder(self) -> None:
        """Ask what would come of the knobs as they stand."""
        if self._there:
            self._questions.tell((self.effective, self._budget))

    async def _predict(self, setting: tuple[float, float]) -> None:
        try:
            said = await self._link.whatif(*setting)
        except DaemonError as e:
            self._tell(str(e))
            return
        self._prediction = None if said is None else Prediction.of(said)
        self._say("#prediction", _in_words(self._prediction))

    # --- what the user wants -----------------------------------------------------------------------------------------

    @on(Slider.Changed)
    def _slid(self, event: Slider.Changed) -> None:
        """Say at once what it would mean; do it when it stands still."""
        self._show_effect()
        self._wonder()
        self._want(RATE_KEY if event.slider.id == "rate" else BUDGET_KEY, event.value)

    @on(Select.Changed, "#reader")
    def _chose_reader(self, event: Select.Changed) -> None:
        if isinstance(event.value, int):
            pace = self._readers[event.value].pace_tps
            self.query_one("#pace", Input).value = f"{pace:g}"
            self._want(PACE_KEY, pace)

    @on(Input.Submitted)
    @on(Input.Blurred)
    def _typed(self, event: Input.Submitted | Input.Blurred) -> None:
        """A field is taken when it is left or entered, if it says something new."""
        if not self._settings:
            return
        key, unit = next(((k, u) for k, _, u in CAPS if _id(k) == event.input.id), (PACE_KEY, 1.0))
        wanted = _number(event.value, unit)
        if isinstance(wanted, str) or (wanted is None and key == PACE_KEY):
            self._tell(f"{key}: a number is wanted, not {event.value!r}")
        elif wanted != self._get(key):
            self._want(key, wanted)

    def _want(self, key: str, value: Any) -> None:
        self._pending[key] = value
        self._changes.tell(None)

    async def _apply(self, _: None) -> None:
        """Send what is wanted; what was before can be had back."""
        wanted, self._pending = self._pending, {}
        if not self._settings or not wanted:
            return
        before = {key: self._get(key) for key in wanted}
        if await self._send(wanted):
            self._undo = [*self._undo[1 - MAX_UNDO :], before]

    async def _send(self, changes: Mapping[str, Any]) -> bool:
        """Whether the daemon took them; if not, the knobs go back to what is in force."""
        said = await self._ask(self._link.change(changes))
        if said is not None:
            self._settings = said["settings"]
            self._money = Money.of(said["money"])
        if self._settings and not self._pending:
            self._show_settings()
            self._wonder()
        return said is not None

    def action_undo(self) -> None:
        """Take the last change back, one that waits to be sent too."""
        if self._pending:
            self._pending = {}
            self._changes.forget()
            self._show_settings()
            self._wonder()
        else:
            self.run_worker(self._take_back(), group="undo")

    async def _take_back(self) -> None:
        """Undo one change; one that is under way is waited for, and then it is the last."""
        async with self._undoing:
            await self._changes.flush()
            if self._undo:
                await self._send(self._undo.pop())
            else:
                self._tell("nothing to undo")

    async def on_screen_suspend(self) -> None:
        """Whoever leaves wants what is on the screen."""
        await self._changes.flush()

    async def action_back(self) -> None:
        """Where it was opened from, with everything sent."""
        await self._changes.flush()
        if len(self.app.screen_stack) > 1:
            self.app.pop_screen()


def _id(key: str) -> str:
    return key.replace(".", "-").replace("_", "-")


def _number(text: str, unit: float) -> float | str | None:
    """What a field says, in the setting's unit: a number from 0 on, None for nothing, the text itself for nonsense."""
    if not text.strip():
        return None
    try:
        number = float(text)
    except ValueError:
        return text
    return number / unit if 0 <= number < math.inf else text


def _regime(money: Money, counts: float, set_to: str) -> str:
    """Which side is scarce at that rate, and where that changes."""
    if money.scarcer is None:
        return "there is no server, nothing is scarce"
    if set_to != "auto":
        return f"{set_to} is scarce, as you set it"
    if money.threshold is None:
        return f"{money.scarcer} is scarce at any rate"
    scarcer, other, way = ("device", "server", "up to") if counts > money.threshold else ("server", "device", "above")
    return f"{scarcer} is scarce, {other} {way} {dollars(money.threshold)}"


def _in_words(prediction: Prediction | None) -> str:
    if prediction is None:
        return TOO_LITTLE
    p = prediction
    return (
        f"What-if on your {p.requests} requests, {p.scarcer} scarce:\n"
        f"TTFT mean {seconds(p.mean_s)}, P99 {seconds(p.p99_s)}   "
        f"server {dollars(p.usd_per_day)}/day   this machine {p.wh_per_day:.3g} Wh/day"
    )
