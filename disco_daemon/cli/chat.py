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
    """A conversation: its messages so far, and the daemon they are sent to."""

    def __init__(self, args: argparse.Namespace, root: str, key: str) -> None:
        self._args = args
        self._root = root
        self._key = key
        self.messages: list[dict[str, str]] = []
        self.reset()

    def state(self) -> dict[str, Any]:
        """Return the daemon's state. Raises DaemonError."""
        from ..client import once as client

        found: dict[str, Any] = client.get(self._root, "/disco/v1/state", self._key)
        return found

    def reset(self) -> None:
        """Forget all turns but the system prompt."""
        self.messages = [{"role": "system", "content": self._args.system}] if self._args.system else []

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

    async def ask(self, question: str) -> None:
        """Send one turn and print the answer as it comes; a turn that fails is taken back. Raises DaemonError."""
        from contextlib import aclosing

        from ..client.side_health import fallback_words
        from ..client.stream import Link

        self.messages.append({"role": "user", "content": question})
        screen, answer, record = None if self._args.json else Screen(), "", None
        try:
            async with (
                Link(self._root, self._key) as link,
                aclosing(link.chat(self.messages, model=self._args.model, **self._options())) as pieces,
            ):
                async for piece in pieces:
                    answer += piece.text
                    record = piece.disco or record
                    if screen is not None:
                        screen.show(piece)
        except BaseException:  # Ctrl-C too: a turn without an answer is none
            self.messages.pop()
            if answer and screen is not None:
                sys.stdout.write("\n")
            raise
        finally:
            if screen is not None:
                screen.settle()
        self.messages.append({"role": "assistant", "content": answer})
        print(json.dumps({"answer": answer, "disco": record}) if self._args.json else "")
        if words := fallback_words(record or {}):
            print(f"({words}; `disco doctor` looks for the cause)", file=sys.stderr)
        if record and record.get("stopped"):
            let = "`disco config set delivery.stop_repetition false` lets it"
            print(f"(stopped: it was repeating itself; ask again for another answer; {let})", file=sys.stderr)


def _converse(talk: Talk, runner: asyncio.Runner) -> int:
    """Read and answer questions until Ctrl-D or /quit."""
    import contextlib

    from ..client.offers import stand_in_words
    from ..client.once import DaemonError

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for input()
    with contextlib.suppress(DaemonError):
        if words := stand_in_words(talk.state()):
            print(f"{words} `disco models recommend` shows real ones.")
    print("Ask away. /new starts afresh, /quit or Ctrl-D ends, Ctrl-C stops an answer.")
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
        elif question:
            try:
                runner.run(talk.ask(question))
            except KeyboardInterrupt:
                print("(stopped)")
            except DaemonError as e:
                print(f"disco: {e}", file=sys.stderr)
