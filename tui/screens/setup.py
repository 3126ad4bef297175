"""The setup: a server with its key and model, or another local model, also one to fetch. Escape leaves all as it was.

Nothing is saved before the server has answered one short question; then the daemon saves all of it, and the key in a
file of its own. In this program the key is held by this screen and by one request only. The module is longer than
most: each question stands beside what follows from its answers.
"""

from __future__ import annotations

import asyncio
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

from disco_daemon.client.launcher import DaemonLauncher, startable
from disco_daemon.client.offers import RUNNING, fetch_words, running_words
from disco_daemon.client.once import DaemonError
from disco_daemon.system.net import with_scheme

from ..data.setup_draft import (
    BESIDE,
    CHANGE,
    DIGITS,
    FETCH,
    FIRST,
    LOCAL,
    NONE,
    OTHER,
    PREVIOUS,
    REMOVE,
    SERVERS,
    SERVICE,
    STEP_OF,
    TRY,
    SetupDraft,
    Step,
    choices,
    fitting,
    further,
    local_choices,
    local_text,
    place_choices,
    problem_of,
    result_of,
    server_choices,
)
from ..draw.theme import fit
from ..widgets.words import PlainStatic

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from disco_daemon.client.stream import Link

CLOSE = "close"
NOTE_S = 6.0  # that the note on what was saved stays
FETCH_POLL_S = 0.5  # between two looks at how far a fetch is
CANCEL = "cancel"
BORDER, SCROLL_BAR = 4, 2  # cells beside the choices
COSTS = "Enter tests it with one short question, which costs next to nothing, and saves it."
_LETTERS = {"v": SERVERS, "0": OTHER, "m": LOCAL, "n": NONE, "s": SERVICE, "p": PREVIOUS}


class SetupScreen(Screen[None]):
    """One question after the other, in one place. `_step` is the present one; `_draft` has the answers so far."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Leave", priority=True),
        Binding("down", "move(1)", "Down", show=False),
        Binding("up", "move(-1)", "Up", show=False),
    ]

    def __init__(
        self,
        link: Link,
        launcher: DaemonLauncher,
        settle: Callable[[], Awaitable[None]],
        *,
        plain: bool = False,
        offers: Sequence[dict[str, Any]] = (),
        wanted: str = "",
    ) -> None:
        """Ask through `link`, once `settle` has waited for a daemon that is starting.

        With `wanted` the setup begins where the user has chosen that one of the `offers` to be fetched.
        """
        super().__init__(id="setup-screen")
        self._link, self._launcher, self._settle, self._plain = link, launcher, settle, plain
        self._step = Step.WAIT
        self._draft = SetupDraft()
        self._known: dict[str, Any] = {}
        self._offers, self._wanted = offers, wanted
        self._seen: Mapping[str, Any] = {}
        self._keys: list[str] = []  # of the choices that are shown

    # --- what is on it -----------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        with Vertical(id="setup"):
            yield PlainStatic(id="head")
            yield PlainStatic(id="said")
            yield PlainStatic(id="problem")
            yield Input(id="field", compact=True)
            yield OptionList(id="choices", compact=True)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.set_class(self._plain, "-plain")
        self._wait("Asking the daemon which servers it knows …", self._fetch)

    def _show(
        self,
        step: Step,
        text: str,
        *,
        problem: str = "",
        field: str | None = None,
        rows: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        """Show one step: `field` is the hint of the input, `rows` are choices; None leaves that part out."""
        self._step = step
        self.query_one("#head", Static).update(step.value)
        self.query_one("#said", Static).update(fit(text))
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
        self._show_answer()

    def _show_answer(self) -> None:
        """Scroll to where the answer is given, on a screen that has not room for all of the question."""
        place = self.query_one("#choices" if self._keys else "#field")
        self.call_after_refresh(place.scroll_visible, animate=False)

    @property
    def _room(self) -> int:
        """The cells of a choice's line, beside border, padding and scroll bar."""
        return self.size.width - (SCROLL_BAR if self._plain else SCROLL_BAR + BORDER)

    def on_resize(self) -> None:
        """Make lines that go by the width anew; the same one stays highlighted."""
        self._show_answer()
        if self._step not in (Step.LOCAL, Step.SERVERS):
            return
        options = self.query_one("#choices", OptionList)
        at = options.highlighted
        if self._step is Step.LOCAL and self._keys != [CLOSE]:
            self._offer(local_choices(self._known, self._offers, self._room))
        elif self._step is Step.SERVERS:
            self._offer(server_choices(self._known, self._seen, self._room))
        options.highlighted = at

    def _offer(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show these choices, with the first one highlighted."""
        self._keys = [key for key, _ in rows]
        options = self.query_one("#choices", OptionList)
        options.set_options([Option(Text(fit(line), no_wrap=True, overflow="ellipsis")) for _, line in rows])
        options.highlighted = 0 if rows else None

    def _wait(self, text: str, doing: Callable[..., Coroutine[Any, Any, None]], *args: str) -> None:
        """Run something that takes a moment; Escape gives it up."""
        self._show(Step.WAIT, text)
        self._run_step(doing, *args)

    @work(group="setup", exclusive=True)
    async def _run_step(self, doing: Callable[..., Coroutine[Any, Any, None]], *args: str) -> None:
        """Run it; what the daemon refuses shows at the step where the user can choose again."""
        try:
            await doing(*args)
        except DaemonError as e:
            if self._known:
                self._ask_who(str(e))
            else:
                self._show(Step.DONE, "Nothing was changed.", problem=str(e), rows=[(CLOSE, "Back to the chat")])

    # --- the questions -----------------------------------------------------------------------------------------------

    async def _fetch(self) -> None:
        await self._settle()
        self._known = await self._link.providers()
        self._seen = state = await self._link.state()
        if (state.get("fetch") or {}).get("state") in ("fetching", "loading"):
            await self._follow_fetch()
        elif self._wanted:
            await self._fetch_model(self._wanted)
        else:
            self._ask_who()

    def _ask_who(self, problem: str = "") -> None:
        self._draft = SetupDraft()
        server = self._known["server"]
        others = ", ".join(one["name"] for one in further(self._known))
        now = f"now {server['model']} at {server['base_url']}" if server["base_url"] else f"now {others or 'nobody'}"
        text = f"An OpenAI-compatible server, {now}. A digit chooses; Escape leaves all as it is."
        rows = choices(self._known, here=startable(self._link.root), stand_in=bool(self._seen.get("stand_in")))
        self._show(Step.WHO, text, problem=problem, rows=rows)

    def _ask_address(self, problem: str = "") -> None:
        text = "Its base URL, mostly ending with /v1."
        self._show(Step.ADDRESS, text, problem=problem, field="https://llm.example.com/v1")
        with self.prevent(Input.Changed):
            self.query_one("#field", Input).value = self._draft.base_url

    def _ask_place(self) -> None:
        """Ask whether it comes beside the servers that are there; one whose address is there already is set up anew."""
        draft = self._draft
        same = (
            one for one in self._known.get("servers") or () if one["base_url"].rstrip("/") == draft.base_url.rstrip("/")
        )
        rows = place_choices(self._known, draft)
        if (there := next(same, None)) is not None:
            draft.name = "" if there["name"] == FIRST else there["name"]
            draft.key_there = there["key"]
        if there is not None or not rows:
            self._ask_key()
        else:
            text = f"{draft.base_url} can answer beside the others: the best by first token, tail and price is asked."
            self._show(Step.PLACE, text, rows=rows)

    def _ask_servers(self) -> None:
        text = "Each request goes to the best of them; Enter tries one, changes its model, or takes it away."
        self._show(Step.SERVERS, text, rows=server_choices(self._known, self._seen, self._room))

    def _ask_server(self, text: str = "", problem: str = "") -> None:
        draft = self._draft
        rows = [
            (CHANGE, "Another model of it"),
            (REMOVE, "Take it away; its key stays in its file"),
            (CLOSE, "Back to the chat"),
        ]
        if draft.model:
            rows.insert(0, (TRY, "Try it with one short question, which costs next to nothing"))
        about = f"{draft.title}: {draft.model or 'no model of its own'} at {draft.base_url}."
        self._show(Step.SERVER, f"{about}\n{text}".strip(), problem=problem, rows=rows)

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
        text = f"{len(models)} models: type to find one. {COSTS}" if models else f"{note} {COSTS}".strip()
        rows = [(name, name) for name in fitting(models or [], "")]
        self._show(Step.MODEL, text, problem=problem, field="a part of its name" if models else "its name", rows=rows)

    async def _find_offers(self) -> None:
        """Ask which models suit this machine; those that are here can be chosen in any case."""
        problem = ""
        try:
            self._offers = (await self._link.offers())["models"]
        except DaemonError as e:
            problem = str(e)
        self._seen = await self._link.state()
        self._ask_local(problem)

    def _ask_local(self, problem: str = "") -> None:
        rows = local_choices(self._known, self._offers, self._room)
        text = local_text(self._offers, self._seen, some=bool(rows))
        self._show(Step.LOCAL, text, problem=problem, rows=rows or [(CLOSE, "Back to the chat")])

    # --- the answers -------------------------------------------------------------------------------------------------

    def on_key(self, event: Key) -> None:
        """Choose a server by its digit or letter, the model before by its letter."""
        typed = event.character or ""
        wanted = f"p{DIGITS.index(typed)}" if typed and typed in DIGITS else _LETTERS.get(typed)
        if self._step in (Step.WHO, Step.LOCAL) and wanted in self._keys:
            event.stop()
            self._chose(wanted)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._chose(self._keys[event.option_index])

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self._step is Step.MODEL:
            self._offer([(name, name) for name in fitting(self._draft.models or [], event.value)])

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        text = event.value.strip()
        if self._step is Step.ADDRESS and text:
            self._draft = SetupDraft(base_url=with_scheme(text) or text)
            if with_scheme(text):
                self._ask_place()
            else:
                self._ask_address("That is no address: write it like https://api.openai.com/v1.")
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
        elif self._step is Step.PLACE:
            self._draft.name = key.removeprefix(BESIDE) if key.startswith(BESIDE) else ""
            self._ask_key()
        elif self._step is Step.SERVERS:
            one = self._known["servers"][int(key)]
            name = "" if one["name"] == FIRST else one["name"]
            self._draft = SetupDraft(one["base_url"], one["name"], key_there=one["key"], name=name, model=one["model"])
            self._ask_server()
        elif self._step is Step.SERVER:
            self._chose_act(key)
        elif self._step is Step.MODEL:
            self._wait(f"Asking {key} one short question …", self._try, key)
        elif key == CANCEL:
            self._wait("Ending the fetch …", self._cancel_fetch)
        elif self._step is Step.LOCAL and key.startswith(FETCH):
            self._wait("Asking the Hub for it …", self._fetch_model, key.removeprefix(FETCH))
        elif self._step is Step.LOCAL:
            self._wait("Writing it down …", self._set_local, key)

    def _chose_who(self, key: str) -> None:
        if key == SERVERS:
            self._ask_servers()
        elif key == OTHER:
            self._ask_address()
        elif key == LOCAL:
            self._wait("Looking which models suit this machine …", self._find_offers)
        elif key == SERVICE:
            self._wait("Installing the service …", self._serve)
        elif key == NONE:
            self._wait("Writing it down …", self._set_none)
        else:
            self._draft.take(self._known["providers"][int(key[1:])])
            self._ask_place()

    def _chose_act(self, key: str) -> None:
        draft = self._draft
        if key == TRY:
            self._wait(f"Asking {draft.model} one short question …", self._try_again)
        elif key == CHANGE:
            self._wait(f"Asking {draft.base_url} for its models …", self._list)
        else:
            self._wait("Writing it down …", self._remove)

    # --- what the daemon does ----------------------------------------------------------------------------------------

    async def _list(self) -> None:
        """Ask the server for its models."""
        draft = self._draft
        checked = await self._link.check_server(draft.base_url, draft.key, name=draft.name)
        if problem := problem_of(checked):
            self._back(checked["problem"]["code"], problem)
            return
        draft.models = checked["models"]
        self._ask_model(note=" ".join(checked["notes"]))

    async def _try(self, model: str) -> None:
        """Ask the model one short question, and save the server if it answers."""
        draft = self._draft
        checked = await self._link.check_server(draft.base_url, draft.key, model, draft.name)
        if problem := problem_of(checked):
            self._back(checked["problem"]["code"], problem)
            return
        saved = await self._link.set_server(draft.base_url, draft.key, model, draft.name)
        self._show_saved(result_of(checked), saved)

    async def _try_again(self) -> None:
        """Ask a server that is there one short question, and change nothing."""
        draft = self._draft
        checked = await self._link.check_server(draft.base_url, "", draft.model, draft.name)
        problem = problem_of(checked)
        self._ask_server("" if problem else result_of(checked), problem)

    async def _remove(self) -> None:
        draft = self._draft
        saved = await self._link.set_server("", name=draft.name)
        self._show_saved(f"{draft.title} is asked no more. Its key stays in its file.", saved)

    async def _set_none(self) -> None:
        saved = await self._link.set_server("")
        self._show_saved("No server takes part any more. Its key stays in its file.", saved)

    async def _set_local(self, model: str) -> None:
        saved = await self._link.set_device(model)
        self._show_saved("This machine answers with that model, once it is loaded.", saved)

    async def _fetch_model(self, name: str) -> None:
        """Have the daemon fetch a model, which goes on when this screen is left."""
        try:
            await self._link.fetch_model(name)
        except DaemonError as e:
            self._ask_local(str(e))
            return
        await self._follow_fetch()

    async def _follow_fetch(self) -> None:
        """Show how far the fetch is, until its end."""
        await self._show_fetch()
        while self._step is Step.FETCH:
            await asyncio.sleep(FETCH_POLL_S)
            await self._show_fetch()

    async def _show_fetch(self) -> None:
        self._seen = state = await self._link.state()
        fetch = state.get("fetch") or {}
        if fetch.get("state") in RUNNING:
            text = f"{running_words(state)}\nEscape goes back to the chat meanwhile; it is used as soon as it is here."
            if self._step is Step.FETCH:
                self.query_one("#said", Static).update(fit(text))
            else:
                rows = [(CLOSE, "Back to the chat"), (CANCEL, "Cancel (what came is kept)")]
                self._show(Step.FETCH, text, rows=rows)
        elif fetch.get("state") == "done":
            self.app.notify(fit(fetch_words(fetch)), markup=False, timeout=NOTE_S)
            self._step = Step.DONE
            self.action_close()
        else:
            self._known = await self._link.providers()
            self._ask_local(fetch_words(fetch) if fetch else "The daemon fetches nothing any more.")

    async def _cancel_fetch(self) -> None:
        await self._link.cancel_fetch()
        await self._show_fetch()

    async def _serve(self) -> None:
        """Install the service in place of a daemon of this window: only one can have the port."""
        launcher = self._launcher
        ours = launcher.running
        await launcher.close()
        done, said = await launcher.install_service()
        if done:
            self._show(Step.DONE, said, rows=[(CLOSE, "Back to the chat")])
            return
        if ours:
            await launcher.start()
        self._ask_who(said)

    def _back(self, code: str, problem: str) -> None:
        """Go back to the step where the user can mend the problem."""
        step = STEP_OF.get(code, Step.WHO)
        if step is Step.MODEL and self._draft.models is not None:
            self._ask_model(problem)
        elif step is Step.ADDRESS and not self._draft.title:
            self._ask_address(problem)
        elif step is Step.KEY:
            self._ask_key(problem)
        else:
            self._ask_who(problem)

    def _show_saved(self, text: str, saved: Mapping[str, Any]) -> None:
        """Say that it is saved, what went with it, and what overrides it: a variable, a flag of the running daemon."""
        self._draft = SetupDraft()  # the key is not needed any longer
        over = [f"But the variable {name} is set, and goes before it." for name in saved.get("shadowed", ())]
        text = " ".join([text, *saved.get("notes", ()), *over])
        if saved["needs_restart"]:
            text += " A flag of the running daemon goes before it: restart it without that flag."
            self._show(Step.DONE, f"Saved. {text}", rows=[(CLOSE, "Back to the chat")])
        else:
            self.app.notify(fit(f"Saved. {text}"), markup=False, timeout=NOTE_S)
            self.action_close()

    # --- the rest ----------------------------------------------------------------------------------------------------

    def action_close(self) -> None:
        """Leave, and forget what was not saved."""
        self.workers.cancel_node(self)
        if self.is_current:
            self.app.pop_screen()

    def action_move(self, by: int) -> None:
        """Move in the list, wherever the focus is."""
        options = self.query_one("#choices", OptionList)
        if by > 0:
            options.action_cursor_down()
        else:
            options.action_cursor_up()
