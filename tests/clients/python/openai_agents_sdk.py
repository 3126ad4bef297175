import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cases import HELLO, KEY, LIMIT, LONGER, QUESTION, SUNNY, URL, City, fails, get_weather, is_city, run
from openai import AsyncOpenAI, NotFoundError

set_tracing_disabled(True)
# One script for both of the library's models: of chats, and of the Responses API.
KIND = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[sys.argv[1]]


def of(model, limit=LIMIT, **more):
    client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    return Agent(
        name="a", model=KIND(model=model, openai_client=client), model_settings=ModelSettings(max_tokens=limit), **more
    )


def chat(model):
    assert Runner.run_sync(of(model, LONGER), HELLO).final_output  # an answer that its limit cut it takes for an error


def stream(model):
    async def streamed():
        answer = Runner.run_streamed(of(model, LONGER), HELLO)
        kinds = {event.type async for event in answer.stream_events()}
        assert "raw_response_event" in kinds
        return answer.final_output

    assert asyncio.run(streamed())


def schema(model):
    is_city(Runner.run_sync(of(model, LONGER, output_type=City), HELLO).final_output)


def tool(model):
    assert SUNNY in Runner.run_sync(of(model, tools=[function_tool(get_weather)]), QUESTION).final_output


def error(model):
    fails(lambda: chat(model), NotFoundError)


run("openai-agents", {"chat": chat, "stream": stream, "schema": schema, "tool": tool, "error": error})
