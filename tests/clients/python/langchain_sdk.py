from cases import HELLO, KEY, LIMIT, LONGER, QUESTION, SUNNY, URL, City, fails, get_weather, is_city, run
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool as made_tool
from langchain_openai import ChatOpenAI
from openai import NotFoundError


def of(model, limit=LIMIT):
    return ChatOpenAI(model=model, base_url=URL, api_key=KEY, max_retries=0, max_tokens=limit)


def chat(model):
    answer = of(model).invoke(HELLO)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0


def stream(model):
    assert "".join(chunk.content for chunk in of(model).stream(HELLO))


def schema(model):
    is_city(of(model, LONGER).with_structured_output(City, method="json_schema").invoke(HELLO))


def tool(model):
    weather = made_tool(get_weather)
    bound, said = of(model).bind_tools([weather]), [HumanMessage(QUESTION)]
    said.append(bound.invoke(said))
    (call,) = said[-1].tool_calls
    said.append(weather.invoke(call))
    assert SUNNY in bound.invoke(said).content


def error(model):
    fails(lambda: chat(model), NotFoundError)


run("langchain-openai", {"chat": chat, "stream": stream, "schema": schema, "tool": tool, "error": error})
