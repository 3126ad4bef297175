"""The server of the agents: it dictates what each one does, by the tools that the agent itself offers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from disco_daemon.bench.script import text_of
from tests.clients.scripted import ScriptedServer

FILE = "notes.txt"
WRONG, RIGHT = "teh", "the"  # the word in the file that is to be mended
SAID = "The word is mended"  # at the end, before what the file told
_PATH = re.compile(rf"/\S*/{re.escape(FILE)}")
_SECRET = re.compile(rf"\b(?:{WRONG}|{RIGHT}) (secret-\d+)")
Arguments = Callable[[str, str], dict[str, Any]]  # of a path and the secret in that file


def content(word: str, secret: str) -> str:
    """Return what the file says, with that word."""
    return f"First line.\nThis is {word} {secret} of the file.\n"


def _read_by_shell(path: str, _secret: str) -> dict[str, Any]:
    return {"command": f"cat '{path}'"}


def _edit_by_shell(path: str, secret: str) -> dict[str, Any]:
    return {"command": f"sed -i 's/{WRONG} {secret}/{RIGHT} {secret}/' '{path}'"}


def _with(key: str, made: Arguments) -> Arguments:
    return lambda path, secret: {key: made(path, secret)["command"]}


def _edits(file: str, old: str, new: str) -> Arguments:
    return lambda path, secret: {file: path, old: f"{WRONG} {secret}", new: f"{RIGHT} {secret}"}


# By the tool's name: of Claude Code, opencode, Codex (its two shells).
READ: dict[str, Arguments] = {
    "Read": lambda path, _: {"file_path": path},
    "read": lambda path, _: {"filePath": path},
    "exec_command": _with("cmd", _read_by_shell),
    "shell_command": _read_by_shell,
}
EDIT: dict[str, Arguments] = {
    "Edit": _edits("file_path", "old_string", "new_string"),
    "edit": _edits("filePath", "oldString", "newString"),
    "exec_command": _with("cmd", _edit_by_shell),
    "shell_command": _edit_by_shell,
}


class Dictating(ScriptedServer):
    """Has the agent read the file, mend a word of it, and end.

    What the file says is known from what the agent sends back, so a result that is lost on the way is noticed: the
    conversation then ends with `lost`.
    """

    def __init__(self) -> None:
        super().__init__(tokens=8)
        self.steps: list[str] = []  # what was dictated: "read", "edit", "end", "text" (beside the task), "lost"

    def deltas(self, body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
        messages = body["messages"]
        text = "\n".join(map(text_of, messages))
        found, path = _SECRET.findall(text), _PATH.findall(text)
        names = {tool["function"]["name"] for tool in body.get("tools") or ()}
        if not names and "SEARCH/REPLACE" in text and found:
            self.steps += ["read", "edit", "end"]
            return _aider(found[-1])
        if not names & READ.keys():
            self.steps.append("text")
            return super().deltas(body)
        done = sum(message["role"] == "tool" for message in messages)
        if not path or (done and not found):
            self.steps.append("lost")
            return [{"role": "assistant", "content": "I do not see the file."}], "stop"
        if done >= 2:
            self.steps.append("end")
            return [{"role": "assistant", "content": f"{SAID}: {found[-1]}."}], "stop"
        self.steps.append("edit" if done else "read")
        table = EDIT if done else READ
        name = next(name for name in table if name in names)
        arguments = table[name](path[0], found[-1] if found else "")
        return self._call(name, json.dumps(arguments), f"call_{self.n_requests}"), "tool_calls"

    def _call(self, name: str, arguments: str, call_id: str) -> list[dict[str, Any]]:
        """Return the pieces of a call, behind a thought and a sentence, as models write them."""
        first = {"index": 0, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
        half = len(arguments) // 2
        return [
            {"role": "assistant", "content": None, "reasoning_content": "One thing after the other."},
            {"content": "Next I will "},
            {"content": f"use {name}."},
            {"tool_calls": [first]},
            {"tool_calls": [{"index": 0, "function": {"arguments": arguments[:half]}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": arguments[half:]}}]},
        ]


def _aider(secret: str) -> tuple[list[dict[str, Any]], str]:
    """Return aider's answer: it has the file in its prompt, and takes changes as blocks of text."""
    block = f"<<<<<<< SEARCH\n{content(WRONG, secret)}=======\n{content(RIGHT, secret)}>>>>>>> REPLACE"
    text = f"{SAID}: {secret}.\n\n{FILE}\n```\n{block}\n```\n"
    return [{"role": "assistant", "content": ""}, *({"content": line} for line in text.splitlines(True))], "stop"
