from cases import HELLO, KEY, LIMIT, LONGER, QUESTION, SUNNY, URL, City, fails, is_city, run
from openai import NotFoundError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
messages = [{"role": "user", "content": HELLO}]


class Weather(BaseModel):
    city: str


def chat(model):
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=LIMIT)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def stream(model):
    chunks = client.chat.completions.create(model=model, messages=messages, max_tokens=LIMIT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def schema(model):
    answer = client.chat.completions.parse(model=model, messages=messages, response_format=City, max_tokens=LONGER)
    is_city(answer.choices[0].message.parsed)


def tool(model):
    tools, said = [pydantic_function_tool(Weather)], [{"role": "user", "content": QUESTION}]
    message = client.chat.completions.create(model=model, messages=said, tools=tools).choices[0].message
    (call,) = message.tool_calls
    assert Weather.model_validate_json(call.function.arguments).city
    said += [message, {"role": "tool", "tool_call_id": call.id, "content": SUNNY}]
    assert SUNNY in client.chat.completions.create(model=model, messages=said, tools=tools).choices[0].message.content


def error(model):
    fails(lambda: chat(model), NotFoundError)


run("openai", {"chat": chat, "stream": stream, "schema": schema, "tool": tool, "error": error})
