"""`disco models`: list the model files on this machine, show and choose the device's, and fetch others.

It is longer than other files: each of its verbs says what it found in a form of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from ..plain import reason_of
from .models_compare import add_arguments, compare
from .models_named import name_it, named, names_by_file, require_free, require_unnamed, states, words
from .models_offer import asked_at_terminal, recommend, spec_of
from .terminal import direct, progress

if TYPE_CHECKING:
    from pathlib import Path

    from ..config.schema import DeviceSettings
    from ..models.files import ModelFile
    from ..models.gguf import Header
    from ..models.places import FoundModel
    from ..models.quants import Pin
    from ..onboarding.saving import SavedChoice
    from ..onboarding.setup import Onboarding

DEFAULT = "default"  # the name of the embedded model for `disco models use`


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "models",
        help="list, choose, look at and fetch models",
        description="List the models on this machine, also those of Ollama, LM Studio, llama.cpp and Hugging Face.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_list)
    actions = parser.add_subparsers(metavar="ACTION")
    _add(actions, "list", _list, "list the models on this machine")
    use = _add(actions, "use", _use, "make one the device's model")
    use.add_argument("model", metavar="MODEL", nargs="?", help=f"a name from the list, a path, or `{DEFAULT}`")
    use.add_argument(
        "--previous", action="store_true", help="the model before this one; once more, and this one is back"
    )
    show = _add(actions, "show", _show, "what a model is, and the memory it would take")
    show.add_argument("model", metavar="MODEL", nargs="?", help="as for `use`; by default the device's model")
    _add(actions, "recommend", recommend, "which models suit this machine, with size, memory, speed and licence")
    pull = _add(actions, "pull", _pull, "fetch a model from the Hugging Face Hub")
    pull.add_argument(
        "spec", metavar="MODEL", nargs="?",
        help="a name of `recommend`, a GGUF file of this machine (it is copied), the https URL of one, "
        "or USER/REPO[:QUANT] such as bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M; "
        "without one, what fits is shown, and at a terminal you are asked",
    )  # fmt: skip
    pull.add_argument("--use", action="store_true", help="and make it the device's model")
    pull.add_argument("--sha256", metavar="HEX", default="", help="the checksum that its file has to have")
    pull.add_argument("--online", action="store_true", help="fetch it, although policy.private is on")
    pull.add_argument("--name", metavar="NAME", help="and make it one more model of this machine, `disco/NAME`")
    remove = _add(actions, "rm", _rm, "remove a model that disco has fetched, with its segments and exits")
    remove.add_argument(
        "model",
        metavar="MODEL",
        help="as for `use`, or a name of [[models]], which is taken out of the settings as well",
    )
    remove.add_argument("--yes", action="store_true", help="do not ask")
    compared = _add(actions, "compare", compare, "ask models the same questions, and say whose answers you prefer")
    add_arguments(compared)
    fetch = _add(actions, "fetch", _fetch, "fetch the default model")
    fetch.add_argument("--online", action="store_true", help="fetch it, although policy.private is on")


def _add(actions: Any, name: str, run: Any, words: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=words, description=f"{words.capitalize()}.")
    # Suppressed, or it would undo the flag of `disco models --json list`.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    parser.set_defaults(run=run)
    return parser


# --- list -------------------------------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    from ..models import places
    from ..models.default import models_dir
    from ..models.files import examine, is_model

    in_use = _in_use()
    found = places.find()
    if in_use is not None and in_use.exists() and in_use not in [one.path for one in found]:
        found.append(places.FoundModel(str(in_use), in_use, "device.model"))
    shown = [(one, examine(one.path, quick=True)) for one in found]
    shown = [(one, file) for one, file in shown if is_model(file)]
    named = names_by_file()
    now = states() if named else {}
    if args.json:
        models = [
            _as_json(one, file, in_use) | {"named": {n: now.get(n) for n in named.get(one.path.resolve(), ())}}
            for one, file in shown
        ]
        print(json.dumps({"folder": str(models_dir()), "models": models}))
    elif not shown:
        print(f"no models in {models_dir()}: `disco models fetch` gets the default one")
    else:
        _print_rows([_row(one, file, in_use, words(named.get(one.path.resolve(), ()), now)) for one, file in shown])
    return 0


def _in_use() -> Path | None:
    """Return the device's model; None if another server chooses it."""
    from ..config.layers import load
    from ..models.default import default_model_path

    settings = load().device
    return None if settings.base_url else _path_of(settings.model) if settings.model else default_model_path()


def _path_of(text: str) -> Path:
    from pathlib import Path

    return Path(text).expanduser()


def _as_json(found: FoundModel, file: ModelFile, in_use: Path | None) -> dict[str, Any]:
    from ..models.default import DEFAULT_MODEL

    return {
        "name": found.name,
        "path": str(found.path),
        "source": found.source,
        "size_bytes": file.n_bytes,
        "architecture": file.header.architecture or None,
        "quantization": _packing(file),
        "default": found.path.name == DEFAULT_MODEL and found.source == "disco",
        "in_use": found.path == in_use,
        "problem": file.problem or None,
    }


def _row(found: FoundModel, file: ModelFile, in_use: Path | None, named: str) -> tuple[str, ...]:
    used = ", ".join(filter(None, ["in use" if found.path == in_use else "", named]))
    state = f"cannot be used: it {file.problem}" if file.problem else used
    size = f"{file.n_bytes / 1e6:.0f} MB"
    return found.name, size, _packing(file) or "?", file.header.architecture or "?", found.source, state


def _packing(file: ModelFile) -> str | None:
    """Return the quantization by the header, else by the name: some tools write that key far behind the vocabulary."""
    from ..models.quants import label

    return file.header.packing or label(file.path.name) or None


def _print_rows(rows: list[tuple[str, ...]]) -> None:
    head = ("name", "size", "quant", "architecture", "found in", "")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


# --- use --------------------------------------------------------------------------------------------------------------


def _use(args: argparse.Namespace) -> int:
    from ..config.layers import load
    from ..errors import ConfigError

    if args.previous == (args.model is not None):
        raise ConfigError("name a model, or give --previous: `disco models list` shows what there is")
    load()  # what cannot be read, a variable too, is said before anything is written
    if args.previous:
        saved = _first_steps().use_previous()
        return _print_use(args, _in_use() or load().device.model, saved)
    path = _choose(args.model)
    return _print_use(args, path, _make_it_the_devices(path))


def _choose(wanted: str) -> Path:
    """Return the model file that is meant. Raises ConfigError."""
    from ..errors import ConfigError
    from ..models import places
    from ..models.default import default_model_path

    if wanted == DEFAULT:
        return default_model_path()
    path = _path_of(wanted).absolute()
    if path.is_file():
        return path
    if path.is_dir():
        msg = f"{wanted} is a folder: name a GGUF file in it"
        raise ConfigError(msg)
    return places.choose_model(wanted, places.find()).path


def _first_steps() -> Onboarding:
    import os

    from ..config.layers import config_path
    from ..onboarding.setup import Onboarding

    return Onboarding(config_path(), os.environ)


def _make_it_the_devices(path: Path) -> SavedChoice:
    """Write it down as the device's model, if it can be one. Raises ConfigError."""
    from ..errors import ConfigError
    from ..models.default import default_model_path
    from ..models.files import examine
    from ..onboarding.saving import Choice

    is_default = path == default_model_path()
    if not (is_default and not path.exists()):  # the default model is fetched when it is needed
        found = examine(path)
        if found.problem:
            msg = f"{path} {found.problem}"
            raise ConfigError(msg)
    return _first_steps().save(Choice(local="" if is_default else str(path)))


def _print_use(args: argparse.Namespace, path: Path | str, saved: SavedChoice) -> int:
    from ..config.layers import config_path, load
    from .setup import reload_running

    if args.json:
        reload_running(load())
        print(json.dumps({"path": str(path), "config": str(config_path()), "notes": saved.notes()}))
        return 0
    print("\n".join([f"the device's model is {path} (device.model in {config_path()})", *saved.notes()]))
    if said := reload_running(load()):
        print(said)
    return 0


def _rm(args: argparse.Namespace) -> int:
    from ..errors import ConfigError
    from .models_rm import remove, remove_named, require_unused

    if (settings := named(args.model)) is not None:
        return remove_named(args, settings)
    path = _choose(args.model)
    if not path.exists():
        msg = f"{path} does not exist: `disco models list` shows those that do"
        raise ConfigError(msg)
    require_unused(path, but_default=args.model == DEFAULT)
    require_unnamed(path)
    return remove(args, path)


# --- show -------------------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace) -> int:
    from ..config.layers import load
    from ..errors import ConfigError
    from ..models.files import examine

    settings = load().device
    path = _choose(args.model) if args.model else _in_use()
    if path is None:
        msg = "device.base_url is set: that server knows its model. Name a file to look at"
        raise ConfigError(msg)
    if not path.exists():
        msg = f"{path} does not exist: `disco models fetch` gets the default model, `disco models list` shows others"
        raise ConfigError(msg)
    description = _describe(path, examine(path), settings)
    if args.json:
        print(json.dumps(description))
    else:
        for name, value in _lines(description, settings):
            print(f"{name:13} {value}")
    return 1 if description["problem"] else 0


def _describe(path: Path, file: ModelFile, settings: DeviceSettings) -> dict[str, Any]:
    from ..models.files import CHAT_TEMPLATE, thoughts_of, whole_header
    from ..models.gguf import shard
    from ..models.own_guesses import why_no_guesses
    from ..models.segments import state_of
    from ..system.smallfile import read_text
    from ..tools.formats import GENERIC

    header, n_parameters = file.header, file.n_parameters
    source, where = header.text(CHAT_TEMPLATE), "metadata"
    if settings.chat_template:
        path_of_it, where = _path_of(settings.chat_template), "device.chat_template"
        source = read_text(path_of_it, f"{where} ", hidden=0o002)
    tools = _tool_format(source)
    why_not = None if file.problem else why_no_guesses(whole_header(path))
    return {
        "path": str(path),
        "in_use": path == _in_use(),
        "name": header.text("general.name") or None,
        "architecture": header.architecture or None,
        "parameters": n_parameters,
        "quantization": header.packing or None,
        "bits_per_weight": round(8 * file.n_bytes / n_parameters, 2) if n_parameters else None,
        "size_bytes": file.n_bytes,
        "parts": shard(path.name)[1],
        "n_ctx": file.n_ctx,
        "state": state_of(header),
        "mtp": None if why_not is None else {"used": not why_not, "why_not": why_not or None},
        "template": {
            "tools": None if tools == GENERIC.name else tools,
            "thoughts": None if file.problem else thoughts_of(path, header, source, tools),
            "source": where if source else None,
        },
        "tool_format": tools,
        "texts": _texts(path, header),
        "memory": None if file.problem else _memory(path, settings),
        "problem": file.problem or None,
    }


def _texts(path: Path, header: Header) -> dict[str, Any] | None:
    """Return what a model makes of texts that answers nothing; None of one that answers."""
    from ..models.text_models import text_kind

    kind = text_kind(header, [path.stem])
    if kind is None:
        return None
    purposes, least = sorted(kind.family.prefixes), kind.family.least_dimensions
    makes = "ratings" if kind.rates else "vectors"
    return {"makes": makes, "pooling": kind.pooling, "prefixes": purposes, "least_dimensions": least}


def _text_words(found: dict[str, Any]) -> str:
    if found["makes"] == "ratings":
        return "rates documents by a query (/v1/rerank), and answers nothing"
    prefixes = f"; prefixes for {', '.join(found['prefixes'])}" if found["prefixes"] else ""
    cut = f"; dimensions from {found['least_dimensions']} on" if found["least_dimensions"] else ""
    how = f"makes vectors of texts (/v1/embeddings) by the {found['pooling']} of its rows"
    return f"{how}, and answers nothing{prefixes}{cut}"


def _tool_format(source: str) -> str | None:
    """Return the format in which a chat template has tools called; None for one that is of no use."""
    from ..engine.llama.template import ChatTemplate, TemplateError
    from ..tools.detect import detect

    try:
        template = ChatTemplate(source, "", "")
    except TemplateError:
        return None
    return detect(lambda messages, tools: template.render(messages, tools=tools)).format.name


def _memory(path: Path, settings: DeviceSettings) -> dict[str, Any]:
    """Return the memory that the engine would need, as `engine.measure.checkup` predicts it in a process of its own."""
    import asyncio

    import msgspec

    from ..machines.device_settings import n_gpu_layers
    from ..machines.model_memory import checkup_request, run_checkup

    try:
        asked = checkup_request(settings, path, n_gpu_layers(settings))
    except (OSError, ValueError) as e:
        return {"problem": f"cannot be predicted: {reason_of(e)}"}
    seen = asyncio.run(run_checkup(asked))
    return msgspec.to_builtins(seen.fit) if seen.fit else {"problem": f"cannot be predicted: {seen.problem}"}


def _lines(description: dict[str, Any], settings: DeviceSettings) -> list[tuple[str, str]]:
    """Return the facts as lines of a table: a label and its text."""
    parts = f" in {description['parts']} parts" if description["parts"] > 1 else ""
    lines = [("path", description["path"] + (" (the device's model)" if description["in_use"] else ""))]
    if description["problem"]:
        return [*lines, ("problem", f"it {description['problem']}")]
    lines += [
        ("name", description["name"] or "-"),
        ("architecture", description["architecture"]),
        ("parameters", _parameters(description["parameters"])),
        ("quantization", f"{description['quantization'] or 'unknown'}, {description['bits_per_weight']} bits a weight"),
        ("size", f"{description['size_bytes'] / 1e6:.0f} MB{parts}"),
        ("context", f"{description['n_ctx'] or 'unknown'} tokens as trained; {_context_words(settings)}"),
    ]
    if description["texts"] is not None:
        lines[-1] = ("context", f"texts of {description['n_ctx'] or 'unknown'} tokens as trained")
        lines.append(("use", _text_words(description["texts"])))
    else:
        lines.append(("template", _template_words(description["template"], settings)))
        lines.append(("tools", _tool_words(description["tool_format"])))
    lines += [
        ("memory", _memory_words(description["memory"], texts=description["texts"] is not None)),
    ]
    return [*lines, ("guesses", _guess_words(description["mtp"], settings))] if description["mtp"] else lines


def _guess_words(found: dict[str, Any], settings: DeviceSettings) -> str:
    layer = "a layer of its own guesses next tokens (MTP)"
    if found["why_not"]:
        return f"{layer}, but {found['why_not']}"
    if settings.speculation == "off":
        return f"{layer}, but device.speculation is off"
    return f"{layer}, but device.draft_model guesses" if settings.draft_model else f"{layer}, where that pays"


def _parameters(n: int) -> str:
    return f"{n / 1e9:.2f} G" if n >= 10**9 else f"{n / 1e6:.1f} M"


def _context_words(settings: DeviceSettings) -> str:
    return f"device.n_ctx is {settings.n_ctx}" if settings.n_ctx else "an answer gets as many of them as fit"


def _template_words(found: dict[str, Any], settings: DeviceSettings) -> str:
    if found["source"] is None:
        return "none: a base model; chats are written out plainly, or set device.chat_template"
    where = "its own (metadata)" if found["source"] == "metadata" else f"{settings.chat_template} ({found['source']})"
    return f"{where}; {'thoughts as in ' + found['thoughts'] if found['thoughts'] else 'no thoughts that are known'}"


def _tool_words(name: str | None) -> str:
    if name is None:
        return "none: the template cannot be used"
    return "only calls that are forced (generic)" if name == "generic" else f"calls in the format {name}"


def _memory_words(found: dict[str, Any], *, texts: bool = False) -> str:
    from ..client.side_health import without_experts
    from .doctor.files import GIB

    if found["problem"]:
        return str(found["problem"])
    layers, moe = found["gpu_layers"], without_experts(found["n_cpu_moe"])
    how = f" as {found['kv_type']}" if found["kv_type"] != "f16" else ""
    on_gpu = f" and {layers} layers on the GPU{moe}" if layers else ""
    if texts:
        size, free = found["n_bytes"] / GIB, found["available"] / GIB
        return f"{size:.2f} GiB{on_gpu} for texts of {found['n_ctx']} tokens; {free:.1f} GiB are free"
    return (
        f"{found['n_bytes'] / GIB:.2f} GiB{on_gpu} with {found['n_cells']} tokens kept{how}, {found['n_ctx']} of them "
        f"an answer's at most; {found['available'] / GIB:.1f} GiB are free"
    )


# --- fetching ---------------------------------------------------------------------------------------------------------


def _pull(args: argparse.Namespace) -> int:
    from ..config.layers import load
    from ..models.default import models_dir
    from ..models.hub import copy_in, pull
    from ..models.progress import ProgressBar
    from ..models.quants import NO_PIN
    from ..onboarding.saving import Choice

    load()  # what cannot be read, a variable too, is said before anything is fetched
    if args.name is not None:
        require_free(args.name)
    here = None if args.spec is None else _path_of(args.spec)
    if here is not None and not here.is_file():
        here = None
    spec, pin = args.spec or "", NO_PIN
    if here is None:
        if (chosen := asked_at_terminal() if args.spec is None else spec_of(args.spec)) is None:
            return 0
        spec, pin = chosen
        _require_asking(args)
    if args.sha256:
        pin = _pinned(pin, args.sha256, is_copied=here is not None)
    to_use = args.use or (args.spec is None and args.name is None)
    if to_use:  # what cannot be used is not fetched
        _first_steps().plan(Choice(local=""))
    bar = ProgressBar(direct(sys.stderr))

    def say(line: str) -> None:
        bar.end()
        progress(line)

    try:
        path = copy_in(here, models_dir(), say, bar) if here else pull(spec, models_dir(), say, bar, pin=pin)
    except KeyboardInterrupt:
        say("what came is kept: the same command goes on from there")
        raise
    finally:
        bar.end()
    said = None if args.name is None else name_it(path, args.name)
    if to_use:
        if said:
            progress(said)
        return _print_use(args, path, _make_it_the_devices(path))
    if said and not args.json:
        print(said)
    elif args.json:
        print(json.dumps({"path": str(path)}))
    else:
        print(path)
        progress(
            f"`disco models use {path.name}` makes it the device's model, `disco models show {path.name}` looks at it"
        )
    return 0


def _require_asking(args: argparse.Namespace) -> None:
    """Raise ConfigError where nobody may be asked for anything."""
    from ..config.layers import load
    from ..errors import ConfigError

    if load().policy.private and not args.online:
        raise ConfigError("nobody is asked for anything, policy.private is on: `--online` fetches it all the same")


def _pinned(pin: Pin, sha256: str, *, is_copied: bool) -> Pin:
    """Return a pin with the checksum that the user gave. Raises ConfigError."""
    from ..errors import ConfigError
    from ..models.quants import Pin

    if is_copied:
        raise ConfigError("--sha256 is for what is fetched: a file of this machine is copied as it is")
    if not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise ConfigError("--sha256 is no SHA-256: it has 64 digits from 0 to f")
    if pin.sha256 and pin.sha256.lower() != sha256.lower():
        raise ConfigError(f"the list of models says {pin.sha256} of that model, and --sha256 another checksum")
    return Pin(pin.revision, sha256.lower())


def _fetch(args: argparse.Namespace) -> int:
    from ..models.default import default_model_path, fetch_default_model

    if not default_model_path().exists():
        _require_asking(args)
    path = fetch_default_model(progress)
    print(json.dumps({"path": str(path), "size_bytes": path.stat().st_size}) if args.json else path)
    return 0
