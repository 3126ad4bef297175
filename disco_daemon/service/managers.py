"""systemd and launchd, by their own programs. Every call has a time-out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import DiscoError
from ..plain import reason_of
from . import launchd, systemd
from .spec import NAME, STOP_S, Spec

CALL_S = STOP_S + 45  # a stop waits until running answers have ended
LOG_LINES = 200  # of `disco service logs`


class ServiceError(DiscoError):
    """The service manager is missing, or refuses; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """`state` is one word: `not-installed`, `stopped`, `running`, `failed`, or the manager's own."""

    installed: bool
    state: str
    pid: int | None = None
    detail: str = ""


class Manager(ABC):
    """One service manager. All methods but `files` raise ServiceError."""

    name: str

    @abstractmethod
    def files(self, spec: Spec) -> dict[Path, str]:
        """Return the files that `install` writes, path and text."""

    @abstractmethod
    def installed_files(self) -> list[Path]:
        """Return our files that are installed."""

    def answers(self) -> bool:
        """Whether the manager answers here."""
        return True

    def differs(self, spec: Spec) -> str:
        """Return how the installed files differ from the settings, where that matters; "" if they do not."""
        return ""

    @abstractmethod
    def install(self, spec: Spec) -> None:
        """Write the files, and start the service now and at each login."""

    @abstractmethod
    def uninstall(self) -> list[Path]:
        """Stop the service and remove its files; return the removed ones."""

    @abstractmethod
    def start(self) -> None:
        """Start the service; no error if it runs."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the service until the next login or `start`."""

    @abstractmethod
    def restart(self) -> None:
        """Stop the service and start it again."""

    @abstractmethod
    def status(self) -> ServiceStatus:
        """Return the state of the service."""

    @abstractmethod
    def logs(self, follow: bool) -> list[str]:
        """Return the command that shows the log."""

    def write(self, spec: Spec) -> None:
        """Write all files, each whole or not at all."""
        for path, text in self.files(spec).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(path.name + ".new")
            try:
                temporary.write_text(text, "utf-8")
                temporary.replace(path)
            except OSError as e:
                raise ServiceError(f"{path} cannot be written: {e.strerror}") from e

    def _require_installed(self) -> None:
        if not self.installed_files():
            raise ServiceError("the service is not installed: `disco service install`")


class Systemd(Manager):
    """The systemd of the user; `folder` has its units."""

    name = "systemd"

    def __init__(self, folder: Path | None = None) -> None:
        base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        self._folder = folder or base / "systemd" / "user"

    def files(self, spec: Spec) -> dict[Path, str]:
        return {self._folder / name: text for name, text in systemd.units(spec).items()}

    def installed_files(self) -> list[Path]:
        return [path for name in (systemd.SOCKET, systemd.SERVICE) if (path := self._folder / name).exists()]

    def install(self, spec: Spec) -> None:
        self._require()
        gone = [path for path in self.installed_files() if path not in self.files(spec)]
        self.write(spec)
        for path in gone:  # the daemon picks the port now
            self._ctl("disable", "--now", path.name)
            path.unlink(missing_ok=True)
        self._ctl("daemon-reload")
        names = [path.name for path in self.files(spec)]
        self._ctl("enable", *names)
        self._ctl("restart", *sorted(names, key=lambda name: name != systemd.SOCKET))

    def uninstall(self) -> list[Path]:
        there = self.installed_files()
        if there:
            self._ctl("disable", "--now", *(path.name for path in there), check=False)
        for path in there:
            path.unlink(missing_ok=True)
        if there:
            self._ctl("daemon-reload", check=False)
            self._ctl("reset-failed", systemd.SERVICE, check=False)
        return there

    def start(self) -> None:
        self._require_installed()
        self._ctl("start", *(path.name for path in self.installed_files()))

    def stop(self) -> None:
        """Stops the socket too, or the next client would start the service again."""
        self._require_installed()
        self._ctl("stop", *(path.name for path in self.installed_files()))

    def restart(self) -> None:
        self._require_installed()
        self._ctl("restart", systemd.SERVICE)

    def status(self) -> ServiceStatus:
        if not self.installed_files():
            return ServiceStatus(False, "not-installed")
        wanted = "ActiveState,SubState,MainPID,Result,NRestarts,StatusText"
        said = dict(
            line.partition("=")[::2]
            for line in self._ctl("show", systemd.SERVICE, f"--property={wanted}").stdout.splitlines()
        )
        active, pid = said.get("ActiveState", ""), int(said.get("MainPID") or 0)
        state = {"active": "running", "inactive": "stopped", "failed": "failed"}.get(active, active or "unknown")
        failed = f"ended by {said.get('Result')}" if state == "failed" else ""
        restarts = int(said.get("NRestarts") or 0)
        again = f"restarted {restarts} time{'s' * (restarts > 1)}" if restarts else ""
        detail = "; ".join(part for part in (said.get("StatusText", ""), failed, again) if part)
        return ServiceStatus(True, state, pid or None, detail)

    def logs(self, follow: bool) -> list[str]:
        return ["journalctl", "--user", "-u", systemd.SERVICE, "-n", str(LOG_LINES), *(["-f"] if follow else [])]

    def differs(self, spec: Spec) -> str:
        """The unit has the listening addresses, which stay when a setting changes."""
        if self._folder / systemd.SERVICE not in self.installed_files():
            return ""
        try:
            there = systemd.listens_by((self._folder / systemd.SOCKET).read_text("utf-8", "replace"))
        except OSError:
            there = []
        wanted = systemd.listens(spec)
        if there == wanted:
            return ""
        if there and there == wanted[:1]:
            return "its unit is of an older version, without the Unix socket"
        set_to = wanted[0] if wanted else "a free port"
        return f"its unit listens on {' and '.join(there) or 'nothing'}, the settings say {set_to}"

    def answers(self) -> bool:
        """Whether it answers: a user manager runs while the user is logged in."""
        return self._ctl("show-environment", check=False).returncode == 0

    def _require(self) -> None:
        """Raise ServiceError unless a user manager answers."""
        found = self._ctl("show-environment", check=False)
        if found.returncode:
            msg = (
                f"no systemd user manager answers ({_why(found)}): log in on this machine (or "
                "`loginctl enable-linger`), or run `disco up` from what starts your programs"
            )
            raise ServiceError(msg)

    def _ctl(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return _call(["systemctl", "--user", "--no-pager", *words], check=check)


class Launchd(Manager):
    """The launchd of the user's session; `folder` has its property lists."""

    name = "launchd"

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path.home() / "Library" / "LaunchAgents"
        self._domain = f"gui/{os.getuid()}"
        self._target = f"{self._domain}/{launchd.LABEL}"

    @property
    def _path(self) -> Path:
        return self._folder / launchd.FILE

    def files(self, spec: Spec) -> dict[Path, str]:
        return {self._path: launchd.property_list(spec)}

    def installed_files(self) -> list[Path]:
        return [self._path] if self._path.exists() else []

    def install(self, spec: Spec) -> None:
        self._ctl("bootout", self._target, check=False)
        spec.log.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.write(spec)
        self._ctl("bootstrap", self._domain, str(self._path))

    def uninstall(self) -> list[Path]:
        there = self.installed_files()
        if there:
            self._ctl("bootout", self._target, check=False)
        for path in there:
            path.unlink(missing_ok=True)
        return there

    def start(self) -> None:
        self._require_installed()
        if not self.status().pid:
            self._ctl("bootstrap", self._domain, str(self._path), check=False)
            self._ctl("kickstart", self._target)

    def stop(self) -> None:
        self._require_installed()
        self._ctl("bootout", self._target, check=False)

    def restart(self) -> None:
        self._require_installed()
        self._ctl("bootstrap", self._domain, str(self._path), check=False)
        self._ctl("kickstart", "-k", self._target)

    def status(self) -> ServiceStatus:
        if not self.installed_files():
            return ServiceStatus(False, "not-installed")
        said = self._ctl("print", self._target, check=False)
        if said.returncode:
            return ServiceStatus(True, "stopped")
        rows = dict(line.strip().partition(" = ")[::2] for line in said.stdout.splitlines() if " = " in line)
        pid = int(rows["pid"]) if rows.get("pid", "").isdigit() else None
        code = rows.get("last exit code", "")
        ended = f"last ended with {code}" if code.lstrip("-").isdigit() and code != "0" else ""
        return ServiceStatus(True, "running" if pid else "failed" if ended else "stopped", pid, "" if pid else ended)

    def logs(self, follow: bool) -> list[str]:
        return ["tail", "-n", str(LOG_LINES), *(["-F"] if follow else []), str(log_folder() / f"{NAME}.log")]

    def _ctl(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return _call(["launchctl", *words], check=check)


def log_folder() -> Path:
    """Return the folder of launchd's log."""
    return Path.home() / "Library" / "Logs" / NAME


def of_this_machine(platform: str = sys.platform) -> Manager:
    """Return the service manager here. Raises ServiceError if it is none that we know."""
    if platform == "darwin":
        return Launchd()
    if platform == "linux" and shutil.which("systemctl"):
        return Systemd()
    raise ServiceError("no service manager that we know is on this machine (systemd, launchd): run `disco up` yourself")


def _call(command: Sequence[str], *, check: bool) -> subprocess.CompletedProcess[str]:
    """Run a command; with `check` a failure is a ServiceError."""
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=CALL_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as e:
        msg = f"`{' '.join(command)}` cannot be run: {reason_of(e)}"
        raise ServiceError(msg) from e
    if check and found.returncode:
        raise ServiceError(f"`{' '.join(command)}` failed: {_why(found)}")
    return found


def _why(found: subprocess.CompletedProcess[str]) -> str:
    said = (found.stderr or found.stdout).strip().splitlines()
    return said[-1] if said else f"exit code {found.returncode}"
