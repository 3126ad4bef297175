from cases import HELLO, KEY, LIMIT, LONGER, QUESTION, SUNNY, URL, City, fails, is_city, run
from openai import NotFoundError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)


class Weather(BaseModel):
    city: str


def asked(model, question=HELLO, limit=LIMIT, **more):
    return {"model": model, "input": question, "max_output_tokens": limit, "store": False} | more


def chat(model):
    answer = client.responses.create(**asked(model))
    assert answer.output_text
    assert answer.usage.output_tokens > 0
    assert client.responses.input_tokens.count(model=model, input=HELLO).input_tokens > 0


def stream(model):
    text, last = "", None
    for last in client.responses.create(**asked(model, stream=True)):
        text += last.delta if last.type == "response.output_text.delta" else ""
    assert text
    assert last.type in ("response.completed", "response.incomplete")  # the limit may have cut it
    assert last.response.output_text == text


def schema(model):
    is_city(client.responses.parse(**asked(model, limit=LONGER, text_format=City)).output_parsed)


def tool(model):
    function = pydantic_function_tool(Weather)["function"]
    tools, said = [{"type": "function", **function}], [{"role": "user", "content": QUESTION}]
    answer = client.responses.create(**asked(model, said, LONGER, tools=tools))
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert Weather.model_validate_json(call.arguments).city
    said += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": SUNNY}]
    assert SUNNY in client.responses.create(**asked(model, said, LONGER, tools=tools)).output_text


def error(model):
    fails(lambda: chat(model), NotFoundError)


run("openai", {"chat": chat, "stream": stream, "schema": schema, "tool": tool, "error": error})
