"""What all libraries are asked for, and how they tell what came of it: a line of JSON. Runs in their own venv."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from importlib.metadata import version

from pydantic import BaseModel, Field

URL = os.environ["DISCO_URL"]
MODELS = os.environ["DISCO_MODELS"].split(",")
TOOL_MODELS = os.environ["DISCO_TOOL_MODELS"].split(",")  # those that call tools
NOBODY = "nobody"  # a model that is not there
KEY = "none"
HELLO = "Say hello."
QUESTION = "How is the weather in Paris?"
SUNNY = "sunny"
LIMIT, LONGER = 24, 400  # tokens of a text, and of JSON or what has to come to its own end


class City(BaseModel):
    """What an answer with a schema has, within bounds: a small model writes strings and digits on and on."""

    name: str = Field(max_length=40)
    people: int = Field(ge=0, le=10**9)


def is_city(found: object) -> None:
    """Raise unless it is a city, whatever it is wrapped in."""
    data = found if isinstance(found, dict) else json.loads(found) if isinstance(found, str) else found.model_dump()
    assert City.model_validate(data), found


def get_weather(city: str) -> str:
    """Return the weather in a city.

    Args:
        city: its name
    """
    return f"It is {SUNNY} in {city}."


def fails(call: Callable[[], object], *errors: type[Exception]) -> None:
    """Raise unless it fails with one of these, and with our own words."""
    said = ""
    try:
        call()
    except errors as e:
        said = str(e)
    assert "does not exist" in said, said or "no error"


def run(library: str, cases: dict[str, Callable[[str], None]]) -> None:
    """Try each case with each model, the error and the tools with those that they are for, and tell."""
    passed, failed = [], {}
    for name, case in cases.items():
        for model in [NOBODY] if name == "error" else TOOL_MODELS if name == "tool" else MODELS:
            title = f"{name} {model}"
            try:
                case(model)
            except BaseException as e:  # whatever a library raises is what is to be told
                failed[title] = "".join(traceback.format_exception_only(e)).strip()[-600:]
            else:
                passed.append(title)
    print(json.dumps({"version": version(library), "passed": passed, "failed": failed}))
