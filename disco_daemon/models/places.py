"""The places of model files: our own folder, and those of Ollama, LM Studio, llama.cpp and Hugging Face.

What others have is used where it is. Nothing is written there, copied from there, or believed: a manifest's digest that
is none names no file.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..plain import did_you_mean
from ..system.smallfile import open_regular
from .default import models_dir
from .gguf import shard

OURS, OLLAMA, LM_STUDIO, LLAMA_CPP, HUGGING_FACE = "disco", "Ollama", "LM Studio", "llama.cpp", "Hugging Face"
OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")  # where Ollama's own installer lets its service keep them
MOST_SEEN = 20_000  # files and folders looked at in one place: a downloads folder may hold anything
MOST_DEEP = 5  # folders below a place
MOST_BYTES = 1 << 20  # of a manifest, or of settings; they have some kilobytes
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_OLLAMA_HOST, _OLLAMA_OWN = "registry.ollama.ai", "library"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model file: what to call it in `disco models use`, where it is (its first part), and whose it is."""

    name: str
    path: Path
    source: str


def find(
    env: Mapping[str, str] | None = None, home: Path | None = None, platform: str = sys.platform
) -> list[FoundModel]:
    """Return all model files, ours first; each once, even if several programs have it."""
    env = os.environ if env is None else env
    home = home or Path.home()
    cache = Path(env.get("XDG_CACHE_HOME") or home / ".cache")
    seen: set[str] = set()
    found: list[FoundModel] = []
    for one in (
        *_in_folder(models_dir(), OURS),
        *_ollama(env, home),
        *_lm_studio(home),
        *_llama_cpp(env, home, cache, platform),
        *_hugging_face(env, cache),
    ):
        real = os.path.realpath(one.path)
        if real not in seen:
            seen.add(real)
            found.append(one)
    return found


def choose_model(wanted: str, found: Sequence[FoundModel]) -> FoundModel:
    """The model that a user means: by its name, else by the only file of that name. Raises ConfigError."""
    for one in found:
        if wanted in (one.name, str(one.path)):
            return one
    asked = wanted.casefold().removesuffix(".gguf")
    alike = [one for one in found if asked in _short_names(one)]
    if len(alike) == 1:
        return alike[0]
    if alike:
        msg = f"several models are called {wanted}: {', '.join(one.name for one in alike)}"
        raise ConfigError(msg)
    near = did_you_mean(wanted, (one.name for one in found))
    msg = f"no model is called {wanted}, and there is no such file: {near}`disco models list` shows what there is"
    raise ConfigError(msg)


def _short_names(one: FoundModel) -> set[str]:
    whole = one.name.casefold()
    return {name.removesuffix(".gguf") for name in (whole, whole.rpartition("/")[2])}


# --- folders of GGUF files --------------------------------------------------------------------------------------------


def _in_folder(folder: Path, source: str) -> Iterator[FoundModel]:
    """GGUF files below a folder, called by their paths in it."""
    for path in _files(folder):
        if path.suffix.casefold() == ".gguf" and shard(path.name)[0] == 1:
            yield FoundModel(path.relative_to(folder).as_posix(), path, source)


def _files(folder: Path) -> Iterator[Path]:
    """The files below a folder in order; not those in hidden folders, nor behind links to folders."""
    n_seen = 0
    for name, folders, files in os.walk(folder):
        here = Path(name)
        deep = len(here.relative_to(folder).parts)
        folders[:] = sorted(f for f in folders if not f.startswith(".")) if deep < MOST_DEEP else []
        n_seen += len(folders) + len(files)
        if n_seen > MOST_SEEN:
            return
        for file in sorted(files):
            with suppress(OSError):
                if (here / file).is_file():
                    yield here / file


def _lm_studio(home: Path) -> Iterator[FoundModel]:
    """Look in LM Studio's folder of today and of earlier versions, and in the one that its settings name."""
    for own in (home / ".lmstudio", home / ".cache" / "lm-studio"):
        folders = [own / "models"]
        settings = _json(own / "settings.json")
        if isinstance(elsewhere := settings.get("downloadsFolder"), str) and Path(elsewhere).is_absolute():
            folders.append(Path(elsewhere))
        for folder in folders:
            yield from _in_folder(folder, LM_STUDIO)


def _llama_cpp(env: Mapping[str, str], home: Path, cache: Path, platform: str) -> Iterator[FoundModel]:
    """Look for files that `llama-server -hf` had fetched before it used Hugging Face's own folder."""
    usual = home / "Library" / "Caches" / "llama.cpp" if platform == "darwin" else cache / "llama.cpp"
    yield from _in_folder(Path(env.get("LLAMA_CACHE") or usual), LLAMA_CPP)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def _hugging_face(env: Mapping[str, str], cache: Path) -> Iterator[FoundModel]:
    """The newest snapshot of each repository: huggingface_hub/constants.py says where, its cache guide how."""
    hub = Path(env.get("HF_HOME") or cache / "huggingface") / "hub"
    hub = Path(env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or hub)
    for repo in _list_files(hub):
        if not repo.name.startswith("models--"):
            continue
        names: set[str] = set()
        for snapshot in _snapshots(repo):
            for found in _in_folder(snapshot, HUGGING_FACE):
                name = f"{repo.name.removeprefix('models--').replace('--', '/')}/{found.name}"
                if name not in names:
                    names.add(name)
                    yield FoundModel(name, found.path, HUGGING_FACE)


def _snapshots(repo: Path) -> list[Path]:
    """The snapshots of a repository, that of the main branch first."""
    try:
        main = (repo / "refs" / "main").read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        main = ""
    return sorted(_list_files(repo / "snapshots"), key=lambda snapshot: snapshot.name != main)


def _list_files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())[:MOST_SEEN]
    except OSError:
        return []


# --- Ollama -----------------------------------------------------------------------------------------------------------


def _ollama(env: Mapping[str, str], home: Path) -> Iterator[FoundModel]:
    """A manifest a tag, which names the model's file by its digest."""
    for root in _different([env.get("OLLAMA_MODELS"), home / ".ollama" / "models", OLLAMA_SERVICE]):
        manifests = root / "manifests"
        for path in _files(manifests):
            blob = _model_blob(root, _json(path))
            if blob is not None:
                yield FoundModel(_tag(path.relative_to(manifests).parts), blob, OLLAMA)


def _different(folders: Iterable[str | Path | None]) -> list[Path]:
    return list(dict.fromkeys(Path(folder) for folder in folders if folder))


def _model_blob(root: Path, manifest: Mapping[str, object]) -> Path | None:
    layers = manifest.get("layers")
    for layer in layers if isinstance(layers, list) else []:
        if not isinstance(layer, dict) or layer.get("mediaType") != "application/vnd.ollama.image.model":
            continue
        digest = layer.get("digest")
        if isinstance(digest, str) and _DIGEST.fullmatch(digest):
            blob = root / "blobs" / digest.replace(":", "-")
            with suppress(OSError):
                return blob if blob.is_file() else None
    return None


def _tag(parts: tuple[str, ...]) -> str:
    """Return the name as `ollama list` shows it: without the registry, and without its own library."""
    *where, tag = parts
    if where[:1] == [_OLLAMA_HOST]:
        where = where[1:]
        if where[:1] == [_OLLAMA_OWN]:
            where = where[1:]
    return f"{'/'.join(where)}:{tag}"


def _json(path: Path) -> dict[str, object]:
    """A file that should hold a JSON object; empty if it does not."""
    try:
        with open_regular(path) as f:
            found = json.loads(f.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
