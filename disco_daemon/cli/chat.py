"""`disco chat`: talk to the running daemon, once or in turns; text piped in becomes part of the question."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser("chat", help="ask a question, or chat", description=__doc__)
    parser.add_argument("question", nargs="*", help="one question; without it a conversation begins")
    parser.add_argument("--model", default="disco", help="disco (decide), disco/device or disco/server")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument(
        "--delivery",
        choices=("paced", "reserve", "off"),
        help="how the text comes (default: paced, as it is read; off where nobody reads along)",
    )
    parser.add_argument("--pace", type=float, metavar="TPS", help="reading speed, tokens a second")
    parser.add_argument("--url", help="daemon to ask (default from the configuration)")
    parser.add_argument("--json", action="store_true", help="print the answer and how it came about as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """One question, or a conversation when stdin is a terminal."""
    from .. import client
    from ..config import load

    talk = Talk(args, *client.daemon_at(args.url, load()))
    question = " ".join(args.question)
    if not sys.stdin.isatty():
        piped = sys.stdin.read().strip()
        question = f"{question}\n\n{piped}" if question and piped else question or piped
        if not question:
            print("disco chat: nothing to ask: give a question or pipe some text in", file=sys.stderr)
            return 2
    if question:
        talk.ask(question)
        return 0
    return _converse(talk)


class Talk:
    """A conversation: the messages so far, and where they are sent."""

    def __init__(self, args: argparse.Namespace, root: str, key: str) -> None:
        self._args = args
        self._root = root
        self._key = key
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget all turns but the system prompt."""
        self.messages = [{"role": "system", "content": self._args.system}] if self._args.system else []

    def _delivery(self) -> str:
        """As asked for; else at reading speed for a terminal, and at once for a program."""
        reader = sys.stdout.isatty() and not self._args.json
        return str(self._args.delivery or ("paced" if reader or self._args.pace is not None else "off"))

    def ask(self, question: str) -> None:
        """Send one turn and print the answer as it comes; a turn that fails is taken back."""
        from .. import client

        args = self._args
        self.messages.append({"role": "user", "content": question})
        payload: dict[str, Any] = {"model": args.model, "messages": self.messages}
        payload |= {"max_tokens": args.max_tokens} if args.max_tokens is not None else {}
        payload |= {"temperature": args.temperature} if args.temperature is not None else {}
        payload["disco"] = {"delivery": self._delivery()} | ({"pace_tps": args.pace} if args.pace is not None else {})
        answer, told = "", None
        try:
            for chunk in client.stream_chat(self._root, payload, self._key):
                for choice in chunk["choices"]:
                    text = choice["delta"].get("content") or ""
                    answer += text
                    if not args.json:
                        sys.stdout.write(text)
                        sys.stdout.flush()
                told = chunk.get("disco", told)
        except BaseException:
            self.messages.pop()
            if answer and not args.json:
                sys.stdout.write("\n")
            raise
        self.messages.append({"role": "assistant", "content": answer})
        print(json.dumps({"answer": answer, "disco": told}) if args.json else "")


def _converse(talk: Talk) -> int:
    """Read a question, answer it, until Ctrl-D or /quit."""
    import contextlib

    from ..client import DaemonError

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for input()
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
                talk.ask(question)
            except KeyboardInterrupt:
                print("(stopped)")
            except DaemonError as e:
                print(f"disco: {e}", file=sys.stderr)
