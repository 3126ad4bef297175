import asyncio

from cases import HELLO, KEY, LIMIT, LONGER, QUESTION, SUNNY, URL, City, fails, get_weather, is_city, run
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def of(model, limit=LIMIT, **more):
    chosen = OpenAIChatModel(model, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    return Agent(chosen, model_settings={"max_tokens": limit}, **more)


def chat(model):
    answer = of(model).run_sync(HELLO)
    assert answer.output


def stream(model):
    async def streamed():
        async with of(model).run_stream(HELLO) as answer:
            return [text async for text in answer.stream_text(delta=True)]

    assert "".join(asyncio.run(streamed()))


def schema(model):
    is_city(of(model, LONGER, output_type=NativeOutput(City)).run_sync(HELLO).output)


def tool(model):
    assert SUNNY in of(model, LONGER, tools=[get_weather]).run_sync(QUESTION).output


def error(model):
    fails(lambda: chat(model), ModelHTTPError)


run("pydantic-ai-slim", {"chat": chat, "stream": stream, "schema": schema, "tool": tool, "error": error})
