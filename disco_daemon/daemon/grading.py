"""How good both sides are, and which is a stand-in, by the settings, the device's file and the server's name."""

from __future__ import annotations

from collections.abc import Mapping

from ..config.schema import Config
from ..endpoints.base import Endpoint, Sized
from ..errors import ConfigError
from ..machines.device_settings import header_of, model_path
from ..machines.whole_device import name_of
from ..models.gguf import Header
from ..models.grades import chosen_grade, grade_of_file, grade_of_name
from ..types import EQUAL, Grade, Relation, Side, Unequal, relation


class Grading:
    """Says which side is a stand-in under these settings; a server may tell of its model at any time."""

    def __init__(self, config: Config, endpoints: Mapping[Side, Endpoint]) -> None:
        self._config, self._server = config, endpoints.get(Side.SERVER)
        self._there = len(endpoints) > 1
        self._device = device_grade(config) if self._there else Grade()
        self._known: tuple[int | None, Relation] | None = None

    def __call__(self) -> Relation:
        """Return how the sides stand to each other now."""
        if not self._there:
            return EQUAL
        told = self._server.n_parameters if isinstance(self._server, Sized) else None
        if self._known is None or self._known[0] != told:
            unequal = Unequal(self._config.policy.unequal)
            self._known = told, relation(self._device, server_grade(self._config, told), unequal)
        return self._known[1]


def device_grade(config: Config) -> Grade:
    """Return the grade of this machine's model; unknown where its file tells nothing. Blocks on disk."""
    settings = config.device
    if settings.grade is not None:
        return chosen_grade(settings.grade)
    if settings.base_url:
        return grade_of_name(settings.model)
    try:
        path = model_path(settings)
    except ConfigError:
        return Grade()
    header = header_of(path) or Header(0, {})
    if config.split.enabled:  # the file may have some of the layers only
        header = Header(0, header.keys)
    return grade_of_file(header, [name for name in (name_of(path), path.name) if name])


def server_grade(config: Config, n_parameters: int | None = None) -> Grade:
    """Return the grade of the server's model, of which its catalogue may tell the number of parameters."""
    if config.server.grade is not None:
        return chosen_grade(config.server.grade)
    return grade_of_name(config.server.model, n_parameters)
