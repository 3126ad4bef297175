"""Unmodified client libraries against a daemon: `make clients`.

    python -m tests.clients [NAME …]

Starts a daemon with the embedded model as its device and a scripted server, and each library in a process of its own.
Prints `{"clients": {NAME: {"version", "passed", "failed", "first_prompt_tokens"}}, "skipped": {NAME: why}}`, and ends
with 1 where something has failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.clients.scripted import ScriptedServer
from tests.fixtures.daemon import DaemonProcess, running
from tests.fixtures.installing import install_node, install_python

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
VENV = ROOT / ".venv-clients"
PATIENCE_S = 300.0  # for one library
PYTHON = {
    "anthropic": "anthropic_sdk", "openai": "openai_sdk", "langchain-openai": "langchain_sdk", "litellm": "litellm_sdk",
    "llm": "llm_sdk", "ollama": "ollama_sdk", "langchain-ollama": "langchain_ollama_sdk",
    "instructor": "instructor_sdk", "pydantic-ai-slim": "pydantic_ai_sdk", "openai-agents": "openai_agents_sdk chat",
    "smolagents": "smolagents_sdk",
    "openai (Responses)": "openai_responses_sdk", "openai-agents (Responses)": "openai_agents_sdk responses",
}  # fmt: skip
NODE = {
    "npm openai": "openai", "npm openai (Responses)": "openai_responses", "npm @anthropic-ai/sdk": "anthropic",
    "npm ai": "ai", "npm ollama": "ollama",
}  # fmt: skip
# None of them is to call home, nor to look anything up.
QUIET = {
    "DO_NOT_TRACK": "1", "ANONYMIZED_TELEMETRY": "false", "LANGCHAIN_TRACING_V2": "false", "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1", "OTEL_SDK_DISABLED": "true",
    "LOGFIRE_SEND_TO_LOGFIRE": "false", "AI_SDK_LOG_WARNINGS": "false", "NO_PROXY": "127.0.0.1",
}  # fmt: skip


async def asked(command: list[str], daemon: DaemonProcess, folder: Path) -> dict[str, Any]:
    """Run the cases of one library; return what it told, with the length of the first prompt that it has sent."""
    before = {row["request_id"] for row in await daemon.history()}
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DISCO_", "OPENAI_"))}
    env |= QUIET | {
        "DISCO_URL": daemon.url,
        "DISCO_MODELS": "disco/device,disco/server,disco",
        "DISCO_TOOL_MODELS": "disco/server,disco",
        "HOME": str(folder),
    }
    process = await asyncio.create_subprocess_exec(
        *command, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        told: dict[str, Any] = json.loads(out.splitlines()[-1])
    except (TimeoutError, ValueError, IndexError) as e:
        tail = "" if isinstance(e, TimeoutError) else err.decode(errors="replace")[-600:]
        told = {"version": None, "passed": [], "failed": {"all": f"{type(e).__name__}: {tail}"}}
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    rows = [row for row in await daemon.history() if row["request_id"] not in before]
    return told | {"first_prompt_tokens": rows[-1]["prompt_tokens"] if rows else None}


async def main(names: list[str]) -> int:
    """Ask by each of these libraries, or by all."""
    wanted = [name for name in (*PYTHON, *NODE) if name in names or not names]
    why = {
        **dict.fromkeys(
            PYTHON, install_python(HERE / "requirements.lock", VENV) if set(wanted) & PYTHON.keys() else ""
        ),
        **dict.fromkeys(NODE, install_node(HERE / "node") if set(wanted) & NODE.keys() else ""),
    }
    clients: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with (
            ScriptedServer() as server,
            running(Path(folder) / "d", server=server.url, settings={"policy": {"shadow": False}}) as daemon,
        ):
            await daemon.device_ready()
            for name in wanted:
                if why[name]:
                    continue
                if name in PYTHON:
                    script, *words = PYTHON[name].split()
                    command = [str(VENV / "bin/python"), str(HERE / "python" / f"{script}.py"), *words]
                else:
                    command = ["node", str(HERE / "node" / f"{NODE[name]}.mjs")]
                clients[name] = await asked(command, daemon, Path(folder))
                print(f"{name}: {len(clients[name]['failed'])} failed", file=sys.stderr)
    print(json.dumps({"clients": clients, "skipped": {name: why[name] for name in wanted if why[name]}}, indent=1))
    return 1 if any(told["failed"] for told in clients.values()) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
