"""A fresh daemon on a machine that was measured, with models that nobody has asked yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from disco_daemon.machines.device_settings import is_for_gpu
from disco_daemon.machines.expected_speed import expected_of
from disco_daemon.models.default import default_model_path
from disco_daemon.models.files import whole_header
from disco_daemon.models.listed import listed
from disco_daemon.profiling.measured_machine import keep_speed, machine_key
from disco_daemon.store import History
from docs.recommended import MEASURED
from tests.fixtures.daemon import ask, running

LENGTH = 400  # tokens of a prompt that is planned for


@pytest.mark.skipif(is_for_gpu(), reason="what a GPU does is not predicted")
async def test_new_models_are_planned_by_their_predicted_times_and_then_by_their_own(tmp_path: Path) -> None:
    keep_speed(tmp_path / "disco" / "profiles" / "devices", machine_key(1, "of some build"), MEASURED)
    path = default_model_path()
    work = listed(path, whole_header(path)).work
    predicted_s = work.prompt_s(MEASURED, LENGTH)
    models = [{"name": "helper", "model": str(path), "n_ctx": 512}]
    async with running(tmp_path, models=models) as daemon:
        async with daemon.session.get(f"{daemon.root}/disco/v1/plan?tokens={LENGTH}") as response:
            plan = await response.json()
        before = (await daemon.state())["learned"]["device_ttft"]
        assert before["n"] == 0
        assert LENGTH * before["k_s_per_token"] + before["c_s"] == pytest.approx(predicted_s, rel=0.05)
        assert plan["learned"]["device_ttft"] == before, "plans go by it"
        await daemon.device_ready()
        assert (await ask(daemon, "Hello")).text
        after = (await daemon.state())["learned"]["device_ttft"]
        assert after["n"] == 1
        assert after["k_s_per_token"] != pytest.approx(before["k_s_per_token"], rel=1e-6), "its engine has measured it"
    for _ in range(2):
        with History(tmp_path / "history.sqlite") as history:
            named = history.learned(f"alone | helper | engine {path}")
        assert named is not None
        assert named["device"]["prior"] == pytest.approx([before["k_s_per_token"], before["c_s"]])
        assert named["decode_tps"] == {"device": pytest.approx(expected_of(work, MEASURED).decode_tps)}
        async with running(tmp_path, models=models):  # what it was not asked it knows as before
            pass
