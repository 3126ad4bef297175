import json

import litellm
from cases import HELLO, KEY, LIMIT, LONGER, QUESTION, SUNNY, URL, City, fails, is_city, run

litellm.telemetry = False
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ask(model, question=HELLO, **more):
    said = question if isinstance(question, list) else [{"role": "user", "content": question}]
    wanted = {"max_tokens": LIMIT} | more
    return litellm.completion(f"openai/{model}", said, api_base=URL, api_key=KEY, num_retries=0, **wanted)


def chat(model):
    answer = ask(model)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def stream(model):
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(model, stream=True))


def schema(model):
    is_city(ask(model, response_format=City, max_tokens=LONGER).choices[0].message.content)


def tool(model):
    said = [{"role": "user", "content": QUESTION}]
    said.append(ask(model, said, tools=[TOOL]).choices[0].message.model_dump(exclude_none=True))
    (call,) = said[-1]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"]
    said.append({"role": "tool", "tool_call_id": call["id"], "content": SUNNY})
    assert SUNNY in ask(model, said, tools=[TOOL]).choices[0].message.content


def error(model):
    fails(lambda: ask(model), litellm.NotFoundError)


run("litellm", {"chat": chat, "stream": stream, "schema": schema, "tool": tool, "error": error})
