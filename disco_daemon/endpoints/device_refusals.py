"""Why a request is not for the device: what its fields ask, the form of its answer, its tools, the kind of its model.

Pure.
"""

from __future__ import annotations

from ..engine import constraints
from ..engine.tool_rules import offered
from ..tools.format import ToolError
from ..types import (
    GenerationRequest,
    Refusal,
    TextKind,
    Treatment,
    form_parameter,
    named,
    refused_tools,
    response_format,
    tool_use,
)


def no_answers(model: str, kind: TextKind) -> str:
    """Return why a model that makes vectors of texts, or rates them, is not asked for an answer, and what to do."""
    route = "rates texts (/v1/rerank)" if kind.rates else "makes vectors of texts (/v1/embeddings)"
    mend = "`disco models use` another model, or add a server by `disco setup`"
    return f"the device's model {model} {route}, and answers nothing: {mend}"


def refused_field(request: GenerationRequest) -> Refusal | None:
    """Return why a request is not for the device: the fields of `types.fields` that say so."""
    if forms := named(request.extra, Treatment.FORM):
        msg = f"the device cannot hold an answer to {', '.join(forms)}: give a JSON schema by response_format"
        return Refusal(msg, forms[0])
    if needs := named(request.extra, Treatment.REFUSED):
        return Refusal(f"the device does not support {', '.join(needs)}", needs[0])
    if request.drawing.goes_on and (form := form_parameter(request.extra)):
        name = "ignore_eos" if request.drawing.ignore_eos else "min_tokens"
        msg = (
            f"an answer ends where its form does, so {name} cannot be kept together with {form}: leave one of them out"
        )
        return Refusal(msg, name)
    return None


def refused_form(request: GenerationRequest) -> Refusal | None:
    """Return why the form of the answer cannot be kept."""
    form, param = response_format(request.extra) or {}, form_parameter(request.extra) or "response_format"
    if param == "response_format" and form and form.get("type") not in ("json_object", "json_schema"):
        msg = "response_format.type must be text, json_object or json_schema for the device"
        return Refusal(msg, param)
    try:
        constraints.check(form)
    except constraints.SchemaError as e:
        return Refusal(str(e), param)
    return None


def unoffered(request: GenerationRequest, tool_format: str) -> Refusal | None:
    """Return why tools cannot be offered to a model of this format of calls; "" while that is not known."""
    if request.prompt is not None:
        return None  # nothing tells the model of them there
    if refusal := refused_tools(request.extra):
        return refusal
    if (use := tool_use(request.extra)) is None:
        return None
    if request.drawing.goes_on:
        name = "ignore_eos" if request.drawing.ignore_eos else "min_tokens"
        return Refusal(f"an answer may end with a call, so {name} cannot be kept together with tools", name)
    try:
        offered(use, tool_format)
    except ToolError as e:
        return Refusal(str(e), "tools")
    return None
