"""What the doctor says of the model that ships."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disco_daemon.cli.doctor import stand_in
from disco_daemon.cli.doctor.finding import Level, ok, wrong
from disco_daemon.config.schema import Config, DeviceSettings
from disco_daemon.machines.model_offers import Recommendation
from disco_daemon.models.offered import Memory, predict, shipped
from disco_daemon.models.roofline import MachineSpeed
from docs.recommended import MEASURED

FOUND = ok("model", "/models/SmolLM2, 98 MB")
FITS = next(model for model in shipped() if model.name == "qwen3-4b")


@pytest.mark.parametrize(("fits", "measured"), [(True, MEASURED), (True, None), (False, MEASURED)])
def test_a_real_model_that_fits_is_named_beside_the_stand_in_once_the_speed_is_known(
    fits: bool, measured: MachineSpeed | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DISCO_CONFIG", str(tmp_path / "config.toml"))

    async def recommendation(*_: Any, may_measure: Callable[[], bool]) -> Recommendation:
        assert not may_measure()
        models = (predict(FITS, Memory(int(4.2e9), fits=True), measured),)
        return Recommendation(8 * 2**30, 0, measured, models if fits else ())

    monkeypatch.setattr(stand_in, "recommendation", recommendation)
    found = stand_in.real_model(Config(), FOUND)
    if not fits:
        assert found == FOUND
        return
    assert found.level is Level.WARN
    if measured is None:
        assert (FITS.title in found.found, "`disco models recommend`" in found.mend) == (False, True)
        return
    assert "A real model fits: Qwen3 4B Instruct 2507 (2.5 GB, 4.2 GB of memory, Apache-2.0)" in found.found
    assert "`disco models pull qwen3-4b --use`" in found.mend


def test_another_model_or_one_that_is_wrong_is_left_as_it_is() -> None:
    broken = wrong("model", "it is no GGUF file", "get another one")
    assert stand_in.real_model(Config(), broken) == broken
    assert stand_in.real_model(Config(device=DeviceSettings(model="/models/own.gguf")), FOUND) == FOUND
    assert stand_in.real_model(Config(device=DeviceSettings(base_url="http://127.0.0.1:1/v1")), FOUND) == FOUND
