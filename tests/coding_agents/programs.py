"""The agents as they are run: the command, the files and the variables of each, none of which calls home."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
VENV = ROOT / ".venv-agents"
NODE = HERE / "node" / "node_modules"
KEY = "none"  # what a program gets that insists on a key
# A model's context as the agents are told it, tokens: they shorten nothing within it.
CONTEXT = 65_536
# What the programs see of the machine: nothing of the user's settings, and no word home.
QUIET = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "TERM": "dumb", "DO_NOT_TRACK": "1", "CI": "1",
    "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Program:
    """One agent: its `version`, what its folder needs, and how it is started.

    `files` and `command` are functions of the daemon's address, without `/v1`; a file's name is relative to the home.
    """

    version: str
    program: Path
    command: Callable[[str, str], list[str]]  # of the task and the file that it is about
    files: Callable[[str], Mapping[str, str]] = lambda _: {}
    env: Callable[[str], Mapping[str, str]] = lambda _: {}


def _locked(name: str) -> str:
    """Return a package's version by npm's lock file."""
    packages = json.loads((HERE / "node" / "package-lock.json").read_text())["packages"]
    return str(packages[f"node_modules/{name}"]["version"])


def _aider_version() -> str:
    lines = (HERE / "requirements.lock").read_text().splitlines()
    return next(line.split("==")[1].split()[0] for line in lines if line.startswith("aider-chat=="))


_CODEX = NODE / "@openai/codex/bin/codex.js"
_CLAUDE = NODE / "@anthropic-ai/claude-code-linux-x64/claude"
_OPENCODE = NODE / "opencode-linux-x64/bin/opencode"
_AIDER = VENV / "bin/aider"


def _codex_config(url: str) -> Mapping[str, str]:
    lines = [
        'model = "disco"', 'model_provider = "disco"', f"model_context_window = {CONTEXT}",
        "check_for_update_on_startup = false", "[analytics]", "enabled = false",
        "[model_providers.disco]", 'name = "disco"', f'base_url = "{url}/v1"', 'wire_api = "responses"',
    ]  # fmt: skip
    return {".codex/config.toml": "\n".join(lines) + "\n"}


def _opencode_config(url: str) -> Mapping[str, str]:
    model = {"name": "disco", "limit": {"context": CONTEXT, "output": 4096}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "disco",
        "options": {"baseURL": f"{url}/v1"},
        "models": {"disco": model},
    }
    settings = {
        "$schema": "https://opencode.ai/config.json",
        "autoupdate": False,
        "share": "disabled",
        "model": "disco/disco",
        "provider": {"disco": provider},
    }
    return {".config/opencode/opencode.json": json.dumps(settings, indent=1)}


PROGRAMS: dict[str, Program] = {
    "@openai/codex": Program(
        _locked("@openai/codex"),
        _CODEX,
        lambda task, _: [
            "node", str(_CODEX), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task,
        ],
        _codex_config,
    ),
    "@anthropic-ai/claude-code": Program(
        _locked("@anthropic-ai/claude-code"),
        _CLAUDE,
        lambda task, _: [str(_CLAUDE), "-p", "--allowedTools", "Read", "Edit", "--", task],
        env=lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
    ),
    "opencode-ai": Program(
        _locked("opencode-linux-x64"),
        _OPENCODE,
        lambda task, _: [str(_OPENCODE), "run", task],
        _opencode_config,
        lambda _: {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
    ),
    "aider-chat": Program(
        _aider_version(),
        _AIDER,
        lambda task, file: [
            str(_AIDER), "--model", "openai/disco", "--edit-format", "diff", "--no-analytics", "--no-check-update",
            "--no-show-model-warnings", "--no-git", "--no-pretty", "--yes-always", "--no-browser",
            "--no-detect-urls", "--file", file, "--message", task,
        ],
        env=lambda url: {
            "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
}  # fmt: skip
