"""The programs that `disco launch` starts: what each needs of a model, and how it takes its address for one run. Pure.

Where that is written, by project and file:

- codex: openai/codex, codex-rs/utils/cli/src/config_override.rs (`-c`: a dotted key, a value in TOML),
  codex-rs/model-provider-info/src/lib.rs (the fields of a provider; no login, and the key by `env_key`). Each
  subcommand hears of `-c`, not each of `-m` (openai/codex#2301), and files, also a profile's, are heeded less; a review
  asks `review_model`
- claude: code.claude.com, docs/en/env-vars (address, token, models, traffic, most output), docs/en/model-config
  (`CLAUDE_CODE_MAX_CONTEXT_TOKENS` of a model that it does not know) and docs/en/settings (the `env` of settings goes
  over the environment, and that of `--settings` over all files but an administrator's)
- opencode: opencode.ai, docs/config (`OPENCODE_CONFIG_CONTENT` is merged over all files but an administrator's)
- aider: Aider-AI/aider, aider/main.py (each `.env` goes over the environment, then `--set-env`, the AIDER_ key and the
  flags over that); BerriAI/litellm, litellm/main.py (`OPENAI_BASE_URL` goes before `OPENAI_API_BASE`)
- continue: continuedev/continue, cli/configuration of its docs (`--config`) and
  customize/model-providers/top-level/openai of its docs
- zed: zed-industries/zed, ai/use-api-access of its docs (a provider called disco-daemon has `DISCO_DAEMON_API_KEY`),
  crates/cli/src/main.rs (`--user-data-dir`), crates/paths/src/paths.rs (settings are in `config` there)
- open-webui: open-webui/docs, getting-started/env-configuration (what is set once is kept, unless
  `ENABLE_PERSISTENT_CONFIG` says otherwise); open-webui/open-webui, backend/open_webui/env.py (a `.env` gives what is
  not set: what is to be without a value is set to nothing)

No variable has the name of a setting of disco's own: an agent's shell may start a daemon.

First prompts were measured by `make agents`; of continue and zed nothing was, and they count as opencode does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

NO_KEY = "none"  # for a program that insists on one
AGENT_KEY = "DISCO_AGENT_KEY"  # the variable of a key whose name is ours to choose
# What Claude Code asks in place of an address, where the variable is set.
CLOUDS = ("BEDROCK", "VERTEX", "FOUNDRY", "MANTLE", "ANTHROPIC_AWS", "ANTHROPIC_GOOGLE_CLOUD", "GATEWAY")
OPENCODE_AGENTS = ("build", "plan", "general", "explore", "title", "summary", "compaction")  # those that it comes with
OUTPUT_TOKENS = 4096  # of an answer, for a program that wants to know: a quarter of the context where that is less
SHORT_CONTEXT = 65_536  # tokens; below them Codex gets our instructions, of 100 words in place of 4,000 tokens


@dataclass(frozen=True, slots=True)
class AgentTarget:
    """What a program is pointed at: the daemon's `root` without /v1, a key ("" = none), a model, its context in tokens.

    `folder` is where generated files go, `models` the document of /v1/models. `no_proxy` names the hosts that are asked
    without a proxy, as NO_PROXY has them; "" leaves that to the program.
    """

    root: str
    key: str
    model: str
    context: int | None
    folder: str
    models: Mapping[str, Any] = field(default_factory=dict)
    no_proxy: str = ""

    @property
    def direct(self) -> dict[str, str | None]:
        """The variables that keep a proxy out; programs read the one or the other."""
        return dict.fromkeys(("NO_PROXY", "no_proxy"), self.no_proxy) if self.no_proxy else {}

    @property
    def v1(self) -> str:
        """The address of OpenAI's API."""
        return f"{self.root}/v1"

    @property
    def some_key(self) -> str:
        """The key, or a word in its place."""
        return self.key or NO_KEY

    @property
    def output(self) -> int:
        """The most tokens of an answer."""
        return OUTPUT_TOKENS if self.context is None else min(OUTPUT_TOKENS, self.context // 4)


@dataclass(frozen=True, slots=True)
class AgentRun:
    """How a program is run: arguments before the user's, variables (None = taken away), files by name in the folder.

    Files are JSON. Those that are `merged` may have settings of the user's, which are kept.
    """

    arguments: tuple[str, ...] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    merged: bool = False


@dataclass(frozen=True, slots=True)
class Agent:
    """A program: how it is called in the PATH, how to install it, and the context (tokens) in which it can work.

    One that `leaves` ends at once, while its window stays.
    """

    name: str
    title: str
    program: str
    install: str
    run: Callable[[AgentTarget], AgentRun]
    tools: bool = True
    context: int = 0
    leaves: bool = False

    def lacks(self, card: Mapping[str, Any]) -> list[str]:
        """Return what a model lacks, by its document of /v1/models; what is not known there is taken for granted."""
        lacking = []
        if self.tools and card.get("capabilities", {}).get("tools", "native") != "native":
            lacking.append("it calls no tools by itself")
        if (context := card.get("context_length", self.context)) < self.context:
            lacking.append(f"its context has {context:,} tokens of {self.context:,}")
        return lacking


def _codex(to: AgentTarget) -> AgentRun:
    settings: dict[str, Any] = {
        "model_provider": "disco",
        "model_providers.disco.name": "disco",
        "model_providers.disco.base_url": to.v1,
        "model_providers.disco.wire_api": "responses",
        "model_providers.disco.env_key": AGENT_KEY,
        "model": to.model,
        "review_model": to.model,
    }
    files: dict[str, dict[str, Any]] = {}
    if to.context is not None:
        settings["model_context_window"] = to.context
        if to.context < SHORT_CONTEXT and "models" in to.models:
            files["models.json"] = {"models": to.models["models"]}
            settings["model_catalog_json"] = f"{to.folder}/models.json"
    flags = [word for key, value in settings.items() for word in ("-c", f"{key}={json.dumps(value)}")]
    return AgentRun(tuple(flags), {AGENT_KEY: to.some_key}, files)


def _claude(to: AgentTarget) -> AgentRun:
    kinds = (*(f"DEFAULT_{kind}" for kind in ("OPUS", "SONNET", "HAIKU")), "SMALL_FAST")
    names = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_{kind}_MODEL" for kind in kinds), "CLAUDE_CODE_SUBAGENT_MODEL")
    room = {} if to.context is None else {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(to.context)}
    others = ("ANTHROPIC_API_KEY", "ANTHROPIC_CUSTOM_HEADERS", "ANTHROPIC_UNIX_SOCKET")
    env: dict[str, str | None] = {
        "ANTHROPIC_BASE_URL": to.root, "ANTHROPIC_AUTH_TOKEN": to.some_key, **dict.fromkeys(names, to.model), **room,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(to.output), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **to.direct, **dict.fromkeys((*others, *(f"CLAUDE_CODE_USE_{cloud}" for cloud in CLOUDS))),
    }  # fmt: skip
    settings = {"env": {name: value or "" for name, value in env.items()}}
    flags = ("--settings", f"{to.folder}/settings.json", "--model", to.model)
    return AgentRun(flags, env, {"settings.json": settings})


def _opencode(to: AgentTarget) -> AgentRun:
    limit = {} if to.context is None else {"limit": {"context": to.context, "output": to.output}}
    provider = {
        "npm": "@ai-sdk/openai-compatible", "name": "disco",
        "options": {"baseURL": to.v1, "apiKey": to.some_key},
        "models": {to.model: {"name": to.model, **limit}},
    }  # fmt: skip
    model = f"disco/{to.model}"
    settings = {
        "model": model, "small_model": model, "agent": {name: {"model": model} for name in OPENCODE_AGENTS},
        "provider": {"disco": provider}, "enabled_providers": ["disco"], "disabled_providers": [],
    }  # fmt: skip
    quiet = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    return AgentRun(env={"OPENCODE_CONFIG_CONTENT": json.dumps(settings), **quiet})


def _aider(to: AgentTarget) -> AgentRun:
    name = f"openai/{to.model}"
    files: dict[str, dict[str, Any]] = {}
    more: tuple[str, ...] = ()
    if to.context is not None:
        lengths = {"max_input_tokens": to.context, "max_output_tokens": to.output}
        files["models.json"] = {name: {**lengths, "litellm_provider": "openai", "mode": "chat"}}
        more = ("--model-metadata-file", f"{to.folder}/models.json")
    models = ("--model", name, "--weak-model", name, "--editor-model", name)
    address = ("--openai-api-base", to.v1, "--set-env", f"OPENAI_BASE_URL={to.v1}")
    return AgentRun(
        (*models, *address, "--no-show-model-warnings", "--no-check-update", *more),
        {
            **dict.fromkeys(("OPENAI_API_BASE", "OPENAI_BASE_URL"), to.v1),
            **dict.fromkeys(("OPENAI_API_KEY", "AIDER_OPENAI_API_KEY"), to.some_key),
        },
        files,
    )


def _continue(to: AgentTarget) -> AgentRun:
    length = {} if to.context is None else {"defaultCompletionOptions": {"contextLength": to.context}}
    model = {
        "name": "disco", "provider": "openai", "model": to.model, "apiBase": to.v1, "apiKey": to.some_key,
        "roles": ["chat", "edit", "apply"], "capabilities": ["tool_use"], **length,
    }  # fmt: skip
    settings = {"name": "disco", "version": "0.0.1", "schema": "v1", "models": [model]}
    return AgentRun(("--config", f"{to.folder}/config.yaml"), files={"config.yaml": settings})  # JSON is YAML, too


def _zed(to: AgentTarget) -> AgentRun:
    name, able = "disco-daemon", {"tools": True, "images": False}
    model = {"name": to.model, "max_tokens": to.context or ZED.context, "capabilities": able}
    settings = {
        "language_models": {"openai_compatible": {name: {"api_url": to.v1, "available_models": [model]}}},
        "agent": {"default_model": {"provider": name, "model": to.model}},
    }
    flags, env = ("--user-data-dir", to.folder), {"DISCO_DAEMON_API_KEY": to.some_key}
    return AgentRun(flags, env, {"config/settings.json": settings}, merged=True)


def _open_webui(to: AgentTarget) -> AgentRun:
    return AgentRun(
        ("serve",),
        {
            "OPENAI_API_BASE_URL": to.v1, "OPENAI_API_KEY": to.some_key, "OPENAI_API_BASE_URLS": "",
            "OPENAI_API_KEYS": "", "ENABLE_OPENAI_API": "True", "ENABLE_OLLAMA_API": "False",
            "ENABLE_PERSISTENT_CONFIG": "False", "DEFAULT_MODELS": to.model,
        },
    )  # fmt: skip


ZED = Agent("zed", "Zed", "zed", "see https://zed.dev/download", _zed, context=16_384, leaves=True)
AGENTS = {
    agent.name: agent
    for agent in (
        Agent("codex", "Codex", "codex", "npm install -g @openai/codex", _codex, context=32_768),
        Agent("claude", "Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", _claude, context=32_768),
        Agent("opencode", "opencode", "opencode", "npm install -g opencode-ai", _opencode, context=16_384),
        Agent("aider", "aider", "aider", "uv tool install aider-chat", _aider, tools=False, context=8_192),
        Agent("continue", "Continue", "cn", "npm install -g @continuedev/cli", _continue, context=16_384),
        ZED,
        Agent("open-webui", "Open WebUI", "open-webui", "uv tool install open-webui", _open_webui, tools=False),
    )
}


def merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of two layers: `ours` where both have a value, and the tables of both."""
    found = dict(theirs)
    for name, value in ours.items():
        there = found.get(name)
        found[name] = merged(value, there) if isinstance(value, dict) and isinstance(there, dict) else value
    return found
