"""The dialog of `disco setup` at a terminal. It writes nothing: Ctrl-C leaves all as it was."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config.servers import SERVER, servers_of
from ...errors import ConfigError
from ...models.default import SIZE, default_model_path, fetch_default_model, installed_models
from ...money.catalog import is_private
from ...onboarding.checking import Checked, Trouble
from ...onboarding.providers import ServerKey
from ...onboarding.saving import Choice
from ...onboarding.setup import Onboarding
from ...system.net import hostname, without_credentials
from ..terminal import progress

SHOWN = 30  # models in one list; a typed part of a name makes it shorter
_OF_KEYS = (Trouble.KEY, Trouble.CREDIT)
_OF_MODELS = (Trouble.MODEL, Trouble.REFUSED)


@dataclass
class Dialog:
    """Asks with `ask`, for secrets with `ask_secret`, and prints with `say`."""

    setup: Onboarding
    ask: Callable[[str], str] = input
    ask_secret: Callable[[str], str] = getpass.getpass
    say: Callable[[str], None] = print
    offers: Callable[[], dict[str, Any]] | None = None  # models that suit this machine, as `disco models recommend` has
    fetch: Callable[[dict[str, Any]], str] | None = None  # fetches one of them, and returns its path

    def run(self) -> tuple[Choice, Checked | None]:
        """Ask all questions about settings; return the choice, and the check of its server if there was one."""
        choice, checked = self._server()
        return replace(choice, local=self._local(choice)), checked

    def service(self) -> bool:
        """Ask whether disco is to be started at each login."""
        return self._yes("Start disco at each login?", usual=False)

    def _yes(self, question: str, *, usual: bool = True) -> bool:
        answer = self.ask(f"{question} [{'Y/n' if usual else 'y/N'}] ").strip().casefold()
        return usual if not answer else answer.startswith("y")

    # --- the server -----------------------------------------------------------------------------------------------

    def _server(self) -> tuple[Choice, Checked | None]:
        while True:
            base_url = self._who()
            if base_url is None:
                return Choice(), None
            name = self._place(base_url) if base_url else self._which_one()
            found = self._with_key(base_url, name) if base_url else (Choice(), None)
            if found is not None:
                return replace(found[0], base_url=base_url, name=name), found[1]

    def _place(self, base_url: str) -> str:
        """Ask whether a server comes beside those that are there, and under which name; "" for in place of `[server]`.

        One whose address is there already is set up anew.
        """
        config = self.setup.config()
        there = servers_of(config)
        same = next((n for n, one in there.items() if one.base_url.rstrip("/") == base_url.rstrip("/")), None)
        if same is not None or not there:
            return "" if same in (None, SERVER) else str(same)
        if config.server.base_url:
            self.say(f"Now {config.server.model} at {without_credentials(config.server.base_url)} answers.")
            if not self._yes("Keep it, and add this one beside it?"):
                return ""
        usual, shape = self.setup.free_name(base_url), Choice(base_url, "m")
        while True:
            name = self.ask(f"Its name, as in NAME/MODEL [{usual}]: ").strip() or usual
            try:
                if name not in there:
                    self.setup.plan(replace(shape, name=name))
                    return name
                self.say(f"There is a server called {name} already.")
            except ConfigError as e:
                self.say(str(e))

    def _which_one(self) -> str:
        """Ask which of several servers is taken away; "" for `[server]`."""
        names = list(servers_of(self.setup.config()))
        if len(names) == 1:
            return "" if names[0] == SERVER else names[0]
        while True:
            name = self.ask(f"Which one is taken away: {', '.join(names)}? ").strip()
            if name in names:
                return "" if name == SERVER else name

    def _who(self) -> str | None:
        """Ask for the address; "" for no server, None for the one that is configured, if any."""
        known, now = self.setup.providers(), self.setup.config().server
        self.say("Who shall answer beside this machine?")
        for number, provider in enumerate(known, 1):
            self.say(f"{number:3}  {provider.title:14} {provider.base_url}")
        self.say("  0  another address: a URL, such as http://127.0.0.1:8080/v1")
        usual = f"{now.model} at {without_credentials(now.base_url)}" if now.base_url else "none"
        further = [f"{one.name} ({one.model or 'by name only'})" for one in self.setup.config().servers]
        if further:
            self.say(f"Further servers: {', '.join(further)}.")
            usual = usual if now.base_url else "as it is"
        while True:
            answer = self.ask(f"Number, name, URL, or none [{usual}]: ").strip()
            if not answer or answer.casefold() == "none":
                return None if not (answer and (now.base_url or further)) else ""
            if answer == "0":
                answer = self.ask("URL: ").strip()
            elif answer.isdecimal() and 1 <= int(answer) <= len(known):
                answer = known[int(answer) - 1].name
            if (base_url := self._address(answer)) is not None:
                return base_url

    def _address(self, answer: str) -> str | None:
        try:
            base_url = self.setup.address(answer)
        except ConfigError as e:
            self.say(str(e))
            return None
        problem = self.setup.problem(base_url)
        if problem is None:
            return base_url
        self.say(f"{problem.text}: {problem.mend}")
        return None

    def _with_key(self, base_url: str, name: str) -> tuple[Choice, Checked | None] | None:
        """Ask for key, model and test; None to choose another server."""
        while True:
            key = self._key(base_url, name)
            if self.setup.private():
                self.say("Nobody is asked anything while policy.private is on: neither for models, nor for a test.")
                return Choice(base_url, self._model(()), key), None
            self.say(f"Asking {base_url} for its models …")
            listed = self.setup.check(base_url, key, name=name)
            self._tell(listed)
            if listed.problem is None:
                found = self._with_model(listed, key, name)
                if found is not None:
                    return found
            elif listed.problem.code not in _OF_KEYS:
                return None

    def _key(self, base_url: str, name: str) -> ServerKey:
        provider = next((p for p in self.setup.providers() if p.base_url == base_url), None)
        if provider is not None and provider.key_url:
            self.say(f"Keys are made at {provider.key_url}")
        there = self.setup.has_key(base_url, name)
        usual = "; Enter for none" if is_private(hostname(base_url)) else ""
        if there:
            usual = f"; Enter takes the one in {there}"
        while True:
            given = self.ask_secret(f"API key (nothing is shown{usual}): ").strip()
            if (problem := self.setup.problem(base_url, given)) is None:
                return self.setup.key(base_url, given, name)
            self.say(f"{problem.text}: {problem.mend}")

    def _with_model(self, listed: Checked, key: ServerKey, name: str) -> tuple[Choice, Checked | None] | None:
        """Ask for a model that works, or that is to be saved all the same; None for another key."""
        while True:
            model = self._model(listed.models or ())
            choice = Choice(listed.base_url, model, key)
            if not self._yes("Test it with one short question? It costs next to nothing."):
                return choice, None
            checked = self.setup.check(listed.base_url, key, model, name)
            if checked.problem is None:
                return choice, checked
            self._tell(checked)
            if checked.problem.code in _OF_KEYS:
                return None
            if checked.problem.code not in _OF_MODELS and self._yes("Save it all the same?", usual=False):
                return choice, None

    def _model(self, listed: Sequence[str]) -> str:
        shown = list(listed)
        if listed:
            self.say(f"It has {len(listed)} models.")
        while True:
            for number, name in enumerate(shown[:SHOWN], 1):
                self.say(f"{number:3}  {name}")
            if len(shown) > SHOWN:
                self.say(f"     … and {len(shown) - SHOWN} more: a part of the name shortens the list")
            answer = self.ask("Model, number or part of its name: " if shown else "The model's name: ").strip()
            if answer.isdecimal() and 1 <= int(answer) <= min(SHOWN, len(shown)):
                return shown[int(answer) - 1]
            if answer in listed or (answer and not listed):
                return answer
            fitting = [name for name in listed if all(word in name.casefold() for word in answer.casefold().split())]
            if len(fitting) == 1 and self._yes(f"{fitting[0]}?"):
                return fitting[0]
            if answer and not fitting and self._yes(f"{answer} is not among them. Take it all the same?", usual=False):
                return answer
            shown = fitting or list(listed)

    def _tell(self, checked: Checked) -> None:
        for line in checked.sentences():
            self.say(line)

    def _offered(self, choice: Choice) -> str | None:
        """Offer models that suit this machine in place of the stand-in; return the path of the fetched one."""
        from ...errors import DiscoError
        from ..models_offer import ask_which, show

        if self.offers is None or self.fetch is None or self.setup.private():
            return None
        self.say("This machine answers with a 135M stand-in so far. Looking which real models suit it …")
        found = self.offers()
        show(found, self.say)
        if (chosen := ask_which(found, self.ask, self.say)) is None:
            return None
        try:
            self.setup.plan(replace(choice, local=""))  # what cannot be used is not fetched
            return self.fetch(chosen)
        except DiscoError as e:
            self.say(str(e))
            return None

    # --- this machine's model -------------------------------------------------------------------------------------

    def _local(self, choice: Choice) -> str | None:
        """Ask what `device.model` is to be; None leaves it."""
        device = self.setup.config().device
        if not device.enabled or device.base_url:
            return None
        here = installed_models()
        if not device.model and not default_model_path().exists():
            if self.setup.private():
                self.say("This machine's own model is not here yet: `disco models fetch --online` fetches it.")
            elif self._yes(f"This machine's own model is not here yet. Fetch it, {SIZE / 1e6:.0f} MB?"):
                fetch_default_model(progress)
            here = installed_models()
        if (fetched := self._offered(choice)) is not None:
            return fetched
        if len(here) < 2:
            return None
        self.say("Models on this machine:")
        for number, model in enumerate(here, 1):
            self.say(f"{number:3}  {model['name']}  {model['size_bytes'] / 1e6:.0f} MB")
        while True:
            answer = self.ask(f"Which one? [{device.model or default_model_path().name}]: ").strip()
            if not answer:
                return None
            if answer.isdecimal() and 1 <= int(answer) <= len(here):
                chosen = here[int(answer) - 1]
                return "" if chosen["default"] else chosen["path"]
            self.say("A number of the list, or Enter.")
