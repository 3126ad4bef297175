"""First steps over the API: the known servers, the check of one, and writing it down."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ..config.servers import SERVER, servers_of
from ..errors import RequestError
from ..models.default import installed_models
from ..onboarding.checking import Checked
from ..onboarding.providers import ServerKey
from ..onboarding.saving import Choice, SavedChoice, overriding_variables
from ..onboarding.setup import Onboarding
from ..system.net import without_credentials

PREVIOUS = "previous"  # the name of the model before this one, as that of a file ends with .gguf
CHECK_TIMEOUT_S = 30.0  # one list of models and one answer, each with a time-out of its own


class ServerSetup:
    """The first steps that the daemon's API offers. One check at a time: each may cost money."""

    def __init__(self, setup: Onboarding) -> None:
        self._setup = setup
        self._checking = False

    @property
    def folder(self) -> Path:
        """The folder of config.toml, and of what the user puts beside it."""
        return self._setup.path.parent

    def providers(self) -> dict[str, Any]:
        """Return the providers with the place of each key, the settings written down, and the models here. Blocks."""
        setup, saved = self._setup, self._setup.config()
        rows = [
            {
                "name": p.name, "title": p.title, "base_url": p.base_url, "key_url": p.key_url,
                "key": setup.has_key(p.base_url), "free_name": setup.free_name(p.base_url),
            }
            for p in setup.providers()
        ]  # fmt: skip
        device = saved.device
        return {
            "providers": rows,
            "server": {"base_url": without_credentials(saved.server.base_url), "model": saved.server.model},
            "servers": [
                {
                    "name": name,
                    "base_url": without_credentials(one.base_url),
                    "model": one.model,
                    "key": setup.has_key(one.base_url, "" if name == SERVER else name),
                }
                for name, one in servers_of(saved).items()
            ],
            "device": {
                "enabled": device.enabled,
                "model": device.model,
                "models": list(installed_models()),
                "previous": setup.previous_name(),
            },
        }

    async def check(self, base_url: str, api_key: str, model: str, name: str = "") -> dict[str, Any]:
        """Check a server, without `api_key` with the known one. Raises RequestError while another check runs."""
        if self._checking:
            raise RequestError("Another check is under way: try again in a moment.", status=429, code="busy")
        self._checking = True
        try:
            work = asyncio.to_thread(self._check, base_url, api_key, model, name)
            return (await asyncio.wait_for(work, CHECK_TIMEOUT_S)).to_json()
        except TimeoutError as e:
            raise RequestError("The check did not end in time.", status=504, code="timeout") from e
        finally:
            self._checking = False

    def _check(self, base_url: str, api_key: str, model: str, name: str) -> Checked:
        setup = self._setup
        if (problem := setup.problem(base_url, api_key)) is not None:
            return Checked(without_credentials(base_url), model, problem=problem)
        return setup.check(base_url, setup.key(base_url, api_key, name), model, name)

    async def save_server(self, base_url: str, api_key: str, model: str, name: str = "") -> dict[str, Any]:
        """Write a server down, or one of several by `name`; "" takes it away. Raises ConfigError with no change."""
        return await asyncio.to_thread(self._save, base_url, api_key, model, name)

    async def save_device(self, model: str) -> dict[str, Any]:
        """Write down one of the models on this machine. Raises ConfigError, RequestError."""
        return await asyncio.to_thread(self._save_device, model)

    def _save_device(self, model: str) -> dict[str, Any]:
        """Accept only a name or path of `providers`: a caller of the API names no other file of this machine."""
        setup, here = self._setup, installed_models()
        if model == PREVIOUS:
            return self.told(setup.use_previous())
        found = next((m for m in here if model in (m["name"], m["path"])), None)
        if model and found is None:
            names = ", ".join(m["name"] for m in here) or "none"
            msg = f"{model!r} is none of the models here ({names}); `disco setup --local FILE` takes any GGUF file"
            raise RequestError(msg, code="invalid_setting", param="model")
        return self.told(setup.save(Choice(local="" if found is None or found["default"] else found["path"])))

    async def require_local(self) -> None:
        """Raise ConfigError where no model of this machine could be written down: before one is fetched."""
        await asyncio.to_thread(self._setup.plan, Choice(local=""))

    async def save_local(self, model: str) -> SavedChoice:
        """Write down what `device.model` is to be, which has been looked at. Raises ConfigError."""
        return await asyncio.to_thread(self._setup.save, Choice(local=model))

    async def take_back(self, saved: SavedChoice) -> SavedChoice:
        """Write down again what was there before that. Raises ConfigError."""
        return await asyncio.to_thread(self._setup.take_back, saved)

    def told(self, saved: SavedChoice) -> dict[str, Any]:
        """Return what the API says of settings that were written."""
        changes = saved.changes
        shadowed = overriding_variables(changes, self._setup.env)
        return {"saved": sorted(changes), "shadowed": shadowed, "notes": saved.notes()}

    def _save(self, base_url: str, api_key: str, model: str, name: str) -> dict[str, Any]:
        setup = self._setup
        if base_url and (problem := setup.problem(base_url, api_key)) is not None:
            msg = f"{problem.text}: {problem.mend}"
            raise RequestError(msg, code="invalid_setting", param=str(problem.code))
        key = setup.key(base_url, api_key, name) if base_url else ServerKey()
        return self.told(setup.save(Choice(base_url, model, key, name=name)))
