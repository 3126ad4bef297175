"""`disco chat`: talk to the running daemon, once or in turns; text piped in becomes part of the question."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from ..plain import plain
from .terminal import direct, progress

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from ..client.stream import AnswerPiece


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("chat", help="ask a question, or chat", description=__doc__)
    parser.add_argument("question", nargs="*", help="one question; without it a conversation begins")
    parser.add_argument("--model", default="disco", help="disco (decide), disco/device or disco/server")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--max-tokens", type=int, help="length of the answer, at most")
    parser.add_argument("--temperature", type=float, help="0 = the likeliest words, 1 = as the model was trained")
    parser.add_argument(
        "--delivery",
        choices=("paced", "reserve", "off"),
        help="how the text comes (default: as delivery.mode has it; off where the output is no terminal)",
    )
    parser.add_argument("--pace", type=float, metavar="TPS", help="reading speed, tokens a second")
    parser.add_argument("--url", help="daemon to ask (default from the configuration)")
    parser.add_argument("--no-start", action="store_true", help="start no daemon where none runs")
    parser.add_argument("--json", action="store_true", help="print the answer and how it came about as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask one question, or hold a conversation when stdin is a terminal."""
    import asyncio

    from ..client import once as client
    from ..client.launcher import DaemonLauncher, have_daemon
    from ..config.layers import data_path, load

    question = " ".join(args.question)
    if not sys.stdin.isatty():
        piped = sys.stdin.read().strip()
        question = f"{question}\n\n{piped}" if question and piped else question or piped
        if not question:
            print("disco chat: nothing to ask: give a question or pipe some text in", file=sys.stderr)
            return 2
    root, key = client.daemon_at(args.url, load())
    launcher = DaemonLauncher(root, data_path() / "daemon.log")
    # A Runner turns Ctrl-C into a cancelled task: the answer's connection is closed, and with it the answer.
    with asyncio.Runner() as runner:
        try:
            if args.url is None and not args.no_start:  # an address stands for a daemon that runs already
                runner.run(have_daemon(launcher, root, key, "ends with this chat", progress))
            talk = Talk(args, root, key)
            if question:
                runner.run(talk.ask(question))
                return 0
            return _converse(talk, runner)
        finally:
            runner.run(launcher.close())


class Screen:
    """Prints an answer, at a terminal with its thoughts, dimmed."""

    def __init__(self) -> None:
        self._reader = sys.stdout.isatty()
        colour = self._reader and not os.environ.get("NO_COLOR")
        self._dim, self._plain = ("\x1b[2m", "\x1b[0m\n\n") if colour else ("(thinks: ", ")\n\n")
        self._thinking = False

    def show(self, piece: AnswerPiece) -> None:
        """Print a piece of the answer."""
        if piece.thought and self._reader:
            if not self._thinking:
                self._steer(self._dim)
            self._write(piece.thought)
            self._thinking = True
        if piece.text:
            self.settle()
            # A program gets the model's text as it is.
            (self._write if self._reader else self._steer)(piece.text)

    def settle(self) -> None:
        """End a thought, so that the text after it is not dimmed."""
        if self._thinking:
            self._thinking = False
            self._steer(self._plain)

    @staticmethod
    def _write(text: str) -> None:
        """Print a model's text without control codes; a line end that was cut in two counts once."""
        sys.stdout.write(plain(text, ""))
        sys.stdout.flush()

    @staticmethod
    def _steer(codes: str) -> None:
        direct(sys.stdout).write(codes)
        sys.stdout.flush()


class Talk:
    """A conversation: its turns so far, and the daemon they are sent to.

    Of `summaries` each says what was said before the turn of that number; the last one goes out in place of that.
    """

    def __init__(self, args: argparse.Namespace, root: str, key: str) -> None:
        self._args = args
        self._root = root
        self._key = key
        self.turns: list[dict[str, str]] = []
        self.summaries: list[tuple[str, int]] = []
        self.used = 0  # tokens of the conversation with its last answer
        self.was_too_long = False  # whether the last question was refused for that: then all turns may be summarised

    @property
    def model(self) -> str:
        """The model or route that is asked."""
        return str(self._args.model)

    async def state(self) -> dict[str, Any]:
        """Return the daemon's state. Raises DaemonError."""
        from ..client.stream import Link

        async with Link(self._root, self._key) as link:
            return await link.state()

    def reset(self) -> None:
        """Forget all turns but the system prompt."""
        self.turns, self.summaries, self.used, self.was_too_long = [], [], 0, False

    def messages(self, end: int | None = None) -> list[dict[str, str]]:
        """Return what goes out to have the turns before `end` (None = all) gone on with."""
        from ..client.compaction import with_summary

        summary, first = self.summaries[-1] if self.summaries else ("", 0)
        system = with_summary(self._args.system or "", summary)
        return [*([{"role": "system", "content": system}] if system else []), *self.turns[first:end]]

    async def compact(self) -> str:
        """Have all before the last question summarised, and print that; return what came of it. Raises DaemonError."""
        from ..client.compaction import INSTRUCTION, SUMMARY_TOKENS, route_of_summary

        asked = next((i for i in reversed(range(len(self.turns))) if self.turns[i]["role"] == "user"), 0)
        asked = len(self.turns) if self.was_too_long else asked
        if asked <= (self.summaries[-1][1] if self.summaries else 0):
            return "there is nothing to shorten before the last question"
        messages = [*self.messages(asked), {"role": "user", "content": INSTRUCTION}]
        model = route_of_summary(await self.state(), self._args.model, self.used)
        summary, _ = await self._answer(messages, model, self._options() | {"max_tokens": SUMMARY_TOKENS})
        if not summary.strip():
            return "the model wrote no summary; nothing has changed"
        self.summaries.append((summary, asked))
        self.used, self.was_too_long = 0, False
        return "this goes out in place of what was said before; /undo takes it back"

    def _delivery(self) -> dict[str, str]:
        """Return the delivery asked for: a pace means paced, a program wants all at once, a reader what is set."""
        reader = sys.stdout.isatty() and not self._args.json
        usual = "paced" if self._args.pace is not None else None if reader else "off"
        mode = self._args.delivery or usual
        return {} if mode is None else {"delivery": mode}

    def _options(self) -> dict[str, Any]:
        """Return the options of a turn's request."""
        args = self._args
        given = {name: getattr(args, name) for name in ("max_tokens", "temperature")}
        pace = {"pace_tps": args.pace} if args.pace is not None else {}
        return {k: v for k, v in given.items() if v is not None} | {"disco": self._delivery() | pace}

    async def _answer(
        self, messages: list[dict[str, str]], model: str, options: dict[str, Any]
    ) -> tuple[str, Mapping[str, Any] | None]:
        """Print an answer as it comes; return it, and how it came about. Raises DaemonError."""
        from contextlib import aclosing

        from ..client.stream import Link

        screen, answer, record = None if self._args.json else Screen(), "", None
        try:
            async with (
                Link(self._root, self._key) as link,
                aclosing(link.chat(messages, model=model, **options)) as pieces,
            ):
                async for piece in pieces:
                    answer += piece.text
                    record = piece.disco or record
                    if screen is not None:
                        screen.show(piece)
        except BaseException:  # Ctrl-C too: what comes next begins a line of its own
            if answer and screen is not None:
                sys.stdout.write("\n")
            raise
        finally:
            if screen is not None:
                screen.settle()
        return answer, record

    async def ask(self, question: str) -> None:
        """Send one turn and print the answer as it comes; a turn that fails is taken back. Raises DaemonError."""
        from ..client.compaction import TOO_LONG, used_tokens
        from ..client.side_health import fallback_words

        self.turns.append({"role": "user", "content": question})
        try:
            answer, record = await self._answer(self.messages(), self._args.model, self._options())
        except BaseException as e:  # Ctrl-C too: a turn without an answer is none
            self.turns.pop()
            self.was_too_long = getattr(e, "code", None) == TOO_LONG
            raise
        self.turns.append({"role": "assistant", "content": answer})
        self.used, self.was_too_long = used_tokens(record), False
        print(json.dumps({"answer": answer, "disco": record}) if self._args.json else "")
        if words := fallback_words(record or {}):
            print(f"({words}; `disco doctor` looks for the cause)", file=sys.stderr)
        if record and record.get("stopped"):
            let = "`disco config set delivery.stop_repetition false` lets it"
            print(f"(stopped: it was repeating itself; ask again for another answer; {let})", file=sys.stderr)


def _converse(talk: Talk, runner: asyncio.Runner) -> int:
    """Read and answer questions until Ctrl-D or /quit."""
    import contextlib

    from ..client.compaction import TOO_LONG
    from ..client.offers import stand_in_words
    from ..client.once import DaemonError

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for input()
    with contextlib.suppress(DaemonError):
        if words := stand_in_words(runner.run(talk.state())):
            print(f"{words} `disco models recommend` shows real ones.")
    print("Ask away. /new starts afresh, /compact shortens, /quit or Ctrl-D ends, Ctrl-C stops an answer.")
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if question in ("/quit", "/exit"):
            return 0
        if question == "/new":
            talk.reset()
        elif question == "/undo":
            print("(the summary is undone)" if talk.summaries else "(there is no summary to undo)")
            del talk.summaries[-1:]
        elif question:
            try:
                runner.run(_turn(talk, question))
            except KeyboardInterrupt:
                print("(stopped)")
            except DaemonError as e:
                hint = " /compact shortens the conversation; then ask again." if e.code == TOO_LONG else ""
                print(f"disco: {e}{hint}", file=sys.stderr)


async def _turn(talk: Talk, question: str) -> None:
    """Answer a question, or shorten the conversation, and say what is next. Raises DaemonError."""
    import contextlib

    from ..client.compaction import filled
    from ..client.once import DaemonError

    if question == "/compact":
        print(f"\n({await talk.compact()})")
        return
    await talk.ask(question)
    with contextlib.suppress(DaemonError):
        if found := filled(await talk.state(), talk.model, talk.used):
            print("({:,} of {:,} tokens are used: /compact shortens the conversation)".format(*found), file=sys.stderr)
