"""Fetches models from the Hugging Face Hub; the only module that imports huggingface_hub.

Its client finds the files, the address (HF_ENDPOINT), the token (HF_TOKEN) and the meaning of an error. The download is
ours: `hf_hub_download` writes to a name that no other process knows and deletes the file when it fails, so that a cut
download begins again; and it reports nothing below 10 MiB.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path

from huggingface_hub import HfApi, get_session, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented; not in its `__all__`

from .. import __version__
from ..errors import ConfigError
from ..plain import reason_of
from .gguf import read_header
from .local_files import LocalFiles
from .part import PREFIX, NameLock, Part, PartTooLong, drop_old, is_same, path_of
from .progress import Report
from .quants import DEFAULT, NO_PIN, Pin, RemoteFile, Variant, choose, parse
from .remote_source import TIMEOUT_S, Pause, PullError, RemoteSource, T, TransferCut, is_for_now
from .web_file import WebFile, is_web_address

SPARE_BYTES = 256 << 20  # of the disk stay free
LOOK_BYTES = 16 << 20  # come between two looks at the disk: other programs, and other fetches, fill it as well
HEAD_BYTES = 1 << 20  # of a download are checked before it gets its name
_COMMIT = re.compile(r"[0-9a-f]{40}")
# What to do about a file that is another than the list says.
_UNPINNED = (
    "`disco models pull {repo}:{file}` takes what is there now, if you trust that; a models.toml beside the settings "
    "can have a newer entry"
)
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # of git, or SHA-256

# Where the client looks. What a service runs does not see a shell's variables, but the file.
GIVE_TOKEN = "put a token into $HF_TOKEN, or into ~/.cache/huggingface/token, where `hf auth login` writes it"  # noqa: S105 - where one goes

Say = Callable[[str], None]


class Hub(RemoteSource):
    """One repository at the Hub, at one commit, `revision` or the newest. `endpoint` is HF_ENDPOINT by default."""

    kind = "the Hub"

    def __init__(self, repo: str, endpoint: str | None = None, pause: Pause = time.sleep, revision: str = "") -> None:
        super().__init__(pause)
        self.repo, self._revision = repo, revision
        self._endpoint = endpoint
        self.where = f"the Hub ({endpoint})" if endpoint else "the Hub"
        self._commit: str | None = None

    def _files(self) -> list[RemoteFile]:
        api = HfApi(endpoint=self._endpoint, library_name="disco", library_version=__version__)
        info = api.model_info(self.repo, revision=self._revision or None, files_metadata=True, timeout=TIMEOUT_S)
        self._commit = info.sha
        if _COMMIT.fullmatch(self._revision) and info.sha != self._revision:
            raise PullError(self._not_pinned(f"gives the commit {info.sha} in its place"))
        files = []
        for sibling in info.siblings or []:
            digest = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
            if sibling.size is not None and digest and _DIGEST.fullmatch(digest):
                files.append(RemoteFile(sibling.rfilename, sibling.size, digest))
        return files

    def _append(self, part: Part) -> None:
        """Send one request for the missing part."""
        headers: dict[str, str] = build_hf_headers(library_name="disco", library_version=__version__)
        headers["Accept-Encoding"] = "identity"
        if begin := part.n_bytes:
            headers["Range"] = f"bytes={begin}-"
        url = hf_hub_url(self.repo, part.file.path, revision=self._commit, endpoint=self._endpoint)
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as response:
            if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                part.restart()
                raise TransferCut("the server has not so much of it")
            hf_raise_for_status(response)
            self._take(response, part)

    def _translate_errors(self, work: Callable[[], T]) -> T:
        return super()._translate_errors(lambda: self._without_hub_errors(work))

    def _without_hub_errors(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except OfflineModeIsEnabled as e:
            raise PullError("HF_HUB_OFFLINE is set: unset it to fetch something") from e
        except HfHubHTTPError as e:
            status = e.response.status_code
            if is_for_now(status):
                raise TransferCut(f"it answers {status}") from e
            raise PullError(self._refusal(e, status)) from e

    def _refusal(self, error: HfHubHTTPError, status: int) -> str:
        if isinstance(error, GatedRepoError):
            return f"{self.repo} wants its licence accepted: do that on its page at the Hub, and {GIVE_TOKEN}"
        if isinstance(error, RevisionNotFoundError):
            return self._not_pinned("has none such")
        if isinstance(error, RepositoryNotFoundError):
            return f"there is no {self.repo} at the Hub, or it is private: check the name, or {GIVE_TOKEN}"
        return f"{self.where} answers {status}: check HF_TOKEN, HF_ENDPOINT and the proxy"

    def _not_pinned(self, what: str) -> str:
        return (
            f"the list of models names the commit {self._revision} of {self.repo}, and {self.where} {what}; nothing "
            f"was fetched: {_UNPINNED.format(repo=self.repo, file='QUANT')}"
        )


def pull(
    spec: str,
    folder: Path,
    say: Say,
    report: Report,
    endpoint: str | None = None,
    pause: Pause = time.sleep,
    begin: Callable[[Mapping[RemoteFile, bool]], None] = lambda _: None,
    pin: Pin = NO_PIN,
) -> Path:
    """Fetch the model `spec` (`USER/REPO[:QUANT]`, or a file's address) into `folder`; return its first file's path.

    `say` gets short lines, `begin` its files and which of them are here, `report` the progress. Raises ConfigError or
    PullError, also for a model that is not the one of its `pin`. A later call continues a cut one.
    """
    if is_web_address(spec):
        web = WebFile(spec.strip(), pin.sha256, pause)
        if not (models := web.variants()):
            raise ConfigError(f"{web.where} is no model by its name")
        [only] = models
        say(f"{web.where}: {only}")
        return _take(web, only, folder, say, report, begin)
    repo, wanted = parse(spec)
    hub = Hub(repo, endpoint, pause, pin.revision)
    found = hub.variants()
    variant = choose(repo, found, wanted)
    if pin.sha256 and pin.sha256.lower() != (digest := variant.files[0].digest):
        msg = (
            f"{variant.name} of {repo} has the checksum {digest} at the Hub, and the list of models says {pin.sha256}: "
            f"nothing was fetched; {_UNPINNED.format(repo=repo, file=variant.name)}"
        )
        raise PullError(msg)
    if wanted is None and variant.label != DEFAULT:
        say(f"there is no {DEFAULT} in {repo}, but {', '.join(map(str, found))}")
    say(f"{repo}: {variant}")
    return _take(hub, variant, folder, say, report, begin)


def copy_in(path: Path, folder: Path, say: Say, report: Report) -> Path:
    """Copy the model whose first file is at `path` into `folder`, as `pull` fetches one; return its first file."""
    source = LocalFiles(path)
    say(f"reading {path}")
    try:
        [variant] = source.variants()
    except OSError as e:
        raise ConfigError(f"{path} cannot be read, or one of its parts: {reason_of(e)}") from e
    return _take(source, variant, folder, say, report, lambda _: None)


def _take(
    source: RemoteSource | LocalFiles,
    variant: Variant,
    folder: Path,
    say: Say,
    report: Report,
    begin: Callable[[Mapping[RemoteFile, bool]], None],
) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NameLock(variant.name, folder):
            drop_old(folder)
            files = {file: _is_there(file, folder, say) for file in variant.files}
            missing = [file for file, is_here in files.items() if not is_here]
            begin(files)
            _check_room(missing, folder)
            for file in reversed(missing):  # the first part last: a model is listed by it, and must be whole then
                _fetch(source, file, folder, say, report)
    except OSError as e:
        raise _disk_trouble(folder, e) from e
    return folder / variant.name


def _is_there(file: RemoteFile, folder: Path, say: Say) -> bool:
    """Whether the file was fetched before. Raises PullError if another file has its name, or the name is unusable."""
    target = folder / file.name
    if file.name.startswith(".") or not file.name.isprintable():
        raise PullError(f"the repository calls a file {file.name!r}: that is no name for one here")
    if not target.exists():
        return False
    say(f"checking {target}")
    if is_same(target, file):
        if not file.digest:
            say("it has the size of that file; whether it is the same one only its checksum could say (--sha256)")
        return True
    raise PullError(f"{target} is there already, and is another file: move it away, then pull again")


def _check_room(missing: list[RemoteFile], folder: Path) -> None:
    """Raise PullError if the disk has no room for the rest."""
    parts = [path_of(file, folder) for file in missing]
    there = sum(part.stat().st_size for part in parts if part.exists())
    needed = sum(file.n_bytes for file in missing) - there
    free = shutil.disk_usage(folder).free
    if missing and needed + SPARE_BYTES > free:
        others = sum(_size(one) for one in folder.glob(f"{PREFIX}*") if one not in parts)
        kept = f"; {others / 1e9:.2f} GB are of other fetches that have not ended ({PREFIX}… in it)" if others else ""
        msg = (
            f"no room in {folder}: {needed / 1e9:.2f} GB are still to come, and {free / 1e9:.2f} GB are free "
            f"({SPARE_BYTES / 1e9:.2f} GB stay so){kept}: free some, or set DISCO_MODELS_DIR"
        )
        raise PullError(msg)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # another fetch has just ended
        return 0


def _fetch(source: RemoteSource | LocalFiles, file: RemoteFile, folder: Path, say: Say, report: Report) -> None:
    """Fetch one file: download what is missing, check it, and rename it."""
    looked = -LOOK_BYTES

    def has_grown(done: int) -> None:
        nonlocal looked
        if abs(done - looked) >= LOOK_BYTES:
            looked = done
            if shutil.disk_usage(folder).free < SPARE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        report(file.name, done, file.n_bytes)

    with Part(file, folder, has_grown) as part:
        if part.n_bytes:
            say(f"going on with {file.name} at {part.n_bytes / 1e6:.0f} MB")
        try:
            source.fetch(part)
        except PullError as e:
            if isinstance(e.__cause__, PartTooLong):
                part.path.unlink()
            raise
        say(f"checking {file.name}")
        _check_header(part)
        if not part.finish(folder / file.name):
            msg = f"the checksum of {file.name} is not {file.digest}, as it has to be; nothing was kept: pull again"
            raise PullError(msg)


def _check_header(part: Part) -> None:
    """Raise PullError unless the file is a GGUF."""
    try:
        with part.path.open("rb") as f:
            read_header(f.read(HEAD_BYTES))
    except ValueError as e:
        part.path.unlink()
        raise PullError(f"what came for {part.file.name} is no model ({e}); nothing was kept: pull again") from e


def _disk_trouble(folder: Path, error: OSError) -> ConfigError:
    """Say what a user can do about an OSError in the models folder."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(f"no room left in {folder}: free some, and pull again: it goes on where it is")
    return ConfigError(
        f"cannot write to the models folder {folder}: {reason_of(error)}; mend it, or set DISCO_MODELS_DIR"
    )
