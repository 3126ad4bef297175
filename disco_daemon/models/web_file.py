"""A model at an address that a person gave, at any host but the Hub's: a plain GET, gone on with where it was cut.

No key and no cookie goes along. The bytes come by https, or from this machine, and so do those of each redirect, of
which a few are followed; one that leads from the open network to an address of one's own is not. What the file has to
be says the checksum that the person gave. Without one its size, and the server's name for this version of it, have to
stay the same.
"""

from __future__ import annotations

import hashlib
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from http import HTTPStatus
from pathlib import PurePosixPath
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

import httpx2

from ..errors import ConfigError
from ..plain import one_line
from ..system.net import (
    hostname,
    is_http_url,
    is_loopback,
    is_plain,
    is_private_address,
    pointed_to,
    without_credentials,
)
from .gguf import shard_names
from .part import Part
from .quants import RemoteFile, is_at_hub
from .remote_source import TIMEOUT_S, Pause, PullError, RemoteSource, TransferCut, is_for_now

MOST_REDIRECTS = 5  # a page of releases, its store, and a mirror of that, with some to spare
_OF = re.compile(r"bytes (?:\d+-\d+|\*)/(\d+)")


def is_web_address(spec: str) -> bool:
    """Whether a person means a file at a host that is not the Hub."""
    return spec.strip().casefold().startswith(("https://", "http://")) and not is_at_hub(spec.strip())


class WebFile(RemoteSource):
    """The model whose first file is at `url`; it has the `sha256`, if that is not empty. Raises ConfigError."""

    def __init__(self, url: str, sha256: str = "", pause: Pause = time.sleep) -> None:
        super().__init__(pause)
        if not is_http_url(url):
            raise ConfigError(f"{without_credentials(url)} is no address of a file")
        parts = urlsplit(url)
        folder, _, name = parts.path.rpartition("/")
        self.name = PurePosixPath(unquote(name)).name
        if not self.name.casefold().endswith(".gguf"):
            raise ConfigError(f"{without_credentials(url)} names no GGUF file: the address has to end with one")
        names = shard_names(self.name)
        if sha256 and len(names) > 1:
            raise ConfigError(f"{self.name} is one of {len(names)} parts: --sha256 can be that of a single file only")
        self._sha256, self._url = sha256.lower(), url
        paths = [parts.path] if len(names) == 1 else [f"{folder}/{quote(one)}" for one in names]
        self._urls = {one: urlunsplit(parts._replace(path=path)) for one, path in zip(names, paths, strict=True)}
        self._versions: dict[str, str] = {}  # by name: what the server calls this version of a file, empty if nothing
        self.where = without_credentials(urlunsplit(parts._replace(query="", fragment="")))
        self._require_safe(url)

    def fetch(self, part: Part) -> None:
        """Download all that is missing of a part; what cannot be told from another version's begins again."""
        if not part.file.digest and not self._versions[part.file.name]:
            part.restart()
        super().fetch(part)

    def _files(self) -> list[RemoteFile]:
        return [self._look(name, url) for name, url in self._urls.items()]

    def _look(self, name: str, url: str) -> RemoteFile:
        with self._answer(url, {"Range": "bytes=0-0"}) as response:
            n_bytes, headers = _whole_bytes(response), response.headers
        if not n_bytes:
            raise PullError(f"{self.where} does not say how large {name} is, so it cannot be fetched safely")
        tag = headers.get("ETag", "")
        version = tag if tag.startswith('"') else headers.get("Last-Modified", "")
        self._versions[name] = version
        mark = hashlib.sha256(f"{url}\n{n_bytes}\n{version}".encode()).hexdigest()
        return RemoteFile(name, n_bytes, self._sha256, mark)

    def _append(self, part: Part) -> None:
        name, headers = part.file.name, dict[str, str]()
        if begin := part.n_bytes:
            headers["Range"] = f"bytes={begin}-"
            if version := self._versions[name]:
                headers["If-Range"] = version
        with self._answer(self._urls[name], headers) as response:
            if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                part.restart()
                raise TransferCut("the server has not so much of it")
            n_bytes = _whole_bytes(response)
            if n_bytes is not None and n_bytes != part.file.n_bytes:
                raise PullError(f"{self.where} has another file now than a moment ago: pull again")
            self._take(response, part)

    @contextmanager
    def _answer(self, url: str, headers: Mapping[str, str]) -> Iterator[httpx2.Response]:
        """Give the answer to a GET, behind redirects. Raises TransferCut, PullError, or an error of httpx2."""
        for _ in range(MOST_REDIRECTS + 1):
            with (
                httpx2.Client(timeout=TIMEOUT_S, trust_env=not is_loopback(hostname(url))) as http,
                http.stream("GET", url, headers={"Accept-Encoding": "identity", **headers}) as response,
            ):
                if not response.has_redirect_location:
                    self._require_there(response)
                    yield response
                    return
                location = response.headers["Location"]
            url = self._pointed_to(url, location)
        raise PullError(f"{self.where} points elsewhere more than {MOST_REDIRECTS} times")

    def _require_there(self, response: httpx2.Response) -> None:
        status = response.status_code
        if status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE):
            return
        if is_for_now(status):
            raise TransferCut(f"it answers {status}")
        raise PullError(f"{self.where} answers {status}: look whether a browser gets the file from that address")

    def _pointed_to(self, url: str, location: str) -> str:
        """Return where a redirect leads, if it may be followed. Raises PullError."""
        try:
            found = urljoin(url, location)
            self._require_safe(found)
            self._require_outside(hostname(found))
        except (ValueError, ConfigError) as e:
            shown = one_line(pointed_to(url, location), 200)
            raise PullError(f"{self.where} points to {shown}, which is not followed: {e}") from e
        return found

    def _require_safe(self, url: str) -> None:
        """Raise ConfigError for an address from which no bytes are taken."""
        if not is_http_url(url) or (is_plain(url) and not is_loopback(hostname(url))):
            raise ConfigError("models come by https only, so that nobody on the way can change them")

    def _require_outside(self, host: str) -> None:
        """Raise ConfigError for a host of this machine or its network, unless the person named one."""
        if not self._is_from_inside and _is_inside(host):
            raise ConfigError("that is an address of this machine or its network")

    @cached_property
    def _is_from_inside(self) -> bool:
        return _is_inside(hostname(self._url))


def _is_inside(host: str) -> bool:
    """Whether a host is this machine or of its network: by one of its addresses, if it has any that can be found."""
    if is_loopback(host):
        return True
    try:  # also of addresses, which have more spellings than one
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(is_private_address(str(address[4][0]).partition("%")[0]) for address in found)


def _whole_bytes(response: httpx2.Response) -> int | None:
    """Return the size of the whole file, bytes; None where the answer does not say it."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        return None
    if response.status_code == HTTPStatus.PARTIAL_CONTENT:
        found = _OF.fullmatch(response.headers.get("Content-Range", ""))
        return int(found[1]) if found else None
    length = response.headers.get("Content-Length", "")
    return int(length) if response.status_code == HTTPStatus.OK and length.isdecimal() else None
