"""The control panel: exchange rate, budget, tail, pace, caps, set and privacy. One key undoes a change.

While a slider moves, the panel asks the daemon what the latest value would do, on the user's own history. When the
slider has stood still for a moment, the change goes to the daemon, which writes it to its settings.
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
from textual.widgets import Footer, Input, Select, Static

from disco_daemon.client.amounts import dollars
from disco_daemon.client.once import NOT_RUNNING, REFUSED_KEY, DaemonError

from ..data.debounce import Debounce
from ..data.model import DaemonApi, HostApp, Money, Prediction
from ..data.readers import PacePreset, pace_options, presets
from ..data.scale import BUDGET, RATE, factor_of, in_force
from ..data.sliders import (
    BUDGET_WORDS,
    CAP_WORDS,
    CAPS,
    PACE_KEY,
    PACE_WORDS,
    PRIVATE_KEY,
    PRIVATE_WORDS,
    RATE_WORDS,
    SET_KEY,
    SET_WORDS,
    SLIDERS,
    TAILS,
    Tail,
    field_id,
    no_tail,
    number,
    prediction_words,
    regime,
    set_options,
    slider_words,
    stand_in_words,
)
from ..widgets.slider import Slider
from ..widgets.state_tables import StateTables
from ..widgets.toggle import Toggle
from ..widgets.words import PlainLabel, PlainStatic, block

T = TypeVar("T")

SETTLE_S = 0.25  # a slider that stands still for this long is where the user wants it
POLL_S = 2.0  # between two questions for the state: the battery, and the changes of others
MAX_UNDO = 100


class ControlScreen(Screen[None]):
    """The live settings. The daemon owns them; the application keeps the values before each change."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+z", "undo", "Undo", priority=True),
        Binding("escape", "back", "Back"),
        Binding("down", "app.focus_next", "Next", show=False),
        Binding("up", "app.focus_previous", "Previous", show=False),
    ]

    AUTO_FOCUS = ""  # the first slider gets the focus as soon as it is enabled

    def __init__(self) -> None:
        super().__init__()
        self._settings: dict[str, Any] = {}
        self._money = Money()
        self._undoing = asyncio.Lock()
        self._readers: list[PacePreset] = presets()
        self._pending: dict[str, Any] = {}
        self._sending: dict[str, Any] = {}  # changes that are on their way to the daemon
        self._settled: dict[str, str] = {}  # the text of each field when it was last shown or taken
        self._changes: Debounce[None] = Debounce(self._apply, SETTLE_S)
        self._questions: Debounce[tuple[float, float, dict[str, float]]] = Debounce(self._predict)
        self._prediction: Prediction | None = None
        self._trouble = self._note = ""

    @property
    def _link(self) -> DaemonApi:
        return cast(HostApp, self.app).link

    @property
    def _undo_log(self) -> list[dict[str, Any]]:
        return cast(HostApp, self.app).undo_log

    @property
    def _plain(self) -> bool:
        return bool(getattr(self.app, "plain", False))

    # --- what is on it -----------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """Lay out the sliders by importance, with the prediction between them, always in view."""
        yield PlainLabel("", id="banner")
        with VerticalScroll(can_focus=False):
            (grades := PlainStatic(id="grades")).display = False  # until one side is a stand-in
            rate = Slider(RATE, 0.3, plain=self._plain, id="rate")
            yield block(RATE_WORDS, rate, PlainStatic(id="effect"), grades)
            budget = Slider(BUDGET, 0.5, plain=self._plain, id="budget")
            shown = PlainLabel("", id="budget-value", classes="value")
            yield block(BUDGET_WORDS, Horizontal(budget, shown, classes="slider"))
            for tail in TAILS.values():
                with Vertical(classes="block tail", id=f"{tail.name}-block"):
                    yield PlainLabel(tail.words, classes="words")
                    with Horizontal(classes="slider"):
                        yield Slider(tail.scale, tail.scale.low, plain=self._plain, id=tail.name)
                        yield PlainLabel("", id=f"{tail.name}-value", classes="value")
            yield PlainLabel("", classes="words block tail", id="no-tail")
            with Vertical(classes="block"):
                yield PlainStatic("What-if: asking the daemon", id="prediction")
            yield from self._compose_rest()
        yield Footer()

    def _compose_rest(self) -> ComposeResult:
        presets_of = Select[int](
            pace_options(self._readers), prompt="presets: reading and listening", compact=True, id="reader"
        )
        pace = Input(type="number", compact=True, id="pace", placeholder="token/s")
        yield block(PACE_WORDS, Horizontal(pace, presets_of, classes="row"))
        caps = [
            (name, Input(type="number", compact=True, id=field_id(key), placeholder="none")) for key, name, _ in CAPS
        ]
        fields = [Vertical(PlainLabel(name), field, classes="cap") for name, field in caps]
        yield block(CAP_WORDS, Horizontal(*fields, classes="caps"))
        yield StateTables()
        yield block(SET_WORDS, Select[str](set_options(), allow_blank=False, compact=True, id="set"))
        yield Toggle(PRIVATE_WORDS, id="private")

    def on_mount(self) -> None:
        self.set_class(self._plain, "plain")
        self._enable(False)  # a change would be lost before the settings are known
        self.run_worker(cast("Any", self._load), group="load")
        self.run_worker(cast("Any", self._changes.run), group="changes")
        self.run_worker(cast("Any", self._questions.run), group="questions")
        self.set_interval(POLL_S, self._poll_again)

    def on_resize(self) -> None:
        """Leave out empty lines on a low terminal."""
        self.set_class(self.size.height < 30, "low")

    def _poll_again(self) -> None:
        if self.is_current and not self._pending:
            self.run_worker(cast("Any", self._poll), group="poll", exclusive=True)

    # --- from the daemon ---------------------------------------------------------------------------------------------

    async def _ask(self, question: Awaitable[T]) -> T | None:
        """Return the daemon's answer; None if there is none, and the banner says why."""
        try:
            answer = await question
        except DaemonError as e:
            self._tell(str(e))
            return None
        self._tell("")
        return answer

    def _tell(self, message: str) -> None:
        """Show what is wrong with the daemon, until it answers again."""
        self._trouble = message
        self._show_banner()

    def _remark(self, message: str) -> None:
        """Show what the user's last act led to, until the next one; an answer of the daemon leaves it there."""
        self._note = message
        self._show_banner()

    def _show_banner(self) -> None:
        message = self._note or self._trouble
        self._say("#banner", message)
        self.query("#banner").set(display=bool(message))

    def _say(self, where: str, text: str) -> None:
        """Write a text, if its place exists: an answer may come while the screen is being closed."""
        for label in self.query(where).results(Static):
            label.update(text)

    @property
    def _there(self) -> bool:
        return len(self.query("Slider")) == len(SLIDERS)

    async def _load(self) -> None:
        said = await self._ask(self._link.settings())
        if said is not None:
            self._settings = said["settings"]
            await self._poll()
            self._enable(True)
            self._show_settings()
            self._ask_whatif()

    def _enable(self, known: bool) -> None:
        self.query("Slider, Input, Select, Toggle").set(disabled=not known)
        if known and self._there and self.focused is None:
            self.query_one("#rate", Slider).focus()

    async def _poll(self) -> None:
        if not self._settings:
            await self._load()
            return
        state = await self._ask(self._link.state())
        if state is not None and not self._pending:
            self._money = Money.of(state["money"])
            self._say("#grades", words := stand_in_words(state))
            self.query("#grades").set(display=bool(words))
            self._show_effect()
            for tables in self.query(StateTables):
                tables.show(state)

    def _show_settings(self) -> None:
        """Show the daemon's settings, if they are known; that is no change by the user."""
        if not self._settings or not self._there:
            return
        for name, key in SLIDERS.items():
            self.query_one(f"#{name}", Slider).show(self._get(key))
        self.query_one("#private", Toggle).show(self._get(PRIVATE_KEY))
        with self.prevent(Input.Changed, Input.Submitted, Select.Changed):
            self.query_one("#set", Select).value = self._settings["policy"].get("set", "balanced")
            self._fill("pace", f"{self._get(PACE_KEY):g}")
            for key, _, unit in CAPS:
                value = self._get(key)
                self._fill(field_id(key), "" if value is None else f"{value * unit:g}")
        self._show_tail()
        self._show_effect()

    def _fill(self, name: str, text: str) -> None:
        """Show a text in a field, unless the user is writing there."""
        field = self.query_one(f"#{name}", Input)
        if not field.has_focus or field.value == self._settled.get(name, field.value):
            field.value = self._settled[name] = text

    def _get(self, key: str) -> Any:
        section, name = key.split(".")
        return self._settings[section][name]

    # --- the figures beside the sliders ----------------------------------------------------------------------------

    @property
    def _rate(self) -> float:
        return self.query_one("#rate", Slider).value

    @property
    def _policy(self) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], self._settings.get("policy", {}))

    @property
    def _tail(self) -> Tail | None:
        """The slider for the slowest requests that the policy in force has, if any."""
        return TAILS.get(self._policy.get("name", ""))

    @property
    def effective(self) -> float:
        """The rate that counts with the slider where it is, as battery and heat are now, $/kWh."""
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
        """Show the tail's slider that the policy in force has, and hide the others."""
        tail, policy = self._tail, self._policy.get("name", "")
        self.query(".tail").remove_class("shown")
        self.query("#no-tail" if tail is None else f"#{tail.name}-block").add_class("shown")
        self._say("#no-tail", "" if tail is not None else no_tail(policy))

    def _ask_whatif(self) -> None:
        """Ask what the sliders, as they stand, would do."""
        if self._there:
            tail = self._tail
            tail_value = {} if tail is None else {tail.name: self.query_one(f"#{tail.name}", Slider).value}
            self._questions.call((self.effective, self.query_one("#budget", Slider).value, tail_value))

    async def _predict(self, setting: tuple[float, float, dict[str, float]]) -> None:
        rate, budget, tail_value = setting
        try:
            said = await self._link.whatif(rate, budget, **tail_value)
        except DaemonError as e:
            self._tell(str(e))
            return
        self._prediction = None if said is None else Prediction.of(said)
        self._say("#prediction", prediction_words(self._prediction))

    # --- what the user wants -----------------------------------------------------------------------------------------

    @on(Slider.Slid)
    def _slid(self, event: Slider.Slid) -> None:
        """Predict the effect at once; the change is sent when the slider stands still."""
        self._show_effect()
        self._ask_whatif()
        self._change(SLIDERS[str(event.slider.id)], event.value)

    @on(Toggle.Turned)
    def _apply_toggle(self, event: Toggle.Turned) -> None:
        self._show_effect()
        self._change(PRIVATE_KEY, event.value)

    @on(Select.Changed, "#set")
    def _chose_set(self, event: Select.Changed) -> None:
        now = {SET_KEY: self._policy.get("set", event.value), **self._sending, **self._pending}[SET_KEY]
        if event.value == event.select.value != now:  # the first message is of what it shows before it knows
            self._change(SET_KEY, event.value)

    @on(Select.Changed, "#reader")
    def _chose_reader(self, event: Select.Changed) -> None:
        if isinstance(event.value, int):
            pace = self._readers[event.value].pace_tps
            self.query_one("#pace", Input).value = f"{pace:g}"
            self._change(PACE_KEY, pace)

    @on(Input.Submitted)
    @on(Input.Blurred)
    def _apply_field(self, event: Input.Submitted | Input.Blurred) -> None:
        """Take a field when it is left or entered, if its value is new."""
        if not self._settings:
            return
        key, unit = next(((k, u) for k, _, u in CAPS if field_id(k) == event.input.id), (PACE_KEY, 1.0))
        self._settled[str(event.input.id)] = event.value
        wanted = number(event.value, unit)
        if isinstance(wanted, str) or (wanted is None and key == PACE_KEY):
            self._remark(f"{key}: a number is wanted, not {event.value!r}")
        elif wanted != {key: self._get(key), **self._sending, **self._pending}[key]:
            self._change(key, wanted)

    def _change(self, key: str, value: Any) -> None:
        self._remark("")
        self._pending[key] = value
        self._changes.call(None)

    async def _apply(self, _: None) -> None:
        """Send the changes that wait, and note the old values."""
        wanted, self._pending = self._pending, {}
        if not self._settings or not wanted:
            return
        before = {key: self._get(key) for key in wanted}
        self._sending = wanted
        if await self._send(wanted):
            self._undo_log.append(before)
            del self._undo_log[:-MAX_UNDO]

    async def _send(self, changes: Mapping[str, Any]) -> bool:
        """Send changes; return whether the daemon took them. If not, the screen shows what is in force."""
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
            self._ask_whatif()
        return said is not None

    def action_undo(self) -> None:
        self._remark("")
        if self._pending:
            self._pending = {}
            self._changes.forget()
            self._show_settings()
            self._ask_whatif()
        else:
            self.run_worker(cast("Any", self._take_back), group="undo")

    async def _take_back(self) -> None:
        """Undo one change, after the one that is being sent, if any."""
        async with self._undoing:
            await self._changes.flush()
            if not self._undo_log:
                self._remark("nothing to undo")
                return
            was = self._undo_log.pop()
            if not await self._send(was):
                self._undo_log.append(was)  # the banner says why; the user can try again

    async def on_screen_suspend(self) -> None:
        """Send what waits: the user leaves with what is on the screen."""
        await self._changes.flush()

    async def action_back(self) -> None:
        """Send what waits, and go back."""
        await self._changes.flush()
        if len(self.app.screen_stack) > 1:
            self.app.pop_screen()
