"""Two real daemons on loopback compute one model: paired, joined, asked by the unmodified OpenAI client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import psutil
import pytest
import pytest_asyncio

from disco_daemon.engine.llama.weights import read_output, read_weights
from disco_daemon.engine.measure.exit_messages import ExitFigures, ExitTrained
from disco_daemon.exits.head import ExitHead
from disco_daemon.exits.packing import tensors_of
from disco_daemon.machines.split.trained_exits import KeptExits
from disco_daemon.models.default import default_model_path
from disco_daemon.models.segment_files import read_head
from tests.e2e.cli.test_cli import disco
from tests.fixtures.daemon import DaemonProcess, Heard, ask, running
from tests.fixtures.ports import free_port

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not default_model_path().exists(), reason="the default model is not fetched"),
    pytest.mark.timeout(600),  # some start four daemons, beside other tests
]

CUT, N_CTX = 15, 1000
PROMPTS = ["Name three colours.", "What is the capital of France?", "Tell me about lighthouses."]


@dataclass
class Machine:
    """A daemon with a home of its own, and the verbs as they are typed there."""

    daemon: DaemonProcess

    @property
    def folder(self) -> Path:
        return self.daemon.folder

    async def type(self, *words: str) -> tuple[int, str, str]:
        env = {f"XDG_{name}_HOME": str(self.folder) for name in ("CONFIG", "DATA", "CACHE")}
        return await disco(*words, "--url", self.daemon.root, home=self.folder, env=env)

    async def json(self, *words: str) -> dict[str, Any]:
        code, out, err = await self.type(*words, "--json")
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    async def in_state(self, wanted: str) -> dict[str, Any]:
        """The link of this machine, as soon as it is in that state."""
        state = await self.daemon.until(lambda s: (s["split"] or {}).get("state") == wanted)
        found: dict[str, Any] = state["split"]
        return found


@asynccontextmanager
async def machine(
    folder: Path,
    port: int = 0,
    server: str | None = None,
    more: Mapping[str, dict[str, Any]] | None = None,
    model: Path | None = None,
) -> AsyncIterator[Machine]:
    settings: dict[str, dict[str, Any]] = {"peer": {"port": port or free_port()}, "partner": {"listen": "127.0.0.1"}}
    for section, values in (more or {}).items():
        settings.setdefault(section, {}).update(values)
    if server is not None:
        settings["server"] = {"model": "disco/device", "continuation": "token_ids", "stream_usage": True}
    async with running(folder, settings=settings, policy="all-device", server=server, model=model) as daemon:
        await daemon.device_ready()
        yield Machine(daemon)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def partner(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Machine]:
    async with machine(tmp_path_factory.mktemp("partner"), more={"device": {"n_ctx": N_CTX}}) as one:
        yield one


def another_model(folder: Path) -> Path:
    """A model file that is not the partner's, by one byte that nobody reads."""
    folder.mkdir(exist_ok=True)
    path = folder / "another.gguf"
    path.write_bytes(default_model_path().read_bytes() + b"\0")
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge(partner: Machine, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Machine]:
    folder = tmp_path_factory.mktemp("edge")
    async with machine(folder, model=another_model(folder)) as one:
        code = (await partner.json("machines", "pair", "--as", "split"))["code"]
        joined = await one.json("machines", "join", code, "--cut", str(CUT), "--name", "laptop")
        assert joined["cut"] == CUT
        assert joined["running"]
        yield one


async def test_nothing_listens_before_a_code_is_made(tmp_path: Path) -> None:
    port = free_port()
    async with machine(tmp_path, port, more={"partner": {"memory": 1e5}}) as one:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        found = await one.json("machines", "pair", "--as", "split")
        assert found["turned_on"]
        assert 500 < found["expires_s"] <= 600
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        assert (await one.json("machines", "list", "--as", "split"))["state"] == "waiting for a machine"
        # It says at once that it is too small, with the numbers; what is named is refused as what is planned.
        laptop = tmp_path / "laptop"
        laptop.mkdir()
        env = {f"XDG_{name}_HOME": str(laptop) for name in ("CONFIG", "DATA", "CACHE")}
        words = ["machines", "join", found["code"], "--name", "laptop", "--url", "http://127.0.0.1:1"]
        for cut, why in (([], "no cut fits both machines: .* 107374"), (["--cut", "15"], "107374.* GB at the partner")):
            status, _, err = await disco(*words, *cut, home=laptop, env=env)
            assert status == 1
            assert re.search(why, err), err


async def test_two_machines_say_what_the_whole_model_says(partner: Machine, edge: Machine) -> None:
    status = await edge.in_state("up")
    assert (status["mode"], status["cut"], status["codec"], status["same_bits"]) == ("exact", CUT, "f32", True)
    state = await edge.daemon.state()
    assert state["endpoints"]["device"]["n_ctx"] == N_CTX, "the partner's, which is the smaller one"
    rate = state["money"]["effective_usd_per_kwh"]
    assert rate > 0
    for prompt in PROMPTS:
        whole = await ask(partner.daemon, prompt, max_tokens=32)
        split = await ask(edge.daemon, prompt, max_tokens=32)
        assert split.text == whole.text
        assert split.finish_reason == whole.finish_reason
        told = split.disco["split"]
        assert (told["mode"], told["quality"], told["codec"], told["same_bits"]) == ("exact", "whole", "f32", True)
        assert told["n_rows"] > 0 < told["layer_tokens"]["edge"]
        assert 0 < told["round_trips"] <= 33
        # What was drawn, and drafts that were judged together with a wrong one before them.
        drawn = told["round_trips"] + told["accepted"]
        assert drawn <= told["n_judged"] <= told["round_trips"] + told["drafted"]
        assert told["n_judged"] < told["n_rows"]
        assert told["bytes"]["up"] > 576 * 4 * told["n_rows"] / 2
        assert told["partner_j"] == pytest.approx(status["partner_watts"] * told["partner_s"], rel=0.01)
        assert told["partner_j_from"] == status["partner_watts_from"]
        assert told["partner_usd"] == pytest.approx(told["partner_j"] / 3.6e6 * rate)
        assert split.disco["energy_j"] > told["partner_j"] > 0
        assert "split" not in whole.disco
    async with asyncio.timeout(30):
        while not (await partner.json("machines", "list", "--as", "split"))["members"][0]["rows"]:
            await asyncio.sleep(0.1)  # a link reports what it carried once a second


async def test_no_engine_has_a_layer_of_the_other_range(partner: Machine, edge: Machine) -> None:
    lower = list((edge.folder / "disco" / "split").glob("*.gguf"))
    assert [path.name for path in lower] == [f"layers-0-{CUT}.gguf"]
    assert (await partner.json("machines", "list", "--as", "split"))["cut"] == CUT


async def test_a_private_request_is_refused_with_the_reason(edge: Machine) -> None:
    with pytest.raises(openai.BadRequestError, match="private request is not sent to the partner"):
        await edge.daemon.client.chat.completions.create(
            model="disco", messages=[{"role": "user", "content": "Hi"}], extra_body={"disco": {"private": True}}
        )


async def partner_list(of: Machine) -> dict[str, Any]:
    async with of.daemon.controls.get(f"{of.daemon.root}/disco/v1/partner") as response:
        found: dict[str, Any] = await response.json()
        return found


async def children(of: Machine, module: str) -> set[int]:
    """Return the processes of a daemon that run this module."""
    found = set()
    for child in psutil.Process((await of.daemon.state())["pid"]).children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if module in child.cmdline():
                found.add(child.pid)
    return found


async def test_a_daemon_that_becomes_private_cuts_the_link_and_comes_back(edge: Machine) -> None:
    await edge.in_state("up")
    engines = await children(edge, "disco_daemon.engine.worker")
    assert engines
    changed = await edge.daemon.controls.patch(f"{edge.daemon.root}/disco/v1/settings", json={"policy.private": True})
    assert changed.status == 200
    status = (await edge.daemon.state())["split"]
    assert (status["state"], status["error"]) == ("down", "policy.private is on: nothing leaves this machine")
    await edge.daemon.controls.patch(f"{edge.daemon.root}/disco/v1/settings", json={"policy.private": False})
    await edge.in_state("up")
    assert (await ask(edge.daemon, PROMPTS[0], max_tokens=8)).text
    assert await children(edge, "disco_daemon.engine.worker") == engines, "answers in flight would have failed"


async def test_a_relay_that_dies_takes_no_engine_with_it(partner: Machine, edge: Machine) -> None:
    whole = await ask(partner.daemon, PROMPTS[1], max_tokens=24)
    for one in (partner, edge):
        await edge.in_state("up")
        engines = [await children(of, "disco_daemon.engine.worker") for of in (partner, edge)]
        [relay] = await children(one, "disco_daemon.link.relay.worker")
        os.kill(relay, signal.SIGKILL)
        async with asyncio.timeout(60):
            while await children(one, "disco_daemon.link.relay.worker") in (set(), {relay}):
                await asyncio.sleep(0.05)  # its daemon has no event for us
            while not (await partner_list(partner))["members"][0]["connected"]:
                await asyncio.sleep(0.05)
        await edge.in_state("up")
        assert (await ask(edge.daemon, PROMPTS[1], max_tokens=24)).text == whole.text
        assert [await children(of, "disco_daemon.engine.worker") for of in (partner, edge)] == engines


async def test_an_embedding_is_refused_with_the_reason(edge: Machine) -> None:
    with pytest.raises(openai.BadRequestError, match="split over two machines"):
        await edge.daemon.client.embeddings.create(model="disco", input="Hi")


async def test_a_code_is_good_for_one_machine_and_a_wrong_one_for_none(
    partner: Machine, edge: Machine, tmp_path: Path
) -> None:
    before = (edge.folder / "config.toml").read_text()
    code, _, err = await edge.type("machines", "join", "no-code")
    assert code == 1
    assert "typing error" in err
    first = (await partner.json("machines", "pair", "--as", "split"))["code"]
    second = (await partner.json("machines", "pair", "--as", "split"))["code"]
    code, _, err = await edge.type("machines", "join", first, "--name", "other")
    assert code == 1
    assert "not the latest one" in err
    code, _, err = await edge.type("machines", "join", second, "--name", "laptop")
    assert code == 1
    assert "paired already" in err
    assert (edge.folder / "config.toml").read_text() == before


async def test_a_cut_that_is_none_is_refused_and_the_code_is_still_good(
    partner: Machine, edge: Machine, tmp_path: Path
) -> None:
    code = (await partner.json("machines", "pair", "--as", "split"))["code"]
    env = {f"XDG_{name}_HOME": str(tmp_path) for name in ("CONFIG", "DATA", "CACHE")}
    words = ["machines", "join", code, "--name", "third", "--url", "http://127.0.0.1:1", "--json"]
    for cut, why in (("0", "one layer at least"), ("-1", "one layer"), ("30", "1 to 29"), ("31", "1 to 29")):
        status, _, err = await disco(*words, "--cut", cut, home=tmp_path, env=env)
        assert status == 1
        assert why in err
    status, _, err = await disco(*words, "--cut", "20", home=tmp_path, env=env)
    assert status == 1
    assert f"from {CUT} on, for another machine: use --cut {CUT}" in err  # the partner has one range
    assert "laptop" not in err, "no member hears of another one"
    status, out, err = await disco(*words, "--cut", str(CUT), home=tmp_path, env=env)
    assert status == 0, err
    assert not json.loads(out)["running"]
    assert {one["name"] for one in (await partner.json("machines", "list", "--as", "split"))["members"]} == {
        "laptop",
        "third",
    }


async def test_a_partner_that_is_gone_ends_the_answer_with_the_reason(partner: Machine, edge: Machine) -> None:
    await edge.in_state("up")
    pid = (await partner.json("machines", "list", "--as", "split"))["relay_pid"]

    def cut(heard: object) -> None:
        nonlocal pid
        if pid:
            os.kill(pid, signal.SIGKILL)
            pid = 0

    whole = await ask(partner.daemon, PROMPTS[2], max_tokens=48)
    heard = Heard()
    error = ""
    try:
        await ask(edge.daemon, PROMPTS[2], max_tokens=48, heard=heard, on_piece=cut)
    except openai.APIError as e:  # else the link was there again within the answer's patience
        error = str(e)
    assert whole.text.startswith(heard.text)
    assert "partner" in error or heard.text == whole.text
    await edge.in_state("up")
    assert (await ask(edge.daemon, PROMPTS[2], max_tokens=48)).text == whole.text


async def test_a_server_takes_the_answer_over_where_the_partner_has_left_it(partner: Machine, tmp_path: Path) -> None:
    whole = await ask(partner.daemon, PROMPTS[2], max_tokens=96)
    revoke = partial(partner.daemon.controls.post, f"{partner.daemon.root}/disco/v1/partner/revoke")
    revoking: list[asyncio.Task[aiohttp.ClientResponse]] = []

    async def refuse() -> aiohttp.ClientResponse:
        return await revoke(json={"name": "fourth"})

    def leave(heard: Heard) -> None:
        if not revoking and len(heard.text) > 20:
            revoking.append(asyncio.create_task(refuse()))

    async with machine(tmp_path, server=partner.daemon.url) as one:
        code = (await partner.json("machines", "pair", "--as", "split"))["code"]
        await one.json("machines", "join", code, "--cut", str(CUT), "--name", "fourth")
        await one.in_state("up")
        heard = await ask(one.daemon, PROMPTS[2], max_tokens=96, on_piece=leave)
    assert [(await task).status for task in revoking] == [200]
    assert heard.text == whole.text
    assert heard.disco["handoffs"] == 1
    assert heard.disco["endpoints"]["device"]["error"] == "partner_gone"
    assert heard.disco["tokens"]["server"] > 0 < heard.disco["tokens"]["device"]


def keep_exit(folder: Path) -> None:
    """Keep an exit that nobody has trained, as sure as 0.7 of each token; by its figures 12 % may leave."""
    model = default_model_path()
    _, header = read_head(model)
    output = read_output(model, header)
    head = ExitHead(read_weights(model, header, "output_norm.weight"), np.eye(output.shape[1], dtype=np.float32), 1e-5)
    arrays: dict[str, Any] = {"coefficients": np.zeros(4), "scores": np.array([0.0, 1.0]), "shares": np.full(2, 0.7)}
    for name, tensor in tensors_of(head, output).items():
        arrays[f"shape {name}"] = np.array([tensor.packing, *tensor.shape], np.float64)
        arrays[f"data {name}"] = np.frombuffer(tensor.data, np.uint8)
    figures = ExitFigures("m", CUT, "linear", 1, 1.0, 0.1, 9.0, 0.1, {"0.8": 0.12}, 1.0, 0.1)
    source = folder / "source.npz"
    with source.open("wb") as file:
        np.savez(file, **arrays)
    KeptExits(model, folder / "disco" / "exits").keep(ExitTrained(figures, f"{CUT}-linear.npz"), source)


async def posted(one: Machine, **options: Any) -> tuple[int, str, dict[str, Any]]:
    """Return status, quality by the header and body of an answer in one piece."""
    body = {
        "model": "disco", "messages": [{"role": "user", "content": PROMPTS[0]}], "temperature": 0, "max_tokens": 12,
        "disco": options,
    }  # fmt: skip
    async with one.daemon.controls.post(f"{one.daemon.root}/v1/chat/completions", json=body) as response:
        return response.status, response.headers.get("X-Disco-Quality", ""), await response.json()


async def set_live(one: Machine, **settings: Any) -> tuple[int, str]:
    url, changes = f"{one.daemon.root}/disco/v1/settings", {k.replace("__", "."): v for k, v in settings.items()}
    async with one.daemon.controls.patch(url, json=changes) as response:
        return response.status, await response.text()


async def test_who_decides_a_token_follows_request_settings_and_exit(tmp_path: Path) -> None:
    lower = tmp_path / "lower"
    async with machine(tmp_path / "upper") as partner, machine(lower, model=another_model(lower)) as one:
        # An exit that is trained after a machine has joined comes with its next join.
        for name in ("fifth", "sixth"):
            code = (await partner.json("machines", "pair", "--as", "split"))["code"]
            await one.json("machines", "join", code, "--cut", str(CUT), "--name", name)
            await one.in_state("up")
            if name == "fifth":
                status, _, body = await posted(one, split_mode="alone")
                assert (status, "disco exits train" in body["error"]["message"]) == (400, True)
                keep_exit(partner.folder)
        # Alone, by the request: nothing goes to the partner.
        status, quality, body = await posted(one, split_mode="alone")
        alone, told = body["choices"][0]["message"]["content"], body["disco"]["split"]
        assert (status, quality) == (200, "alone")
        assert (told["mode"], told["quality"], told["alone_from"], told["n_rows"]) == ("alone", "alone", 0, 0)
        assert told["bytes"] == {"up": 0, "down": 0}
        # Confident has to be earned, by the request and by the settings.
        status, _, body = await posted(one, split_mode="confident")
        assert (status, "12%" in body["error"]["message"]) == (400, True)
        status, text = await set_live(one, split__mode="confident")
        assert (status, "12%" in text) == (400, True)
        assert (await posted(one, theta=1.5))[0] == 400
        # A private request is alone once that is allowed, also while nothing may leave this machine.
        status, _, body = await posted(one, private=True)
        assert (status, "split.private_alone" in body["error"]["message"]) == (400, True)
        assert (await set_live(one, split__private_alone=True))[0] == 200
        status, quality, body = await posted(one, private=True)
        assert (status, quality, body["choices"][0]["message"]["content"]) == (200, "alone", alone)
        assert body["disco"]["split"]["bytes"] == {"up": 0, "down": 0}
        assert (await set_live(one, policy__private=True))[0] == 200
        assert (await posted(one))[2]["choices"][0]["message"]["content"] == alone
        assert (await set_live(one, policy__private=False))[0] == 200
        await one.in_state("up")
        # The settings' mode changes without another engine; then what is asked for nothing is alone.
        pid = (await one.daemon.state())["endpoints"]["device"]["pid"]
        assert (await set_live(one, split__mode="alone"))[0] == 200
        assert (await posted(one))[1] == "alone"
        assert (await set_live(one, split__mode="exact"))[0] == 200
        qualities = [(await posted(one))[1]]
        while qualities[-1] != "whole" and len(qualities) < 3:  # a verdict may be late where the machine is held up
            qualities.append((await posted(one))[1])
        assert qualities[-1] == "whole"
        state = await one.daemon.state()
        assert state["endpoints"]["device"]["pid"] == pid
        assert state["split"]["mode"] == "exact"
        # While the partner is gone answers are alone, unless they are to stop.
        await partner.json("machines", "revoke", "sixth")
        await one.daemon.until(lambda state: state["split"]["state"] != "up")
        status, quality, body = await posted(one)
        assert (status, quality, body["choices"][0]["message"]["content"]) == (200, "alone", alone)
        assert body["disco"]["split"]["alone_from"] == 0
        assert (await set_live(one, split__alone="stop"))[0] == 200
        status, _, body = await posted(one)
        assert status >= 500
        assert "partner" in body["error"]["message"]


async def test_two_machines_find_each_other_again_after_both_were_started_anew(tmp_path: Path) -> None:
    port = free_port()
    async with machine(tmp_path / "upper", port) as upper, machine(tmp_path / "lower") as lower:
        whole = await ask(upper.daemon, PROMPTS[0], max_tokens=16)
        code = (await upper.json("machines", "pair", "--as", "split"))["code"]
        planned = await lower.json("machines", "join", code, "--name", "laptop")  # where the plan says
        assert planned["cut"] == 29  # two equal machines: the partner has least to compute
        assert "for other machines" not in planned["why"]
    joined = {"split": {"enabled": True, "partner": f"127.0.0.1:{port}", "cut": planned["cut"]}}
    hosting = {"partner": {"enabled": True}}
    async with (
        machine(tmp_path / "lower", more=joined) as lower,
        machine(tmp_path / "upper", port, more=hosting) as upper,
    ):
        assert (await lower.in_state("up"))["cut"] == planned["cut"]
        assert (await ask(lower.daemon, PROMPTS[0], max_tokens=16)).text == whole.text


async def test_a_machine_that_is_revoked_is_refused_at_once(partner: Machine, edge: Machine) -> None:
    await edge.in_state("up")
    assert (await partner.json("machines", "revoke", "laptop")) == {"revoked": "laptop"}
    status = await edge.in_state("refused")
    assert "revoked" in status["error"]
    code, out, _ = await edge.type("split", "status")
    assert code == 1
    assert "refused" in out
    with pytest.raises(openai.APIError, match="partner"):
        await ask(edge.daemon, "Hi", max_tokens=4)
    code, _, err = await partner.type("machines", "revoke", "laptop")
    assert code == 1
    assert "laptop" in err


async def test_leaving_removes_layers_certificate_and_settings(edge: Machine) -> None:
    code, _, err = await edge.type("machines", "leave")
    assert code == 1
    assert "--yes" in err
    assert (await edge.json("machines", "leave", "--yes"))["removed_bytes"] > 1e6
    assert not (edge.folder / "disco" / "split").exists()
    await edge.daemon.device_ready()
    assert (await edge.json("split", "status")) == {"state": "off"}
    assert (await ask(edge.daemon, "Name three colours.", max_tokens=8)).text


async def test_a_machine_that_leaves_is_forgotten_by_the_partner_and_its_cut_is_free(
    partner: Machine, edge: Machine
) -> None:
    for member in (await partner.json("machines", "list", "--as", "split"))["members"]:
        await partner.json("machines", "revoke", member["name"])
    for cut in (10, 12):  # the partner has one cut at a time
        code = (await partner.json("machines", "pair", "--as", "split"))["code"]
        assert (await edge.json("machines", "join", code, "--cut", str(cut), "--name", "laptop"))["cut"] == cut
        await edge.in_state("up")
        assert (await partner.json("machines", "list", "--as", "split"))["cut"] == cut
        assert (await edge.json("machines", "leave", "--yes"))["told"]
        async with asyncio.timeout(30):  # its relay answers first: with the last member that process ends
            while (found := await partner_list(partner))["members"]:
                assert found["cut"] == cut
        assert found["cut"] is None  # at once, though the engine may still be ending
        assert found["state"] != "serving"
