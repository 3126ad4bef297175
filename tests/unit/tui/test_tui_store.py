"""The conversations on disk: what is kept, found, taken away and brought back."""

from __future__ import annotations

import itertools
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_tui.data.found_words import folded, words_in
from disco_tui.data.store import KEEP_DELETED_S, Conversation, Store, StoreError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "conversations.sqlite"


@pytest.fixture
def store(file: Path) -> Iterator[Store]:
    ticks = itertools.count(1000.0)
    with Store(file, wall=lambda: next(ticks)) as made:
        yield made


def begun(store: Store, question: str = "Why is the sky blue?") -> tuple[Conversation, int]:
    """A conversation with a question, and an answer that has not begun."""
    conversation = store.new()
    asked = store.add(conversation.id, "user", question)
    return conversation, store.add(conversation.id, "assistant", "", parent=asked)


def texts(store: Store, conversation: Conversation) -> list[str]:
    return [turn.text for turn in store.turns(conversation.id)]


def found(store: Store, query: str) -> list[int]:
    return [conversation.id for conversation in store.list(query)]


def test_the_file_and_its_companions_are_private(store: Store, file: Path) -> None:
    begun(store)
    modes = {path.name: path.stat().st_mode & 0o777 for path in file.parent.iterdir()}
    assert modes == dict.fromkeys((file.name, f"{file.name}-wal", f"{file.name}-shm"), 0o600)
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    file = tmp_path / "c.sqlite"
    file.touch(0o644)
    Store(file).close()
    assert file.stat().st_mode & 0o777 == 0o600


def test_pieces_become_one_text_with_marks_where_the_side_changes(store: Store) -> None:
    conversation, answer = begun(store)
    for text, side in (("Because ", "device"), ("of ", "device"), ("", "server"), ("light", "server"), ("!", None)):
        store.append(answer, text, side)
    coming = store.turns(conversation.id)[1]
    assert (coming.text, coming.finish, coming.disco) == ("Because of light!", None, None)
    assert coming.sides == ((0, "device"), (11, "server"), (16, ""))
    store.finish(answer, "stop", {"qoe": 1.0})
    done = store.turns(conversation.id)[1]
    assert (done.text, done.sides) == (coming.text, coming.sides)
    assert (done.finish, done.disco, done.parent) == ("stop", {"qoe": 1.0}, store.turns(conversation.id)[0].id)


@given(
    said=st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=20)), max_size=8),
    heard=st.lists(st.tuples(st.text(max_size=5), st.sampled_from(["device", "server"])), max_size=4),
    cut=st.integers(0, 8),
)
def test_messages_one_by_one_are_those_of_the_whole_conversation(
    said: list[tuple[str, str]], heard: list[tuple[str, str]], cut: int
) -> None:
    with Store(None) as store:
        conversation = store.new().id
        ids = [store.add(conversation, role, text.replace("\0", "")) for role, text in said]
        heard = heard if said and said[-1][0] == "assistant" else []
        for piece, side in heard:
            store.append(ids[-1], piece, side)
        if cut < len(ids):
            store.cut(conversation, ids[cut])
        turns = store.turns(conversation)
        heads = store.heads(conversation)
        assert [(head.id, head.role) for head in heads] == [(turn.id, turn.role) for turn in turns]
        assert all(store.turn(turn.id) == turn for turn in turns)
        found = store.texts(ids)
        assert [found[turn.id] for turn in turns] == [turn.text for turn in turns]
        assert store.questions(conversation, 3) == [turn.text for turn in turns if turn.role == "user"][-3:]
        over = [turn.id for turn in turns if not heard or turn.id != ids[-1]]
        sizes = {head.id: head.size for head in heads}
        assert all(sizes[i] == (len(found[i]), found[i].count("\n")) for i in over)
        assert store.turn(max(ids, default=0) + 1) is None


def test_an_answer_may_go_on_after_its_end(store: Store) -> None:
    conversation, answer = begun(store)
    store.append(answer, "Once", "device")
    store.finish(answer, "length", None)
    store.append(answer, " upon", "device")
    store.append(answer, " a time", "server")
    store.finish(answer, "stop", None)
    turn = store.turns(conversation.id)[1]
    assert (turn.text, turn.sides, turn.finish) == ("Once upon a time", ((0, "device"), (9, "server")), "stop")


def test_a_half_answer_is_there_after_opening_again_and_can_be_found(file: Path) -> None:
    with Store(file) as store:
        conversation, answer = begun(store)
        store.append(answer, "Rayleigh scat", "device")
    with Store(file) as store:
        assert texts(store, conversation)[1] == "Rayleigh scat"
        assert store.turns(conversation.id)[1].finish is None
        assert found(store, "rayleigh") == [conversation.id]


def test_another_terminal_on_the_same_file_disturbs_no_running_answer(store: Store, file: Path) -> None:
    conversation, answer = begun(store)
    store.append(answer, "one ", "device")
    with Store(file) as other:  # it puts together what seems to be left over
        store.append(answer, "two ", "device")
        assert texts(other, conversation)[1] == "one two "
    store.append(answer, "three", "server")
    store.finish(answer, "stop", None)
    turn = store.turns(conversation.id)[1]
    assert (turn.text, turn.sides) == ("one two three", ((0, "device"), (8, "server")))


def test_the_first_question_is_the_title_until_it_gets_another(store: Store) -> None:
    conversation, _ = begun(store, "\n  What   is\tthis?\nAnd that?")
    assert store.list()[0].title == "What is this?"
    store.rename(conversation.id, "Things")
    store.add(conversation.id, "user", "More")
    assert store.list()[0].title == "Things"
    begun(store, "word " * 40)
    begun(store, "x" * 100)
    assert [len(c.title) <= 61 and c.title.endswith("…") for c in store.list()[:2]] == [True, True]


def test_the_newest_message_puts_its_conversation_on_top(store: Store) -> None:
    (first, answer), (second, _) = begun(store), begun(store)
    assert found(store, "") == [second.id, first.id]
    store.finish(answer, "stop", None)
    assert found(store, "") == [first.id, second.id]


def test_system_prompt_and_model_are_the_conversations_own(store: Store) -> None:
    conversation = store.new(system="Be brief.", model="disco/device")
    store.set_system(conversation.id, "Be long.")
    store.set_model(conversation.id, "disco/server")
    (seen,) = store.list()
    assert (conversation.system, conversation.model) == ("Be brief.", "disco/device")
    assert (seen.system, seen.model) == ("Be long.", "disco/server")


def test_a_search_finds_beginnings_of_words_in_messages_and_titles(store: Store) -> None:
    sky, answer = begun(store, "Why is the sky blue?")
    store.append(answer, "Größere Wellenlängen, naïve reader", "device")
    store.finish(answer, "stop", None)
    other, _ = begun(store, "今日はいい天気ですね")
    store.rename(other.id, "Weather talk")
    assert found(store, "GRÖSSERE WELLEN") == []
    assert found(store, "GRÖßERE") == found(store, "wellen naive") == found(store, "blu sk") == [sky.id]
    assert found(store, "weath") == [other.id]
    assert found(store, "天気") == [other.id], "there are no spaces to begin a word after"
    assert found(store, "sky weather") == []
    assert [store.found(sky.id, query) for query in ("blu sk", "wellen", "hy i", "weath")] == [1, 2, 1, None]
    assert store.found(other.id, "天気") == 3
    assert store.found(other.id, "weath") is None, "by its title alone"


def test_what_was_cut_or_renamed_is_not_found_any_more(store: Store) -> None:
    conversation, answer = begun(store, "zebra")
    store.rename(conversation.id, "animals")
    assert found(store, "zeb") == [conversation.id]
    store.cut(conversation.id, answer - 1)
    assert found(store, "zeb") == []
    store.uncut(conversation.id)
    store.rename(conversation.id, "plants")
    assert found(store, "animals") == []


@given(query=st.text())
def test_no_query_is_an_error(query: str) -> None:
    with Store(None) as store:
        begun(store)
        assert len(store.list(query)) in (0, 1)
        assert store.found(1, query) in (None, 1)
        assert words_in("Why is the sky blue?", query)


@pytest.mark.parametrize(
    ("query", "text", "marked"),
    [
        ("naive WELLEN", "Größere Wellenlängen, naïve Mikrowellen", ["Wellen", "naïve"]),
        ("ellen", "Größere Wellenlängen", ["ellen"]),
        ("天気 ", "今日はいい天気ですね", ["天気"]),
        ("co-op", "A co op, a co-op; not a scoop", ["co op", "co-op"]),
        ("(*.py", "all (*.py files", ["py"]),
        ("*.", "all *.py files", ["*."]),
        (" ", "nothing", []),
        ("İ", "İstanbul, istanbul", ["İ", "i"]),
    ],
)
def test_what_the_search_finds_is_marked_where_it_stands(query: str, text: str, marked: list[str]) -> None:
    assert [text[hit.start() : hit.end()] for hit in words_in(text, query).finditer(folded(text))] == marked


@given(text=st.text())
def test_a_folded_text_has_each_character_at_its_place(text: str) -> None:
    assert len(folded(text)) == len(text)


def test_a_deleted_conversation_can_be_brought_back(store: Store) -> None:
    conversation, _ = begun(store)
    store.delete(conversation.id)
    assert store.list() == store.list("sky") == []
    store.undelete(conversation.id)
    assert found(store, "") == found(store, "sky") == [conversation.id]


def test_after_a_day_what_was_deleted_is_gone(file: Path) -> None:
    now = [1000.0]
    conversation = Conversation(0, "", "", "", 0.0, 0.0)
    for passed, there in ((KEEP_DELETED_S - 1, True), (2, False)):
        with Store(file, wall=lambda: now[0]) as store:
            if not conversation.id:
                conversation, _ = begun(store)
                store.delete(conversation.id)
        now[0] += passed
        with Store(file, wall=lambda: now[0]) as store:
            assert bool(store.turns(conversation.id)) is there


def test_what_was_purged_has_left_the_file(store: Store, file: Path) -> None:
    secret, answer = begun(store, "the launch code is xyzzy")
    store.append(answer, "plugh it is", "device")
    store.finish(answer, "stop", None)
    kept, _ = begun(store, "hello quux")
    cut = store.add(kept.id, "user", "frobnicate this")
    store.cut(kept.id, cut)
    store.delete(secret.id)
    store.purge()
    store.undelete(secret.id)
    assert found(store, "") == [kept.id]
    assert store.uncut(kept.id) is False
    store.close()
    data = b"".join(path.read_bytes() for path in file.parent.iterdir())
    assert b"quux" in data
    for word in (b"xyzzy", b"plugh", b"frobnicate"):
        assert word not in data


def test_cutting_and_bringing_back_swap_the_two_ends(store: Store) -> None:
    conversation, _ = begun(store, "first")
    second = store.add(conversation.id, "user", "second")
    store.cut(conversation.id, second)
    assert texts(store, conversation) == ["first", ""]
    store.add(conversation.id, "user", "instead")
    store.add(conversation.id, "assistant", "well")
    assert store.uncut(conversation.id) is True
    assert texts(store, conversation) == ["first", "", "second"]
    assert store.uncut(conversation.id) is True
    assert texts(store, conversation) == ["first", "", "instead", "well"]
    assert store.uncut(store.new().id) is False


def test_in_memory_nothing_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Store(None) as store:
        conversation, answer = begun(store)
        store.append(answer, "Hm", "device")
        assert texts(store, conversation) == ["Why is the sky blue?", "Hm"]
        assert not list(tmp_path.iterdir())


def test_half_characters_and_zeros_are_kept_as_far_as_a_file_can(store: Store) -> None:
    conversation, answer = begun(store, "a\0b\ud83d")
    store.append(answer, "c\0\udc00d", "device")
    store.append(answer, "e", "server")
    store.finish(answer, "stop", None)
    assert texts(store, conversation) == ["a\0b\ufffd", "c\0\ufffdde"]
    assert store.turns(conversation.id)[1].sides == ((0, "device"), (4, "server"))


def test_a_damaged_file_is_moved_aside(file: Path) -> None:
    Store(file).close()
    whole = file.read_bytes()
    file.write_bytes(whole[:100] + b"\xff" * (len(whole) - 100))
    with Store(file) as store:
        conversation, _ = begun(store)
        assert found(store, "") == [conversation.id]
    (aside,) = file.parent.glob("*.damaged-*")
    assert aside.read_bytes()[100:200] == b"\xff" * 100


def test_a_file_that_is_not_ours_is_left_alone(file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(b"no database at all " * 100)
    with pytest.raises(StoreError, match=r"no database of disco: it is left alone"):
        Store(file)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert file.read_bytes().startswith(b"no database")


def test_a_newer_file_is_left_alone(file: Path) -> None:
    Store(file).close()
    with closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="newer version"):
        Store(file)
    assert not list(file.parent.glob("*.damaged-*"))


def test_what_cannot_be_written_is_a_store_error_that_names_the_file(store: Store, file: Path) -> None:
    for call in (lambda: store.append(77, "x", None), lambda: store.add(77, "user", "x")):
        with pytest.raises(StoreError, match=file.name):
            call()
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.list()
    with pytest.raises(StoreError, match="cannot be read or written"):
        Store(file / "below-a-file" / "c.sqlite")


def test_a_failed_change_changes_nothing(file: Path) -> None:
    ticks = [4.0, 3.0, 2.0, 1.0]

    def wall() -> float:  # a clock that breaks in the middle of a change
        if not ticks:
            raise ArithmeticError
        return ticks.pop()

    with Store(file, wall=wall) as store:
        conversation, answer = begun(store)
        store.append(answer, "kept", "device")
        before = store.turns(conversation.id)
        with pytest.raises(ArithmeticError):
            store.finish(answer, "stop", None)
        assert store.turns(conversation.id) == before
        store.append(answer, " too", "device")
        assert texts(store, conversation)[1] == "kept too"


def test_readers_in_other_threads_see_whole_states_while_an_answer_comes(store: Store) -> None:
    conversation, answer = begun(store)
    seen: list[str] = []
    begun_reading, over = threading.Event(), threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.append(texts(store, conversation)[1])
            begun_reading.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun_reading.wait(30)
    for i in range(300):
        store.append(answer, f"{i % 10}", "device")
        if i % 100 == 99:
            store.finish(answer, "stop", None)
    over.set()
    reader.join()
    whole = texts(store, conversation)[1]
    assert len(whole) == 300
    assert seen
    assert all(whole.startswith(text) for text in seen)
    assert [len(text) for text in seen] == sorted(len(text) for text in seen)


def test_the_log_is_gone_at_the_end(store: Store, file: Path) -> None:
    conversation, answer = begun(store)
    store.append(answer, "x", None)
    assert file.with_name(f"{file.name}-wal").exists()
    store.close()
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    with Store(file) as again:
        assert texts(again, conversation)[1] == "x"
