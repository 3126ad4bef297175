from cases import HELLO, KEY, LIMIT, LONGER, QUESTION, SUNNY, URL, City, fails, get_weather, is_city, run
from llm.default_plugins.openai_models import Chat
from openai import NotFoundError


def of(model):
    return Chat(model, model_name=model, api_base=URL, supports_schema=True, supports_tools=True)


def chat(model):
    assert of(model).prompt(HELLO, stream=False, key=KEY, max_tokens=LIMIT).text()


def stream(model):
    assert "".join(of(model).prompt(HELLO, stream=True, key=KEY, max_tokens=LIMIT))


def schema(model):
    is_city(of(model).prompt(HELLO, stream=False, key=KEY, schema=City, max_tokens=LONGER).text())


def tool(model):
    assert SUNNY in of(model).chain(QUESTION, tools=[get_weather], key=KEY, options={"max_tokens": LIMIT}).text()


def error(model):
    fails(lambda: chat(model), NotFoundError)


run("llm", {"chat": chat, "stream": stream, "schema": schema, "tool": tool, "error": error})
