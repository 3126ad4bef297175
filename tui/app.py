"""The application: it owns the link to the daemon, the store of conversations and what all screens share."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import traceback
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

from rich.segment import Segments
from rich.text import Text
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.dom import DOMNode
from textual.message import Message
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.theme import Theme

from disco_daemon.client.launcher import DaemonLauncher, startable
from disco_daemon.client.once import DaemonError
from disco_daemon.client.stream import Link
from disco_daemon.plain import reason_of

from .data import banner
from .data.preferences import NAME, Preferences
from .data.store import Store
from .draw.theme import TextTheme, fit, text_theme_of
from .screens.chat import KEYS, ChatScreen
from .screens.conversations import Conversations
from .screens.dialogs import HelpDialog

STYLESHEET = Path(__file__).with_name("disco.tcss")
POLL_S = 2.0  # between two questions for the daemon's state
SOON_S = 0.2  # the same while a daemon is starting
START_S = 60.0  # answers wait no longer than this for a daemon that is starting
READING_TPS = 4.8  # the reader's pace where the daemon does not tell; profiles/readers.toml
DARK, LIGHT = "textual-dark", "textual-light"


class DiscoApp(App[None]):
    """The terminal UI. `path` is the store's file; without one nothing is kept.

    With `start` it launches a daemon at once if none runs and this machine can run it.
    """

    TITLE = "disco"
    CSS_PATH = STYLESHEET
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f1", "help", "Help", tooltip="Show all keys"),
        Binding("f2", "go('chat')", "Chat", show=False, tooltip="Go to the chat"),
        Binding("f3", "go('control')", "Control", tooltip="Set costs, caps and privacy"),
        Binding("f4", "go('dashboard')", "Dashboard", tooltip="See what today cost, and what goes on"),
        Binding("f5", "setup", "Setup", tooltip="Add a server or another model"),
        Binding("ctrl+l", "light", "Light", show=False, priority=True, tooltip="Switch between light and dark"),
        Binding("alt+p", "pace", "Pace", show=False, priority=True, tooltip="Fade words ahead of your reading pace"),
    ]

    def __init__(
        self, link: Link, store: Store, *, plain: bool = False, path: Path | None = None, start: bool = False
    ) -> None:
        super().__init__()
        self.link = link
        self.store = store
        self.plain = plain
        self.undo_log: list[dict[str, Any]] = []  # the old values of each change in the control panel, oldest first
        self.conversations = Conversations(link, store, post=self._post_to_chat, ready=self._settle)
        self.chat = ChatScreen(self.conversations, lambda: self.text_theme, plain=plain)
        self.launcher = DaemonLauncher(link.root, None if path is None else path.with_name("daemon.log"))
        self._crash_log = None if path is None else path.with_name("crash.log")
        self._text_theme: tuple[str, TextTheme] | None = None  # and the name of the theme that it is made of
        self._poll: asyncio.Task[None] | None = None
        self.preferences = Preferences.load(None if path is None else path.with_name(NAME))
        self._welcome = not self.preferences.welcomed
        self._offers: list[dict[str, Any]] | None = None  # that suit this machine; None: nobody has asked yet
        self._may_start = start  # without being asked, and at the first check only
        self._look = asyncio.Event()  # set where the state is to be asked for now
        self._settled = asyncio.Event()  # cleared while a daemon is starting
        self._settled.set()
        self.set_class(plain, "-plain")
        if plain:
            self.animation_level = "none"

    @property
    def ready(self) -> bool:
        """Whether the chat is on the screen."""
        return self._poll is not None

    @property
    def text_theme(self) -> TextTheme:
        """The styles of words in the present theme."""
        if self._text_theme is None or self._text_theme[0] != self.theme:
            found = text_theme_of(self.theme_variables, dark=self.current_theme.dark, plain=self.plain)
            self._text_theme = (self.theme, found)
        return self._text_theme[1]

    async def on_mount(self) -> None:
        """Connect, show the chat, and begin to check the daemon."""
        await self.link.__aenter__()
        if self.preferences.theme in self.available_themes:
            self.theme = self.preferences.theme
        self.theme_changed_signal.subscribe(self, self._theme_changed)
        await self.push_screen(self.chat)
        self._poll = asyncio.create_task(self._watch(), name="poll")

    def on_ready(self) -> None:
        """Hide what the imports left behind from the garbage collector, whose full rounds would hold up keys.

        A full round still takes some 30 ms once a conversation is drawn, so they become ten times as rare.
        """
        if not self.is_headless:
            gc.collect()
            gc.freeze()
            young, middle, old = gc.get_threshold()
            gc.set_threshold(young, middle, 10 * old)

    async def on_unmount(self) -> None:
        """Write the answers under way, and stop a daemon that was started here."""
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)
        await self.conversations.close()
        await self.link.__aexit__(None, None, None)
        await self.launcher.close()

    def _theme_changed(self, theme: Theme) -> None:
        if theme.name != self.preferences.theme:
            self.preferences.theme = theme.name
            self.preferences.save()
        self._text_theme = None
        if self.chat.is_mounted:
            self.chat.refresh_theme()

    # --- screens ----------------------------------------------------------------------------------------------------

    async def action_go(self, name: str) -> None:
        """Show the chat, the control panel or the dashboard."""
        from .screens.control import ControlScreen
        from .screens.dashboard import DashboardScreen

        wanted = {"control": ControlScreen, "dashboard": DashboardScreen}.get(name)
        if wanted is not None and any(type(screen) is wanted for screen in self.screen_stack[-1:]):
            return
        while self.screen_stack[-1] != self.chat:
            await self.pop_screen()
        if wanted is not None:
            await self.push_screen(wanted())

    def action_setup(self, wanted: str = "") -> None:
        """Open the setup, where a `wanted` one of the offered models is fetched."""
        from .screens.setup import SetupScreen

        self.dismiss_welcome()
        if not any(isinstance(screen, SetupScreen) for screen in self.screen_stack):
            shown = SetupScreen(
                self.link, self.launcher, self._settle, plain=self.plain, offers=self._offers or (), wanted=wanted
            )
            self.push_screen(shown)

    def on_chat_screen_model_wanted(self, event: ChatScreen.ModelWanted) -> None:
        self.action_setup(event.name)

    def action_help(self) -> None:
        self.push_screen(HelpDialog(KEYS, self.text_theme.whole_legend))

    def action_light(self) -> None:
        self.theme = LIGHT if self.current_theme.dark else DARK

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Yield all of disco's actions for the palette, each with its key, and Textual's own behind them."""
        for owner, bindings in ((self.chat, ChatScreen.BINDINGS), (self, DiscoApp.BINDINGS)):
            for binding in bindings:
                if isinstance(binding, Binding) and binding.tooltip:
                    key = "+".join(part.capitalize() for part in binding.key.split("+"))
                    yield SystemCommand(binding.tooltip, key, partial(self._act, binding.action, owner))
        yield from super().get_system_commands(screen)

    async def _act(self, action: str, owner: DOMNode) -> None:
        """Carry out an action that was chosen in the palette, on any screen."""
        if owner is self.chat:
            await self.action_go("chat")
        await self.run_action(action, owner)

    def action_pace(self) -> None:
        """Fade the words ahead of the reader's pace, or show all alike again."""
        self.preferences.faded = not self.preferences.faded
        self.preferences.save()
        said = "Words ahead of your reading pace (F3) are faded." if self.preferences.faded else "All words look alike."
        self.notify(said, markup=False)
        self.on_chat_screen_pace_wanted()

    def on_chat_screen_pace_wanted(self) -> None:
        self.run_worker(cast("Any", self._show_pace), group="pace", exclusive=True)

    async def _show_pace(self) -> None:
        """Take up the reading pace that is set, which the control panel may have changed."""
        pace_tps = 0.0
        if self.preferences.faded:
            pace_tps = READING_TPS
            with contextlib.suppress(DaemonError, KeyError, TypeError, ValueError):
                pace_tps = float((await self.link.settings())["settings"]["delivery"]["pace_tps"])
        self.chat.show_pace(pace_tps)

    # --- the daemon -------------------------------------------------------------------------------------------------

    def _post_to_chat(self, message: Message) -> None:
        self.chat.post_message(message)

    def on_chat_screen_daemon_wanted(self) -> None:
        self.start_daemon()

    def on_chat_screen_welcome_dismissed(self) -> None:
        self.dismiss_welcome()

    def on_chat_screen_answer_over(self) -> None:
        self._look.set()

    async def _watch(self) -> None:
        while True:
            self._look.clear()
            await self.check_daemon()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), POLL_S if self._settled.is_set() else SOON_S)

    async def check_daemon(self) -> None:
        """Ask the daemon for its state, and show what is wrong in the banner."""
        state, error = None, None
        try:
            state = await self.link.state()
        except DaemonError as e:
            error = e
        if self._launching:  # the answer is that of the daemon before
            return
        if error is not None:
            found: banner.Banner | None = self._trouble(error)
        else:
            self._settled.set()
            found = banner.of_state(state or {}) or self._greeting(state or {})
        self._may_start = False
        self.startable = found is not None and found.startable
        self.chat.show_banner(found)
        trouble = "the daemon is starting" if self.launcher.running else "no daemon"
        self.chat.show_state(state, trouble + (": F9 starts one" if self.startable else ""))

    def _trouble(self, error: DaemonError) -> banner.Banner:
        """Return why there is no state; launch a daemon if that is wanted."""
        here = startable(self.link.root)
        if self.launcher.running:
            return banner.Banner("The daemon is starting; it stops when this window closes …")
        self._settled.set()
        if self.launcher.has_failed:
            return banner.Banner(
                f"The daemon has ended: {self.launcher.why_ended().rstrip('.')}. F9 tries again.", here
            )
        found = banner.of_error(error, self.link.root, here=here)
        if not (self._may_start and found.startable):
            return found
        self.startable = True
        self.start_daemon()
        return banner.Banner("No daemon was running: one is starting, and stops when this window closes …")

    def _greeting(self, state: Mapping[str, Any]) -> banner.Banner | None:
        """Return the welcome until it is dismissed; later windows show only that a stand-in answers."""
        found = banner.welcome(state) if self._welcome or (state.get("stand_in") and not self._dismissed) else None
        if found is not None and not self.preferences.welcomed:
            self.preferences.welcomed = True
            self.preferences.save()
        self._greeted = found is not None
        if self._greeted and self._welcome and state.get("stand_in") and self._offers is None:
            self._offers = []
            self.run_worker(cast("Any", self._find_offers), group="offers")
        return found

    async def _find_offers(self) -> None:
        """Show in the first window which models suit this machine."""
        with contextlib.suppress(DaemonError):
            self._offers = (await self.link.offers())["models"]
        if self._welcome:
            self.chat.show_offers(self._offers or ())

    def dismiss_welcome(self) -> None:
        """Do not show the welcome again."""
        self._welcome, self._dismissed = False, True
        if self._greeted:
            self._greeted = False
            self.chat.show_banner(None)
            self.chat.show_offers(())

    startable = _launching = _greeted = _dismissed = False

    def start_daemon(self) -> None:
        """Launch a daemon if the banner offers it."""
        if self.startable:
            self._settled.clear()
            self._launching = True
            self.run_worker(cast("Any", self._start), group="start", exclusive=True)

    async def _start(self) -> None:
        try:
            await self.launcher.start()
        except OSError as e:
            self.notify(f"The daemon cannot be started: {reason_of(e)}.", severity="warning", markup=False)
        finally:
            self._launching = False
        await self.check_daemon()

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = True,
    ) -> None:
        """Show a note (see `App.notify`) without the control characters of a foreign text."""
        super().notify(fit(message), title=fit(title), severity=severity, timeout=timeout, markup=markup)

    async def _settle(self) -> None:
        """Wait for a daemon that is starting, so that it gets the questions asked meanwhile."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), START_S)

    async def _close_all(self) -> None:
        """End what works for the screens before their parts go, one after the other: it would miss them."""
        self.workers.cancel_all()
        await super()._close_all()

    # --- when this program itself is wrong --------------------------------------------------------------------------

    def _fatal_error(self) -> None:
        """Write the traceback to a file and show a sentence; Textual would print all local values."""
        where = ""
        if self._crash_log is not None:
            with contextlib.suppress(OSError):
                opened = os.open(self._crash_log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with os.fdopen(opened, "w") as file:
                    file.write(traceback.format_exc())
                where = f" What happened is in {self._crash_log}; please report it."
        sentence = Text(f"disco: the terminal UI had to end. Conversations are kept.{where}\n")
        self._exit_renderables.append(Segments(self.console.render(sentence, self.console.options)))
        self._close_messages_no_wait()


def run(root: str, key: str = "", path: Path | None = None, *, plain: bool = False, start: bool = False) -> int:
    """Run the terminal UI until it is quit; return the exit code. `path` None keeps no conversations.

    With `start` it launches a daemon if none runs and this machine can run it.
    """
    store = Store(path)
    try:
        app = DiscoApp(Link(root, key), store, plain=plain, path=path, start=start)
        app.run()
        store.purge()
        return app.return_code or 0
    finally:
        store.close()
