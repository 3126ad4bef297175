"""Any order of changes, with the file closed and opened in between, leaves what a plain model says."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from disco_tui.data.store import Store, StoreError

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
SIDES = st.sampled_from(["device", "server", None])


@dataclass
class Said:
    """A turn as the model knows it: each character with the side that made it, None for what was added whole."""

    id: int
    role: str
    chars: list[tuple[str, str | None]] = field(default_factory=list)
    finish: str | None = None
    disco: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return "".join(char for char, _ in self.chars)


@dataclass
class Talk:
    id: int
    system: str
    model: str = "disco"
    title: str | None = None  # None: the store's own
    deleted: bool = False
    gone: bool = False
    live: list[Said] = field(default_factory=list)
    cuts: list[tuple[int, list[Said]]] = field(default_factory=list)  # where each cut began, and what it took away


class StoreMachine(RuleBasedStateMachine):
    talks = Bundle("talks")
    there = talks.filter(lambda talk: not talk.gone)

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.now = 1000.0
        self.store = self.opened()
        self.known: list[Talk] = []

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    def wall(self) -> float:
        self.now += 1.0
        return self.now

    def opened(self) -> Store:
        return Store(self.folder / "c.sqlite", wall=self.wall)

    @rule(target=talks, system=TEXTS)
    def new(self, system: str) -> Talk:
        talk = Talk(self.store.new(system=system).id, system)
        self.known.append(talk)
        return talk

    @rule(talk=there, role=st.sampled_from(["user", "assistant"]), text=TEXTS)
    def add(self, talk: Talk, role: str, text: str) -> None:
        turn = self.store.add(talk.id, role, text)
        talk.live.append(Said(turn, role, [(char, None) for char in text]))

    @rule(talk=there, data=st.data(), pieces=st.lists(st.tuples(TEXTS, SIDES), max_size=4))
    def append(self, talk: Talk, data: st.DataObject, pieces: list[tuple[str, str | None]]) -> None:
        if talk.live:
            said = data.draw(st.sampled_from(talk.live))
            for text, side in pieces:
                self.store.append(said.id, text, side)
                said.chars += [(char, side) for char in text]

    @rule(talk=there, data=st.data(), finish=st.sampled_from(["stop", "length", None]), told=st.booleans())
    def finish(self, talk: Talk, data: st.DataObject, finish: str | None, told: bool) -> None:
        if talk.live:
            said = data.draw(st.sampled_from(talk.live))
            said.finish, said.disco = finish, {"qoe": 0.5} if told else None
            self.store.finish(said.id, finish, said.disco)

    @rule(talk=there, data=st.data())
    def cut(self, talk: Talk, data: st.DataObject) -> None:
        if talk.live:
            at = data.draw(st.integers(0, len(talk.live) - 1))
            talk.cuts.append((talk.live[at].id, talk.live[at:]))
            del talk.live[at:]
            self.store.cut(talk.id, talk.cuts[-1][0])

    @rule(talk=there)
    def uncut(self, talk: Talk) -> None:
        assert self.store.uncut(talk.id) is bool(talk.cuts)
        if talk.cuts:
            at, gone = talk.cuts[-1]
            since = [said for said in talk.live if said.id >= at]
            talk.live = [said for said in talk.live if said.id < at] + gone
            talk.cuts[-1] = (at, since)
            if not since:
                talk.cuts.pop()

    @rule(talk=there, title=TEXTS, model=TEXTS, system=TEXTS)
    def head(self, talk: Talk, title: str, model: str, system: str) -> None:
        talk.title, talk.model, talk.system = title, model, system
        self.store.rename(talk.id, title)
        self.store.set_model(talk.id, model)
        self.store.set_system(talk.id, system)

    @rule(talk=there)
    def delete(self, talk: Talk) -> None:
        talk.deleted = True
        self.store.delete(talk.id)

    @rule(talk=there)
    def undelete(self, talk: Talk) -> None:
        talk.deleted = False
        self.store.undelete(talk.id)

    @rule()
    def purge(self) -> None:
        self.store.purge()
        for talk in self.known:
            talk.cuts.clear()
            talk.gone = talk.deleted
        self.known = [talk for talk in self.known if not talk.gone]

    @rule(talk=consumes(talks))
    def what_is_gone_cannot_be_changed(self, talk: Talk) -> None:
        self.store.delete(talk.id)
        talk.deleted = True
        self.purge()
        self.store.undelete(talk.id)
        assert self.store.turns(talk.id) == []
        assert self.store.uncut(talk.id) is False
        with pytest.raises(StoreError):
            self.store.add(talk.id, "user", "x")

    @rule()
    def open_again(self) -> None:
        self.store.close()
        self.store = self.opened()

    @rule(talk=there)
    def a_second_terminal_looks(self, talk: Talk) -> None:
        with self.opened() as other:
            assert other.turns(talk.id) == self.store.turns(talk.id)

    @invariant()
    def all_is_as_the_model_says(self) -> None:
        shown = {conversation.id: conversation for conversation in self.store.list()}
        assert set(shown) == {talk.id for talk in self.known if not talk.deleted}
        for talk in self.known:
            if talk.id in shown:
                head = shown[talk.id]
                assert (head.system, head.model) == (talk.system, talk.model)
                assert talk.title in (None, "", head.title)
            turns = self.store.turns(talk.id)
            assert [(t.id, t.role, t.text, t.finish, t.disco) for t in turns] == [
                (said.id, said.role, said.text, said.finish, said.disco) for said in talk.live
            ]
            for turn, said in zip(turns, talk.live, strict=True):
                marks = [""] * len(turn.text)
                for at, side in turn.sides:
                    marks[at:] = [side] * (len(turn.text) - at)
                assert marks == [side or "" for _, side in said.chars]
                assert all(a[0] < b[0] and a[1] != b[1] for a, b in zip(turn.sides, turn.sides[1:], strict=False))


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=30)
