"""LoRA adapters by name on the real model: each answer is its adapter's, whoever's is computed beside it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from disco_daemon.engine import wire
from disco_daemon.engine.kv.cells import Cells
from disco_daemon.engine.llama.model import AbortFlag, Llama
from disco_daemon.engine.llama.refusals import PromptError
from disco_daemon.engine.serve.admission import Admission
from disco_daemon.engine.serve.batch import Batcher
from disco_daemon.models.default import default_model_path
from disco_daemon.scheduler.baselines import RoundRobin
from disco_daemon.scheduler.latency import IterationLatency
from tests.fixtures.daemon import DaemonProcess, ask, running
from tests.fixtures.lora import write_lora
from tests.fixtures.upstream import Upstream

STORY = "Tell me a story about a lamp, a river and an old lighthouse keeper who never sleeps."

# --- the engine's core, in this process ---------------------------------------------------------------------------


class Core:
    """Batcher, admission and cells around the real model."""

    def __init__(self, llama: Llama) -> None:
        llama.clear()
        self.said: dict[str, str] = {}
        self.done: dict[str, wire.Done] = {}
        self.llama = llama
        self.cells = Cells(llama, 6, 768)
        self.admission = Admission(self.cells, RoundRobin(slice_s=0.05), IterationLatency(llama.latency_prior))
        self.batcher = Batcher(llama, self._heard, self.admission)

    def _heard(self, message: wire.Message) -> None:
        match message:
            case wire.TextPiece(id=id_, text=text):
                self.said[id_] = self.said.get(id_, "") + text
            case wire.Done(id=id_):
                self.done[id_] = message
            case wire.Failed(id=id_, message=text):
                pytest.fail(f"{id_}: {text}")

    def ask(self, id_: str, prompt: str, adapter: str, max_tokens: int = 16) -> None:
        messages = [{"role": "user", "content": prompt}]
        self.batcher.add(
            wire.Generate(id=id_, messages=messages, temperature=0, max_tokens=max_tokens, adapter=adapter)
        )

    def finish(self) -> None:
        for _ in range(10_000):
            if not self.batcher.step():
                return
        pytest.fail("the engine never comes to rest")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_lora(folder / "one.gguf", seed=1)
    write_lora(folder / "two.gguf", seed=2)
    write_lora(folder / "wide.gguf", n_embd=640)
    write_lora(folder / "other.gguf", architecture="qwen2")
    write_lora(folder / "late.gguf", more={"adapter.alora.invocation_tokens": [1, 2]})
    (folder / "text.gguf").write_text("This is no model.")
    return folder


@pytest.fixture(scope="module")
def llama(folder: Path) -> Llama:
    names = ("one", "two", "wide", "other", "late", "text", "nowhere")
    adapters = [wire.AdapterFile(name=name, path=str(folder / f"{name}.gguf")) for name in names]
    adapters.append(wire.AdapterFile(name="off", path=str(folder / "one.gguf"), scale=0.0))
    return Llama(
        wire.Load(
            model_path=str(default_model_path()),
            n_ctx=512,
            n_threads=1,
            n_gpu_layers=0,
            n_cells=768,
            adapters=tuple(adapters),
        ),
        AbortFlag(),
    )


@pytest.mark.slow
def test_what_cannot_be_loaded_is_left_out_with_the_reason(llama: Llama, capfd: pytest.CaptureFixture[str]) -> None:
    told = llama.adapters.failures
    assert {name for name, why in told.items() if not why} == {"one", "two", "off"}
    assert "incorrect shape" in told["wide"]
    assert "mismatch" in told["other"]
    assert "aLoRA" in told["late"]
    assert "text.gguf" in told["text"]
    assert "No such file" in told["nowhere"]
    with pytest.raises(PromptError, match=r"'wide' \(.*incorrect shape.*There are: one, two, off\."):
        llama.salt("wide")


@pytest.mark.slow
def test_answers_are_bit_for_bit_those_of_their_adapter_alone(llama: Llama) -> None:
    core, alone = Core(llama), {}
    for name in ("", "one", "two", "off"):
        core = Core(llama)
        core.ask("alone", STORY, name, 24)
        core.finish()
        alone[name] = core.said["alone"]
    assert len({alone[""], alone["one"], alone["two"]}) == 3
    assert alone["off"] == alone[""], "a scale of nothing adds nothing"
    rng, core = random.Random(7), Core(llama)
    for i in range(16):
        core.ask(f"{i}", STORY, rng.choice(list(alone)), 24)
        for _ in range(rng.randrange(8)):
            core.batcher.step()
        if rng.random() < 0.3 and core.admission.resident:
            core.cells.swap_s_per_byte = rng.choice([1e-12, 1.0])  # swapped, or computed again
            core.admission.preempt(rng.choice(core.admission.resident))
        if i == 9:
            core.cells.tidy()
    asked = {id_: s.request.adapter for id_, s in core.admission.sequences.items()}
    core.finish()
    assert len(asked) > 4
    assert {id_: core.said[id_] for id_ in asked} == {id_: alone[name] for id_, name in asked.items()}


@pytest.mark.slow
def test_a_prefix_is_reused_under_its_own_adapter_only(llama: Llama) -> None:
    core = Core(llama)
    for name in ("one", "two", "", "one", "two", ""):
        core.ask(f"{len(core.done)}", STORY, name, 4)
        core.finish()
    cached = [core.done[f"{i}"].n_cached for i in range(6)]
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) > 20


# --- the daemon ---------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemon(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    adapters = {
        "one": str(folder / "one.gguf"),
        "twice": {"path": str(folder / "one.gguf"), "scale": 2.0},
        "gone": str(folder / "nowhere.gguf"),
    }
    settings = {"device": {"n_ctx": 512, "adapters": adapters}}
    async with (
        Upstream() as upstream,
        running(tmp_path_factory.mktemp("d"), server=upstream.url, policy="all-server", settings=settings) as process,
    ):
        await process.device_ready()
        yield process
        assert not [e for e in upstream.exchanges if "disco/device" in str(e.body)]


async def said(daemon: DaemonProcess, model: str, prompt: str = STORY) -> str:
    heard = await ask(daemon, prompt, model=model)
    assert heard.disco["winner"] == "device"
    assert set(heard.disco["endpoints"]) == {"device"}, "the server has no such adapter"
    return heard.text


@pytest.mark.asyncio(loop_scope="module")
async def test_each_adapter_that_is_there_is_a_model(daemon: DaemonProcess) -> None:
    names = {model.id async for model in daemon.client.models.list()}
    assert {"disco/device", "disco/device:one", "disco/device:twice"} <= names
    assert "disco/device:gone" not in names
    assert (await daemon.client.models.retrieve("disco/device:one")).id == "disco/device:one"
    with pytest.raises(openai.NotFoundError, match=r"gone.*No such file.*disco/device:one"):
        await said(daemon, "disco/device:gone")
    with pytest.raises(openai.NotFoundError, match=r"does not exist: .*disco/device:twice"):
        await said(daemon, "disco/device:other")
    adapters = (await daemon.state())["endpoints"]["device"]["adapters"]
    assert (adapters["one"], adapters["twice"]) == ("", "")
    assert "No such file" in adapters["gone"]
    assert "engine goes on without adapter gone" in daemon.log


@pytest.mark.asyncio(loop_scope="module")
async def test_adapters_beside_each_other_change_only_their_own_answers(daemon: DaemonProcess) -> None:
    models = ["disco/device", "disco/device:one", "disco/device:twice"]
    alone = [await said(daemon, model) for model in models]
    assert len(set(alone)) == 3
    assert await asyncio.gather(*(said(daemon, model) for model in 3 * models)) == 3 * alone
    raw = [
        (await daemon.client.completions.create(model=model, prompt="Once upon a time", temperature=0)).choices[0].text
        for model in models
    ]
    assert len(set(raw)) == 3


@pytest.mark.asyncio(loop_scope="module")
async def test_a_second_turn_reuses_what_its_adapter_has_computed(daemon: DaemonProcess) -> None:
    async def turn(model: str, messages: list[Any]) -> tuple[str, int]:
        answer = await daemon.client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=12
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.choices[0].message.content or "", answer.usage.prompt_tokens_details.cached_tokens or 0

    first: list[Any] = [{"role": "user", "content": "Name three birds that live near the sea, please, and say why."}]
    text, template = await turn("disco/device:one", first)
    second = [*first, {"role": "assistant", "content": text}, {"role": "user", "content": "And three fish?"}]
    assert (await turn("disco/device:twice", second))[1] <= template, "what all prompts have in common"
    assert (await turn("disco/device:one", second))[1] > template + 20


@pytest.mark.asyncio(loop_scope="module")
async def test_the_server_cannot_be_asked_for_an_adapter(daemon: DaemonProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="contradict"):
        await daemon.client.chat.completions.create(
            model="disco/device:one",
            messages=[{"role": "user", "content": "Hi"}],
            extra_body={"disco": {"route": "server"}},
        )
