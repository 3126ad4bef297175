"""First steps: a server with its key and model, or another local model. Escape leaves everything as it was.

Nothing is written before the server has answered one short question; then the daemon writes it down, and the key into a
file of its own. The key is in this screen and in one request, and nowhere else here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Key
from textual.screen import Screen
from textual.widgets import Footer, Input, OptionList, Static
from textual.widgets.option_list import Option

from disco_daemon.client.once import DaemonError

from ..data.daemon_launcher import startable
from ..data.setup_draft import (  # fmt: skip
    DIGITS,
    LOCAL,
    NONE,
    OTHER,
    SERVICE,
    STEP_OF,
    Draft,
    Step,
    choices,
    fitting,
    local_choices,
    problem_of,
    result_of,
)
from ..draw.theme import fit

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from ..app import DiscoApp

CLOSE = "close"
NOTE_S = 6.0  # how long it is told that all is saved
COSTS = "Enter tests it with one short question, which costs next to nothing, and saves it."
_LETTERS = {"0": OTHER, "m": LOCAL, "n": NONE, "s": SERVICE}


class SetupScreen(Screen[None]):
    """One question after the other, in one place. `_step` says which; `_draft` what is known by then."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Leave", priority=True),
        Binding("down", "move(1)", "Down", show=False),
        Binding("up", "move(-1)", "Up", show=False),
    ]

    app: DiscoApp

    def __init__(self) -> None:
        super().__init__(id="setup-screen")
        self._step = Step.WAIT
        self._draft = Draft()
        self._known: dict[str, Any] = {}
        self._keys: list[str] = []  # of the choices that are shown

    # --- what is on it -----------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """A question, what helps to answer it, and where to."""
        with Vertical(id="setup"):
            yield Static(id="head", markup=False)
            yield Static(id="said", markup=False)
            yield Static(id="problem", markup=False)
            yield Input(id="field", compact=True)
            yield OptionList(id="choices", compact=True)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Ask the daemon what there is."""
        self.set_class(self.app.plain, "-plain")
        self._wait("Asking the daemon which servers it knows …", self._look)

    def _show(
        self,
        step: Step,
        told: str,
        *,
        problem: str = "",
        field: str | None = None,
        rows: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        """One step: `field` is the hint of the input, `rows` are choices; None leaves that out."""
        self._step = step
        self.query_one("#head", Static).update(step.value)
        self.query_one("#said", Static).update(fit(told))
        place = self.query_one("#problem", Static)
        place.set_class(bool(problem), "-shown")
        place.update(f"! {fit(problem)}" if problem else "")
        line, options = self.query_one("#field", Input), self.query_one("#choices", OptionList)
        line.set_class(field is not None, "-shown")
        options.set_class(rows is not None, "-shown")
        with self.prevent(Input.Changed):
            line.value = ""
        line.placeholder, line.password = field or "", step is Step.KEY
        self._offer(rows or ())
        if field is not None:
            self.set_focus(line)
        else:
            self.set_focus(options if rows is not None else None)

    def _offer(self, rows: Sequence[tuple[str, str]]) -> None:
        """These choices, the first of them at hand."""
        self._keys = [key for key, _ in rows]
        options = self.query_one("#choices", OptionList)
        options.set_options([Option(Text(fit(line), no_wrap=True, overflow="ellipsis")) for _, line in rows])
        options.highlighted = 0 if rows else None

    def _wait(self, told: str, doing: Callable[..., Coroutine[Any, Any, None]], *args: str) -> None:
        """Something that takes a moment; Escape gives it up."""
        self._show(Step.WAIT, told)
        self._told(doing, *args)

    @work(group="setup", exclusive=True)
    async def _told(self, doing: Callable[..., Coroutine[Any, Any, None]], *args: str) -> None:
        """What the daemon refuses is said, at the step where one can choose anew."""
        try:
            await doing(*args)
        except DaemonError as e:
            if self._known:
                self._ask_who(str(e))
            else:
                self._show(Step.DONE, "Nothing was changed.", problem=str(e), rows=[(CLOSE, "Back to the chat")])

    # --- the questions -----------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        self._known = await self.app.link.providers()
        self._ask_who()

    def _ask_who(self, problem: str = "") -> None:
        self._draft = Draft()
        server = self._known["server"]
        now = f"now {server['model']} at {server['base_url']}" if server["base_url"] else "now nobody"
        told = f"An OpenAI-compatible server, {now}. A digit chooses; Escape leaves all as it is."
        rows = choices(self._known, here=startable(self.app.link.root))
        self._show(Step.WHO, told, problem=problem, rows=rows)

    def _ask_address(self, problem: str = "") -> None:
        told = "Its base URL, mostly ending with /v1."
        self._show(Step.ADDRESS, told, problem=problem, field="https://llm.example.com/v1")
        with self.prevent(Input.Changed):
            self.query_one("#field", Input).value = self._draft.base_url

    def _ask_key(self, problem: str = "") -> None:
        draft = self._draft
        lines = [f"{draft.title or 'The server'} at {draft.base_url}."]
        if draft.key_url:
            lines.append(f"Keys are made at {draft.key_url}")
        lines.append("It is kept in a file that only you can read, and shown to nobody but that server.")
        hint = f"Enter takes the key in {draft.key_there}" if draft.key_there else "paste the key (Enter alone: none)"
        self._show(Step.KEY, "\n".join(lines), problem=problem, field=hint)

    def _ask_model(self, problem: str = "", note: str = "") -> None:
        models = self._draft.models
        told = f"{len(models)} models: type to find one. {COSTS}" if models else f"{note} {COSTS}".strip()
        rows = [(name, name) for name in fitting(models or [], "")]
        self._show(Step.MODEL, told, problem=problem, field="a part of its name" if models else "its name", rows=rows)

    def _ask_local(self) -> None:
        rows = local_choices(self._known)
        told = "GGUF files in the folder of models." if rows else "There is none: `disco models fetch` gets one."
        self._show(Step.LOCAL, told, rows=rows or [(CLOSE, "Back to the chat")])

    # --- the answers -------------------------------------------------------------------------------------------------

    def on_key(self, event: Key) -> None:
        """A digit or letter chooses who shall answer."""
        if self._step is not Step.WHO or event.character is None:
            return
        wanted = f"p{DIGITS.index(event.character)}" if event.character in DIGITS else _LETTERS.get(event.character, "")
        if wanted in self._keys:
            event.stop()
            self._chose(wanted)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Enter, or the mouse, in the list."""
        event.stop()
        self._chose(self._keys[event.option_index])

    def on_input_changed(self, event: Input.Changed) -> None:
        """Fewer models with every letter."""
        event.stop()
        if self._step is Step.MODEL:
            self._offer([(name, name) for name in fitting(self._draft.models or [], event.value)])

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter in the input."""
        event.stop()
        text = event.value.strip()
        if self._step is Step.ADDRESS and text:
            self._draft = Draft(base_url=text)
            self._ask_key()
        elif self._step is Step.KEY:
            self._draft.key = text
            self._wait(f"Asking {self._draft.base_url} for its models …", self._list)
        elif self._step is Step.MODEL:
            at = self.query_one("#choices", OptionList).highlighted
            chosen = self._keys[at] if at is not None and self._keys else text
            if chosen:
                self._chose(chosen)

    def _chose(self, key: str) -> None:
        if key == CLOSE:
            self.action_close()
        elif self._step is Step.WHO:
            self._chose_who(key)
        elif self._step is Step.MODEL:
            self._wait(f"Asking {key} one short question …", self._try, key)
        elif self._step is Step.LOCAL:
            self._wait("Writing it down …", self._set_local, key)

    def _chose_who(self, key: str) -> None:
        if key == OTHER:
            self._ask_address()
        elif key == LOCAL:
            self._ask_local()
        elif key == SERVICE:
            self._wait("Installing the service …", self._serve)
        elif key == NONE:
            self._wait("Writing it down …", self._set_none)
        else:
            self._draft.take(self._known["providers"][int(key[1:])])
            self._ask_key()

    # --- what the daemon does ----------------------------------------------------------------------------------------

    async def _list(self) -> None:
        """Its models."""
        draft = self._draft
        checked = await self.app.link.check_server(draft.base_url, draft.key)
        if problem := problem_of(checked):
            self._back(checked["problem"]["code"], problem)
            return
        draft.models = checked["models"]
        self._ask_model(note=" ".join(checked["notes"]))

    async def _try(self, model: str) -> None:
        """One short question, and if it was answered all is written down."""
        draft = self._draft
        checked = await self.app.link.check_server(draft.base_url, draft.key, model)
        if problem := problem_of(checked):
            self._back(checked["problem"]["code"], problem)
            return
        saved = await self.app.link.set_server(draft.base_url, draft.key, model)
        over = "".join(f" But the variable {name} is set, and goes before it." for name in saved.get("shadowed", ()))
        self._done(result_of(checked) + over, saved)

    async def _set_none(self) -> None:
        saved = await self.app.link.set_server("")
        self._done("No server takes part any more. Its key stays in its file.", saved)

    async def _set_local(self, model: str) -> None:
        saved = await self.app.link.set_device(model)
        self._done("This machine answers with that model, once it is loaded.", saved)

    async def _serve(self) -> None:
        """The service takes over from a daemon of this window: both cannot have its port."""
        starter = self.app.starter
        ours = starter.running
        await starter.close()
        done, said = await starter.install_service()
        if done:
            self._show(Step.DONE, said, rows=[(CLOSE, "Back to the chat")])
            return
        if ours:
            await starter.start()
        self._ask_who(said)

    def _back(self, code: str, problem: str) -> None:
        """To the step where that can be mended."""
        step = STEP_OF.get(code, Step.WHO)
        if step is Step.MODEL and self._draft.models is not None:
            self._ask_model(problem)
        elif step is Step.ADDRESS and not self._draft.title:
            self._ask_address(problem)
        elif step is Step.KEY:
            self._ask_key(problem)
        else:
            self._ask_who(problem)

    def _done(self, told: str, saved: Mapping[str, Any]) -> None:
        """Saved, and the next question goes by it, unless the daemon was started with a flag that says otherwise."""
        self._draft = Draft()  # the key is not needed any more
        if saved["needs_restart"]:
            told += " A flag of the running daemon goes before it: restart it without that flag."
            self._show(Step.DONE, f"Saved. {told}", rows=[(CLOSE, "Back to the chat")])
        else:
            self.app.notify(fit(f"Saved. {told}"), markup=False, timeout=NOTE_S)
            self.action_close()

    # --- the rest ----------------------------------------------------------------------------------------------------

    def action_close(self) -> None:
        """Leave; what was not written yet is forgotten."""
        self.workers.cancel_node(self)
        if self.is_current:
            self.app.pop_screen()

    def action_move(self, by: int) -> None:
        """Up and Down move in the list, wherever the cursor is."""
        options = self.query_one("#choices", OptionList)
        if by > 0:
            options.action_cursor_down()
        else:
            options.action_cursor_up()
