from anthropic import Anthropic, NotFoundError
from cases import HELLO, KEY, LIMIT, LONGER, QUESTION, SUNNY, URL, City, fails, is_city, run

client = Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, max_retries=0)
messages = [{"role": "user", "content": HELLO}]
WEATHER = {
    "name": "get_weather",
    "description": "Return the weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def said(message):
    return "".join(block.text for block in message.content if block.type == "text")


def chat(model):
    answer = client.messages.create(model=model, messages=messages, max_tokens=LIMIT)
    assert said(answer)
    assert answer.usage.output_tokens > 0
    assert client.messages.count_tokens(model=model, messages=messages).input_tokens > 0


def stream(model):
    with client.messages.stream(model=model, messages=messages, max_tokens=LIMIT) as events:
        text = "".join(events.text_stream)
        assert text
        assert said(events.get_final_message()) == text


def schema(model):
    form = {"type": "json_schema", "schema": City.model_json_schema()}
    answer = client.messages.create(model=model, messages=messages, max_tokens=LONGER, output_config={"format": form})
    is_city(said(answer))


def tool(model):
    turns = [{"role": "user", "content": QUESTION}]
    answer = client.messages.create(model=model, messages=turns, max_tokens=LONGER, tools=[WEATHER])
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.input["city"]
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": SUNNY}
    turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert SUNNY in said(client.messages.create(model=model, messages=turns, max_tokens=LONGER, tools=[WEATHER]))


def error(model):
    fails(lambda: chat(model), NotFoundError)


run("anthropic", {"chat": chat, "stream": stream, "schema": schema, "tool": tool, "error": error})
