"""What becomes of the schemas of the official JSON-Schema-Test-Suite, and of answers by them.

`python -m benchmarks.engine.schemas --suite DIR` prints JSON; DIR is a checkout of
json-schema-org/JSON-Schema-Test-Suite, or the folder `json` of the source distribution of `jsonschema`, which has a
copy. Without it that is downloaded, by the hash in requirements-dev.lock. Each schema in the required tests of drafts 4
to 2020-12 is read in two ways: `whole`, by its letter, as `disco.whole_schema` and `strict` ask for; and `meant`, as
without both. Its fate is one of:

- `held`: the grammar allows each instance that is valid, and none that is not.
- `narrowed`: none that is not valid, but not each that is, and `disco.narrowed` says so.
- `narrower`: the same, and nothing says so.
- `loosened`: an instance that is not valid is allowed, since a keyword is left out, which `disco.ignored` names.
- `refused`: by name, with a reason: no instance is valid (`void`), it refers to what is not in it (`elsewhere`), or no
  grammar can say it (`unsayable`).
- `wrong`: an instance that is not valid is allowed, or llama.cpp refuses the grammar.

An instance is written in the orders that its members can have; numbers without exponent or `.0`. Answers are drawn by
the grammars of both readings: by their text, and by llama.cpp's own sampler from the tokens of the embedded model, with
chances that are random but favour what closes. They are validated by `jsonschema`, with `multipleOf` in exact
fractions, as the specification has it; `by_division_of_doubles` counts what only its own division rejects
(-0.09 / 0.0001 is -899.9999999999999 there).
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from disco_daemon.engine.json_schema.numbers import exactly
from disco_daemon.engine.json_schema.reading import GrammarError
from disco_daemon.engine.json_schema.unenforced import left_out, narrowed
from disco_daemon.engine.llama.grammar import grammar_of
from tests.fixtures.gbnf import Language
from tests.fixtures.token_draws import TokenDraws, default_vocabulary

ABROAD = "another document"  # what a refusal says of a reference that leads there
ROOT = Path(__file__).parent.parent.parent
PIP_S = 600.0  # for pip to fetch half a megabyte over any line
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#", "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#", "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}  # fmt: skip
MAX_ORDERS = 200  # of one instance
FATES = ("held", "narrowed", "narrower", "loosened", "refused", "wrong")
READINGS = ("whole", "meant")


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
    grammar: str = ""  # empty where none keeps all of the schema
    cause: str = ""


def cases(suite: Path) -> Iterator[Case]:
    """Yield the required cases."""
    for draft, address in DRAFTS.items():
        for file in sorted((suite / "tests" / draft).glob("*.json")):
            for group in json.loads(file.read_text("utf-8")):
                schema = group["schema"]
                schema = {"allOf": [schema]} if isinstance(schema, bool) else schema
                schema = {"$schema": address} | schema  # old drafts' tests leave it out
                yield Case(draft, f"{file.stem}: {group['description']}", schema, group["tests"])


def form_of(case: Case, reading: str) -> dict[str, Any]:
    """Return the form of an answer by a case's schema."""
    is_whole = reading == "whole"
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": is_whole, "schema": case.schema}}
    return form | ({"whole": True} if is_whole else {})


def fate_of(case: Case, reading: str) -> Fate:
    """Return what becomes of a case."""
    form = form_of(case, reading)
    try:
        grammar = grammar_of(form)
    except GrammarError as e:
        is_void = not any(test["valid"] for test in case.tests)
        return Fate("refused", str(e), cause="void" if is_void else "elsewhere" if ABROAD in str(e) else "unsayable")
    language = Language(grammar, exact=True)
    missed: list[str] = []
    let_in: list[str] = []
    for test in case.tests:
        is_allowed = any(language.allows(text) for text in spellings(test["data"]))
        if is_allowed is not test["valid"]:
            (let_in if is_allowed else missed).append(test["description"])
    loose, narrow = left_out(form, []), narrowed(form)
    grammar = "" if loose else grammar  # of which answers are as they may not be
    if let_in:
        return Fate("loosened" if loose else "wrong", "; ".join(let_in), grammar, ", ".join(loose))
    if missed:
        return Fate("narrowed" if narrow else "narrower", "; ".join(missed), grammar, ", ".join(narrow))
    return Fate("held", grammar=grammar)


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
         "-d", str(into), "-r", str(into / "jsonschema.lock")], check=True, timeout=PIP_S
    )  # fmt: skip
    (archive,) = into.glob("jsonschema-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(into, filter="data")
    return next(into.glob("jsonschema-*/json"))


def exactly_multiple(_: Any, divisor: Any, instance: Any, __: Any) -> Iterator[Any]:
    """Validate `multipleOf` by the numbers as they are written."""
    number = exactly(instance)
    if number is not None and (number / Fraction(repr(divisor))).denominator != 1:
        yield importlib.import_module("jsonschema").ValidationError(f"{instance} is no multiple of {divisor}")


def answers(drawn: Iterable[tuple[Case, str]]) -> dict[str, Any]:
    """Validate answers by jsonschema, and count those that it rejects."""
    validators = importlib.import_module("jsonschema").validators  # for development only
    rejected, n, n_divided = [], 0, 0
    for case, text in drawn:
        its_own = validators.validator_for({"$schema": DRAFTS[case.draft]})
        exact = validators.extend(its_own, {"multipleOf": exactly_multiple})
        try:
            is_valid, is_its_own = (kind(case.schema).is_valid(json.loads(text)) for kind in (exact, its_own))
        except re.error:  # Python knows no \\p{L}
            continue
        n, n_divided = n + 1, n_divided + (is_valid and not is_its_own)
        if not is_valid:
            rejected.append({"case": f"{case.draft} {case.name}", "answer": text[:200]})
    return {
        "drawn": n, "rejected": len(rejected), "by_division_of_doubles": n_divided, "examples": rejected[:10]
    }  # fmt: skip


def by_text(grammars: Sequence[tuple[Case, str]], n: int) -> Iterator[tuple[Case, str]]:
    """Draw answers from the grammars' texts."""
    chance = random.Random(40)
    languages: dict[str, Language] = {}
    for _ in range(n):
        case, grammar = chance.choice(grammars)
        language = languages.setdefault(grammar, Language(grammar, exact=True))
        yield case, language.draw(chance.randrange(10**9), n=chance.choice((5, 20, 60)))


def by_tokens(grammars: Sequence[tuple[Case, str]], n: int) -> Iterator[tuple[Case, str]]:
    """Draw answers from a model's tokens; those that are cut are drawn again."""
    chance, drawn = random.Random(41), 0
    with default_vocabulary() as vocabulary:
        draws = TokenDraws(vocabulary)
        while drawn < n:
            case, grammar = chance.choice(grammars)
            if (text := draws.draw(grammar, chance.randrange(10**9))) is not None:
                drawn += 1
                yield case, text


def fates_of(found: Sequence[tuple[Case, Fate]]) -> dict[str, Any]:
    """Count fates, by draft and in all, and say how many are as they should be."""
    counts = {draft: Counter(fate.kind for case, fate in found if case.draft == draft) for draft in DRAFTS}
    total = sum(counts.values(), Counter())
    causes = Counter(fate.cause for _, fate in found if fate.kind == "refused")
    held = total["held"] + total["refused"]
    said = held + total["narrowed"] + total["loosened"]
    return {
        "by_draft": {draft: {kind: counts[draft][kind] for kind in FATES} for draft in DRAFTS},
        "all": {kind: total[kind] for kind in FATES} | {"cases": total.total()},
        "refused_since": dict(causes),
        "held_or_refused": round(held / total.total(), 4),
        "held_or_rightly_refused": round((held - causes["unsayable"]) / total.total(), 4),
        "held_refused_or_said_so": round(said / total.total(), 4),
    }


def table(found: Sequence[tuple[Case, Fate]]) -> str:
    """Write the cases that are not held by the keyword that they test, by fate, and by cause."""
    counts = Counter(
        (case.name.partition(":")[0], fate.kind, fate.cause) for case, fate in found if fate.kind != "held"
    )
    rows = [f"{keyword:<28}{kind:<10}{n:>5}  {cause}" for (keyword, kind, cause), n in sorted(counts.items())]
    return "\n".join([f"{'keyword':<28}{'fate':<10}{'cases':>5}  cause", *rows])


def main() -> None:
    """Print what became of all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, help="a checkout of the suite; without it a copy is downloaded")
    parser.add_argument("--answers", type=int, default=2000, help="answers to draw from the grammars' texts")
    parser.add_argument("--by-tokens", type=int, default=200, help="answers to draw by llama.cpp from a model's tokens")
    parser.add_argument("--reading", choices=READINGS, help="one reading only")
    parser.add_argument("--list", choices=FATES, help="print the cases of this fate, with the reason")
    parser.add_argument("--table", action="store_true", help="print the cases that are not held by keyword and cause")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        listed = list(cases(args.suite or downloaded(Path(folder))))
    readings = [args.reading] if args.reading else READINGS
    found = {reading: [(case, fate_of(case, reading)) for case in listed] for reading in readings}
    if args.list or args.table:
        for reading, fates in found.items():
            print(f"--- {reading}")
            print(table(fates) if args.table else "\n".join(
                f"{case.draft} {case.name}: {fate.why}" for case, fate in fates if fate.kind == args.list
            ))  # fmt: skip
        return
    sound = [(case, fate.grammar) for fates in found.values() for case, fate in fates if fate.grammar]
    print(json.dumps({
        **{reading: fates_of(fates) for reading, fates in found.items()},
        "answers": answers(by_text(sound, args.answers)),
        "answers_by_tokens": answers(by_tokens(sound, args.by_tokens)) if args.by_tokens else None,
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
