"""Confinement: a process that takes what strangers made, model files or frames, gives up rights that it does not need.

A process calls `confine` before it opens a model or a connection, while it has one thread. From then on it has no new
privileges, leaves no core dump, is the first to go when memory is short, opens only the files that it names (landlock),
and makes no process and no socket, or only those of the network if that is its work (seccomp). A measure that the
kernel lacks is left out and reported: `disco doctor` shows it.

On Linux this is landlock(7) and seccomp(2), by their system calls, on x86-64 and arm64. On macOS it is a sandbox
profile (sandbox_init): no network, no writes but where allowed, none of the folders where keys are kept.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

OOM_SCORE = 500  # of 1000: before the user's programs, and long before the daemon, which can start us again

# What interpreter, libraries and a GPU's driver read. The rest of the system, home folders above all, is closed.
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/nix/store", "/proc", "/sys", "/run/opengl-driver")
DEVICES = ("null", "zero", "random", "urandom", "nvidia*", "dri", "kfd", "accel", "dxg", "mali*")
# NVIDIA's driver (580; 570 is told of, too) names its threads there while it opens, by fopen(…, "w"), and fails with
# CUDA's error 304 if it cannot: then llama.cpp finds no GPU.
NAMES_THREADS, THREADS = ("nvidiactl", "dxg"), Path("/proc/self/task")
LIBRARY_PATHS = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "HIP_PATH", "ROCM_PATH")


@dataclass(frozen=True, slots=True)
class Access:
    """The access of a process beside its program: files or folders to `read`, folders to `write`.

    `replace` is a file that exists, and may be written and renamed within its folder. `network`: it may connect and
    listen by IP. Unix sockets stay closed, by which the daemon is controlled: a name that only a local service knows
    (mDNS) is not found.
    """

    read: Sequence[Path] = ()
    write: Sequence[Path] = ()
    replace: Path | None = None
    network: bool = False


@dataclass(slots=True)
class Confinement:
    """The measures in force, and why others are not."""

    in_force: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, measure: Callable[[], str | None]) -> None:
        """Put one measure in force, and record the detail that it returns, or why the system refuses it."""
        try:
            detail = measure()
        except OSError as e:
            self.missing[name] = e.strerror or "unknown"
        else:
            self.in_force.append(f"{name} {detail}" if detail else name)


def confine(access: Access, open_gpu: Callable[[], object] = lambda: None) -> Confinement:
    """Give up what `access` does not name. `open_gpu` is called while a driver may still use all system calls."""
    found = Confinement()
    if sys.platform == "linux":
        found.take(
            "first to be ended when memory is short", _first_to_go
        )  # before there is no dump: from then on that file is root's
    found.take("no core dumps", _no_core_dumps)
    if sys.platform == "linux":
        found.take("no new privileges", _no_new_privileges)
        found.take("landlock", lambda: _landlock(access))
        families = (*(IP if access.network else ()), *(_families() if open_gpu() else ()))
        found.take("seccomp", lambda: _seccomp(families))
    elif sys.platform == "darwin":
        found.take("sandbox", lambda: _sandbox(access))
    return found


def try_forbidden() -> dict[str, bool]:
    """Try to connect, to read the user's files, and to write; return whether each was refused."""
    return {"connect": _is_refused(_connect), "read": _is_refused(_read_home), "write": _is_refused(_write)}


def _is_refused(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except PermissionError:
        return True
    except OSError:  # such as a port without a listener: the attempt was let through
        return False
    return False


def _connect() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tcp:
        tcp.settimeout(1.0)
        tcp.connect(("127.0.0.1", 9))


def _read_home() -> None:
    keys = Path.home() / ".ssh"
    list((keys if keys.is_dir() else Path.home()).iterdir())


def _write() -> None:
    target = Path(os.environ.get("TMPDIR", "/tmp")) / f"disco-confined-{os.getpid()}"  # noqa: S108 - it must not succeed
    target.touch(exist_ok=False)
    target.unlink()


def _no_core_dumps() -> None:
    """Make no core dump: it holds the conversation. A limit of 0 does not stop a `core_pattern` that is a pipe."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        _prctl(PR_SET_DUMPABLE, 0)


# --- Linux ------------------------------------------------------------------------------------------------------------

PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same on all architectures
LANDLOCK_VERSION = 1  # flag of LANDLOCK_CREATE
RULE_PATH_BENEATH = 1

# Rights of landlock, by the version of its interface that they came with.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 5
MAKE_DIR, MAKE_REG, TRUNCATE, IOCTL_DEV = 1 << 7, 1 << 8, 1 << 14, 1 << 15
HANDLED = {1: (1 << 13) - 1, 2: 1 << 13, 3: TRUNCATE, 5: IOCTL_DEV}
NET_TCP, NET_SINCE = 0b11, 4  # to bind and to connect
SCOPES, SCOPED_SINCE = 0b11, 6  # abstract Unix sockets, and signals to others
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
READING = READ_FILE | READ_DIR
WRITING = READING | WRITE_FILE | TRUNCATE | MAKE_REG | MAKE_DIR | REMOVE_FILE

# System calls by name, per architecture: seccomp itself, socket, and those that are refused. io_uring can do what the
# others do.
CALLS: dict[str, dict[str, int]] = {
    "x86_64": {
        "seccomp": 317, "socket": 41, "execve": 59, "execveat": 322, "ptrace": 101, "process_vm_readv": 310,
        "process_vm_writev": 311, "io_uring_setup": 425, "unshare": 272, "setns": 308, "mount": 165, "bpf": 321,
        "perf_event_open": 298, "userfaultfd": 323, "keyctl": 250, "add_key": 248, "request_key": 249,
        "kexec_load": 246, "init_module": 175, "finit_module": 313, "pidfd_getfd": 438,
    },
    "aarch64": {
        "seccomp": 277, "socket": 198, "execve": 221, "execveat": 281, "ptrace": 117, "process_vm_readv": 270,
        "process_vm_writev": 271, "io_uring_setup": 425, "unshare": 97, "setns": 268, "mount": 40, "bpf": 280,
        "perf_event_open": 241, "userfaultfd": 282, "keyctl": 219, "add_key": 217, "request_key": 218,
        "kexec_load": 104, "init_module": 105, "finit_module": 273, "pidfd_getfd": 438,
    },
}  # fmt: skip
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # as the kernel tells a filter
X32_BIT = 0x40000000  # x86-64's calls under other numbers
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC = 1, 1
LOAD_WORD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
AT_NUMBER, AT_ARCHITECTURE, AT_FIRST_ARGUMENT = 0, 4, 16  # in struct seccomp_data; little-endian
AF_UNIX, AF_NETLINK = 1, 16
IP = (2, 10, AF_NETLINK)  # IPv4, IPv6, and by what the C library looks which of them this machine has


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _prctl(option: int, value: int) -> None:
    zeros = [ctypes.c_ulong(0)] * 3
    _check(_libc().prctl(option, ctypes.c_ulong(value), *zeros))


def _call(number: int, *arguments: object) -> int:
    return _check(_libc().syscall(ctypes.c_long(number), *arguments))


def _first_to_go() -> None:
    score = Path("/proc/self/oom_score_adj")
    if int(score.read_text("ascii")) < OOM_SCORE:
        score.write_text(str(OOM_SCORE), "ascii")


def _no_new_privileges() -> None:
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def _landlock(access: Access) -> str:
    """Restrict this thread and all that it starts; return the version of the interface."""
    n_threads = len(list(Path("/proc/self/task").iterdir()))
    if n_threads > 1:
        raise OSError(errno.EBUSY, f"{n_threads} threads run already, and it holds for one")
    version = _call(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(LANDLOCK_VERSION))
    handled = sum(rights for since, rights in HANDLED.items() if since <= version)
    net, scopes = (
        NET_TCP if version >= NET_SINCE and not access.network else 0,
        SCOPES if version >= SCOPED_SINCE else 0,
    )
    rules = struct.pack("=QQQ", handled, net, scopes)
    size = 8 * (1 + (version >= NET_SINCE) + (version >= SCOPED_SINCE))
    ruleset = _call(LANDLOCK_CREATE, rules, ctypes.c_size_t(size), ctypes.c_uint32(0))
    # Open for ever: a rule is about an inode, and /proc makes a new one once the old one is closed.
    os.open(THREADS, os.O_PATH | os.O_CLOEXEC)  # type: ignore[attr-defined,unused-ignore] # Linux
    try:
        for path, rights in _grants(access):
            _grant(ruleset, path, rights & handled)
        _call(LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)
    return f"v{version}"


def _grants(access: Access) -> Iterator[tuple[Path, int]]:
    """Yield each path with its rights, none of which is to execute."""
    for path in {*_program(), *map(Path, SYSTEM), *access.read}:
        yield path, READING
    for device in chain.from_iterable(Path("/dev").glob(pattern) for pattern in DEVICES):
        yield device, READING | WRITE_FILE | IOCTL_DEV
    if any((Path("/dev") / name).exists() for name in NAMES_THREADS):
        yield THREADS, READING | WRITE_FILE | TRUNCATE
    for folder in access.write:
        yield folder, WRITING
    if access.replace is not None:
        yield access.replace, READ_FILE | WRITE_FILE | TRUNCATE
        yield access.replace.parent, MAKE_REG | REMOVE_FILE


def _program() -> Iterator[Path]:
    """Return where the interpreter, our modules and the libraries are; also those of the single binary."""
    ours = Path(__file__).parents[2]
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, getattr(sys, "_MEIPASS", ""), Path(sys.executable).parent)
    named = (folder for name in LIBRARY_PATHS for folder in os.environ.get(name, "").split(os.pathsep))
    for place in chain(prefixes, sys.path, named, (ours,)):
        if place and Path(place).is_absolute():
            yield Path(place)


def _grant(ruleset: int, path: Path, rights: int) -> None:
    try:
        at = os.open(path, os.O_PATH | os.O_CLOEXEC)  # type: ignore[attr-defined,unused-ignore] # Linux
    except OSError:  # it does not exist, and is not needed
        return
    try:
        if not path.is_dir():
            rights &= OF_FILES
        rule = struct.pack("=Qi", rights, at)
        _call(LANDLOCK_ADD, ctypes.c_int(ruleset), ctypes.c_int(RULE_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(at)


def _families() -> Sequence[int]:
    """Return the socket families of a GPU's driver: not Unix sockets, by which the daemon is controlled.

    An exception is NVIDIA's service for several processes, if the environment names it.
    """
    return (AF_NETLINK, AF_UNIX) if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") else (AF_NETLINK,)


def _seccomp(families: Sequence[int]) -> None:
    """Refuse system calls from here on, in all threads, and sockets but of these families."""
    machine = platform.machine()
    if machine not in CALLS:
        raise OSError(errno.ENOSYS, f"its system calls are not known here for {machine}")
    program = b"".join(_filter(machine, families))
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    flags = ctypes.c_uint(SECCOMP_FILTER_FLAG_TSYNC)
    result = _call(CALLS[machine]["seccomp"], ctypes.c_uint(SECCOMP_SET_MODE_FILTER), flags, header)
    if result:
        raise OSError(errno.EBUSY, f"thread {result} cannot be restricted")


def _filter(machine: str, families: Sequence[int]) -> Iterator[bytes]:
    """Make the filter's BPF instructions: (code, jump if true, jump if false, constant)."""
    denied = dict(CALLS[machine])
    del denied["seccomp"]  # more of it only takes more away
    socket_call = denied.pop("socket")

    def step(code: int, constant: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, constant)

    yield step(LOAD_WORD, AT_ARCHITECTURE)
    yield step(JUMP_EQUAL, ARCHITECTURES[machine], if_true=1)
    yield step(RETURN, KILL_PROCESS)
    yield step(LOAD_WORD, AT_NUMBER)
    yield step(JUMP_AT_LEAST, X32_BIT, if_false=1)
    yield step(RETURN, REFUSE | errno.ENOSYS)
    for number in denied.values():
        yield step(JUMP_EQUAL, number, if_false=1)
        yield step(RETURN, REFUSE | errno.EPERM)
    yield step(JUMP_EQUAL, socket_call, if_true=1)
    yield step(RETURN, ALLOW)
    yield step(LOAD_WORD, AT_FIRST_ARGUMENT)
    for family in families:
        yield step(JUMP_EQUAL, family, if_false=1)
        yield step(RETURN, ALLOW)
    yield step(RETURN, REFUSE | errno.EACCES)


# --- macOS ------------------------------------------------------------------------------------------------------------

KEYS = (".ssh", ".gnupg", ".aws", ".config/gcloud", ".kube", "Library/Keychains", "Library/Cookies")


def profile_text(access: Access, home: Path) -> str:
    """Write the sandbox profile; the last matching rule wins. Metal keeps its shaders below /private/var/folders."""
    writable = ["/dev", "/private/var/folders", *map(str, access.write)]
    writable += [str(access.replace.parent)] if access.replace is not None else []
    lines = ["(version 1)", "(allow default)", "(deny process-exec*)", "(deny file-write*)"]
    lines += [] if access.network else ["(deny network*)"]
    lines += [f"(allow file-write* (subpath {_quote(path)}))" for path in writable]
    lines += [f"(deny file-read* (subpath {_quote(str(home / name))}))" for name in KEYS]
    return "\n".join(lines)


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _sandbox(access: Access) -> None:
    """Apply the profile. `sandbox_init` is marked as deprecated, but browsers use it."""
    library = ctypes.CDLL("libsandbox.1.dylib")
    why = ctypes.c_char_p()
    text = profile_text(access, Path.home()).encode()
    if library.sandbox_init(text, ctypes.c_uint64(0), ctypes.byref(why)) != 0:
        message = (why.value or b"no reason given").decode("utf-8", "replace")
        with suppress(AttributeError):
            library.sandbox_free_error(why)
        raise OSError(errno.EPERM, message)
