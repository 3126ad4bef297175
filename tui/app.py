"""The terminal UI: screens over one link to a daemon and one store of conversations."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rich.segment import Segments
from rich.text import Text
from textual.app import App
from textual.binding import Binding, BindingType
from textual.notifications import SeverityLevel
from textual.theme import Theme

from disco_daemon.client.once import DaemonError
from disco_daemon.client.stream import Link

from .data import banner
from .data.daemon_launcher import Starter, startable
from .data.preferences import NAME, Preferences
from .data.store import Store
from .draw.theme import Look, fit, look_of
from .screens.chat import KEYS, ChatScreen
from .screens.conversation import Talks
from .screens.dialogs import Help

STYLESHEET = Path(__file__).with_name("disco.tcss")
POLL_S = 2.0  # between two looks at how the daemon is
SOON_S = 0.2  # the same while one is on its way
START_S = 60.0  # a daemon that listens no sooner than this is not waited for
DARK, LIGHT = "textual-dark", "textual-light"


class DiscoApp(App[None]):
    """What all screens share: `link`, `store`, `talks`, `look`. `path` is the store's file, if there is one.

    `start`: a daemon that does not run is started at once, if that can be done here.
    """

    TITLE = "disco"
    CSS_PATH = STYLESHEET
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f1", "help", "Help"),
        Binding("f2", "go('chat')", "Chat", show=False),
        Binding("f3", "go('control')", "Control"),
        Binding("f4", "go('dashboard')", "Dashboard"),
        Binding("f5", "setup", "Setup", show=False),
        Binding("ctrl+l", "light", "Light or dark", show=False, priority=True),
    ]

    def __init__(
        self, link: Link, store: Store, *, plain: bool = False, path: Path | None = None, start: bool = False
    ) -> None:
        super().__init__()
        self.link = link
        self.store = store
        self.plain = plain
        self.before: list[dict[str, Any]] = []  # what the settings were before each change in the control panel
        self.chat = ChatScreen()
        self.talks = Talks(link, store, self.chat.changed, self.chat.ended, ready=self._settle)
        self.starter = Starter(link.root, None if path is None else path.with_name("daemon.log"))
        self._crash_log = None if path is None else path.with_name("crash.log")
        self._look: tuple[str, Look] | None = None
        self._poll: asyncio.Task[None] | None = None
        self.preferences = Preferences.load(None if path is None else path.with_name(NAME))
        self._welcome = not self.preferences.welcomed
        self._may_start = start  # by itself, at the first look only
        self._settled = asyncio.Event()  # cleared while a daemon is on its way
        self._settled.set()
        if plain:
            self.animation_level = "none"

    @property
    def ready(self) -> bool:
        """Whether the chat is on the screen."""
        return self._poll is not None

    @property
    def look(self) -> Look:
        """How words look in the present theme."""
        if self._look is None or self._look[0] != self.theme:
            found = look_of(self.theme_variables, dark=self.current_theme.dark, plain=self.plain)
            self._look = (self.theme, found)
        return self._look[1]

    async def on_mount(self) -> None:
        """Connect, show the chat, and look after the daemon."""
        await self.link.__aenter__()
        if self.preferences.theme in self.available_themes:
            self.theme = self.preferences.theme
        self.theme_changed_signal.subscribe(self, self._theme_changed)
        await self.push_screen(self.chat)
        self._poll = asyncio.create_task(self._watch(), name="poll")

    def on_ready(self) -> None:
        """Keep what the imports left behind out of the collector's sight: its full rounds would hold up keys.

        They still take some 30 ms once a conversation is drawn, so they are made ten times as rare.
        """
        if not self.is_headless:
            gc.collect()
            gc.freeze()
            young, middle, old = gc.get_threshold()
            gc.set_threshold(young, middle, 10 * old)

    async def on_unmount(self) -> None:
        """End what runs: answers are written, a daemon started here is stopped."""
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)
        await self.talks.close()
        await self.link.__aexit__(None, None, None)
        await self.starter.close()

    def _theme_changed(self, theme: Theme) -> None:
        if theme.name != self.preferences.theme:
            self.preferences.theme = theme.name
            self.preferences.save()
        self._look = None
        if self.chat.is_mounted:
            self.chat.refresh_look()

    # --- screens ----------------------------------------------------------------------------------------------------

    async def action_go(self, name: str) -> None:
        """The chat, the control panel or the dashboard."""
        from .screens.control import ControlScreen
        from .screens.dashboard import DashboardScreen

        wanted = {"control": ControlScreen, "dashboard": DashboardScreen}.get(name)
        if wanted is not None and any(type(screen) is wanted for screen in self.screen_stack[-1:]):
            return
        while self.screen_stack[-1] != self.chat:
            await self.pop_screen()
        if wanted is not None:
            await self.push_screen(wanted())

    def show_timeline(self, disco: Mapping[str, Any]) -> None:
        """How one answer came about."""
        from .screens.timeline import TimelineScreen

        self.push_screen(TimelineScreen(disco))

    def action_setup(self) -> None:
        """First steps: a server, its key and model, or another local model."""
        from .screens.setup import SetupScreen

        self.wave_away()
        if not any(isinstance(screen, SetupScreen) for screen in self.screen_stack):
            self.push_screen(SetupScreen())

    def action_help(self) -> None:
        """All keys."""
        self.push_screen(Help(KEYS, self.look.legend))

    def action_light(self) -> None:
        """Light or dark."""
        self.theme = LIGHT if self.current_theme.dark else DARK

    # --- the daemon -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await self.look_after()
            await asyncio.sleep(POLL_S if self._settled.is_set() else SOON_S)

    async def look_after(self) -> None:
        """See how the daemon is, and say what is wrong."""
        state, error = None, None
        try:
            state = await self.link.state()
        except DaemonError as e:
            error = e
        if self._at_work:  # this was of the daemon before
            return
        if error is not None:
            found: banner.Banner | None = self._trouble(error)
        else:
            self._settled.set()
            found = banner.of_state(state or {}) or self._greeting(state or {})
        self._may_start = False
        self.startable = found is not None and found.startable
        self.chat.show_banner(found)

    def _trouble(self, error: DaemonError) -> banner.Banner:
        """Why there is no state, and what is done about it."""
        here = startable(self.link.root)
        if self.starter.running:
            return banner.Banner("The daemon is starting; it ends with this window …")
        self._settled.set()
        if self.starter.failed:
            return banner.Banner(f"The daemon has ended: {self.starter.last_words()} F9 tries again.", here)
        found = banner.of_error(error, self.link.root, here=here)
        if not (self._may_start and found.startable):
            return found
        self.startable = True
        self.start_daemon()
        return banner.Banner("No daemon was running: one is starting, and ends with this window …")

    def _greeting(self, state: Mapping[str, Any]) -> banner.Banner | None:
        """The first steps, told until they are waved away, and never in another window."""
        found = banner.welcome(state) if self._welcome else None
        if found is not None and not self.preferences.welcomed:
            self.preferences.welcomed = True
            self.preferences.save()
        self._greeted = found is not None
        return found

    def wave_away(self) -> None:
        """Greet no more."""
        self._welcome = False
        if self._greeted:
            self._greeted = False
            self.chat.show_banner(None)

    startable = _at_work = _greeted = False

    def start_daemon(self) -> None:
        """Start a daemon if the banner says that one could be."""
        if self.startable:
            self._settled.clear()
            self._at_work = True
            self.run_worker(self._start(), group="start", exclusive=True)

    async def _start(self) -> None:
        try:
            await self.starter.start()
        except OSError as e:
            self.notify(f"The daemon cannot be started: {e}", severity="warning", markup=False)
        finally:
            self._at_work = False
        await self.look_after()

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = True,
    ) -> None:
        """See `App.notify`; nothing in it drives the terminal, whoever has worded it."""
        super().notify(fit(message), title=fit(title), severity=severity, timeout=timeout, markup=markup)

    async def _settle(self) -> None:
        """Wait for a daemon that is on its way: what is asked meanwhile is for it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), START_S)

    # --- when this program itself is wrong --------------------------------------------------------------------------

    def _fatal_error(self) -> None:
        """Textual would print a traceback with all local values; here it goes to a file, and a sentence is shown."""
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
    """Show it until it is quit; the exit code. `path` is where conversations are kept, None keeps none.

    `start`: have a daemon started, if none runs and it can be done here.
    """
    store = Store(path)
    try:
        app = DiscoApp(Link(root, key), store, plain=plain, path=path, start=start)
        app.run()
        store.purge()
        return app.return_code or 0
    finally:
        store.close()
