"""systemd's units for a user manager: the service, and the socket that listens from login on. Pure.

The hardening needs no mount namespace: many systems do not give one to users, and a unit that asks for it fails to
start there. `MemoryDenyWriteExecute` is left out: libffi's closures need such pages.
"""

from __future__ import annotations

from .spec import MAX_FILES, MAX_TASKS, NAME, RESTART_S, STOP_S, WATCHDOG_S, Spec

SERVICE, SOCKET = f"{NAME}.service", f"{NAME}.socket"
HARDENING = (
    "NoNewPrivileges=yes",
    "LockPersonality=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "RestrictNamespaces=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    # The engine confines itself further (`engine.confine`): an older systemd has these in no set.
    "SystemCallFilter=seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self",
    "SystemCallErrorNumber=EPERM",
    "LimitCORE=0",  # a core dump contains keys and conversations
    f"TasksMax={MAX_TASKS}",
    "UMask=0077",
)
HIGH_SHARE = 0.9  # of the memory limit; above it the kernel reclaims memory, before it kills


def units(spec: Spec) -> dict[str, str]:
    """Return the units by name. Raises ValueError for a value that a unit cannot hold."""
    found = {SERVICE: _service(spec)}
    if spec.port is not None:
        found[SOCKET] = _socket(spec)
    return found


def _service(spec: Spec) -> str:
    lines = [
        "[Unit]",
        "Description=disco, LLM answers from this machine and a server",
        "StartLimitIntervalSec=300",
        "StartLimitBurst=10",
        *([f"Requires={SOCKET}", f"After={SOCKET}"] if spec.port is not None else []),
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={' '.join(quote(word) for word in spec.command)}",
        "ExecReload=kill -HUP $MAINPID",
        *(f"Environment={quote(f'{name}={value}', command=False)}" for name, value in sorted(spec.environment.items())),
        "Restart=on-failure",
        f"RestartSec={RESTART_S}",
        "TimeoutStartSec=60",
        f"TimeoutStopSec={STOP_S}",
        f"WatchdogSec={WATCHDOG_S}",
        # Only the daemon gets the signal; it ends its engine, which must not die in the middle of an answer.
        "KillMode=mixed",
        *(_memory(spec.memory_bytes) if spec.memory_bytes is not None else []),
        f"LimitNOFILE={MAX_FILES}",
        "OOMPolicy=continue",  # the engine is the large process, and the daemon restarts it
        *HARDENING,
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def _memory(most_bytes: int) -> list[str]:
    return [f"MemoryHigh={int(HIGH_SHARE * most_bytes)}", f"MemoryMax={most_bytes}"]


def listens(spec: Spec) -> list[str]:
    """Return where systemd listens for the daemon: the TCP port, and the Unix socket of `socketfile`."""
    if spec.port is None:
        return []
    host = f"[{spec.host}]" if ":" in spec.host else spec.host
    return [f"{host}:{spec.port}", f"%t/{NAME}/{spec.port}.sock"]


def listens_by(unit: str) -> list[str]:
    """Return the same, read from the text of a socket unit."""
    rows = (line.partition("=") for line in unit.splitlines())
    return [value.strip() for name, _, value in rows if name.strip() == "ListenStream"]


def _socket(spec: Spec) -> str:
    lines = [
        "[Unit]",
        "Description=disco's port",
        "",
        "[Socket]",
        *(f"ListenStream={where}" for where in listens(spec)),
        "SocketMode=0600",
        "DirectoryMode=0700",
        "RemoveOnStop=yes",
        "Backlog=128",
        "",
        "[Install]",
        "WantedBy=sockets.target",
    ]
    return "\n".join(lines) + "\n"


def quote(word: str, *, command: bool = True) -> str:
    """Quote a word of a command line or an assignment by systemd.syntax(7). Raises ValueError for a line end.

    In a command `$` would begin a variable.
    """
    if any(c in word for c in "\n\r\0"):
        raise ValueError(f"{word!r} cannot stand in a unit file: it has a line end in it")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    if command:
        escaped = escaped.replace("$", "$$")
    return f'"{escaped}"' if not escaped or any(c in " \t'\"\\;" for c in escaped) else escaped
