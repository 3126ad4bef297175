"""`disco setup` as a conversation: what it asks, in which order, and what it would write. It writes nothing itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from disco_daemon.cli.setup import dialog
from disco_daemon.cli.setup.dialog import Dialog
from disco_daemon.models import default as models
from disco_daemon.onboarding.checking import Checked
from disco_daemon.onboarding.saving import Choice
from disco_daemon.onboarding.setup import Onboarding
from tests.fixtures.provider import SECRET, Provider


@dataclass
class Terminal:
    """Types these answers, one after the other; `said` is all that stood on the screen. A secret is typed unseen."""

    answers: Iterator[str]
    said: list[str] = field(default_factory=list)

    def ask(self, question: str) -> str:
        self.said.append(question)
        return next(self.answers)

    @property
    def text(self) -> str:
        return "\n".join(self.said)


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Onboarding:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / models.DEFAULT_MODEL).write_bytes(b"GGUF")
    monkeypatch.setenv("DISCO_MODELS_DIR", str(tmp_path / "models"))
    return Onboarding(tmp_path / "config.toml", {})


async def talked(setup: Onboarding, *answers: str) -> tuple[Choice, Checked | None, Terminal]:
    terminal = Terminal(iter(answers))
    dialog = Dialog(setup, terminal.ask, terminal.ask, terminal.said.append)
    choice, checked = await asyncio.to_thread(dialog.run)
    assert next(terminal.answers, None) is None, "every answer was wanted"
    assert SECRET not in terminal.text
    assert not setup.path.exists(), "nothing is written before all is known"
    return choice, checked, terminal


async def test_a_server_of_one_s_own_key_model_and_test(setup: Onboarding) -> None:
    async with Provider() as server:
        choice, checked, terminal = await talked(setup, "0", server.url, SECRET, "small", "y")
        assert (choice.base_url, choice.model, choice.key.value) == (server.url, "small", SECRET)
        assert choice.local is None
        assert checked is not None
        assert checked.ttft_s is not None
        assert "1  Anthropic" in terminal.text
        assert "It has 3 models." in terminal.text
        assert server.n_requests == 1


async def test_a_real_model_is_offered_in_place_of_the_stand_in_and_takes_a_yes(setup: Onboarding) -> None:
    offer = {
        "id": "tiny", "title": "Tiny", "bytes": 2.5e9, "memory_bytes": 4.2e9, "tps": None, "licence": "MIT",
        "ttft_s": {"100": None, "2000": None}, "abilities": [], "recommended": True,
    }  # fmt: skip
    found = {"machine": {"free_bytes": 8e9, "measured": None}, "models": [offer], "problem": ""}
    for answer, wanted in (("", None), ("1", "/models/tiny.gguf")):
        terminal = Terminal(iter(["", answer]))
        talk = Dialog(
            setup,
            terminal.ask,
            terminal.ask,
            terminal.said.append,
            lambda: found,
            lambda one: f"/models/{one['id']}.gguf",
        )
        choice, _ = await asyncio.to_thread(talk.run)
        assert choice.local == wanted
        assert "135M stand-in" in terminal.text
        assert "MIT" in terminal.text


async def test_while_nothing_may_leave_nobody_is_asked_for_models_or_a_test(setup: Onboarding) -> None:
    async with Provider() as server:
        choice, checked, terminal = await talked(replace(setup, switch=lambda: True), server.url, SECRET, "small")
        assert (choice.base_url, choice.model, choice.key.value, checked) == (server.url, "small", SECRET, None)
        assert "policy.private" in terminal.text
        assert server.seen == []


async def test_a_wrong_key_is_asked_for_again_and_a_wrong_model_too(setup: Onboarding) -> None:
    async with Provider() as server:
        answers = (server.url, "sk-wrong-key-1234567", SECRET, "medium", "y", "y", "2", "")
        choice, checked, terminal = await talked(setup, *answers)
        assert (choice.model, choice.key.value) == ("small", SECRET)
        assert checked is not None
        assert "refuses the key" in terminal.text
        assert "medium does not answer" in terminal.text


async def test_part_of_a_name_shortens_a_long_list(setup: Onboarding) -> None:
    async with Provider(names=[f"maker/model-{i}" for i in range(200)]) as server:
        choice, _, terminal = await talked(setup, server.url, SECRET, "-19", "model-199", "y", "n")
        assert choice.model == "maker/model-199"
        assert "and 170 more" in terminal.text
        assert server.n_requests == 0, "no test was wanted"


async def test_without_a_list_the_name_is_typed(setup: Onboarding) -> None:
    async with Provider(names=None, key="") as server:
        choice, checked, _ = await talked(setup, server.url, "", "whatever", "y")
        assert (choice.model, choice.key.value) == ("whatever", "")
        assert checked is not None


async def test_an_address_where_nobody_is_leads_back_to_the_question_who(setup: Onboarding) -> None:
    async with Provider() as server:
        pass
    _, _, terminal = await talked(setup, server.url, SECRET, "")
    assert terminal.text.count("Who shall answer") == 2


async def test_enter_leaves_all_as_it_is_and_nonsense_is_asked_again(setup: Onboarding) -> None:
    choice, checked, terminal = await talked(setup, "nobody", "99", "")
    assert (choice, checked) == (Choice(), None)
    assert "is no known server" in terminal.text


async def test_a_model_that_is_not_here_is_fetched_if_one_wants_it(
    setup: Onboarding, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models.default_model_path()
    path.unlink()
    fetched: list[bool] = []
    monkeypatch.setattr(dialog, "fetch_default_model", lambda progress: fetched.append(True))
    _, _, terminal = await talked(setup, "", "n")
    assert "98 MB" in terminal.text
    assert not fetched
    await talked(setup, "", "")
    assert fetched == [True]


async def test_one_of_several_local_models_is_chosen(setup: Onboarding) -> None:
    other = models.default_model_path().with_name("other.gguf")
    other.write_bytes(b"GGUF")
    assert (await talked(setup, "", "x", "2"))[0].local == str(other)
    assert (await talked(setup, "", "1"))[0].local == ""
    assert (await talked(setup, "", ""))[0].local is None


async def test_a_server_that_is_configured_stays_with_enter_and_goes_with_none(setup: Onboarding) -> None:
    async with Provider() as server:
        setup.save(Choice(server.url, "small", setup.key(server.url, SECRET)))
        text = setup.path.read_text("utf-8")
        for answer, wanted in (("", None), ("none", "")):
            terminal = Terminal(iter([answer]))
            choice, _ = await asyncio.to_thread(Dialog(setup, terminal.ask, terminal.ask, terminal.said.append).run)
            assert choice.base_url == wanted
            assert f"[small at {server.url}]" in terminal.text
        terminal = Terminal(iter([server.url, "", "small", "y"]))
        choice, checked = await asyncio.to_thread(Dialog(setup, terminal.ask, terminal.ask, terminal.said.append).run)
        assert "Enter takes the one in" in terminal.text
        assert checked is not None
        assert server.seen[-1] == SECRET, "the key that is there"
        assert setup.path.read_text("utf-8") == text


@pytest.mark.parametrize(("answer", "wanted"), [("", False), ("y", True), ("n", False)])
def test_the_service_is_asked_for_and_not_taken_for_granted(setup: Onboarding, answer: str, wanted: bool) -> None:
    terminal = Terminal(iter([answer]))
    assert Dialog(setup, terminal.ask, terminal.ask, terminal.said.append).service() is wanted


async def test_a_further_server_comes_beside_the_first_with_a_name_and_is_taken_away_by_it(setup: Onboarding) -> None:
    setup.path.write_text('[server]\nbase_url = "https://api.example.com/v1"\nmodel = "m"\n')
    async with Provider() as server:
        terminal = Terminal(iter([server.url, "y", "server", "box", SECRET, "small", "y"]))
        choice, checked = await asyncio.to_thread(Dialog(setup, terminal.ask, terminal.ask, terminal.said.append).run)
        assert (choice.name, choice.base_url, choice.model) == ("box", server.url, "small")
        assert checked is not None
        assert "Now m at https://api.example.com/v1 answers." in terminal.text
        assert "no name for a further server" in terminal.text or "called server already" in terminal.text
        setup.save(choice)
        assert [one.name for one in setup.config().servers] == ["box"]
        again = Terminal(iter([server.url, "", "large-2", "y"]))
        choice, _ = await asyncio.to_thread(Dialog(setup, again.ask, again.ask, again.said.append).run)
        assert (choice.name, choice.model) == ("box", "large-2"), "one that is there is set up anew"
        assert "Further servers: box (small)." in again.text
        gone = Terminal(iter(["none", "box"]))
        choice, _ = await asyncio.to_thread(Dialog(setup, gone.ask, gone.ask, gone.said.append).run)
        assert choice == Choice("", name="box")
        instead = Terminal(iter([server.url.replace("127.0.0.1", "localhost"), "n", SECRET, "small", "n"]))
        choice, _ = await asyncio.to_thread(Dialog(setup, instead.ask, instead.ask, instead.said.append).run)
        assert choice.name == ""
