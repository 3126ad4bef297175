"""`disco models`, in a home of its own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest

from disco_daemon.cli import models as verb
from disco_daemon.cli import models_offer
from disco_daemon.clock import SystemClock
from disco_daemon.config import layers as config
from disco_daemon.daemon.endpoints import make_endpoints
from disco_daemon.errors import ConfigError
from disco_daemon.machines.managed_device import Making
from disco_daemon.machines.split.check import segment_files
from disco_daemon.machines.split.trained_exits import KeptExits
from disco_daemon.models import default as models
from disco_daemon.models import hub, places
from disco_daemon.models.segment_files import _stem
from disco_daemon.types import Side
from tests.fixtures.gguf import model_file
from tests.fixtures.hub import HubServer, Repo
from tests.fixtures.tiny_bert import CONTEXT, MEAN, RANK, tiny_bert
from tests.fixtures.tiny_models import tiny_model

HERMES = Path(__file__).parents[2] / "fixtures/templates/tools/Qwen-Qwen2.5-7B-Instruct.jinja"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DISCO_MODELS_DIR", str(tmp_path / "ours"))
    monkeypatch.setenv("DISCO_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setattr(places, "OLLAMA_SERVICE", tmp_path / "service")
    return tmp_path


def disco(*words: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    args = parser.parse_args(["models", *words])
    code = args.run(args)
    assert isinstance(code, int)
    return code


def told(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    disco(*words, "--json")
    return json.loads(capsys.readouterr().out)


def in_config() -> str:
    return config.load().device.model


def test_without_models_it_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert disco() == 0
    assert "disco models fetch" in capsys.readouterr().out


def test_the_list_tells_what_they_are_and_which_one_is_in_use(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_file(home / "ours" / models.DEFAULT_MODEL)
    model_file(home / ".lmstudio/models/maker/tiny/tiny-Q4_K_M.gguf", general__file_type=None)
    model_file(home / ".lmstudio/models/maker/tiny/mmproj.gguf", general__type="mmproj")
    model_file(home / "ours" / "nameless.gguf", general__architecture=None)
    assert disco("list") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "size", "quant", "architecture", "found", "in"]
    assert [row.split()[0] for row in rows] == [models.DEFAULT_MODEL, "nameless.gguf", "maker/tiny/tiny-Q4_K_M.gguf"]
    assert rows[0].endswith("in use")
    assert rows[1].endswith("cannot be used: it does not tell its architecture")
    default, _, other = told(capsys, "list")["models"]
    assert default == {
        "name": models.DEFAULT_MODEL, "path": str(home / "ours" / models.DEFAULT_MODEL), "source": "disco",
        "size_bytes": (home / "ours" / models.DEFAULT_MODEL).stat().st_size, "architecture": "llama",
        "quantization": "Q8_0", "default": True, "in_use": True, "problem": None, "named": {},
    }  # fmt: skip
    assert (other["source"], other["in_use"], other["quantization"]) == ("LM Studio", False, "Q8_0")


def test_the_flag_may_stand_before_the_action_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--json"], ["--json", "list"], ["list", "--json"]):
        assert disco(*words) == 0
        assert json.loads(capsys.readouterr().out)["models"] == []


def test_named_models_are_shown_and_not_removed_while_they_are_named(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model_file(home / "ours" / "tiny.gguf")
    (home / "config.toml").write_text(f"""# mine
[[models]]
name = "coder"
model = "{path}"

[[models]]
name = "gone"
model = "/nowhere/x.gguf"
""")
    assert disco("list") == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("disco/coder")
    assert told(capsys, "list")["models"][0]["named"] == {"coder": None}, "no daemon runs that could say how it is"
    with pytest.raises(ConfigError, match=r"is the file of disco/coder in .*: `disco models rm coder` removes that"):
        disco("rm", "tiny", "--yes")
    assert path.exists()
    assert disco("rm", "coder") == 1, "nobody said yes"
    assert path.exists()
    assert told(capsys, "rm", "coder", "--yes")["removed"] == [str(path)]
    assert not path.exists()
    assert disco("rm", "disco/gone", "--yes") == 0
    assert "disco/gone is taken out of [[models]]" in capsys.readouterr().out
    assert (home / "config.toml").read_text().strip() == "# mine"


def test_the_file_of_a_named_model_stays_while_anything_else_has_it(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = home / "ours" / "tiny.gguf", home / ".lmstudio/models/maker/tiny/tiny.gguf"
    for path in (ours, theirs):
        model_file(path, general__name=path.parent.name)
    entry = '[[models]]\nname = "{}"\nmodel = "{}"\n'
    kept = entry.format("a", ours) + entry.format("b", ours) + entry.format("theirs", theirs)
    (home / "config.toml").write_text(kept + f'[device]\nmodel = "{ours}"\n')
    for name, why in (
        ("a", "it is the file of disco/b and is the device's model"),
        ("b", "it is the device's model"),
        ("theirs", "another program"),
    ):
        assert disco("rm", name, "--yes") == 0
        assert why in capsys.readouterr().out
        assert name not in [model.name for model in config.load().models]
    assert [ours.exists(), theirs.exists()] == [True, True]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ('[device]\nmodel = "{}"\n', "is the device's model: `disco models use`"),
        ('[device]\ndraft_model = "{}"\n', "guesses for the device's model: .* device.draft_model"),
        ('[split]\ncut = 0\ndraft_model = "{}"\n', "drafts for the partner's model: .* split.draft_model"),
        ('[device.adapters]\nlaw = "{}"\n', r"is the adapter law: take it out of \[device.adapters\]"),
        ('[device.adapters]\nlaw = {{path = "{}", scale = 0.5}}\n', "is the adapter law"),
    ],
)
def test_what_any_setting_names_stays_by_each_of_its_parts_and_spellings(
    home: Path, settings: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [model_file(home / "ours" / f"big-0000{n}-of-00002.gguf") for n in (1, 2)]
    (home / "link.gguf").symlink_to(parts[0])
    (home / "config.toml").write_text(settings.format(parts[0]))
    for spelled in (parts[0], parts[1], home / "link.gguf", home / "ours" / ".." / "ours" / parts[1].name):
        with pytest.raises(ConfigError, match=why):
            disco("rm", str(spelled), "--yes")
    entry = f'[[models]]\nname = "big"\nmodel = "{home / "link.gguf"}"\n'
    (home / "config.toml").write_text(settings.format(parts[0]) + entry)
    assert disco("rm", "big", "--yes") == 0
    assert why.partition(":")[0] in capsys.readouterr().out
    assert [path.exists() for path in parts] == [True, True]


def test_a_part_of_a_named_model_is_not_removed_by_itself(home: Path) -> None:
    parts = [model_file(home / "ours" / f"big-0000{n}-of-00002.gguf") for n in (1, 2)]
    (home / "config.toml").write_text(f'[[models]]\nname = "big"\nmodel = "{parts[0]}"\n')
    with pytest.raises(ConfigError, match="is the file of disco/big"):
        disco("rm", str(parts[1]), "--yes")
    assert disco("rm", "big", "--yes") == 0
    assert [path.exists() for path in parts] == [False, False]


def test_a_link_to_a_model_is_not_disco_s_to_remove(home: Path) -> None:
    path = model_file(home / "ours" / "mine.gguf")
    (link := home / "link.gguf").symlink_to(path)
    assert disco("rm", str(link), "--yes") == 0
    assert (link.is_symlink(), path.exists()) == (True, False)


def test_a_named_model_that_a_rule_names_stays_with_its_file(home: Path) -> None:
    path = model_file(home / "ours" / "tiny.gguf")
    text = f"""[[models]]
name = "coder"
model = "{path}"

[[rules]]
code = true
use = "disco/coder"
"""
    (home / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match="coder"):
        disco("rm", "coder", "--yes")
    assert path.exists()
    assert (home / "config.toml").read_text() == text


def test_a_model_somewhere_else_is_listed_while_it_is_in_use(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_file(home / "downloads" / "mine.gguf")
    assert disco("use", str(path)) == 0
    capsys.readouterr()
    [one] = told(capsys, "list")["models"]
    assert (one["path"], one["source"], one["in_use"]) == (str(path), "device.model", True)


def test_use_writes_the_path_and_default_takes_it_back(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "config.toml").write_text("# mine\n[device]\nn_ctx = 1000 # short\n")
    path = model_file(home / ".lmstudio/models/maker/tiny/tiny.gguf")
    assert disco("use", "tiny") == 0
    assert "device.model in" in capsys.readouterr().out
    assert in_config() == str(path)
    text = (home / "config.toml").read_text()
    assert "# mine" in text
    assert "# short" in text
    assert disco("use", "default") == 0
    assert in_config() == ""


def test_use_previous_goes_back_and_forth_with_all_that_was_said_of_a_model(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="no model before this one is known"):
        disco("use", "--previous")
    one, two = model_file(home / "one.gguf"), model_file(home / "two.gguf")
    disco("use", str(one))
    config.set_values(home / "config.toml", {"device.grade": 3, "caps.usd_per_day": 1.0})
    disco("use", str(two))
    assert (in_config(), config.load().device.grade) == (str(two), config.load(home / "none.toml").device.grade)
    config.set_values(home / "config.toml", {"caps.usd_per_day": 2.0})
    assert disco("use", "--previous") == 0
    assert f"the device's model is {one}" in capsys.readouterr().out
    assert (in_config(), config.load().device.grade) == (str(one), 3)
    assert config.load().caps.usd_per_day == 2.0, "nothing but the model goes back"
    assert disco("use", "--previous") == 0
    assert in_config() == str(two)
    one.unlink()
    with pytest.raises(ConfigError, match="no longer there"):
        disco("use", "--previous")
    config.set_values(home / "config.toml", {"device.model": str(model_file(home / "one.gguf").with_name("3.gguf"))})
    with pytest.raises(ConfigError, match="by hand since"):
        disco("use", "--previous")
    theirs = {"device.base_url": "http://127.0.0.1:11434/v1", "device.model": "llama3"}
    config.set_values(home / "config.toml", theirs)
    disco("use", str(two))
    capsys.readouterr()
    disco("use", "--previous")
    assert f"the device's model is llama3 (device.model in {home / 'config.toml'})" in capsys.readouterr().out
    for words in ((), ("two.gguf", "--previous")):
        with pytest.raises(ConfigError, match="name a model, or give --previous"):
            disco("use", *words)


def test_use_takes_a_path_as_it_is_typed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_file(home / "here" / "mine.gguf")
    monkeypatch.chdir(home / "here")
    assert disco("use", "mine.gguf") == 0
    assert in_config() == str(path)
    assert disco("use", "~/here/mine.gguf") == 0
    assert in_config() == str(path)


def test_ollama_s_model_keeps_its_name_though_its_file_is_called_by_a_checksum(home: Path) -> None:
    root, digest = home / ".ollama" / "models", "ab" * 32
    blob = model_file(root / "blobs" / f"sha256-{digest}")
    manifest = root / "manifests/registry.ollama.ai/library/llama3.2/3b"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    assert disco("use", "llama3.2:3b") == 0
    assert in_config() == str(blob)
    assert make_endpoints(config.load(), Making(SystemClock()))[Side.DEVICE].model == "llama3.2:3b"
    disco("use", str(model_file(home / "m.gguf")))
    assert make_endpoints(config.load(), Making(SystemClock()))[Side.DEVICE].model == "m"


def test_use_refuses_what_cannot_be_loaded_and_changes_nothing(home: Path) -> None:
    whole = model_file(home / "whole.gguf")
    disco("use", str(whole))
    for problem, path in (
        ("cut short", model_file(home / "cut.gguf", missing=1)),
        ("LoRA", model_file(home / "lora.gguf", general__type="adapter")),
        ("is a folder", home),
    ):
        with pytest.raises(ConfigError, match=problem):
            disco("use", str(path))
    with pytest.raises(ConfigError, match="no model is called nonsense"):
        disco("use", "nonsense")
    assert in_config() == str(whole)


def test_use_takes_the_place_of_a_local_server_and_says_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = {"device.base_url": "http://127.0.0.1:1/v1", "device.model": "theirs", "device.grade": 3}
    config.set_values(home / "config.toml", theirs)
    with pytest.raises(ConfigError, match=r"device\.base_url is set"):
        disco("show")
    path = model_file(home / "m.gguf")
    assert disco("use", str(path)) == 0
    said = capsys.readouterr().out
    assert "device.base_url = http://127.0.0.1:1/v1 is taken out" in said
    assert "device.grade = 3.0 was for the model before, and is taken out." in said
    device = config.load().device
    assert (device.base_url, device.model, device.grade) == ("", str(path), None)


@pytest.mark.parametrize("words", [["pull", "maker/tiny", "--use"], ["pull"]])
def test_nothing_is_fetched_that_could_not_be_used(
    home: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(verb, "asked_at_terminal", lambda: models_offer.spec_of(server.repo.name))
    monkeypatch.setenv("DISCO_DEVICE_BASE_URL", "http://127.0.0.1:1/v1")
    with pytest.raises(ConfigError, match="DISCO_DEVICE_BASE_URL is set"):
        disco(*words)
    monkeypatch.delenv("DISCO_DEVICE_BASE_URL")
    config.set_values(home / "config.toml", {"server.base_url": "https://llm.example.com/v1"})
    with pytest.raises(ConfigError, match=r"server\.model is not"):
        disco(*words)
    assert server.repo.asked == []
    assert in_config() == ""


@pytest.mark.parametrize(("pooling", "words"), [(MEAN, "prefixes for"), (RANK, "rates documents by a query")])
def test_show_tells_of_a_model_that_answers_nothing_what_it_makes(
    pooling: int, words: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "ours").mkdir(exist_ok=True)
    path = tiny_bert(home / "ours/m.gguf", pooling, name="nomic-embed-text-v1.5").path
    assert disco("show", "m") == 0
    out = capsys.readouterr().out
    for part in (words, "answers nothing", f"texts of {CONTEXT} tokens", "GiB are free"):
        assert part in out
    assert "template" not in out
    seen = told(capsys, "show", "m")
    assert seen["texts"]["makes"] == ("ratings" if pooling == RANK else "vectors")
    assert seen["texts"]["least_dimensions"] == (None if pooling == RANK else 64)
    assert path.stat().st_size < seen["memory"]["n_bytes"] < path.stat().st_size + 4 * 2**20


def test_show_tells_what_it_is_and_what_it_takes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_file(home / "ours/m.gguf", tokenizer__chat_template="<think>{{ tools }}")
    assert disco("show", "m") == 0
    out = capsys.readouterr().out
    for words in (
        str(path),
        "llama",
        "Q8_0",
        "0.0 M",
        "2048 tokens as trained",
        "thoughts as in think",
        "GiB are free",
    ):
        assert words in out
    seen = told(capsys, "show", "m")
    assert seen["memory"]["n_bytes"] > path.stat().st_size
    assert seen["memory"]["n_cells"] >= 4096
    assert (seen["parameters"], seen["parts"], seen["in_use"]) == (6464, 1, False)
    assert seen["template"] == {"tools": None, "thoughts": "think", "source": "metadata"}
    assert seen["tool_format"] == "generic"
    assert seen["state"] == "kv"
    assert seen["mtp"] is None


@pytest.fixture(scope="module")
def guessing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made before `home` is: it has the default model's vocabulary."""
    return tiny_model(tmp_path_factory.mktemp("guessing") / "m.gguf", "nextn")


def test_show_tells_whether_a_layer_of_its_own_guesses(
    guessing_model: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "ours").mkdir()
    copyfile(guessing_model, home / "ours/m.gguf")
    assert told(capsys, "show", "m")["mtp"] == {"used": True, "why_not": None}
    for setting, value, words in (
        ("device.speculation", "auto", "(MTP), where that pays"),
        ("device.speculation", "off", "(MTP), but device.speculation is off"),
    ):
        config.set_values(home / "config.toml", {setting: value})
        disco("show", "m")
        assert words in capsys.readouterr().out
    model_file(home / "ours/m.gguf", llama__nextn_predict_layers=1)
    disco("show", "m")
    assert "(MTP), but the file was written without it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("template", "tokens", "tools", "thoughts"),
    [
        (None, ["a"], None, None),
        (HERMES.read_text(), ["a"], "hermes", None),
        (HERMES.read_text(), ["a", "<think>"], "hermes", None),
        (HERMES.read_text(), ["a", "<think>", "b", "</think>"], "hermes", "think"),
        (HERMES.read_text(), ["[/THINK]", "[THINK]"], "hermes", "mistral"),
        (HERMES.with_name("openai-gpt-oss-120b.jinja").read_text(), ["a"], "gpt-oss", "gpt-oss"),
        (HERMES.with_name("google-gemma-4-31B-it.jinja").read_text(), ["a"], "gemma", "gemma"),
        (HERMES.parents[1].joinpath("calls/GLM-4.6.jinja").read_text(), ["a"], "tagged", "think"),
        (HERMES.parents[1].joinpath("calls/ByteDance-Seed-OSS.jinja").read_text(), ["a"], "tagged", "seed"),
    ],
)
def test_show_tells_what_the_template_does_without_a_daemon(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    template: str | None,
    tokens: list[str],
    tools: str | None,
    thoughts: str | None,
) -> None:
    model_file(home / "ours/m.gguf", tokenizer__chat_template=template, tokenizer__ggml__tokens=tokens)
    source = "metadata" if template else None
    assert told(capsys, "show", "m")["template"] == {"tools": tools, "thoughts": thoughts, "source": source}
    disco("show", "m")
    words = f"thoughts as in {thoughts}" if thoughts else "no thoughts that are known" if template else "a base model"
    assert words in capsys.readouterr().out


def test_show_tells_of_the_template_that_is_set_in_place_of_the_files(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_file(home / "ours/m.gguf", tokenizer__chat_template="{{ messages }}")
    config.set_values(home / "config.toml", {"device.chat_template": str(HERMES)})
    seen = told(capsys, "show", "m")["template"]
    assert seen == {"tools": "hermes", "thoughts": None, "source": "device.chat_template"}
    disco("show", "m")
    assert f"{HERMES} (device.chat_template)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (HERMES.read_text(), "calls in the format hermes"),
        ("{{ messages[0].content }}", "only calls that are forced"),
        ("{% for", "none: the template cannot be used"),
    ],
)
def test_show_tells_how_the_template_has_tools_called(
    home: Path, capsys: pytest.CaptureFixture[str], template: str, words: str
) -> None:
    model_file(home / "ours/m.gguf", tokenizer__chat_template=template)
    assert disco("show", "m") == 0
    assert words in capsys.readouterr().out


def test_show_of_something_broken_says_why_and_fails(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_file(home / "cut.gguf", missing=7)
    assert disco("show", str(path)) == 1
    assert "cut.gguf is cut short: 7 bytes are missing" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="disco models fetch"):
        disco("show")


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    content = model_file(home / "source.gguf").read_bytes()
    with HubServer(Repo(files={"tiny-Q8_0.gguf": content})) as server:
        pull = hub.pull
        monkeypatch.setattr(hub, "pull", partial(pull, endpoint=server.url))
        yield server


def test_pull_names_the_file_and_how_to_use_it(
    home: Path, server: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert disco("pull", server.repo.name) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{home / 'ours' / 'tiny-Q8_0.gguf'}\n"
    assert "tiny-Q8_0.gguf  100 %" in printed.err
    assert "`disco models use tiny-Q8_0.gguf`" in printed.err
    assert in_config() == ""
    assert told(capsys, "list")["models"][0]["name"] == "tiny-Q8_0.gguf"


def test_nothing_is_written_where_the_settings_cannot_be_read_with_the_variables(
    home: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = model_file(home / "ours" / "a.gguf"), model_file(home / "ours" / "b.gguf")
    disco("use", str(path))
    disco("use", str(other))
    before = (home / "config.toml").read_text()
    monkeypatch.setenv("DISCO_POLICY_BUDGET_RATIO", "much")
    for words in (["use", str(path)], ["use", "--previous"], ["pull", str(home / "source.gguf"), "--use"],
                  ["pull", server.repo.name, "--use"], ["pull", server.repo.name, "--name", "coder"]):  # fmt: skip
        with pytest.raises(ConfigError, match="DISCO_POLICY_BUDGET_RATIO"):
            disco(*words)
        assert (home / "config.toml").read_text() == before, words
    assert (server.repo.asked, server.repo.looks) == ([], 0)
    assert not (home / "ours" / "source.gguf").exists()


def test_nobody_is_asked_for_a_model_with_policy_private_unless_one_says_so(home: Path, server: HubServer) -> None:
    (home / "config.toml").write_text("[policy]\nprivate = true\n")
    for words in (["pull", server.repo.name], ["pull", f"{server.url}/bytes/tiny-Q8_0.gguf"], ["fetch"]):
        with pytest.raises(ConfigError, match=r"policy.private is on: `--online`"):
            disco(*words)
    assert (server.repo.asked, server.repo.looks, server.repo.tokens) == ([], 0, [])
    assert disco("pull", str(home / "source.gguf")) == 0, "that is copied"
    assert disco("pull", server.repo.name, "--online") == 0


def test_pull_and_use_in_one(home: Path, server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert disco("pull", server.repo.name, "--use") == 0
    assert in_config() == str(home / "ours" / "tiny-Q8_0.gguf")
    capsys.readouterr()
    assert told(capsys, "pull", server.repo.name) == {"path": in_config()}


def test_pull_names_a_model_in_one_go_and_no_name_twice(
    home: Path, server: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "config.toml").write_text("[device]\nn_ctx = 1000 # short\n")
    assert disco("pull", server.repo.name, "--name", "coder") == 0
    path = home / "ours" / "tiny-Q8_0.gguf"
    assert f"disco/coder is {path}" in capsys.readouterr().out
    [named] = config.load().models
    assert (named.name, named.model) == ("coder", str(path))
    assert "n_ctx = 1000 # short" in (home / "config.toml").read_text()
    assert config.load().device.model == ""
    n_asked = len(server.repo.asked)
    for wrong, why in (("coder", "has a model called coder already"), ("No Name", "is no name of a model")):
        with pytest.raises(ConfigError, match=why):
            disco("pull", server.repo.name, "--name", wrong)
    assert len(server.repo.asked) == n_asked, "nothing was fetched"


OFFER: dict[str, Any] = {
    "id": "tiny", "title": "Tiny", "repo": "maker/tiny-GGUF", "file": "tiny-Q8_0.gguf", "bytes": 2.5e9,
    "memory_bytes": 4.2e9, "tps": 7.94, "ttft_s": {"100": 3.77, "2000": 75.0}, "licence": "MIT", "abilities": [],
    "recommended": True, "revision": None, "sha256": None,
}  # fmt: skip


class Offered:
    """What suits this machine."""

    def __init__(self, *models: dict[str, Any]) -> None:
        self.models = models

    def to_json(self) -> dict[str, Any]:
        measured = {"model": "x", "tps": 1.0}
        machine = {"free_bytes": 8e9, "gpu_bytes": 0, "measured": measured}
        return {"machine": machine, "models": list(self.models), "problem": ""}


def test_pull_without_a_name_shows_what_fits_and_fetches_nothing_without_a_yes(
    home: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models_offer, "recommended", lambda: Offered(OFFER))
    assert disco("pull") == 0
    printed = capsys.readouterr().err
    assert (
        "Tiny  2.5 GB  4.2 GB memory  about 7.9 token/s  first after 3.8 s  MIT  recommended  75 s for 2,000 tokens"
        in printed
    )
    assert "mostly within 15 %" in printed
    assert server.repo.asked == [], "this is no terminal, so nobody said yes"
    for answers, wanted in ((["", "1"], ""), (["7", "1"], str(home / "ours" / "tiny-Q8_0.gguf"))):
        typed = iter(answers)
        monkeypatch.setattr("builtins.input", lambda _, typed=typed: next(typed))
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        assert disco("pull") == 0
        assert in_config() == wanted


def test_pull_takes_a_short_name_and_shows_its_licence(
    home: Path, server: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "models.toml").write_text(
        '[[models]]\nnames = ["tiny"]\nparameters = 0.1\n[[models.files]]\nname = "tiny"\ntitle = "Tiny"\n'
        'repo = "maker/tiny-GGUF"\nfile = "tiny-Q8_0.gguf"\npacking = "Q8_0"\nbytes = 1000\nlicence = "MIT"\n'
        'architecture = "llama"\nlayers = 1\nhidden = 1\nvocab = 1\nkv_heads = 1\nhead_dim = 1\ncontext = 9000\n'
    )
    assert disco("pull", "Tiny", "--use") == 0
    assert "licence: MIT" in capsys.readouterr().err
    assert in_config() == str(home / "ours" / "tiny-Q8_0.gguf")
    with pytest.raises(ConfigError, match="qwen3-4b"):
        disco("pull", "tinyy")


def test_recommend_says_why_nothing_is_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models_offer, "recommended", Offered)
    assert disco("recommend") == 1
    assert "No model of the list fits into the memory that is free (8.0 GB)" in capsys.readouterr().out
    assert told(capsys, "recommend")["models"] == []


def test_fetch_prints_where_the_default_model_is(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model_file(home / "ours" / models.DEFAULT_MODEL)
    monkeypatch.setattr(models, "fetch_default_model", lambda say: (say("ready"), path)[1])
    assert disco("fetch") == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (f"{path}\n", "ready\n")
    assert told(capsys, "fetch") == {"path": str(path), "size_bytes": path.stat().st_size}


def test_the_verb_refuses_an_unknown_action() -> None:
    with pytest.raises(SystemExit) as stop:
        disco("eat")
    assert stop.value.code == 2


def test_a_model_goes_with_its_segments_and_exits_after_asking(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    mine, other = home / "ours" / "mine.gguf", home / ".lmstudio/models/maker/tiny/tiny.gguf"
    model_file(mine)
    model_file(other, general__name="another")
    kept = [KeptExits(path).folder / "24-linear.json" for path in (mine, other)]
    for path in kept:
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    segments = segment_files()
    folder = config.data_path() / "segments"
    folder.mkdir()
    for path in (mine, other):
        (folder / f"{_stem(path)}-0-24.v2.gguf").write_bytes(b"weights")
    assert disco("rm", str(mine)) == 1
    assert "--yes" in capsys.readouterr().err
    assert mine.exists()
    assert told(capsys, "rm", str(mine), "--yes")["removed_bytes"] > 0
    assert not mine.exists()
    assert not kept[0].parent.exists()
    assert [one.exists() for one in (kept[1], other)] == [True, True]
    assert len(segments.of_model(other)) == 1
    assert disco("rm", str(other), "--yes") == 0
    assert "another program fetched it" in capsys.readouterr().out
    assert other.exists()
    assert not kept[1].parent.exists()
    assert list(folder.iterdir()) == []


def test_the_device_s_model_is_not_removed_before_another_one_is_chosen(home: Path) -> None:
    mine = home / "ours" / "mine.gguf"
    model_file(mine)
    (home / "link").symlink_to(home)
    elsewhere = mine.parent / ".." / "ours" / "mine.gguf"
    disco("use", str(mine))
    for spelled in (mine, elsewhere, home / "link/ours/mine.gguf"):
        with pytest.raises(ConfigError, match="`disco models use` another one first"):
            disco("rm", str(spelled), "--yes")
    (home / "config.toml").write_text(f'[device]\ndraft_model = "{mine}"\n')
    with pytest.raises(ConfigError, match=r"guesses for the device's model: .* device.draft_model"):
        disco("rm", str(elsewhere), "--yes")
    assert mine.exists()
