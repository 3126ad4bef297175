"""What the file of the device's model says of it, for the API's lists of models."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ..api.ollama.ollama_models import DeviceFile
from ..endpoints.base import Endpoint
from ..endpoints.device import Device
from ..models.files import ModelFile, examine, thinks

MOST_FILES = 64  # headers that are remembered: more than there may be models


class DeviceFiles:
    """Describes the models of devices by their files; a header is read again only when the file is another one."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, float], ModelFile] = {}

    async def describe(self, device: Endpoint | None) -> DeviceFile | None:
        """Return what is known of it; None where no file can be read, as of a local server in the device's place."""
        if not isinstance(device, Device):
            return None
        engine = device.engine
        key = (Path(engine.config.model_path), device.known_since)
        found = self._known.get(key)
        if found is None:
            found = await asyncio.to_thread(examine, key[0])
            if len(self._known) >= MOST_FILES:
                self._known.clear()
            self._known[key] = found
        if not found.header.architecture:
            return None
        architecture = found.header.architecture
        n_layers = found.header.number(f"{architecture}.block_count") or 0
        on_gpu = engine.info.n_gpu_layers if engine.info is not None else 0
        alive_s = engine.keep_alive_s
        return DeviceFile(
            architecture=architecture,
            packing=found.header.packing,
            n_bytes=found.n_bytes,
            n_parameters=found.n_parameters,
            thinks=thinks(found.header),
            is_loaded=device.ready,
            leaves_at=engine.clock.wall() + alive_s if alive_s > 0 else None,
            on_gpu=1.0 if on_gpu < 0 else min(1.0, on_gpu / (n_layers + 1)),
        )
