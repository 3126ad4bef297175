"""A request for the model that a rule names: never another one than the client allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disco_daemon.api.answering import by_rule
from disco_daemon.api.names import NamedModel
from disco_daemon.errors import RequestError
from disco_daemon.types import BOTH, GenerationRequest, Side

DEVICE, SERVER = frozenset({Side.DEVICE}), frozenset({Side.SERVER})
ASKED = GenerationRequest("q", (), rule="code")
CODER = NamedModel("disco/coder", DEVICE, "coder")
THERE = NamedModel("big", SERVER, servers=("one/big", "two/big"))


def test_a_named_model_answers_what_would_be_anybodys() -> None:
    found = by_rule(ASKED, CODER)
    assert (found.allowed, found.local, found.ruled) == (DEVICE, "coder", True)
    found = by_rule(ASKED, THERE)
    assert (found.allowed, found.local, found.servers) == (SERVER, "", ("one/big", "two/big"))


def test_of_several_servers_those_are_left_that_the_client_names_too() -> None:
    asked = replace(ASKED, allowed=SERVER, servers=("two/big", "three/big"))
    assert by_rule(asked, THERE).servers == ("two/big",)


@pytest.mark.parametrize(
    ("asked", "model", "says"),
    [
        (replace(ASKED, allowed=SERVER), CODER, "asks for another one"),
        (replace(ASKED, allowed=DEVICE, private=True), THERE, "is private"),
        (replace(ASKED, allowed=DEVICE, local="small"), CODER, "asks for another one"),
        (replace(ASKED, allowed=DEVICE, adapter="law"), CODER, "asks for another one"),
        (replace(ASKED, allowed=SERVER, servers=("three/big",)), THERE, "asks for another one"),
    ],
)
def test_where_the_client_asks_for_another_one_an_error_names_the_rule(
    asked: GenerationRequest, model: NamedModel, says: str
) -> None:
    with pytest.raises(RequestError, match=rf"^Rule 'code' has only '{model.target}' answer this, and the .*{says}"):
        by_rule(asked, model)
    assert by_rule(replace(asked, allowed=BOTH, local="", adapter="", servers=(), private=False), model).ruled
