"""The conversations, in a file on this machine only, or in memory.

`append` commits before it returns, in some 20 µs, so that whatever the reader has seen survives a `kill -9`. All
methods may be called from any thread, and raise StoreError. The file is longer than others: it is one table's SQL.
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from .chat_tables import Checkpointer, StoreError, open_database, open_reader, unusable

__all__ = ["Conversation", "Store", "StoreError", "StoredTurn"]

KEEP_DELETED_S = 86_400.0  # how long a deleted conversation can be brought back
CHECKPOINT_EVERY = 500  # pieces; a log of some 4 MB
TITLE_LENGTH = 60  # characters
MAX_WORDS = 32  # of a search; the rest is ignored
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which no file can hold

Sides = tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """One message. `sides` says which endpoint wrote the text, each from a character on; "" is unknown.

    `disco` is the object of the answer's last chunk. An answer without `finish` was cut off, or is still coming.
    `created` is Unix time, s; `parent` is the turn that it answers or replaces.
    """

    id: int
    role: str
    text: str
    sides: Sides
    disco: Mapping[str, Any] | None
    finish: str | None
    created: float
    parent: int | None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation's head. `created` and `updated` are Unix times, s; the latter that of its newest message."""

    id: int
    title: str
    system: str
    model: str
    created: float
    updated: float


@dataclass(frozen=True, slots=True)
class Head:
    """A message without its words; `size` is their characters and line ends, without what still streams."""

    id: int
    role: str
    finish: str | None
    size: tuple[int, int]


Turns = list[StoredTurn]
Heads = list[Head]
Texts = list[str]
Conversations = list[Conversation]  # within the class, `list` is a method

_HEAD = "SELECT id, title, system, model, created, updated FROM conversations WHERE deleted IS NULL"
_NEWEST = " ORDER BY updated DESC, id DESC"
_FOUND = """
 AND (id IN (SELECT rowid FROM titles WHERE titles MATCH :words) OR id IN (
  SELECT conversation FROM turns WHERE cut IS NULL AND id IN (SELECT rowid FROM words WHERE words MATCH :words)))
"""
_FIRST_FOUND = """
SELECT min(id) FROM turns
WHERE conversation = :conversation AND cut IS NULL AND id IN (SELECT rowid FROM words WHERE words MATCH :words)
"""
_FIRST_ANYWHERE = """
SELECT min(id) FROM turns WHERE conversation = :conversation AND cut IS NULL AND instr(lower(text), lower(:query))
"""
_ANYWHERE = """
 AND (instr(lower(title), lower(:query)) OR id IN (
  SELECT conversation FROM turns WHERE cut IS NULL AND instr(lower(text), lower(:query))))
"""
_TURN = "SELECT id, role, text, sides, disco, finish, created, parent FROM turns "
_TURNS = _TURN + "WHERE conversation = ? AND cut IS NULL ORDER BY id"
_HEADS = """
SELECT id, role, iif(role = 'user', 'stop', finish),
  length(text), length(text) - length(replace(text, char(10), ''))
FROM turns WHERE conversation = ? AND cut IS NULL ORDER BY id
"""
_ASKED = """
SELECT text FROM turns WHERE conversation = ? AND role = 'user' AND cut IS NULL ORDER BY id DESC LIMIT ?
"""
_PIECES = """
SELECT turn, side, text FROM pieces WHERE turn IN (SELECT id FROM turns WHERE conversation = ?) ORDER BY id
"""


class Store:
    """The conversations at `path`, or in memory only if it is None. `wall` returns Unix time, s.

    Owners: `_writer` is used under `_lock`, `_reader` under `_reading`; in memory they are one, and so are the locks.
    """

    def __init__(self, path: Path | None, wall: Callable[[], float] = time.time) -> None:
        self.path = path
        self._wall = wall
        self._lock = threading.RLock()
        self._writer = open_database(path)
        self._reading = self._lock if path is None else threading.RLock()
        self._reader = self._writer if path is None else open_reader(path)
        self._keeper = None if path is None else Checkpointer(path)
        self._n_appended = 0
        self._recover()

    def __repr__(self) -> str:
        return f"<Store {self.path or 'in memory'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; twice is fine. Waits for the disk."""
        keeper, self._keeper = self._keeper, None
        with self._lock, self._reading:
            self._reader.close()
            self._writer.close()
        if keeper is not None:
            keeper.close()

    # --- conversations -------------------------------------------------------------------------------------------

    def new(self, *, system: str = "", model: str = "disco") -> Conversation:
        """Begin a conversation; the first question becomes its title."""
        now = self._wall()
        sql = "INSERT INTO conversations (title, system, model, created, updated) VALUES ('', ?, ?, ?, ?)"
        with self._writing() as db:
            made = db.execute(sql, (_whole(system), _whole(model), now, now)).lastrowid
        assert made is not None
        return Conversation(made, "", _whole(system), _whole(model), now, now)

    def list(self, query: str = "") -> Conversations:
        """Return the conversations, newest first: all, or those with a message or title that has all words of `query`.

        A word matches the beginning of a word. If nothing matches, the query may stand anywhere, also within words: not
        every language puts spaces between them.
        """
        wanted = _wanted(query)
        with self._read_transaction() as db:
            if not wanted["query"]:
                return [Conversation(*row) for row in db.execute(_HEAD + _NEWEST)]
            rows = db.execute(_HEAD + _FOUND + _NEWEST, wanted).fetchall()
            rows = rows or db.execute(_HEAD + _ANYWHERE + _NEWEST, wanted).fetchall()
        return [Conversation(*row) for row in rows]

    def found(self, conversation: int, query: str) -> int | None:
        """Return the first message for which `list` finds a conversation; None where it does by the title alone."""
        wanted = _wanted(query) | {"conversation": conversation}
        if not wanted["query"]:
            return None
        with self._read_transaction() as db:
            (turn,) = db.execute(_FIRST_FOUND, wanted).fetchone()
            if turn is None:
                (turn,) = db.execute(_FIRST_ANYWHERE, wanted).fetchone()
        return None if turn is None else int(turn)

    def rename(self, conversation: int, title: str) -> None:
        """Give it another title."""
        self._set("title = ?", _whole(title), conversation)

    def set_system(self, conversation: int, system: str) -> None:
        """Give it another system prompt."""
        self._set("system = ?", _whole(system), conversation)

    def set_model(self, conversation: int, model: str) -> None:
        """Have its questions answered by another model or route."""
        self._set("model = ?", _whole(model), conversation)

    def delete(self, conversation: int) -> None:
        """Take a conversation off the list; for a day it can be brought back."""
        self._set("deleted = ?", self._wall(), conversation)

    def undelete(self, conversation: int) -> None:
        """Bring a deleted conversation back, if it still exists."""
        self._set("deleted = ?", None, conversation)

    def purge(self) -> None:
        """Remove from the file all that was deleted, and all turns that were cut."""
        self._purge(self._wall())
        with self._writing() as db:
            db.execute("DELETE FROM turns WHERE cut IS NOT NULL")
            for table in ("words", "titles"):
                db.execute(f"INSERT INTO {table} ({table}) VALUES ('optimize')")  # noqa: S608 - a name of ours

    # --- turns ---------------------------------------------------------------------------------------------------

    def turns(self, conversation: int) -> Turns:
        """Return the messages in order, with what an answer that still streams has so far."""
        with self._read_transaction() as db:
            rows = db.execute(_TURNS, (conversation,)).fetchall()
            heard: dict[int, list[tuple[str, str]]] = {}
            for turn, side, text in db.execute(_PIECES, (conversation,)):
                heard.setdefault(turn, []).append((side, text))
        return [_turn(row, heard.get(row[0], ())) for row in rows]

    def heads(self, conversation: int) -> Heads:
        """Return the messages in order, without their words."""
        with self._read_transaction() as db:
            rows = db.execute(_HEADS, (conversation,)).fetchall()
        return [Head(number, role, finish, (length, ends)) for number, role, finish, length, ends in rows]

    def turn(self, turn: int) -> StoredTurn | None:
        """Return one message, even one that was cut; None if it does not exist any more."""
        with self._read_transaction() as db:
            row = db.execute(_TURN + "WHERE id = ?", (turn,)).fetchone()
            pieces = db.execute("SELECT side, text FROM pieces WHERE turn = ? ORDER BY id", (turn,)).fetchall()
        return None if row is None else _turn(row, pieces)

    def texts(self, turns: Sequence[int]) -> dict[int, str]:
        """Return the words of up to some hundred messages by their ids; those that exist no more are missing."""
        marks = ", ".join("?" * len(turns))
        with self._read_transaction() as db:
            found = dict(db.execute(f"SELECT id, text FROM turns WHERE id IN ({marks})", turns).fetchall())  # noqa: S608
            sql = f"SELECT turn, text FROM pieces WHERE turn IN ({marks}) ORDER BY id"  # noqa: S608 - marks only
            for turn, text in db.execute(sql, turns):
                found[turn] += text
        return found

    def questions(self, conversation: int, limit: int) -> Texts:
        """Return the latest questions, oldest first."""
        with self._read_transaction() as db:
            rows = db.execute(_ASKED, (conversation, limit)).fetchall()
        return [text for (text,) in reversed(rows)]

    def add(self, conversation: int, role: str, text: str, parent: int | None = None) -> int:
        """Add a message and return its id; an answer is added with the text "" before it streams."""
        now, text = self._wall(), _whole(text)
        sql = "INSERT INTO turns (conversation, parent, role, text, sides, created) VALUES (?, ?, ?, ?, '[]', ?)"
        with self._writing() as db:
            made = db.execute(sql, (conversation, parent, role, text, now)).lastrowid
            db.execute("UPDATE conversations SET updated = ? WHERE id = ?", (now, conversation))
            if role == "user" and (title := _title(text)):
                db.execute("UPDATE conversations SET title = ? WHERE id = ? AND title = ''", (title, conversation))
        assert made is not None
        return made

    def append(self, turn: int, text: str, side: str | None) -> None:
        """Add a piece of an answer by `side`; it is safe when this returns."""
        if not text:
            return
        try:
            with self._lock:
                sql = "INSERT INTO pieces (turn, side, text) VALUES (?, ?, ?)"
                self._writer.execute(sql, (turn, side or "", _whole(text)))
                self._n_appended += 1
        except sqlite3.Error as error:
            raise unusable(self.path, error) from error
        if self._n_appended % CHECKPOINT_EVERY == 0:
            self._poke()

    def finish(self, turn: int, finish: str | None, disco: Mapping[str, Any] | None) -> None:
        """Record how an answer ended; from now on its words can be searched for."""
        encoded = None if disco is None else json.dumps(dict(disco))
        sql = "UPDATE conversations SET updated = ? WHERE id = (SELECT conversation FROM turns WHERE id = ?)"
        with self._writing() as db:
            _fold(db, turn)
            db.execute("UPDATE turns SET finish = ?, disco = ? WHERE id = ?", (finish, encoded, turn))
            db.execute(sql, (self._wall(), turn))

    def cut(self, conversation: int, turn: int) -> None:
        """Take away a message and all after it; `uncut` brings them back."""
        sql = """
        UPDATE turns SET cut_at = :turn,
          cut = (SELECT coalesce(max(cut), 0) + 1 FROM turns WHERE conversation = :conversation)
        WHERE conversation = :conversation AND id >= :turn AND cut IS NULL
        """
        with self._writing() as db:
            db.execute(sql, {"conversation": conversation, "turn": turn})

    def remove(self, turn: int) -> None:
        """Remove one message, which no `uncut` brings back."""
        with self._writing() as db:
            db.execute("DELETE FROM turns WHERE id = ?", (turn,))

    def uncut(self, conversation: int) -> bool:
        """Swap what was cut last with what came in its place; a second call swaps it back.

        Returns False if nothing was cut.
        """
        sql = "SELECT cut, cut_at FROM turns WHERE conversation = ? AND cut IS NOT NULL ORDER BY cut DESC LIMIT 1"
        with self._writing() as db:
            found = db.execute(sql, (conversation,)).fetchone()
            if found is None:
                return False
            swap = """
            UPDATE turns SET cut = iif(cut IS NULL, :cut, NULL), cut_at = iif(cut IS NULL, :at, NULL)
            WHERE conversation = :conversation AND (cut = :cut OR (cut IS NULL AND id >= :at))
            """
            db.execute(swap, {"conversation": conversation, "cut": found[0], "at": found[1]})
        return True

    # --- within --------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Finish what a killed terminal has left; one that still writes is not disturbed."""
        self._purge(self._wall() - KEEP_DELETED_S)
        with self._writing() as db:
            for (turn,) in db.execute("SELECT DISTINCT turn FROM pieces").fetchall():
                _fold(db, turn)

    def _purge(self, before: float) -> None:
        with self._read_transaction() as db:
            gone = db.execute("SELECT id FROM conversations WHERE deleted <= ?", (before,)).fetchall()
        for row in gone:  # one transaction each: another terminal's answer must not wait for all
            with self._writing() as db:
                db.execute("DELETE FROM conversations WHERE id = ? AND deleted <= ?", (*row, before))

    def _set(self, change: str, value: str | float | None, conversation: int) -> None:
        with self._writing() as db:
            db.execute(f"UPDATE conversations SET {change} WHERE id = ?", (value, conversation))  # noqa: S608 - ours

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Run a writing transaction, whole or not at all."""
        with self._lock, _transaction(self._writer, "BEGIN IMMEDIATE", self.path):
            yield self._writer
        self._poke()

    @contextmanager
    def _read_transaction(self) -> Iterator[sqlite3.Connection]:
        """Run a reading transaction, which sees one moment."""
        with self._reading, _transaction(self._reader, "BEGIN", self.path):
            yield self._reader

    def _poke(self) -> None:
        if self._keeper is not None:
            self._keeper.poke()


@contextmanager
def _transaction(db: sqlite3.Connection, begin: str, path: Path | None) -> Iterator[None]:
    try:
        db.execute(begin)
        try:
            yield
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
    except sqlite3.Error as error:
        raise unusable(path, error) from error


def _fold(db: sqlite3.Connection, turn: int) -> None:
    """Move the pieces of an answer into its text. Safe at any time: later pieces go behind it."""
    row = db.execute("SELECT text, sides FROM turns WHERE id = ?", (turn,)).fetchone()
    pieces = db.execute("SELECT side, text FROM pieces WHERE turn = ? ORDER BY id", (turn,)).fetchall()
    if row is None or not pieces:
        return
    text, sides = _join(row[0], json.loads(row[1]), pieces)
    db.execute("UPDATE turns SET text = ?, sides = ? WHERE id = ?", (text, json.dumps(sides), turn))
    db.execute("DELETE FROM pieces WHERE turn = ?", (turn,))


def _join(text: str, sides: Iterable[Iterable[Any]], pieces: Iterable[tuple[str, str]]) -> tuple[str, Sides]:
    """Return a text and its sides with pieces, pairs of (side, text), added."""
    parts, marks, n = [text], [(int(at), str(side)) for at, side in sides], len(text)
    last = marks[-1][1] if marks else ""
    for side, piece in pieces:
        if side != last:
            marks.append((n, side))
            last = side
        parts.append(piece)
        n += len(piece)
    return "".join(parts), tuple(marks)


def _turn(row: tuple[Any, ...], pieces: Iterable[tuple[str, str]]) -> StoredTurn:
    number, role, text, sides, disco, finish, created, parent = row
    text, marks = _join(text, json.loads(sides), pieces)
    return StoredTurn(number, role, text, marks, None if disco is None else json.loads(disco), finish, created, parent)


def _wanted(query: str) -> dict[str, Any]:
    """Return a search as statements take it: what may stand anywhere, and the words, each the beginning of one."""
    query = " ".join(_whole(query).replace("\0", " ").split())
    words = " ".join('"' + word.replace('"', '""') + '"*' for word in query.split()[:MAX_WORDS])
    return {"query": query, "words": words}


def _title(text: str) -> str:
    """Return the first line of a question, cut between words if it is too long."""
    line = next((" ".join(line.split()) for line in text.splitlines() if line.strip()), "")
    if len(line) <= TITLE_LENGTH:
        return line
    return (line[:TITLE_LENGTH].rpartition(" ")[0] or line[: TITLE_LENGTH - 1]) + "…"


def _whole(text: str) -> str:
    """Return the text with a mark in place of half characters."""
    return _SURROGATE.sub("\ufffd", text)
