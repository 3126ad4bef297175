"""What becomes of the schemas of the official JSON-Schema-Test-Suite, and of answers by them.

`python -m benchmarks.schemas --suite DIR` prints JSON; DIR is a checkout of json-schema-org/JSON-Schema-Test-Suite, or
the folder `json` of the source distribution of `jsonschema`, which has a copy. Without it that is downloaded, by the
hash in requirements-dev.lock. Of each schema in the required tests of drafts 4 to 2020-12:

- `held`: the grammar allows each instance that is valid, and none that is not.
- `narrower`: none that is not valid, but not each that is: one with members that the schema does not name, of another
  type than its keywords speak of, or with a format that this draft does not check.
- `loosened`: a keyword is left out, and named, and an instance that is not valid is allowed.
- `refused`: by name, with a reason.
- `wrong`: an instance that is not valid is allowed, or llama.cpp refuses the grammar.

An instance is written in the orders that its members can have; numbers without exponent or `.0`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disco_daemon.engine.llama.grammar import GrammarError, grammar_of
from tests.fixtures.gbnf import Language

ROOT = Path(__file__).parent.parent
PIP_S = 600.0  # for pip to fetch half a megabyte over any line
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#", "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#", "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}  # fmt: skip
MAX_ORDERS = 200  # of one instance
FATES = ("held", "narrower", "loosened", "refused", "wrong")


@dataclass(frozen=True, slots=True)
class Case:
    """A schema of the suite, with instances."""

    draft: str
    name: str
    schema: dict[str, Any]
    tests: list[Mapping[str, Any]]


@dataclass(slots=True)
class Fate:
    """What became of a case."""

    kind: str
    why: str = ""
    grammar: str = ""


def cases(suite: Path) -> Iterator[Case]:
    """Yield the required cases."""
    for draft, address in DRAFTS.items():
        for file in sorted((suite / "tests" / draft).glob("*.json")):
            for group in json.loads(file.read_text("utf-8")):
                schema = group["schema"]
                schema = {"allOf": [schema]} if isinstance(schema, bool) else schema
                schema = {"$schema": address} | schema  # old drafts' tests leave it out
                yield Case(draft, f"{file.stem}: {group['description']}", schema, group["tests"])


def fate_of(case: Case, *, strict: bool) -> Fate:
    """Return what becomes of a case."""
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": strict, "schema": case.schema}}
    try:
        grammar = grammar_of(wanted)
    except GrammarError as e:
        return Fate("refused", str(e))
    language = Language(grammar, exact=True)
    missed = []
    for test in case.tests:
        is_allowed = any(language.allows(text) for text in spellings(test["data"]))
        if is_allowed and not test["valid"]:
            return Fate("wrong" if strict else "loosened", test["description"], grammar)
        if test["valid"] and not is_allowed:
            missed.append(test["description"])
    return Fate("narrower" if missed else "held", "; ".join(missed), grammar)


def spellings(value: Any) -> Iterator[str]:
    """Yield the JSON of a value with its members in each order."""
    yield from itertools.islice(_spelled(value), MAX_ORDERS)


def _spelled(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for items in itertools.product(*(list(itertools.islice(_spelled(item), MAX_ORDERS)) for item in value)):
            yield f"[{','.join(items)}]"
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            options = [list(itertools.islice(_spelled(value[name]), MAX_ORDERS)) for name in names]
            for inner in itertools.product(*options):
                pairs = [f"{json.dumps(name, ensure_ascii=False)}:{v}" for name, v in zip(names, inner, strict=True)]
                yield "{" + ",".join(pairs) + "}"
    elif isinstance(value, float) and value.is_integer():
        yield str(int(value))
    else:
        yield json.dumps(value, ensure_ascii=False)


def downloaded(into: Path) -> Path:
    """Download the copy of the suite in the source distribution of jsonschema, by its hash."""
    lock = (ROOT / "requirements-dev.lock").read_text("utf-8")
    found = re.search(r"^jsonschema==.*\\\n(?:.*--hash=.*\n)+", lock, re.MULTILINE)
    assert found
    (into / "jsonschema.lock").write_text(found[0])
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "jsonschema", "--require-hashes",
         "--no-build-isolation", "-d", str(into), "-r", str(into / "jsonschema.lock")], check=True, timeout=PIP_S
    )  # fmt: skip
    (archive,) = into.glob("jsonschema-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(into, filter="data")
    return next(into.glob("jsonschema-*/json"))


def answers(grammars: list[tuple[Case, str]], n: int) -> dict[str, Any]:
    """Draw answers by the grammars at random, and count those that jsonschema rejects."""
    jsonschema = importlib.import_module("jsonschema")  # for development only

    chance = random.Random(40)
    rejected, drawn = [], 0
    languages = {id(case): Language(grammar, exact=True) for case, grammar in grammars}
    while drawn < n:
        case, _ = chance.choice(grammars)
        text = languages[id(case)].draw(chance.randrange(10**9), n=chance.choice((5, 20, 60)))
        address = DRAFTS[case.draft]
        try:
            is_valid = jsonschema.validators.validator_for({"$schema": address})(case.schema).is_valid(json.loads(text))
        except re.error:  # Python knows no \\p{L}
            continue
        drawn += 1
        if not is_valid:
            rejected.append({"case": f"{case.draft} {case.name}", "answer": text[:200]})
    return {"drawn": drawn, "rejected": len(rejected), "examples": rejected[:10]}


def main() -> None:
    """Print what became of all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, help="a checkout of the suite; without it a copy is downloaded")
    parser.add_argument("--answers", type=int, default=2000, help="answers to draw and validate")
    parser.add_argument("--list", choices=FATES, help="print the cases of this fate, with the reason")
    parser.add_argument("--lenient", action="store_true", help="as without `strict`: keywords may be left out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [
            (case, fate_of(case, strict=not args.lenient)) for case in cases(args.suite or downloaded(Path(folder)))
        ]
    if args.list:
        for case, fate in found:
            if fate.kind == args.list:
                print(f"{case.draft} {case.name}: {fate.why}")
        return
    counts = {draft: Counter(fate.kind for case, fate in found if case.draft == draft) for draft in DRAFTS}
    total = sum(counts.values(), Counter())
    print(json.dumps({
        "by_draft": {draft: {kind: counts[draft][kind] for kind in FATES} for draft in DRAFTS},
        "all": {kind: total[kind] for kind in FATES} | {"cases": total.total()},
        "answers": answers([(case, fate.grammar) for case, fate in found if fate.grammar], args.answers)
        if args.answers else None,
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
