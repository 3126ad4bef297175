import instructor
from cases import HELLO, KEY, LIMIT, LONGER, URL, City, fails, is_city, run
from instructor.core.exceptions import InstructorRetryException
from openai import NotFoundError, OpenAI

messages = [{"role": "user", "content": HELLO}]


def of(mode):
    return instructor.from_openai(OpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=mode)


def chat(model):
    asked = of(instructor.Mode.JSON_SCHEMA).chat.completions
    answer = asked.create(model=model, messages=messages, response_model=None, max_tokens=LIMIT)
    assert answer.choices[0].message.content


def stream(model):
    asked = of(instructor.Mode.JSON_SCHEMA).chat.completions
    *_, last = asked.create_partial(model=model, messages=messages, response_model=City, max_tokens=LONGER)
    is_city(last)


def schema(model):
    asked = of(instructor.Mode.JSON_SCHEMA).chat.completions
    is_city(asked.create(model=model, messages=messages, response_model=City, max_tokens=LONGER, max_retries=0))


def tool(model):
    asked = of(instructor.Mode.TOOLS).chat.completions
    is_city(asked.create(model=model, messages=messages, response_model=City, max_tokens=LONGER, max_retries=0))


def error(model):
    fails(lambda: chat(model), NotFoundError, InstructorRetryException)


run("instructor", {"chat": chat, "stream": stream, "schema": schema, "tool": tool, "error": error})
