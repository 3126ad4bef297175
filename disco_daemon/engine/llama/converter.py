"""llama.cpp's converter of JSON schemas to grammars, with bounds, and with what schemas of tools need.

The converter leaves out what stands beside `anyOf` or a list of types, the bounds of numbers, and a comma; it names a
reference by its last word, lets line feeds stand in a string as they are, and knows no value without a type. All that
this one writes is JSON that the schema allows, but for what no grammar counts here: `multipleOf`, `uniqueItems`, `not`
and the like.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llama_cpp.llama_grammar import INVALID_RULE_CHARS_RE, PRIMITIVE_RULES, RESERVED_NAMES, BuiltinRule, SchemaConverter

from .patterns import spell
from .ranges import bounded, has_bounds

MAX_GRAMMAR = 256 * 1024  # characters of what a schema is turned into; llama.cpp reads that in milliseconds
MAX_STEPS = 10_000  # schemas and rules looked at: references may lead to the same ones again and again
MAX_ALIKE = 300  # rules whose names differ in nothing but signs; the converter tries one number after the other
# An escape, and one of a whole character: a model would have to complete half of one beyond U+FFFF.
ESCAPE = '"u" [0-9a-fA-F]{4}'
WHOLE = '"u" ([0-9a-cA-Ce-fE-F] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2})'
# A character of a string that is JSON: what JSON writes as an escape does not stand there as it is.
_CHAR = BuiltinRule(rf'[^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | {WHOLE})', [])
_SIGNS = {'"': '\\"', "\\": "\\\\"}
_BINDS = frozenset({
    "$ref", "oneOf", "anyOf", "allOf", "type", "const", "enum", "properties", "required", "additionalProperties",
    "items", "prefixItems", "pattern", "format", "minLength", "maxLength",
})  # fmt: skip
_VALUES = frozenset({"$ref", "oneOf", "anyOf", "allOf", "const", "enum"})
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "boolean": (bool,), "null": (type(None),), "integer": (int,), "number": (int, float),
    "object": (dict,), "array": (list,),
}  # fmt: skip


class GrammarError(ValueError):
    """A response format that cannot be obeyed; the message is fit for a user."""


class Converter(SchemaConverter):  # type: ignore[misc]
    """llama.cpp's converter, which gives up where a schema's grammar grows beyond all bounds."""

    def __init__(self) -> None:
        super().__init__(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
        self._n_steps = self._n_characters = 0
        self._names: dict[str, str] = {}  # of rules, by the references they stand for

    @property
    def rules(self) -> dict[str, str]:
        """The rules so far, by name."""
        return dict(self._rules)

    def visit(self, schema: Any, name: str) -> Any:
        """Make the rules of one schema."""
        self._step(0)
        plain = self._plain(schema)
        if isinstance(plain, dict) and [] in (plain.get("enum"), plain.get("anyOf"), plain.get("oneOf")):
            raise GrammarError("The JSON schema has an 'enum' or 'anyOf' of no values: no answer could hold to it.")
        if name and isinstance(plain, dict) and not plain.keys() & _BINDS:
            self._add_primitive("value", PRIMITIVE_RULES["value"])
            return "value"
        if isinstance(plain, dict) and plain.get("type") in ("integer", "number") and not plain.keys() & _VALUES:
            return self._number(plain, name) if has_bounds(plain) else super().visit(plain, name)
        return super().visit(plain, name)

    def _number(self, schema: dict[str, Any], name: str) -> Any:
        """Make the rule of a number within bounds."""
        numbers = bounded(schema, is_integer=schema["type"] == "integer")
        if not numbers:
            raise GrammarError("The JSON schema has a 'minimum' above its 'maximum': no answer could hold to it.")
        return self._add_rule(f"{name}-" if name in RESERVED_NAMES else name or "root", f"({numbers}) space")

    def _plain(self, schema: Any) -> Any:
        """Return a schema that says the same in words that the converter knows."""
        if schema is True:
            return {}
        if not isinstance(schema, dict) or "$ref" in schema:
            return schema
        if parts := schema.get("allOf"):
            base = {k: v for k, v in schema.items() if k != "allOf"}
            if len(parts) == 1 and not base.keys() & _BINDS:
                return self._plain(parts[0])
            schema = self._merged(base, *parts)
        kind = "anyOf" if "anyOf" in schema else "oneOf"
        if kind in schema:
            base = {k: v for k, v in schema.items() if k != kind}
            return {"anyOf": [self._merged(base, part) for part in schema[kind]]} if base.keys() & _BINDS else schema
        if isinstance(types := schema.get("type"), list):
            kinds = [_of_type(schema, kind) for kind in types]
            return {"anyOf": [kind for kind in kinds if kind.get("enum") != []]}
        missing = set(schema.get("required", ())) - schema.get("properties", {}).keys()
        rest = schema.get("additionalProperties", {})
        if missing and rest is not False and schema.get("type", "object") == "object":
            more = {name: rest for name in schema["required"] if name in missing}
            return schema | {"properties": schema.get("properties", {}) | more}
        return schema

    def _merged(self, *parts: Any) -> Any:
        """Return a schema that asks for all that its parts ask for, as far as they are objects."""
        found: dict[str, Any] = {}
        for part in parts:
            self._step(0)
            seen: set[str] = set()
            while isinstance(part, dict) and (ref := str(part.get("$ref"))) in self._refs and ref not in seen:
                seen.add(ref)
                part = {k: v for k, v in part.items() if k != "$ref"} | self._refs[ref]
            if isinstance(part, dict):
                properties = found.get("properties", {}) | part.get("properties", {})
                required = list(dict.fromkeys([*found.get("required", ()), *part.get("required", ())]))
                found |= part
                found |= ({"properties": properties} if properties else {}) | (
                    {"required": required} if required else {}
                )
        return found

    def _resolve_ref(self, ref: str) -> Any:
        if ref in self._refs_being_resolved:
            return self._names[ref]
        if ref not in self._names:
            self._names[ref] = self._new_name(ref.rpartition("/")[2])
            self._refs_being_resolved.add(ref)
            self._names[ref] = self.visit(self._refs[ref], self._names[ref])
            self._refs_being_resolved.remove(ref)
        return self._names[ref]

    def _new_name(self, word: str) -> str:
        """Return a name for a rule that holds itself: no other may take it before it is written.

        All that come meanwhile have a hyphen.
        """
        wish = name = "".join(filter(str.isalnum, word.encode("ascii", "ignore").decode())) or "ref"
        while name in self._rules or name in RESERVED_NAMES or name in self._names.values():
            name = f"{wish}{len(self._names)}"
            wish += "x"
        return name

    def _generate_constant_rule(self, value: Any) -> str:
        return literal(json.dumps(value, ensure_ascii=False))

    def _format_literal(self, text: str) -> str:
        return literal(json.dumps(json.loads(text), ensure_ascii=False))

    def _build_object_rule(
        self, properties: list[tuple[str, Any]], required: set[str], name: str, additional_properties: Any
    ) -> str:
        """Return the body of an object's rule.

        llama.cpp's own has no comma between the last property that may be missing and those that have no name.
        """
        prefix = f"{name}-" if name else ""
        pairs = dict[str, str]()
        for key, inner in properties:
            value = self.visit(inner, f"{prefix}{key}")
            pairs[key] = self._add_rule(
                f"{prefix}{key}-kv", f'{self._generate_constant_rule(key)} space ":" space {value}'
            )
        more = ""  # the rule of one without a name
        if additional_properties is True or isinstance(additional_properties, dict):
            inner = {} if additional_properties is True else additional_properties
            value = self.visit(inner, f"{prefix}additional-value")
            text = self._add_primitive("string", PRIMITIVE_RULES["string"])
            more = self._add_rule(f"{prefix}additional-kv", f'{text} ":" space {value}')
        begins = [self._add_rule(f"{prefix}additional-kvs", f'{more} ( "," space {more} )*')] if more else []
        rest = f'( "," space {more} )*' if more else ""
        for key in reversed([key for key in pairs if key not in required]):
            after = self._add_rule(f"{prefix}{key}-rest", rest) if rest else ""
            begins.append(f"{pairs[key]} {after}".rstrip())
            rest = f'( "," space {pairs[key]} )? {after}'.rstrip()
        rule = '"{" space ' + ' "," space '.join(pair for key, pair in pairs.items() if key in required)
        if begins:
            either = " | ".join(reversed(begins))
            rule += f' ( "," space ( {either} ) )?' if required & pairs.keys() else f" ({either} )?"
        return rule + ' "}" space'

    def _visit_pattern(self, pattern: str, name: str) -> Any:
        return super()._visit_pattern(spell(pattern), name)

    def _add_primitive(self, name: str, rule: BuiltinRule) -> Any:
        return super()._add_primitive(name, _CHAR if rule is PRIMITIVE_RULES["char"] else rule)

    def _add_rule(self, name: str, rule: str) -> Any:
        n_before = len(self._rules)
        if f"{INVALID_RULE_CHARS_RE.sub('-', name)}{MAX_ALIKE}" in self._rules:
            raise GrammarError("The JSON schema has too many names that differ in no letter and no digit.")
        key = super()._add_rule(name, rule)
        self._step(len(name) + len(rule) if len(self._rules) > n_before else 0)
        return key

    def _step(self, n_characters: int) -> None:
        self._n_steps += 1
        self._n_characters += n_characters
        if self._n_steps > MAX_STEPS or self._n_characters > MAX_GRAMMAR:
            raise GrammarError(
                "The JSON schema makes too large a grammar: lower its counts, or name fewer properties and $refs."
            )


def resolve(converter: Converter, schema: dict[str, Any]) -> Any:
    """Resolve a schema's references. The converter looks for none beside a reference: not in its $defs."""
    refers_to_all = _name_whole(schema)
    if "$ref" not in schema and not refers_to_all:
        return converter.resolve_refs(schema, "stdin")
    root = {"$ref": schema.pop("$ref")} if "$ref" in schema else schema
    converter.resolve_refs(schema | {"": root}, "stdin")
    return root


def _name_whole(schema: Any) -> bool:
    """Name the whole schema `#/`, which the converter finds, where it is `#`; return whether it is named at all."""
    if isinstance(schema, list):
        return sum(map(_name_whole, schema)) > 0  # all of them, not up to the first
    if not isinstance(schema, dict):
        return False
    found = schema.get("$ref") == "#"
    if found:
        schema["$ref"] = "#/"
    return _name_whole(list(schema.values())) or found


def literal(text: str) -> str:
    """Return a text as a literal of a grammar."""
    return '"' + "".join(_SIGNS.get(c, c) if c.isprintable() else f"\\U{ord(c):08X}" for c in text) + '"'


def _of_type(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return one of the types of a schema that has several, with the values of its enum that are of that type."""
    made = dict(schema) | {"type": kind}
    if isinstance(values := schema.get("enum"), list):
        made["enum"] = [value for value in values if _is_of_type(value, kind)]
    return made


def _is_of_type(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, ()))
