"""The scripted server of the tests, which here also calls tools and keeps to schemas, as a model would that can."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from disco_daemon.bench.loopback import SSE_HEADERS
from disco_daemon.bench.script import DONE, Exchange, sse
from tests.fixtures.upstream import Upstream

SAID = "It is sunny in Paris."
LAST = "final_answer"  # smolagents' tool for the answer itself


def example(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Return something that a schema allows, of the kinds that the clients' schemas have."""
    if "$ref" in schema:
        return example(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    match schema.get("type"):
        case "object":
            return {name: example(part, root) for name, part in schema.get("properties", {}).items()}
        case "array":
            return [example(schema.get("items", {}), root)]
        case "integer" | "number":
            return 3
        case "boolean":
            return True
    return SAID if "answer" in schema.get("description", "") else "Paris"


class ScriptedServer(Upstream):
    """Calls the first tool that it is offered, once, and then says what came of it."""

    async def respond(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        body = exchange.body
        deltas, reason = self.deltas(body)
        if not deltas:
            return await super().respond(request, exchange)
        response = web.StreamResponse(headers=SSE_HEADERS)
        await response.prepare(request)
        head = exchange.envelope("chat.completion.chunk")
        for delta in deltas:
            await response.write(sse(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}))
        await response.write(sse(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}))
        usage = {"prompt_tokens": 20, "completion_tokens": len(deltas), "total_tokens": 20 + len(deltas)}
        await response.write(sse(head | {"choices": [], "usage": usage}) + DONE)
        await response.write_eof()
        return response

    def deltas(self, body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
        """Return the pieces of an answer with a tool or a schema; none for any other."""
        tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
        is_done = "sunny" in json.dumps(body["messages"])
        if tools and is_done and LAST not in tools:
            return [{"role": "assistant", "content": SAID}], "stop"
        if tools:
            name = LAST if is_done else next(name for name in tools if name != LAST)
            schema = tools[name].get("parameters") or {"type": "object"}
            text = json.dumps({"answer": SAID} if is_done else example(schema, schema))
            first = {"index": 0, "id": f"call_{self.n_requests}", "type": "function"}
            half = len(text) // 2
            return [
                {"role": "assistant", "content": None},
                {"tool_calls": [first | {"function": {"name": name, "arguments": ""}}]},
                {"tool_calls": [{"index": 0, "function": {"arguments": text[:half]}}]},
                {"tool_calls": [{"index": 0, "function": {"arguments": text[half:]}}]},
            ], "tool_calls"
        form = body.get("response_format") or {}
        if form.get("type") == "json_schema":
            schema = form["json_schema"]["schema"]
            return [{"role": "assistant", "content": json.dumps(example(schema, schema))}], "stop"
        return [], ""
