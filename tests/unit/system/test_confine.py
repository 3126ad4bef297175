"""What a process that reads model files gives up: the filter of its system calls, its files, its environment."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from disco_daemon.models.gguf import with_shards
from disco_daemon.system import confine, program
from disco_daemon.system.confine import Access, Confinement

ALLOWED, KILLED = confine.ALLOW, confine.KILL_PROCESS


def verdict(machine: str, number: int, argument: int = 0, *, architecture: int | None = None, gpu: bool = False) -> int:
    """What the kernel would do: the filter run as classic BPF."""
    families = (confine.AF_UNIX, confine.AF_NETLINK) if gpu else ()
    steps = [struct.unpack("=HBBI", step) for step in confine._filter(machine, families)]
    data = struct.pack("<iIQQ", number, architecture or confine.ARCHITECTURES[machine], 0, argument)
    at, word = 0, 0
    while True:
        code, if_true, if_false, constant = steps[at]
        at += 1
        match code:
            case confine.LOAD_WORD:
                (word,) = struct.unpack_from("<I", data, constant)
            case confine.JUMP_EQUAL:
                at += if_true if word == constant else if_false
            case confine.JUMP_AT_LEAST:
                at += if_true if word >= constant else if_false
            case confine.RETURN:
                return int(constant)


@pytest.mark.parametrize("machine", confine.CALLS)
def test_what_makes_sockets_and_processes_is_refused_and_the_rest_goes_on(machine: str) -> None:
    calls = confine.CALLS[machine]
    for name, number in calls.items():
        expected = ALLOWED if name == "seccomp" else confine.REFUSE
        assert verdict(machine, number, 2) & 0xFFFF0000 == expected, name
    assert {"execve", "io_uring_setup", "ptrace"} <= set(calls)
    read_and_write = {"x86_64": (0, 1), "aarch64": (63, 64)}[machine]
    assert all(verdict(machine, number) == ALLOWED for number in read_and_write)


@pytest.mark.parametrize("machine", confine.CALLS)
def test_a_gpus_driver_keeps_what_it_needs_and_nothing_that_reaches_a_network(machine: str) -> None:
    socket_call = confine.CALLS[machine]["socket"]
    decided = {family: verdict(machine, socket_call, family, gpu=True) == ALLOWED for family in range(46)}
    assert {family for family, let_through in decided.items() if let_through} == {1, 16}
    assert not any(verdict(machine, socket_call, family) == ALLOWED for family in range(46))


def test_unix_sockets_by_which_the_daemon_is_controlled_are_kept_only_where_a_gpu_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    assert confine.AF_UNIX not in confine._families()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")
    assert confine.AF_UNIX in confine._families()


def test_calls_of_another_architecture_do_not_get_round_the_filter() -> None:
    assert verdict("x86_64", 102, architecture=0x40000003) == KILLED  # socketcall of i386
    assert verdict("x86_64", confine.X32_BIT | 41) & 0xFFFF0000 == confine.REFUSE


def test_a_profile_for_macos_quotes_paths_and_allows_only_what_is_named() -> None:
    text = confine.profile_text(Access(write=[Path('/Users/me/a "b"/kv')]), Path("/Users/me"))
    assert "(deny network*)" in text
    assert '(allow file-write* (subpath "/Users/me/a \\"b\\"/kv"))' in text
    assert '(deny file-read* (subpath "/Users/me/.ssh"))' in text


def test_a_measure_that_the_system_refuses_is_told_and_the_others_go_on() -> None:
    found = Confinement()

    def refused() -> None:
        raise OSError(38, "Function not implemented")

    found.take("landlock", refused)
    found.take("seccomp", lambda: None)
    assert found == Confinement(["seccomp"], {"landlock": "Function not implemented"})


def test_the_parts_of_a_model_in_several_files_are_all_read() -> None:
    first = Path("/models/m-00001-of-00003.gguf")
    names = [path.name for path in with_shards([first, Path("/models/one.gguf")])]
    assert names == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)] + ["one.gguf"]


def test_the_environment_of_a_part_has_no_keys_and_all_that_a_gpu_needs() -> None:
    ours = {
        "OPENAI_API_KEY": "sk-1", "HF_TOKEN": "hf", "AWS_SECRET_ACCESS_KEY": "aws", "DISCO_API_KEY": "k",
        "SSH_AUTH_SOCK": "/s",
        "CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1", "GGML_VK_VISIBLE_DEVICES": "0", "GGML_API_KEY": "no",
        "OMP_NUM_THREADS": "2", "LD_LIBRARY_PATH": "/opt/cuda", "_MEIPASS2": "/unpacked", "_PYI_ARCHIVE_FILE": "/disco",
        "DBUS_SESSION_BUS_ADDRESS": "unix:", "ANYTHING": "else", "HOME": "/home/me",
    }  # fmt: skip
    told = program.environment(ours)
    assert set(told) == {
        "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LD_LIBRARY_PATH",
        "_MEIPASS2", "_PYI_ARCHIVE_FILE", "HOME", "GOMP_SPINCOUNT", "OPENBLAS_NUM_THREADS",
    }  # fmt: skip
    assert "GOMP_SPINCOUNT" not in program.environment({"OMP_WAIT_POLICY": "active"})
    host = program.environment(ours, "disco_daemon.engine.hosts.process")
    assert set(host) - set(told) == {"GLIBC_TUNABLES"}, "large pages are for a host's cache alone"
