"""The keys with names of a running daemon: whose thread their caps are, and that a change is whole or none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from disco_daemon.clock import SystemClock
from disco_daemon.daemon.named_keys import NamedKeys
from disco_daemon.errors import ConfigError
from disco_daemon.keys.key_file import KeyFile
from disco_daemon.keys.named_key import KeyTerms
from disco_daemon.money.caps import CapLimits, Caps
from disco_daemon.store import History
from disco_daemon.types import Caller


class Owner:
    """A daemon's keys, without the daemon; `ended` are those whose answers were ended."""

    def __init__(self, folder: Path, history: History) -> None:
        self.config, clock = folder / "config.toml", SystemClock()
        self.file = KeyFile(self.config)
        self.caps = Caps(CapLimits(), None, clock.wall())
        self.ended: list[str] = []
        conductor = SimpleNamespace(in_flight=self)
        self.keys = NamedKeys(self.config, history, clock, lambda: self.caps, lambda: cast(Any, conductor))

    async def revoke(self, caller: Caller) -> int:
        self.ended.append(caller.name)
        return 1

    @property
    def let_in(self) -> list[str]:
        return [key.name for key in self.keys.ring]

    async def listed(self) -> list[str]:
        return [key["name"] for key in await self.keys.document()]


@pytest_asyncio.fixture
async def owner(tmp_path: Path) -> AsyncIterator[Owner]:
    with History(tmp_path / "history.sqlite") as history:
        found = Owner(tmp_path, history)
        await found.keys.start()
        yield found


@pytest.mark.asyncio
async def test_caps_that_answers_go_by_are_asked_in_the_loops_thread_alone(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have one owner: a sum that a thread reads while an answer is settled has lost that answer's cost."""
    used_in: list[int] = []

    def watched(method: Any) -> Any:
        def ask(caps: Caps, *args: Any, **more: Any) -> Any:
            if caps is owner.caps or caps in owner.caps.keys.values():
                used_in.append(threading.get_ident())
            return method(caps, *args, **more)

        return ask

    for name in ("spent", "set_limits", "check", "reserve", "settle", "book", "state", "restore"):
        monkeypatch.setattr(Caps, name, watched(getattr(Caps, name)))
    await owner.keys.add("anna", KeyTerms(usd_per_day=1.0))
    await owner.keys.change("anna", {"usd_per_day": 2.0})
    assert (await owner.keys.document())[0]["usd_today"] == 0.0
    await owner.keys.reload_with(lambda: asyncio.sleep(0))
    await owner.keys.revoke("anna")
    assert set(used_in) == {threading.get_ident()}


@pytest.mark.asyncio
async def test_a_reload_takes_up_both_files_or_neither(owner: Owner) -> None:
    await owner.keys.add("anna", KeyTerms())
    owner.file.add("bert", KeyTerms(), 0.0)

    async def refused() -> None:
        raise ConfigError("config.toml is wrong")

    with pytest.raises(ConfigError, match=r"config.toml is wrong"):
        await owner.keys.reload_with(refused)
    assert owner.let_in == ["anna"], "nothing has changed"
    assert await owner.keys.reload_with(lambda: asyncio.sleep(0, "reloaded")) == "reloaded"
    assert owner.let_in == ["anna", "bert"]

    owner.file.path.write_text("{")
    done: list[int] = []

    async def reloaded() -> None:
        done.append(1)

    with pytest.raises(ConfigError, match="is damaged"):
        await owner.keys.reload_with(reloaded)
    assert not done, "the settings are not read either"
    assert owner.let_in == ["anna", "bert"]


@pytest.mark.asyncio
async def test_what_is_listed_is_what_is_let_in_and_each_can_be_revoked_without_the_file(owner: Owner) -> None:
    for name in ("anna", "bert", "carl"):
        await owner.keys.add(name, KeyTerms())
    whole = owner.file.path.read_text()
    owner.file.path.unlink()
    assert await owner.listed() == ["anna", "bert", "carl"]
    assert await owner.keys.revoke("anna") == {"revoked": "anna", "ended": 1}
    assert await owner.listed() == ["bert", "carl"]

    owner.file.path.write_text(whole[:-9])
    owner.file.path.chmod(0o600)
    with pytest.raises(ConfigError, match="'bert' is let in no more by this daemon, but the next one may let it in"):
        await owner.keys.revoke("bert")
    assert (owner.let_in, owner.ended) == (["carl"], ["anna", "bert"])
    with pytest.raises(ConfigError, match="is damaged"):
        await owner.keys.revoke("nobody")
    assert owner.let_in == ["carl"]


@pytest.mark.asyncio
async def test_a_damaged_file_at_the_start_is_told_by_the_list(owner: Owner) -> None:
    owner.file.path.write_text("{")
    owner.file.path.chmod(0o600)
    with pytest.raises(ConfigError, match="is damaged"):
        await owner.keys.document()


@pytest.mark.asyncio
@pytest.mark.parametrize("n_turns", range(6))
async def test_a_client_that_leaves_leaves_no_change_half_done(owner: Owner, n_turns: int) -> None:
    await owner.keys.add("anna", KeyTerms())
    task = asyncio.create_task(owner.keys.revoke("anna"))
    for _ in range(n_turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await owner.keys.reload_with(lambda: asyncio.sleep(0))  # behind it
    assert owner.let_in == [key.name for key in owner.file.read()]
    assert owner.ended == (["anna"] if n_turns else []), (
        "the key is gone from the file and from the daemon, or from none"
    )
