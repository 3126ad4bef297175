"""The model files of this machine: where they are, and what they are."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from disco_daemon.errors import ConfigError
from disco_daemon.models import files, places
from disco_daemon.models.files import examine, thinks
from disco_daemon.models.places import FoundModel
from disco_daemon.models.progress import ProgressBar, lasting
from tests.fixtures.gguf import array, encoded, gguf, header, model_file, pair, text

DIGEST = "sha256:" + "ab" * 32
COMMITS = "c" * 40, "a" * 40


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISCO_MODELS_DIR", str(tmp_path / "ours"))
    monkeypatch.setattr(places, "OLLAMA_SERVICE", tmp_path / "service" / "models")
    return tmp_path


def named(home: Path, env: dict[str, str] | None = None, platform: str = "linux") -> dict[str, str]:
    return {found.name: found.source for found in places.find(env or {}, home, platform)}


def ollama(root: Path, tag: str, digest: str = DIGEST, media: str = "application/vnd.ollama.image.model") -> Path:
    manifest = root / "manifests" / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [{"mediaType": "application/vnd.ollama.image.license", "digest": DIGEST.replace("a", "0")}]
    layers.append({"mediaType": media, "digest": digest})
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return root / "blobs" / digest.replace(":", "-")


# --- places -----------------------------------------------------------------------------------------------------------


def test_nothing_is_found_where_nothing_is(home: Path) -> None:
    assert named(home) == {}


def test_our_own_folder_comes_first_and_folders_in_it_count(home: Path) -> None:
    for name in ("b.gguf", "a.GGUF", "more/c.gguf", ".fetch-1/d.gguf", "e.gguf.part", "f-00002-of-00002.gguf"):
        model_file(home / "ours" / name)
    (home / "ours" / "gone.gguf").symlink_to(home / "nowhere")
    (home / "ours" / "folder.gguf").mkdir()
    assert list(named(home)) == ["a.GGUF", "b.gguf", "more/c.gguf"]


def test_what_ollama_has_is_called_as_it_calls_it(home: Path) -> None:
    root = home / ".ollama" / "models"
    model_file(ollama(root, "registry.ollama.ai/library/llama3.2/3b"))
    other = "sha256:" + "cd" * 32
    model_file(ollama(root, "registry.ollama.ai/somebody/tuned/latest", other))
    third = "sha256:" + "ef" * 32
    model_file(ollama(home / "service" / "models", "hf.co/maker/tiny-GGUF/Q4_K_M", third))
    assert named(home) == {
        "llama3.2:3b": "Ollama", "somebody/tuned:latest": "Ollama", "hf.co/maker/tiny-GGUF:Q4_K_M": "Ollama"
    }  # fmt: skip
    assert places.find({}, home)[0].path == root / "blobs" / DIGEST.replace(":", "-")


def test_ollama_s_folder_follows_its_variable(home: Path) -> None:
    model_file(ollama(home / "elsewhere", "registry.ollama.ai/library/a/b"))
    assert named(home, {"OLLAMA_MODELS": str(home / "elsewhere")}) == {"a:b": "Ollama"}


@pytest.mark.parametrize(
    "digest", ["sha256:../../../../etc/passwd", "sha256-" + "ab" * 32, "sha256:" + "AB" * 32, "../x", DIGEST + "/.."]
)
def test_a_digest_that_is_none_names_no_file(home: Path, digest: str) -> None:
    ollama(home / ".ollama" / "models", "registry.ollama.ai/library/a/b", digest)
    (home / ".ollama" / "models" / "blobs").mkdir()
    assert named(home) == {}


@pytest.mark.parametrize(
    "manifest", [b"", b"[]", b"{", b'{"layers": 1}', b'{"layers": [1, {}]}', b"[" * 100_000, b"\xff"]
)
def test_a_manifest_that_is_none_is_passed_by(home: Path, manifest: bytes) -> None:
    root = home / ".ollama" / "models"
    ollama(root, "registry.ollama.ai/library/a/b")
    (root / "manifests/registry.ollama.ai/library/a/b").write_bytes(manifest)
    assert named(home) == {}


def test_a_model_that_ollama_has_removed_is_not_there(home: Path) -> None:
    ollama(home / ".ollama" / "models", "registry.ollama.ai/library/a/b")
    assert named(home) == {}


def test_lm_studio_s_folders_old_new_and_chosen(home: Path) -> None:
    model_file(home / ".lmstudio/models/maker/tiny-GGUF/tiny.gguf")
    model_file(home / ".cache/lm-studio/models/maker/old/old.gguf")
    model_file(home / "big/maker/chosen/chosen.gguf")
    (home / ".lmstudio/settings.json").write_text(json.dumps({"downloadsFolder": str(home / "big")}))
    assert list(named(home)) == ["maker/tiny-GGUF/tiny.gguf", "maker/chosen/chosen.gguf", "maker/old/old.gguf"]


def test_llama_cpp_s_folder_is_elsewhere_on_a_mac_and_follows_its_variable(home: Path) -> None:
    model_file(home / ".cache/llama.cpp/a.gguf")
    model_file(home / "Library/Caches/llama.cpp/b.gguf")
    model_file(home / "own/c.gguf")
    model_file(home / "xdg/llama.cpp/d.gguf")
    assert named(home) == {"a.gguf": "llama.cpp"}
    assert named(home, platform="darwin") == {"b.gguf": "llama.cpp"}
    assert named(home, {"LLAMA_CACHE": str(home / "own")}) == {"c.gguf": "llama.cpp"}
    assert named(home, {"XDG_CACHE_HOME": str(home / "xdg")}) == {"d.gguf": "llama.cpp"}


def hugging_face(hub: Path, commit: str, name: str = "tiny.Q8_0.gguf", blob: str = "f00") -> Path:
    """A file as huggingface_hub's cache has it: a link to a blob."""
    repo = hub / "models--maker--tiny-GGUF"
    model_file(repo / "blobs" / blob)
    path = repo / "snapshots" / commit / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(repo / "blobs" / blob)
    return path


def test_hugging_face_s_newest_snapshot_counts(home: Path) -> None:
    hub = home / ".cache/huggingface/hub"
    newest = hugging_face(hub, COMMITS[0], blob="new")
    hugging_face(hub, COMMITS[1], blob="old")
    hugging_face(hub, COMMITS[1], name="only/there.gguf", blob="other")
    (hub / "models--maker--tiny-GGUF/refs").mkdir()
    (hub / "models--maker--tiny-GGUF/refs/main").write_text(COMMITS[0])
    (hub / "datasets--a--b/snapshots/x").mkdir(parents=True)
    model_file(hub / "datasets--a--b/snapshots/x/no.gguf")
    found = places.find({}, home)
    assert [one.name for one in found] == ["maker/tiny-GGUF/tiny.Q8_0.gguf", "maker/tiny-GGUF/only/there.gguf"]
    assert found[0] == FoundModel("maker/tiny-GGUF/tiny.Q8_0.gguf", newest, "Hugging Face")


@pytest.mark.parametrize(
    ("variable", "below"),
    [
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ],
)
def test_hugging_face_s_folder_follows_its_variables(home: Path, variable: str, below: str) -> None:
    hugging_face(home / "x" / below, COMMITS[0])
    assert list(named(home, {variable: str(home / "x")})) == ["maker/tiny-GGUF/tiny.Q8_0.gguf"]


def test_a_file_that_two_programs_have_is_listed_once(home: Path) -> None:
    path = hugging_face(home / ".cache/huggingface/hub", COMMITS[0])
    (home / "ours").mkdir()
    (home / "ours/mine.gguf").symlink_to(path)
    assert named(home) == {"mine.gguf": "disco"}


def test_looking_ends_in_a_folder_without_end(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MOST_SEEN", 10)
    for n in range(5):
        model_file(home / f"ours/a{n}.gguf")
        model_file(home / f"ours/z/b{n}.gguf")
        model_file(home / f"ours/z/z/b{n}.gguf")
    assert 5 <= len(named(home)) <= 10
    (home / "ours/z/z/loop").symlink_to(home / "ours")
    assert len(named(home)) <= 10


def test_others_folders_are_left_as_they_are(home: Path) -> None:
    model_file(ollama(home / ".ollama" / "models", "registry.ollama.ai/library/a/b"))
    hugging_face(home / ".cache/huggingface/hub", COMMITS[0])
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in home.rglob("*"))
    for found in places.find({}, home):
        examine(found.path)
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in home.rglob("*")) == before


def test_a_model_is_chosen_by_its_name_or_the_only_file_of_that_name() -> None:
    found = [
        FoundModel("llama3.2:3b", Path("/blobs/1"), "Ollama"),
        FoundModel("maker/tiny/tiny.Q8_0.gguf", Path("/hf/tiny.Q8_0.gguf"), "Hugging Face"),
        FoundModel("other/tiny/big.gguf", Path("/hf/big.gguf"), "Hugging Face"),
        FoundModel("big.gguf", Path("/ours/big.gguf"), "disco"),
    ]
    assert places.choose_model("llama3.2:3b", found) is found[0]
    assert places.choose_model("/blobs/1", found) is found[0]
    assert places.choose_model("Tiny.q8_0", found) is found[1]
    assert places.choose_model("big.gguf", found) is found[3]
    with pytest.raises(ConfigError, match=r"several models are called BIG: other/tiny/big\.gguf, big\.gguf"):
        places.choose_model("BIG", found)
    with pytest.raises(ConfigError, match="disco models list"):
        places.choose_model("tiny", found)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_whole_model_has_no_problem_and_tells_what_it_is(tmp_path: Path) -> None:
    found = examine(model_file(tmp_path / "m.gguf"))
    assert (found.problem, found.n_parameters, found.n_ctx) == ("", 6464, 2048)
    assert found.n_bytes == found.path.stat().st_size
    quick = examine(found.path, quick=True)
    assert (quick.problem, quick.n_parameters) == ("", None)


def test_a_header_longer_than_the_first_look_is_read_to_its_end(tmp_path: Path) -> None:
    vocabulary = [f"word{n:06}" * 3 for n in range(100_000)]
    path = model_file(tmp_path / "m.gguf", tokenizer__ggml__tokens=vocabulary, tokenizer__chat_template="<think>")
    assert path.stat().st_size > files.QUICK
    found = examine(path)
    assert found.problem == ""
    assert found.header.keys["tokenizer.ggml.tokens.length"] == 100_000
    assert thinks(found.header)
    assert not examine(path, quick=True).header.text("tokenizer.chat_template")


def cut(path: Path) -> Path:
    return model_file(path, missing=100)


def cut_in_the_header(path: Path) -> Path:
    model_file(path)
    path.write_bytes(path.read_bytes()[:200])
    return path


def adapter(path: Path) -> Path:
    return model_file(path, general__type="adapter")


def vision(path: Path) -> Path:
    return model_file(path, general__architecture="clip", general__type=None)


def nameless(path: Path) -> Path:
    return model_file(path, general__architecture=None)


def a_later_part(path: Path) -> Path:
    return model_file(path, split__no=1, split__count=2)


def a_lonely_part(path: Path) -> Path:
    return model_file(path, split__no=0, split__count=2)


def a_page(path: Path) -> Path:
    path.write_text("<html>")
    return path


def nothing(path: Path) -> Path:
    return path


def hostile(path: Path) -> Path:
    path.write_bytes(header(pair("a", 9, array(8, 2**63, text("x") * 9)), encoded("b", "c")))
    return path


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (cut, "m.gguf is cut short: 100 bytes are missing"),
        (cut_in_the_header, "m.gguf is cut short"),
        (adapter, "is a LoRA adapter"),
        (vision, "part of a model that sees"),
        (nameless, "does not tell its architecture"),
        (a_later_part, "is not the first part"),
        (a_lonely_part, "is one of several parts"),
        (a_page, "too short for a GGUF file"),
        (nothing, "cannot be read: No such file"),
        (hostile, "does not tell its architecture"),
        (lambda path: gguf(path, general__architecture="llama"), "holds a vocabulary, and no weights"),
    ],
)
def test_what_llama_cpp_could_not_load_is_told(make: Callable[[Path], Path], problem: str, tmp_path: Path) -> None:
    assert problem in examine(make(tmp_path / "m.gguf")).problem


def test_a_model_in_parts_is_one(tmp_path: Path) -> None:
    names = [f"big-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for n, name in enumerate(names):
        model_file(tmp_path / name, split__no=n, split__count=3)
    found = examine(tmp_path / names[0])
    assert found.problem == ""
    assert found.n_parameters == 3 * 6464
    assert found.n_bytes == sum((tmp_path / name).stat().st_size for name in names)
    assert f"name {names[0]}" in examine(tmp_path / names[1]).problem
    model_file(tmp_path / names[2], missing=8, split__no=2, split__count=3)
    assert f"{names[2]} is cut short: 8 bytes" in examine(tmp_path / names[0]).problem
    (tmp_path / names[2]).write_text("<html>" * 9)
    assert "has a part that is no GGUF file" in examine(tmp_path / names[0]).problem
    (tmp_path / names[2]).unlink()
    assert f"lacks 1 of its 3 parts: {names[2]}" in examine(tmp_path / names[0]).problem


@pytest.mark.parametrize(
    ("source", "does"),
    [
        (None, False),
        ("{{ messages }}", False),
        ("{% if enable_thinking %}", True),
        ("<think>{{ content }}</think>{% for t in tools %}", True),
    ],
)
def test_a_template_shows_whether_its_model_thinks(source: str | None, does: bool, tmp_path: Path) -> None:
    assert thinks(examine(model_file(tmp_path / "m.gguf", tokenizer__chat_template=source)).header) is does


# --- progress ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Hands:
    """A clock that is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_at_a_terminal_one_line_tells_share_rate_and_time_left() -> None:
    out, clock = Terminal(), Hands()
    progress = ProgressBar(out, clock)
    for second in range(6):
        clock.now = float(second)
        progress("m.gguf", second * 2_000_000, 100_000_000)
    lines = out.getvalue().split("\r")
    assert lines[-1] == "m.gguf   10 %  10.0 of 100.0 MB  2.0 MB/s  45 s left\x1b[K"
    assert "\n" not in out.getvalue()
    progress.end()
    progress.end()
    assert out.getvalue().endswith("left\x1b[K\n")


def test_the_line_is_not_written_for_each_piece() -> None:
    out, clock = Terminal(), Hands()
    progress = ProgressBar(out, clock)
    for n in range(1000):
        clock.now = n / 1000
        progress("m.gguf", n, 999)
    assert 10 <= out.getvalue().count("\r") <= 12
    assert "100 %" in out.getvalue()


def test_the_rate_is_that_of_the_last_seconds_and_begins_anew() -> None:
    out, clock = Terminal(), Hands()
    progress = ProgressBar(out, clock)
    for second in range(100):
        clock.now = float(second)
        progress("m.gguf", 1_000_000 * min(second, 50) + 3_000_000 * max(0, second - 50), 10**9)
    assert "3.0 MB/s" in out.getvalue().rpartition("\r")[2]
    clock.now = 200.0
    progress("m.gguf", 0, 10**9)
    assert "MB/s" not in out.getvalue().rpartition("\r")[2]


def test_where_nobody_watches_there_is_a_line_a_tenth() -> None:
    out = io.StringIO()
    progress = ProgressBar(out, Hands())
    for done in range(0, 1001, 7):
        progress("m.gguf", done, 1000)
    progress("m.gguf", 1000, 1000)
    assert len(out.getvalue().splitlines()) == 11
    assert "\r" not in out.getvalue()


def test_times_to_wait() -> None:
    assert [lasting(s) for s in (0.4, 59, 61, 3600 * 5 + 120)] == ["0 s", "59 s", "1 min 1 s", "5 h 2 min"]
