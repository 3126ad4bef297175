"""Two machines compute one model over a link that delays, reorders between its connections, and breaks.

The edge and the content manager of the partner are the product's; the network, the two engines and their KV caches are
here. A row says which text it was computed from, so a row out of place is seen at once. The model draws a token that
depends on the whole text: what it drew is what both must agree on, whatever was drafted, cut, evicted or lost.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disco_daemon.link.protocol import (
    IDS,
    AnswerClosed,
    AnswerFailed,
    AnswerOpened,
    BeginDrawing,
    CloseAnswer,
    Credit,
    CutAnswer,
    DraftVerdict,
    DrawRules,
    JudgeDrafts,
    NeedRows,
    OpenAnswer,
    SendRows,
    ToEdge,
    ToPartner,
)
from disco_daemon.link.rows.codec import RowArray
from disco_daemon.link.rows.content import ContentChange, ContentManager
from disco_daemon.link.rows.credits import LinkCredits
from disco_daemon.link.rows.edge_rows import EdgeAnswer, send_all_due
from disco_daemon.link.rows.pending import MAX_JUDGED, ContentKey

N_VOCAB, N_CTX, N_EMBD, MAX_ANSWERS = 3, 60, 4, 2
CREDITS = 2 * MAX_JUDGED * MAX_ANSWERS
PEERS = (4, 9)
tokens_of = st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=12)


def row_of(text: list[int], pos: int) -> RowArray:
    """The row of a position: it says its token, its position and the whole text up to it."""
    prefix = zlib.crc32(bytes(text[: pos + 1])) % (1 << 24)
    return np.array([text[pos], pos, prefix, 0.5], np.float32)


def rows_of(text: list[int], start: int, end: int) -> RowArray:
    return np.array([row_of(text, pos) for pos in range(start, end)], np.float32).reshape(end - start, N_EMBD)


def drawn_behind(text: list[int]) -> int:
    """What the whole model says next."""
    return zlib.crc32(bytes(text) + b"next") % N_VOCAB


@dataclass
class Network:
    """One link: two connections up, one down, each in order."""

    credits: LinkCredits
    rows: deque[tuple[SendRows, bytes]] = field(default_factory=deque)
    calls: deque[ToPartner] = field(default_factory=deque)
    down: deque[ToEdge] = field(default_factory=deque)

    def n_rows(self) -> int:
        there = sum(len(message.tokens) for message, _ in self.rows)
        return there + sum(message.rows for message in self.down if isinstance(message, Credit))


class TwoMachines(RuleBasedStateMachine):
    """Two edges, a partner, and what is between them."""

    n_embd, codec = N_EMBD, "f32"

    def rows(self, text: list[int], start: int, end: int) -> RowArray:
        return rows_of(text, start, end)[:, : self.n_embd]

    @initialize(few=st.booleans(), tokens=tokens_of)
    def start(self, few: bool, tokens: list[int]) -> None:
        self.n_credits = 9 if few else CREDITS  # the edge's; with few of them drafts may wait for each other
        self.manager = ContentManager(self.n_embd, N_VOCAB, N_CTX, MAX_ANSWERS, CREDITS)
        self.links = {peer: Network(LinkCredits(self.n_credits)) for peer in PEERS}
        self.answers: dict[ContentKey, EdgeAnswer] = {}
        self.kv: dict[ContentKey, list[int]] = {}  # the partner's: tokens, each of which was computed from its row
        self.sent: dict[tuple[ContentKey, int], dict[int, bytes]] = {}  # rows of the edge by position and turn
        self.n_opened = 0
        self.open_answer(PEERS[0], tokens, eager=True)

    # --- the edge -------------------------------------------------------------------------------------------------

    def call(self, key: ContentKey, message: ToPartner) -> None:
        self.links[key[0]].calls.append(message)

    def pick(self, data: st.DataObject, *, is_open: bool = True) -> tuple[ContentKey, EdgeAnswer] | None:
        keys = [key for key, answer in self.answers.items() if answer.is_open or not is_open]
        if not keys:
            return None
        key = data.draw(st.sampled_from(keys))
        return key, self.answers[key]

    @rule(peer=st.sampled_from(PEERS), tokens=tokens_of, eager=st.booleans())
    def open_answer(self, peer: int, tokens: list[int], eager: bool) -> None:
        if sum(key[0] == peer for key in self.answers) > MAX_ANSWERS:
            return
        self.n_opened += 1
        name = f"a{self.n_opened}"
        answer = EdgeAnswer(name, tokens, n_ctx=N_CTX, n_vocab=N_VOCAB, codec=self.codec, is_eager=eager)
        self.answers[peer, name] = answer
        self.call((peer, name), answer.open())

    @rule(data=st.data(), n=st.integers(1, 9), right=st.lists(st.booleans(), max_size=6), sends=st.booleans())
    def compute_some(self, data: st.DataObject, n: int, right: list[bool], sends: bool) -> None:
        """Some rows of the text, also before the partner has opened the answer, or drafts."""
        if not (found := self.pick(data, is_open=False)):
            return
        answer = found[1]
        start, end = answer.n_rows, min(answer.n_rows + n, answer.n_text)
        if answer.n_rows == 0 and answer.n_text > 3:
            start = data.draw(st.integers(0, 2))  # the edge's own KV cache had the first ones
        if start < end:
            answer.add(start, answer.tokens[start:end], self.rows(answer.tokens, start, end))
        elif answer.is_open and answer.missing:
            start = answer.missing.start
            end = min(start + n, answer.missing.stop)
            answer.add(start, answer.tokens[start:end], self.rows(answer.tokens, start, end))
        else:
            self.draft_on(answer, right)
        if sends:
            self.send(found[0][0])

    def draft_on(self, answer: EdgeAnswer, right: list[bool]) -> None:
        for is_right in right:
            at = len(answer.tokens)
            if answer.n_rows != at or at >= N_CTX - 2 or at >= answer.n_text + MAX_JUDGED - 1:
                return
            token = (drawn_behind(answer.tokens) + (not is_right)) % N_VOCAB
            answer.add(at, [token], self.rows([*answer.tokens, token], at, at + 1))

    @rule(data=st.data(), right=st.lists(st.booleans(), max_size=6), waits=st.sampled_from([False, False, True]))
    def answer_on(self, data: st.DataObject, right: list[bool], waits: bool) -> None:
        """What an edge mostly does: compute the text's rows, begin to draw, draft and ask for the verdict."""
        if not (found := self.pick(data)):
            return
        key, answer = found
        self.compute_all_text(answer)
        if not answer.is_drawing:
            self.call(key, answer.begin_drawing(DrawRules()))
        self.draft_on(answer, right)
        n_drafts = min(answer.n_rows - answer.n_text, MAX_JUDGED - 1)
        if answer.judged is None and n_drafts >= 0 and not waits:
            self.call(key, answer.judge(data.draw(st.none() | st.integers(0, n_drafts))))
        self.send(key[0])

    def compute_all_text(self, answer: EdgeAnswer) -> None:
        start, end = answer.n_rows, answer.n_text
        if start < end:
            answer.add(start, answer.tokens[start:end], self.rows(answer.tokens, start, end))
        if missing := answer.missing:
            tokens = answer.tokens[missing.start : missing.stop]
            answer.add(missing.start, tokens, self.rows(answer.tokens, missing.start, missing.stop))

    @rule(data=st.data(), more=st.lists(st.integers(0, N_VOCAB - 1), max_size=3))
    def cut(self, data: st.DataObject, more: list[int]) -> None:
        if not (found := self.pick(data, is_open=False)):
            return
        key, answer = found
        self.call(key, answer.cut(data.draw(st.integers(1, len(answer.tokens)))))
        if len(answer.tokens) + len(more) < N_CTX:
            answer.extend(more)

    @rule(data=st.data())
    def accept_or_drop_drafts(self, data: st.DataObject) -> None:
        found = self.pick(data)
        if not found or found[1].judged or found[1].n_due:
            return
        answer = found[1]
        n_drafts = len(answer.tokens) - answer.n_text
        if answer.is_eager or not n_drafts:
            return
        if data.draw(st.booleans()):
            answer.drop_drafts()
        else:
            try:
                answer.accept_drafts(data.draw(st.integers(1, n_drafts)))
            except ValueError:
                assert answer.is_drawing  # the row before them is a draft, and sent

    def send(self, peer: int) -> None:
        link = self.links[peer]
        mine = [answer for key, answer in self.answers.items() if key[0] == peer]
        for message, payload in send_all_due(mine, link.credits):
            link.rows.append((message, payload))
            rows = np.frombuffer(payload, "<f4").reshape(len(message.tokens), self.n_embd)
            for at, row in enumerate(rows):
                sent = self.sent.setdefault(((peer, message.id), message.pos + at), {})
                assert message.turn not in sent
                sent[message.turn] = row.tobytes()

    @rule(data=st.data(), seldom=st.integers(0, 3))
    def close(self, data: st.DataObject, seldom: int) -> None:
        if seldom == 3 and (found := self.pick(data)):
            self.call(found[0], CloseAnswer(id=found[0][1]))
            del self.answers[found[0]]

    # --- the network ----------------------------------------------------------------------------------------------

    @rule(which=st.lists(st.tuples(st.sampled_from(PEERS), st.integers(0, 2), st.integers(1, 9)), min_size=6))
    def deliver_some(self, which: list[tuple[int, int, int]]) -> None:
        """Each connection in order, one before or behind the other."""
        for peer, connection, n in which:
            (self.deliver_rows, self.deliver_calls, self.deliver_down)[connection](peer, n)

    def deliver_rows(self, peer: int, n: int) -> None:
        for _ in range(min(n, len(self.links[peer].rows))):
            message, payload = self.links[peer].rows.popleft()
            self.follow((peer, message.id), self.manager.rows(peer, message, payload))

    def deliver_calls(self, peer: int, n: int) -> None:
        for _ in range(min(n, len(self.links[peer].calls))):
            message = self.links[peer].calls.popleft()
            match message:
                case OpenAnswer():
                    key = (peer, message.id)
                    self.kv[key] = list(message.tokens[: len(message.id) * 3 % 7])  # the prefix index found these
                    change = self.manager.open(peer, message, len(self.kv[key]))
                case BeginDrawing():
                    change = self.manager.begin(peer, message)
                case JudgeDrafts():
                    change = self.manager.judge(peer, message)
                case CutAnswer():
                    change = self.manager.cut(peer, message)
                case CloseAnswer():
                    change = self.manager.close(peer, message)
                case _:
                    raise AssertionError(message)
            self.follow((peer, message.id), change)

    def deliver_down(self, peer: int, n: int) -> None:
        link = self.links[peer]
        for _ in range(min(n, len(link.down))):
            message = link.down.popleft()
            if isinstance(message, Credit):
                link.credits.give_back(message)
                continue
            assert not isinstance(message, AnswerFailed) or message.reason == "overloaded", message
            if isinstance(message, AnswerClosed) or (peer, getattr(message, "id", "")) not in self.answers:
                continue
            key = (peer, message.id)  # type: ignore[union-attr]
            answer = self.answers[key]
            match message:
                case AnswerOpened():
                    answer.opened(message)
                case DraftVerdict():
                    self.take_verdict(answer, message)
                case NeedRows():
                    for said in answer.need(message):
                        self.call(key, said)
                case AnswerFailed():
                    del self.answers[key]
                case _:
                    raise AssertionError(message)

    def take_verdict(self, answer: EdgeAnswer, message: DraftVerdict) -> None:
        before = answer.tokens[: answer.n_text]
        taken = answer.verdict(message)
        if taken is None:
            assert answer.tokens[: answer.n_text] == before
            return
        for token in taken.tokens:
            assert token == drawn_behind(before), "the edge's text is not what the whole model says"
            before.append(token)
        assert answer.tokens[: answer.n_text] == before
        assert answer.n_rows in (answer.n_text - 1, len(answer.tokens))
        assert taken.n_standing <= answer.n_rows - (answer.n_text - 1)

    @rule(peer=st.sampled_from(PEERS), seldom=st.integers(0, 3))
    @precondition(lambda self: any(link.down for link in self.links.values()))
    def break_link(self, peer: int, seldom: int) -> None:
        """What is on its way is lost, and what the partner had of this edge; the edge opens its answers again."""
        if seldom < 3:
            return
        ended = self.manager.peer_left(peer)
        assert set(ended) == {key for key in self.kv if key[0] == peer}
        self.reconnect(peer)

    @rule()
    @precondition(lambda self: any(content.run for content in self.manager.contents))
    def restart_partner(self) -> None:
        self.manager = ContentManager(self.n_embd, N_VOCAB, N_CTX, MAX_ANSWERS, CREDITS)
        for peer in PEERS:
            self.reconnect(peer)

    def reconnect(self, peer: int) -> None:
        self.kv = {key: kept for key, kept in self.kv.items() if key[0] != peer}
        self.sent = {key: rows for key, rows in self.sent.items() if key[0][0] != peer}
        self.links[peer] = Network(LinkCredits(self.n_credits))
        for key, answer in self.answers.items():
            if key[0] == peer:
                self.call(key, answer.open())

    # --- the partner ----------------------------------------------------------------------------------------------

    def follow(self, key: ContentKey, change: ContentChange) -> None:
        self.links[key[0]].down.extend(change.send)
        if change.keep is not None:
            assert change.keep <= len(self.kv[key])
            del self.kv[key][change.keep :]
        if change.ended:
            self.kv.pop(key, None)

    def pick_content(self, data: st.DataObject) -> ContentKey | None:
        keys = [content.key for content in self.manager.contents]
        return data.draw(st.sampled_from(keys)) if keys else None

    @rule(n=st.sampled_from([2, 5, 40, 40]), draws=st.booleans(), stops=st.sampled_from([1, 99, 99, 99]))
    def compute(self, n: int, draws: bool, stops: int) -> None:
        for content in self.manager.contents:
            self.compute_rows(content.key, n)
            if draws:
                self.draw_tokens(content.key, stops)

    def compute_rows(self, key: ContentKey, n: int) -> bool:
        content = self.manager.get(key)
        assert content is not None
        ready = self.manager.take(key, n)
        if ready is None:
            return False
        kv = self.kv[key]
        assert len(kv) == ready.pos
        assert len(ready.tokens) == len(ready.rows) <= n
        assert 0 <= ready.n_logits <= len(ready.tokens)
        for token, row in zip(ready.tokens, ready.rows, strict=True):
            turn = max(turn for turn in self.sent[key, len(kv)] if turn <= content.turn)
            assert row.tobytes() == self.sent[key, len(kv)].pop(turn), "not the edge's row, or computed twice in a turn"
            kv.append(token)
            assert row.tobytes() == row_of(kv, len(kv) - 1)[: self.n_embd].tobytes(), "a row of another text"
        n_run = len(content.run)
        self.follow(key, self.manager.computed(key, len(ready.tokens)))
        assert len(content.run) == n_run + ready.n_logits
        return True

    def draw_tokens(self, key: ContentKey, stops: int = 99) -> bool:
        content = self.manager.get(key)
        if content is None or content.drafts_from is None or len(content.drawn) == len(content.run):
            return False
        drawn: list[int] = []
        kv, turn, n_before = self.kv[key], content.turn, len(content.drawn)
        assert not n_before or content.drawn[-1] == content.run[n_before], "drawn on behind a wrong draft"
        for at in range(content.drafts_from + n_before, content.drafts_from + len(content.run)):
            drawn.append(drawn_behind(kv[: at + 1]))
            if kv[at + 1 : at + 2] != drawn[-1:] or len(drawn) == stops:
                break
        is_all = n_before + len(drawn) == len(content.run)
        goes_on = is_all and content.n_run > 0 and content.tokens[0] == drawn[-1] and stops > len(drawn)
        self.follow(key, self.manager.draw(key, drawn, ends=len(drawn) == stops))
        assert (content.turn == turn) == goes_on, "a verdict as soon as it is known, and not before"
        return True

    @rule(data=st.data(), share=st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    def evict(self, data: st.DataObject, share: float) -> None:
        if key := self.pick_content(data):
            n_left = int(share * len(self.kv[key]))
            del self.kv[key][n_left:]
            change = self.manager.evicted(key, n_left)
            if change.keep is not None:
                assert change.keep <= n_left
            self.follow(key, change)

    # --- what holds at all times ----------------------------------------------------------------------------------

    @invariant()
    def no_credit_is_lost_or_made(self) -> None:
        for peer, link in self.links.items():
            held = sum(content.n_held for content in self.manager.contents if content.key[0] == peer)
            assert link.credits.left + link.n_rows() + held == link.credits.total
        assert self.manager.n_held == sum(content.n_held for content in self.manager.contents)

    @invariant()
    def the_caches_are_as_long_as_the_manager_thinks(self) -> None:
        assert set(self.kv) == {content.key for content in self.manager.contents}
        assert all(content.n_computed == len(self.kv[content.key]) for content in self.manager.contents)

    def run_on(self) -> bool:
        """Do all that is due, once; whether there was anything."""
        moved = False
        for peer, link in self.links.items():
            before = link.credits.left
            self.send(peer)
            moved |= bool(link.rows or link.calls or link.down) or link.credits.left != before
            self.deliver_rows(peer, len(link.rows))
            self.deliver_calls(peer, len(link.calls))
            self.deliver_down(peer, len(link.down))
        for answer in self.answers.values():
            if answer.is_open and answer.missing:
                self.compute_all_text(answer)
                moved = True
        for content in self.manager.contents:
            moved |= self.compute_rows(content.key, 40) or self.draw_tokens(content.key)
        return moved

    def teardown(self) -> None:
        if not hasattr(self, "links"):
            return
        while self.run_on():
            pass
        for key, answer in list(self.answers.items()):
            if self.n_credits == CREDITS:
                assert answer.judged is None, "a verdict never came"
            self.call(key, CloseAnswer(id=key[1]))
            del self.answers[key]
        while self.run_on():
            pass
        assert not self.kv
        assert not self.manager.n_held
        assert all(link.credits.left == link.credits.total for link in self.links.values())
        for peer in PEERS:
            assert self.manager.peer_left(peer) == ()


class TwoMachinesOfIds(TwoMachines):
    """The same with a partner that has all layers: rows have no numbers, and a text's are there at once."""

    n_embd, codec = 0, IDS


TestTwoMachines = TwoMachines.TestCase
TestTwoMachines.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)  # some 14,000 steps
TestTwoMachinesOfIds = TwoMachinesOfIds.TestCase
TestTwoMachinesOfIds.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
