"""`disco launch`, with a small program that stands in the PATH for each agent, and asks by what was set for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.cli.main import main
from disco_daemon.models.default import models_dir
from disco_daemon.onboarding.agents import AGENTS
from tests.fixtures.daemon import running
from tests.fixtures.ports import free_port
from tests.fixtures.upstream import Upstream

PATIENCE_S = 120.0
SAID = "red green"
STATUS = 7  # of the stand-in
KEY = 'hush-"hush"\\of-the-test'  # which JSON and shells write otherwise
# What an agent does with what it is given, in a few lines: it finds address, key and model where that agent looks.
STAND_IN = """#!{python}
import json, os, subprocess, sys, tomllib, urllib.request
from pathlib import Path

name, argv, env = Path(sys.argv[0]).name, sys.argv[1:], os.environ
after = lambda flag: argv[argv.index(flag) + 1]


def responses(url, key, model):
    from openai import OpenAI

    return OpenAI(base_url=url, api_key=key).responses.create(model=model, input="{said}").output_text


def posted(url, key, **asked):
    asked["messages"] = [{{"role": "user", "content": "{said}"}}]
    told = {{"Authorization": f"Bearer {{key}}", "Content-Type": "application/json", "anthropic-version": "2023-06-01"}}
    request = urllib.request.Request(url, json.dumps(asked).encode(), told)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def chat(url, key, model):
    return posted(f"{{url}}/chat/completions", key, model=model, max_tokens=16)["choices"][0]["message"]["content"]


if name == "codex":
    given = dict(word.partition("=")[::2] for flag, word in zip(argv, argv[1:]) if flag == "-c")
    told = {{key: tomllib.loads(f"x = {{value}}")["x"] for key, value in given.items()}}
    mine = "model_providers." + told["model_provider"]
    assert told[mine + ".wire_api"] == "responses"
    model = told["model"]  # a subcommand is not told what stands behind -m
    if "model_catalog_json" in told:
        assert model in [m["slug"] for m in json.loads(Path(told["model_catalog_json"]).read_text())["models"]]
    answer = responses(told[mine + ".base_url"], env[told[mine + ".env_key"]], model)
elif name == "claude":
    assert "ANTHROPIC_API_KEY" not in env
    env = {{**env, **json.loads(Path(after("--settings")).read_text())["env"]}}
    assert after("--model") == env["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == env["ANTHROPIC_MODEL"]
    url = env["ANTHROPIC_BASE_URL"] + "/v1/messages"
    told = posted(url, env["ANTHROPIC_AUTH_TOKEN"], model=after("--model"), max_tokens=16)
    answer = told["content"][0]["text"]
elif name == "opencode":
    told = json.loads(env["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = told["model"].partition("/")
    assert model in told["provider"][provider]["models"]
    options = told["provider"][provider]["options"]
    answer = chat(options["baseURL"], options["apiKey"], model)
elif name == "aider":
    url, set_by_flag = after("--openai-api-base"), after("--set-env")
    assert set_by_flag == "OPENAI_BASE_URL=" + url
    answer = chat(url, env["AIDER_OPENAI_API_KEY"], after("--model").removeprefix("openai/"))
elif name == "cn":
    told = json.loads(Path(after("--config")).read_text())["models"][0]
    answer = chat(told["apiBase"], told["apiKey"], told["model"])
elif name == "zed":
    told = json.loads((Path(after("--user-data-dir")) / "config/settings.json").read_text())
    chosen = told["agent"]["default_model"]
    provider = told["language_models"]["openai_compatible"][chosen["provider"]]
    assert provider["available_models"][0]["name"] == chosen["model"]
    answer = chat(provider["api_url"], env[chosen["provider"].upper().replace("-", "_") + "_API_KEY"], chosen["model"])
else:
    assert (name, argv[0]) == ("open-webui", "serve")
    answer = chat(env["OPENAI_API_BASE_URL"], env["OPENAI_API_KEY"], env["DEFAULT_MODELS"])
own = [name for name in os.environ if name.startswith("DISCO_API_")]
told = {{"pid": os.getpid(), "argv": argv, "answer": answer, "own": own}}
if "LEAVES" in os.environ:  # such as a watcher of files, which gets every descriptor that it may have
    null = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    told["left"] = subprocess.Popen(waits, close_fds=False, start_new_session=True, **null).pid
Path(os.environ["REPORT"]).write_text(json.dumps(told))
sys.exit({status})
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for agent in AGENTS.values():
        path = folder / agent.program
        path.write_text(STAND_IN.format(python=sys.executable, said=SAID, status=STATUS))
        path.chmod(0o755)
    return folder


async def launch(
    *args: str, home: Path, programs: Path | None, env: Mapping[str, str] | None = None
) -> tuple[int, str, str, int]:
    """Run the verb with that PATH; exit code, stdout, stderr, and the process id that it had."""
    own = {k: v for k, v in os.environ.items() if k == "XDG_RUNTIME_DIR" or not k.startswith(("DISCO_", "XDG_"))}
    own |= {
        "HOME": str(home), "DISCO_CONFIG": str(home / "config.toml"), "NO_COLOR": "1", "COLUMNS": "120",
        "ANTHROPIC_API_KEY": "the-user's-own", "REPORT": str(home / "report.json"), "PATH": str(programs or home),
        "DISCO_MODELS_DIR": str(models_dir()),
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "disco_daemon.cli.main", "launch", *args,
        env=own | dict(env or {}), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode(), process.pid


def report(home: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home / "report.json").read_text())
    return found


async def test_each_agent_asks_the_daemon_by_what_was_set_and_takes_the_verbs_place(
    tmp_path: Path, programs: Path
) -> None:
    async with Upstream(tokens=2) as upstream, running(tmp_path / "d", server=upstream.url, device=False) as daemon:
        for name in AGENTS:
            more = ("exec", "--", "--model", "theirs")
            words, proxy = (name, "--url", daemon.url, "--", *more), {"http_proxy": f"http://127.0.0.1:{free_port()}"}
            code, _, err, pid = await launch(*words, home=tmp_path, programs=programs, env=proxy)
            assert (code, err) == (STATUS, ""), name
            told = report(tmp_path)
            assert told["answer"].split() == SAID.split(), name
            assert told["pid"] == pid, "its signals and its exit status are its own"
            assert told["argv"][-4:] == list(more), name
            assert told["own"] == [], "a daemon that its shell starts would take them for settings"
            (tmp_path / "report.json").unlink()
        assert len(upstream.exchanges) == len(AGENTS)
        (programs / "cn").write_text("#!/bin/sh\nkill -PIPE $$\nexit 3\n")
        code, _, _, _ = await launch("continue", "--url", daemon.url, home=tmp_path, programs=programs)
        assert code == -signal.SIGPIPE, "no signal is ignored that a shell would not ignore"


async def test_the_key_of_the_api_goes_along_and_is_never_shown(tmp_path: Path, programs: Path) -> None:
    keys = {"api": {"key": KEY, "control_key": "for-the-owner-alone"}}
    async with (
        Upstream(tokens=2) as upstream,
        running(tmp_path / "d", server=upstream.url, device=False, settings=keys) as daemon,
    ):
        port = daemon.root.rpartition(":")[2]
        env = {"DISCO_API_KEY": KEY, "DISCO_API_CONTROL_KEY": "for-the-owner-alone", "DISCO_API_PORT": port}
        for name in ("claude", "continue", "opencode"):
            code, _, err, _ = await launch(name, home=tmp_path, programs=programs, env=env)
            assert (code, err) == (STATUS, ""), name
            assert report(tmp_path)["answer"].split() == SAID.split(), name
            assert "DISCO_API_CONTROL_KEY" not in report(tmp_path)["own"], name
            for form in ((), ("--json",)):
                code, out, err, _ = await launch(name, "--print", *form, home=tmp_path, programs=None, env=env)
                assert (code, err) == (0, ""), name
                assert "(api.key)" in out
                assert "hush" not in out, "in no way of writing it"
                assert "for-the-owner" not in out
        for file in ("continue/config.yaml", "claude/settings.json"):
            assert next(tmp_path.rglob(file)).stat().st_mode & 0o077 == 0, "it holds the key"


async def test_print_shows_what_would_be_set_and_starts_nothing(tmp_path: Path, programs: Path) -> None:
    async with Upstream(tokens=2) as upstream, running(tmp_path / "d", server=upstream.url, device=False) as daemon:
        for name in ("codex", "opencode", "zed"):
            agent = AGENTS[name]
            words = (name, "--print", "--json", "--url", daemon.url, "--model", "disco/server", "--", "more")
            code, out, err, _ = await launch(*words, home=tmp_path, programs=programs)
            assert (code, err) == (0, ""), name
            told = json.loads(out)
            assert told["command"][0] == agent.program
            assert told["command"][-1] == "more"
            assert daemon.root in json.dumps(told)
            assert "disco/server" in json.dumps(told)
        assert not upstream.exchanges
        assert not list(tmp_path.rglob("settings.json"))
        code, out, err, _ = await launch("claude", "--print", "--url", daemon.url, home=tmp_path, programs=programs)
        assert f"export ANTHROPIC_BASE_URL={daemon.root}\n" in out
        assert "unset ANTHROPIC_API_KEY\n" in out
    code, _, err, _ = await launch("codex", "--print", home=tmp_path, programs=programs, env={"DISCO_API_PORT": "1"})
    assert code == 1
    assert "disco up" in err


def test_a_program_that_is_missing_or_unknown_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DISCO_CONFIG", str(tmp_path / "config.toml"))
    for name, agent in AGENTS.items():
        assert main(["launch", name]) == 127
        said = capsys.readouterr().err
        assert agent.install in said
        assert len(said.splitlines()) == 1
    assert main(["launch", "codeks"]) == 2
    assert "did you mean codex" in capsys.readouterr().err


async def test_a_model_that_cannot_do_what_an_agent_needs_is_named_with_one_that_can(
    tmp_path: Path, programs: Path
) -> None:
    async with running(tmp_path / "d", settings={"device": {"n_ctx": 2048}}) as daemon:
        await daemon.device_ready()
        env = {"DISCO_DEVICE_N_CTX": "2048"}
        code, _, err, _ = await launch("claude", "--url", daemon.url, home=tmp_path, programs=programs, env=env)
        assert code == 1
        assert "it calls no tools by itself, and its context has 2,048 tokens of 32,768" in err
        assert "disco config set device.n_ctx 32768" in err
        assert "--anyway" in err
        assert not (tmp_path / "report.json").exists()
        words = ("claude", "--anyway", "--url", daemon.url, "--model", "disco/device")
        code, _, err, _ = await launch(*words, home=tmp_path, programs=programs)
        assert code == STATUS, err
        assert report(tmp_path)["answer"]
        code, _, err, _ = await launch("open-webui", "--url", daemon.url, home=tmp_path, programs=programs)
        assert (code, err) == (STATUS, ""), "a chat needs neither tools nor a long context"
        code, _, err, _ = await launch(
            "aider", "--url", daemon.url, "--model", "gpt-9", home=tmp_path, programs=programs
        )
        assert code == 1
        assert "no model gpt-9" in err


async def test_a_daemon_is_started_where_none_runs_and_ends_with_the_agent(tmp_path: Path, programs: Path) -> None:
    port = free_port()
    env = {"DISCO_API_PORT": str(port), "DISCO_DEVICE_N_CTX": "256"}
    code, _, err, pid = await launch("open-webui", home=tmp_path, programs=programs, env=env | {"LEAVES": "1"})
    assert (code, err) == (STATUS, "No daemon was running: one is starting, and ends with Open WebUI …\n")
    assert report(tmp_path)["pid"] == pid
    try:
        async with asyncio.timeout(PATIENCE_S):
            while await _listens(port):
                await asyncio.sleep(0.05)  # the daemon ends by itself, and tells nobody
    finally:
        os.kill(report(tmp_path)["left"], signal.SIGKILL)  # it still ran: the daemon did not wait for its end
    code, _, err, _ = await launch("zed", home=tmp_path, programs=programs, env=env)
    assert code == 1
    assert "disco service install" in err, "Zed leaves its terminal at once, and a daemon would end with that"
    code, _, err, _ = await launch("claude", home=tmp_path, programs=programs, env=env)
    assert code == 1
    assert "its context has 256 tokens" in err, "what the model can do is known before the agent starts"
    assert not await _listens(port), "nor is the daemon left that was started to ask"


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def test_settings_that_the_user_made_in_a_generated_file_stay(tmp_path: Path, programs: Path) -> None:
    async with Upstream(tokens=2) as upstream, running(tmp_path / "d", server=upstream.url, device=False) as daemon:
        words = ("zed", "--url", daemon.url)
        await launch(*words, home=tmp_path, programs=programs)
        path = next(tmp_path.rglob("settings.json"))
        ours = json.loads(path.read_text())
        path.write_text(json.dumps(ours | {"theme": "One Dark", "agent": {"dock": "left"}}))
        await launch(*words, home=tmp_path, programs=programs)
        both = ours["agent"] | {"dock": "left"}
        assert json.loads(path.read_text()) == ours | {"theme": "One Dark", "agent": both}
        path.write_text("// mine\n{}")
        await launch(*words, home=tmp_path, programs=programs)
        assert path.read_text() == "// mine\n{}", "nobody has said yes"
