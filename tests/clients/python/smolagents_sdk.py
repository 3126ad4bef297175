from cases import HELLO, KEY, LIMIT, LONGER, QUESTION, SUNNY, URL, City, fails, get_weather, is_city, run
from openai import NotFoundError
from smolagents import ChatMessage, OpenAIModel, ToolCallingAgent
from smolagents import tool as made_tool

messages = [ChatMessage(role="user", content=[{"type": "text", "text": HELLO}])]
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": City.model_json_schema()}}


def of(model, limit=LIMIT):
    once = {"client_kwargs": {"max_retries": 0}, "retry": False}
    return OpenAIModel(model, api_base=URL, api_key=KEY, max_tokens=limit, **once)


def chat(model):
    assert of(model).generate(messages).content


def stream(model):
    assert "".join(delta.content or "" for delta in of(model).generate_stream(messages))


def schema(model):
    is_city(of(model, LONGER).generate(messages, response_format=FORM).content)


def tool(model):
    agent = ToolCallingAgent(tools=[made_tool(get_weather)], model=of(model, LONGER), max_steps=4, verbosity_level=0)
    assert SUNNY in str(agent.run(QUESTION))


def error(model):
    fails(lambda: chat(model), NotFoundError)


run("smolagents", {"chat": chat, "stream": stream, "schema": schema, "tool": tool, "error": error})
