"""The control panel: exchange rate, budget, tail, pace, caps and privacy; applied at once, undone with one key.

While a slider moves, the what-if on the user's own history is asked again and again, with the latest value only. What
the user changed goes to the daemon when the slider has stood still for a moment, and the daemon writes it down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, ClassVar, TypeVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Input, Label, Select, Static

from disco_daemon.client.once import NOT_RUNNING, REFUSED_KEY, DaemonError

from ..data.debounce import Latest
from ..data.model import Daemon, HasDaemon, Money, Prediction
from ..data.readers import Reader, presets
from ..data.scale import BUDGET, RATE, dollars, factor_of, in_force
from ..data.sliders import (
    BUDGET_WORDS,
    CAP_WORDS,
    CAPS,
    PACE_KEY,
    PACE_WORDS,
    PRIVATE_KEY,
    PRIVATE_WORDS,
    RATE_WORDS,
    SLIDERS,
    TAILS,
    Tail,
    field_id,
    no_tail,
    number,
    prediction_words,
    regime,
    slider_words,
)
from ..widgets.slider import Slider
from ..widgets.toggle import Toggle

T = TypeVar("T")

SETTLE_S = 0.25  # a slider that stands still for so long is where the user wants it
LOOK_S = 2.0  # between two looks at the battery, and at what others change
MAX_UNDO = 100


class ControlScreen(Screen[None]):
    """All live settings. The screen owns what is on it; the daemon owns the settings, the app what they were before."""

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
        self._undoing = asyncio.Lock()
        self._readers: list[Reader] = presets()
        self._pending: dict[str, Any] = {}
        self._sending: dict[str, Any] = {}  # what the daemon is being told
        self._settled: dict[str, str] = {}  # what stood in a field when it was shown or taken last
        self._changes: Latest[None] = Latest(self._apply, SETTLE_S)
        self._questions: Latest[tuple[float, float, dict[str, float]]] = Latest(self._predict)
        self._prediction: Prediction | None = None
        self._trouble = self._note = ""

    @property
    def _link(self) -> Daemon:
        return cast(HasDaemon, self.app).link

    @property
    def _before(self) -> list[dict[str, Any]]:
        return cast(HasDaemon, self.app).before

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
                with Horizontal(classes="slider"):
                    yield Slider(BUDGET, 0.5, plain=self._plain, id="budget")
                    yield Label("", id="budget-value", classes="value")
            for tail in TAILS.values():
                with Vertical(classes="block tail", id=f"{tail.name}-block"):
                    yield Label(tail.words, classes="words")
                    with Horizontal(classes="slider"):
                        yield Slider(tail.scale, tail.scale.low, plain=self._plain, id=tail.name)
                        yield Label("", id=f"{tail.name}-value", classes="value")
            yield Label("", classes="words block tail", id="no-tail")
            with Vertical(classes="block"):
                yield Static("What-if: asking the daemon", id="prediction")
            yield from self._compose_rest()
        yield Footer()

    def _compose_rest(self) -> ComposeResult:
        with Vertical(classes="block"):
            yield Label(PACE_WORDS, classes="words")
            with Horizontal(classes="row"):
                yield Input(type="number", compact=True, id="pace", placeholder="token/s")
                yield Select[int](self._options(), prompt="presets: reading and listening", compact=True, id="reader")
        with Vertical(classes="block"):
            yield Label(CAP_WORDS, classes="words")
            with Horizontal(classes="caps"):
                for key, name, _ in CAPS:
                    with Vertical(classes="cap"):
                        yield Label(name)
                        yield Input(type="number", compact=True, id=field_id(key), placeholder="none")
        yield Toggle(PRIVATE_WORDS, id="private")

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
        """What is wrong with the daemon, until it is not."""
        self._trouble = message
        self._show_banner()

    def _remark(self, message: str) -> None:
        """What came of the user's last act, until the next one: a look at the daemon must not wipe it away."""
        self._note = message
        self._show_banner()

    def _show_banner(self) -> None:
        message = self._note or self._trouble
        self._say("#banner", message)
        self.query("#banner").set(display=bool(message))

    def _say(self, where: str, text: str) -> None:
        """Write it where there is such a place: an answer may come when the screen is being taken down."""
        for label in self.query(where).results(Static):
            label.update(text)

    @property
    def _there(self) -> bool:
        return len(self.query("Slider")) == len(SLIDERS)

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
        self.query("Slider, Input, Select, Toggle").set(disabled=not known)
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
        for name, key in SLIDERS.items():
            self.query_one(f"#{name}", Slider).show(self._get(key))
        self.query_one("#private", Toggle).show(self._get(PRIVATE_KEY))
        with self.prevent(Input.Changed, Input.Submitted, Select.Changed):
            self._fill("pace", f"{self._get(PACE_KEY):g}")
            for key, _, unit in CAPS:
                value = self._get(key)
                self._fill(field_id(key), "" if value is None else f"{value * unit:g}")
        self._show_tail()
        self._show_effect()

    def _fill(self, name: str, text: str) -> None:
        """Show it in a field, unless somebody is writing something else there."""
        field = self.query_one(f"#{name}", Input)
        if not field.has_focus or field.value == self._settled.get(name, field.value):
            field.value = self._settled[name] = text

    def _get(self, key: str) -> Any:
        section, name = key.split(".")
        return self._settings[section][name]

    # --- the figures beside the knobs --------------------------------------------------------------------------------

    @property
    def _rate(self) -> float:
        return self.query_one("#rate", Slider).value

    @property
    def _policy(self) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], self._settings.get("policy", {}))

    @property
    def _tail(self) -> Tail | None:
        """The knob that the policy in force has for its slowest requests."""
        return TAILS.get(self._policy.get("name", ""))

    @property
    def effective(self) -> float:
        """The rate that would count with the slider where it is, as things are now, $/kWh."""
        return in_force(self._rate, factor_of(self._money.rate, self._money.effective))

    def _show_effect(self) -> None:
        if not self._there:
            return
        money, counts = self._money, self.effective
        word = regime(money, counts, {**self._policy, "private": self.query_one("#private", Toggle).value})
        self._say("#effect", f"set {dollars(self._rate)}, counts {dollars(counts)} {money.source}: {word}")
        for name in SLIDERS:
            self._say(f"#{name}-value", slider_words(name, self.query_one(f"#{name}", Slider).value))

    def _show_tail(self) -> None:
        """Of the tail's knobs the one that the policy in force has."""
        tail, policy = self._tail, self._policy.get("name", "")
        self.query(".tail").remove_class("shown")
        self.query("#no-tail" if tail is None else f"#{tail.name}-block").add_class("shown")
        self._say("#no-tail", "" if tail is not None else no_tail(policy))

    def _wonder(self) -> None:
        """Ask what would come of the knobs as they stand."""
        if self._there:
            tail = self._tail
            knobs = {} if tail is None else {tail.name: self.query_one(f"#{tail.name}", Slider).value}
            self._questions.tell((self.effective, self.query_one("#budget", Slider).value, knobs))

    async def _predict(self, setting: tuple[float, float, dict[str, float]]) -> None:
        rate, budget, knobs = setting
        try:
            said = await self._link.whatif(rate, budget, **knobs)
        except DaemonError as e:
            self._tell(str(e))
            return
        self._prediction = None if said is None else Prediction.of(said)
        self._say("#prediction", prediction_words(self._prediction))

    # --- what the user wants -----------------------------------------------------------------------------------------

    @on(Slider.Changed)
    def _slid(self, event: Slider.Changed) -> None:
        """Say at once what it would mean; do it when it stands still."""
        self._show_effect()
        self._wonder()
        self._want(SLIDERS[str(event.slider.id)], event.value)

    @on(Toggle.Changed)
    def _turned(self, event: Toggle.Changed) -> None:
        self._show_effect()
        self._want(PRIVATE_KEY, event.value)

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
        key, unit = next(((k, u) for k, _, u in CAPS if field_id(k) == event.input.id), (PACE_KEY, 1.0))
        self._settled[str(event.input.id)] = event.value
        wanted = number(event.value, unit)
        if isinstance(wanted, str) or (wanted is None and key == PACE_KEY):
            self._remark(f"{key}: a number is wanted, not {event.value!r}")
        elif wanted != {key: self._get(key), **self._sending, **self._pending}[key]:
            self._want(key, wanted)

    def _want(self, key: str, value: Any) -> None:
        self._remark("")
        self._pending[key] = value
        self._changes.tell(None)

    async def _apply(self, _: None) -> None:
        """Send what is wanted; what was before can be had back."""
        wanted, self._pending = self._pending, {}
        if not self._settings or not wanted:
            return
        before = {key: self._get(key) for key in wanted}
        self._sending = wanted
        if await self._send(wanted):
            self._before.append(before)
            del self._before[:-MAX_UNDO]

    async def _send(self, changes: Mapping[str, Any]) -> bool:
        """Whether the daemon took them; if not, the knobs go back to what is in force."""
        said = None
        try:
            said = await self._link.change(changes)
        except DaemonError as e:
            (self._tell if e.code in (NOT_RUNNING, REFUSED_KEY) else self._remark)(str(e))
        else:
            self._tell("")
            self._settings = said["settings"]
            self._money = Money.of(said["money"])
        self._sending = {}
        if self._settings and not self._pending:
            self._show_settings()
            self._wonder()
        return said is not None

    def action_undo(self) -> None:
        """Take the last change back, one that waits to be sent too."""
        self._remark("")
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
            if not self._before:
                self._remark("nothing to undo")
                return
            was = self._before.pop()
            if not await self._send(was):
                self._before.append(was)  # the banner says why; it can be tried again

    async def on_screen_suspend(self) -> None:
        """Whoever leaves wants what is on the screen."""
        await self._changes.flush()

    async def action_back(self) -> None:
        """Where it was opened from, with everything sent."""
        await self._changes.flush()
        if len(self.app.screen_stack) > 1:
            self.app.pop_screen()
