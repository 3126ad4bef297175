"""What `disco up` does before it serves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from disco_daemon.cli.up import _no_certificates


def load_what_fails() -> None:
    with _no_certificates():
        assert os.environ["SSL_CERT_FILE"] == os.environ["SSL_CERT_DIR"] == os.devnull
        raise ValueError("a library")


@pytest.mark.parametrize("before", [{}, {"SSL_CERT_FILE": "/a"}, {"SSL_CERT_FILE": "/a", "SSL_CERT_DIR": "/b"}])
def test_the_users_certificates_are_named_again_afterwards(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str]
) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    whole = dict(os.environ)
    with pytest.raises(ValueError, match="a library"):
        load_what_fails()
    assert dict(os.environ) == whole


def test_what_trusts_nobody_is_no_context_of_a_server() -> None:
    program = (
        "from disco_daemon.cli.up import _no_certificates\n"
        "with _no_certificates():\n"
        "    import aiohttp.connector\n"
        "from disco_daemon.endpoints.server_client import _tls\n"
        "print(*(c.cert_store_stats()['x509_ca'] for c in (aiohttp.connector._SSL_CONTEXT_VERIFIED, _tls())))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    theirs, ours = map(int, done.stdout.split())
    assert theirs == 0
    assert ours > 0
