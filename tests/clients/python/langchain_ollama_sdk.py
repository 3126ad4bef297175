from cases import HELLO, LIMIT, LONGER, QUESTION, SUNNY, URL, City, fails, get_weather, is_city, run
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool as made_tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from ollama import ResponseError

HOST = URL.removesuffix("/v1")


def of(model, limit=LIMIT):
    return ChatOllama(model=model, base_url=HOST, num_predict=limit)


def chat(model):
    answer = of(model).invoke(HELLO)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    assert len(OllamaEmbeddings(model="disco", base_url=HOST).embed_documents(["a", "b"])) == 2


def stream(model):
    assert "".join(chunk.content for chunk in of(model).stream(HELLO))


def schema(model):
    is_city(of(model, LONGER).with_structured_output(City, method="json_schema").invoke(HELLO))


def tool(model):
    weather = made_tool(get_weather)
    bound, said = of(model, LONGER).bind_tools([weather]), [HumanMessage(QUESTION)]
    said.append(bound.invoke(said))
    (call,) = said[-1].tool_calls
    said.append(weather.invoke(call))
    assert SUNNY in bound.invoke(said).content


def error(model):
    fails(lambda: of(model).invoke(HELLO), ResponseError)


run("langchain-ollama", {"chat": chat, "stream": stream, "schema": schema, "tool": tool, "error": error})
