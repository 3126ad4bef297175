from cases import HELLO, KEY, LIMIT, LONGER, QUESTION, SUNNY, URL, City, fails, get_weather, is_city, run
from ollama import Client, ResponseError

client = Client(host=URL.removesuffix("/v1"), headers={"Authorization": f"Bearer {KEY}"})
messages = [{"role": "user", "content": HELLO}]
options = {"num_predict": LIMIT}


def chat(model):
    answer = client.chat(model, messages, options=options)
    assert answer.message.content
    assert answer.eval_count > 0
    assert 0 < answer.eval_duration < answer.total_duration
    assert f"{model}:latest" in [one.model for one in client.list().models]
    assert client.show(model).modelinfo["general.architecture"]
    assert client.generate(model, HELLO, options=options).response


def stream(model):
    pieces = list(client.chat(model, messages, stream=True, options=options))
    assert "".join(piece.message.content for piece in pieces)
    assert [piece.done for piece in pieces[-2:]] == [False, True]


def schema(model):
    form = City.model_json_schema()
    is_city(client.chat(model, messages, format=form, options={"num_predict": LONGER}).message.content)


def tool(model):
    turns = [{"role": "user", "content": QUESTION}]
    said = client.chat(model, turns, tools=[get_weather]).message
    (call,) = said.tool_calls
    result = get_weather(**call.function.arguments)
    turns += [said, {"role": "tool", "tool_name": call.function.name, "content": result}]
    assert SUNNY in client.chat(model, turns, tools=[get_weather]).message.content


def error(model):
    fails(lambda: chat(model), ResponseError)
    fails(lambda: list(client.chat(model, messages, stream=True)), ResponseError)


run("ollama", {"chat": chat, "stream": stream, "schema": schema, "tool": tool, "error": error})
