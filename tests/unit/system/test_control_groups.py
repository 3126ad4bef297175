"""What control groups leave a process: read in one place, whatever shape they have, and respected wherever it counts.

The trees are the shapes that Docker (v1, v2), systemd (v2, hybrid) and Kubernetes (v1, v2) show a process, recorded by
hand as dictionaries of files: as many files of each as a reader looks at, with names shortened and figures made up.
"""

from __future__ import annotations

import argparse
import ast
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.qoe.requests import Setup
from disco_daemon.bench.engine import EngineSetup
from disco_daemon.cli import fleet_join
from disco_daemon.config.schema import Config, DeviceSettings
from disco_daemon.engine.llama.memory import available_bytes
from disco_daemon.machines import device_settings
from disco_daemon.profiling.tuned_profile import key_of
from disco_daemon.system import control_groups
from disco_daemon.system.control_groups import cpu_quota, memory, memory_limits, n_processors
from tests.fixtures.documents import ROOT

GIB = 2**30
NONE_V1 = "9223372036854771712"  # no limit, with pages of 4 KiB; with 64 KiB it is 9223372036854710272


@dataclass(frozen=True)
class Shape:
    """`/proc/self/cgroup`, the files below the mount, and what they mean: limits and uses, own first, and the quota."""

    own: str
    files: Mapping[str, str]
    limits: tuple[tuple[int, int], ...] = ()
    quota: float | None = None


SHAPES = {
    # `docker run --memory 4g --cpus 1.5`: a namespace of its own, whose root is the container's group.
    "docker v2": Shape(
        "0::/\n",
        {
            "cgroup.controllers": "cpuset cpu io memory pids\n",
            "memory.max": "4294967296\n",
            "memory.current": "3221225472\n",
            "memory.stat": "anon 1073741824\nfile 2147483648\nfile_mapped 1048576\ninactive_file 2148532224\n",
            "cpu.max": "150000 100000\n",
        },
        ((4 * GIB, GIB),),
        1.5,
    ),
    # The same with the host's namespace of groups: the host's path is told, and cannot be seen.
    "docker v2, cgroupns=host": Shape(
        "0::/system.slice/docker-4f1c.scope\n",
        {
            "cgroup.controllers": "cpu memory\n",
            "memory.max": "4294967296\n",
            "memory.current": "5\n",
            "cpu.max": "400000 100000\n",
            "system.slice/cpu.max": "1000 100000\n",
        },
        ((4 * GIB, 5),),
        4.0,
    ),
    "docker v2, without limits": Shape(
        "0::/\n", {"memory.max": "max\n", "memory.current": "7\n", "cpu.max": "max 100000\n"}
    ),
    # Joined from another namespace (`nsenter`, `kubectl exec` into a group beside it).
    "beside the namespace": Shape(
        "0::/../other\n",
        {
            "memory.max": "4096\n",
            "memory.current": "96\n",
            "../other/memory.max": "1\n",
            "../other/memory.current": "1\n",
        },
        ((4096, 96),),
    ),
    "docker v1": Shape(
        "12:memory:/docker/4f1c\n11:cpuset:/docker/4f1c\n4:cpu,cpuacct:/docker/4f1c\n1:name=systemd:/docker/4f1c\n0::/\n",
        {
            "memory/memory.limit_in_bytes": "2147483648\n",
            "memory/memory.usage_in_bytes": "2147479552\n",
            "memory/memory.stat": (
                "inactive_file 12\nmapped_file 12\nhierarchical_memory_limit 2147483648\n"
                "total_mapped_file 4096\ntotal_inactive_file 1073745920\n"
            ),
            "memory/docker/memory.limit_in_bytes": "4096\n",  # of containers within this one
            "memory/docker/memory.usage_in_bytes": "4096\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "systemd/cgroup.procs": "1\n",
        },
        ((2 * GIB, GIB - 4096),),
        2.5,
    ),
    "docker v1, without limits": Shape(
        "9:memory:/docker/4f1c\n4:cpu,cpuacct:/docker/4f1c\n",
        {
            "memory/memory.limit_in_bytes": f"{NONE_V1}\n",
            "memory/memory.usage_in_bytes": "4096\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    ),
    "systemd v2": Shape(
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/disco.service\n",
        {
            "cgroup.controllers": "cpu memory\n",  # the root has no limits
            "user.slice/memory.max": "max\n",
            "user.slice/memory.current": "9000000\n",
            "user.slice/cpu.max": "max 100000\n",
            "user.slice/user-1000.slice/memory.max": "8000000\n",
            "user.slice/user-1000.slice/memory.current": "7500000\n",
            "user.slice/user-1000.slice/cpu.max": "300000 100000\n",
            "user.slice/user-1000.slice/user@1000.service/app.slice/disco.service/memory.max": "6000000\n",
            "user.slice/user-1000.slice/user@1000.service/app.slice/disco.service/memory.current": "1000000\n",
            "user.slice/user-1000.slice/user@1000.service/app.slice/disco.service/cpu.max": "60000 10000\n",
        },
        ((6_000_000, 1_000_000), (8_000_000, 7_500_000)),
        3.0,
    ),
    "systemd hybrid": Shape(
        "9:name=systemd:/user.slice/s.scope\n7:memory:/user.slice/s.scope\n3:cpuset:/\n2:cpuacct:/\n1:cpu:/user.slice\n"
        "0::/user.slice/s.scope\n",
        {
            "unified/cgroup.controllers": "\n",
            "unified/user.slice/s.scope/cgroup.procs": "1\n",
            "memory/memory.limit_in_bytes": f"{NONE_V1}\n",
            "memory/memory.usage_in_bytes": "90000\n",
            "memory/user.slice/memory.limit_in_bytes": "50000\n",
            "memory/user.slice/memory.usage_in_bytes": "40000\n",
            "memory/user.slice/s.scope/memory.limit_in_bytes": "60000\n",
            "memory/user.slice/s.scope/memory.usage_in_bytes": "10000\n",
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "cpu/user.slice/cpu.cfs_quota_us": "50000\n",
            "cpu/user.slice/cpu.cfs_period_us": "100000\n",
        },
        ((60000, 10000), (50000, 40000)),
        0.5,
    ),
    # Memory was given to version 2 (`cgroup_no_v1=memory`), and so is mounted beside the trees of version 1.
    "hybrid, memory unified": Shape(
        "3:cpu,cpuacct:/a\n1:name=systemd:/a\n0::/a\n",
        {
            "unified/cgroup.controllers": "memory\n",
            "unified/a/memory.max": "500\n",
            "unified/a/memory.current": "50\n",
            "cpu,cpuacct/a/cpu.cfs_quota_us": "200000\n",
            "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
        },
        ((500, 50),),
        2.0,
    ),
    # All of version 2, but someone mounted systemd's old tree for an old container.
    "v2 with a named tree": Shape(
        "1:name=systemd:/\n0::/\n",
        {"cgroup.controllers": "cpu memory\n", "cpu.max": "700000 100000\n", "systemd/cgroup.procs": "1\n"},
        quota=7.0,
    ),
    "v2 with a group of the name of hybrid's folder": Shape(
        "0::/\n",
        {"cgroup.controllers": "cpu memory\n", "cpu.max": "700000 100000\n", "unified/cpu.max": "1 100000\n"},
        quota=7.0,
    ),
    "kubernetes v2": Shape(
        "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-2.scope\n",
        {
            "cgroup.controllers": "cpu memory\n",
            "kubepods.slice/memory.max": "64000\n",
            "kubepods.slice/memory.current": "32000\n",
            "kubepods.slice/cpu.max": "max 100000\n",
            "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cpu.max": "200000 100000\n",
            "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-2.scope/cpu.max": (
                "max 100000\n"
            ),
        },
        ((64000, 32000),),
        2.0,
    ),
    "kubernetes v1": Shape(
        "11:memory:/kubepods/burstable/pod1/2\n5:cpu,cpuacct:/kubepods/burstable/pod1/2\n",
        {
            "memory/memory.limit_in_bytes": "128000\n",
            "memory/memory.usage_in_bytes": "28000\n",
            # The folder `cpu,cpuacct` is not there under this name, only what is a link elsewhere.
            "cpu/cpu.cfs_quota_us": "10000\n",
            "cpu/cpu.cfs_period_us": "100000\n",
        },
        ((128000, 28000),),
        0.1,
    ),
    "macOS": Shape("", {}),
}


def planted(folder: Path, own: str | None, files: Mapping[str, str]) -> tuple[Path, Path]:
    """Write a tree, and return its mount and which group the process is in."""
    root, told = folder / "groups", folder / "cgroup"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")
    if own:
        told.write_text(own, "utf-8")
    return root, told


@pytest.mark.parametrize("name", SHAPES)
def test_limits_are_found_in_every_shape_and_the_least_counts(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    where = planted(tmp_path, shape.own, shape.files)
    assert tuple(memory_limits(*where)) == shape.limits
    assert cpu_quota(*where) == shape.quota
    found = psutil.virtual_memory().total
    total, free = memory(*where)
    assert total == min([found, *(limit for limit, _ in shape.limits)])
    assert free <= min([found, *(limit - used for limit, used in shape.limits)])


def test_the_least_memory_and_the_least_free_may_be_of_two_levels(tmp_path: Path) -> None:
    shape = SHAPES["systemd v2"]
    assert memory(*planted(tmp_path, shape.own, shape.files)) == (6_000_000, 500_000)


def test_a_group_beyond_its_limit_leaves_nothing(tmp_path: Path) -> None:
    assert memory(*planted(tmp_path, "0::/\n", {"memory.max": "500\n", "memory.current": "1000\n"})) == (500, 0)


@pytest.mark.parametrize(
    ("mapped", "used"), [(0, 2000), (1000, 3000), (9000, 10_000)], ids=["read once", "some mapped", "a loaded model"]
)
def test_pages_of_files_are_used_as_far_as_a_program_has_mapped_them(mapped: int, used: int, tmp_path: Path) -> None:
    stat = f"inactive_file 8000\nfile_mapped {mapped}\n"
    files = {"memory.max": "20000", "memory.current": "10000", "memory.stat": stat}
    assert tuple(memory_limits(*planted(tmp_path, "0::/\n", files))) == ((20_000, used),)


# --- processors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota_us", "period_us", "expected"),
    [
        (150_000, 100_000, 1), (1000, 100_000, 1), (399_999, 100_000, 3), (400_000, 100_000, 4), (20_000, 10_000, 2),
        (3_200_000, 100_000, 32), (9_000_000, 100_000, 32), (None, 100_000, 32),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_v2", [True, False])
def test_a_quota_counts_in_whole_processors_of_those_in_the_mask(
    quota_us: int | None, period_us: int, expected: int, *, is_v2: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    if is_v2:
        where = planted(tmp_path, "0::/\n", {"cpu.max": f"{quota_us or 'max'} {period_us}\n"})
    else:
        files = {"cpu/cpu.cfs_quota_us": f"{quota_us or -1}\n", "cpu/cpu.cfs_period_us": f"{period_us}\n"}
        where = planted(tmp_path, "2:cpu:/\n", files)
    assert n_processors(*where) == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5}, raising=False)
    assert n_processors(*where) == 1, "the mask is narrower"


def test_without_a_mask_all_processors_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert n_processors(*planted(tmp_path, None, {})) == 10
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert n_processors(*planted(tmp_path, None, {})) == 1


# --- what is odd limits nothing -----------------------------------------------------------------------------------

V2, V1 = SHAPES["docker v2"], SHAPES["docker v1"]
READ = [(shape, name) for shape in (V2, V1) for name in shape.files if "mem" in name or "cpu." in name]


@pytest.mark.parametrize(("shape", "name"), [one for one in READ if "/docker/" not in one[1] and "stat" not in one[1]])
@pytest.mark.parametrize(
    "text", [None, "", "-1", "max", "²", "1e9", "0x10", "9" * 5000, "1 2 3", "\n\n", "\x00", "folder"]
)
def test_a_file_that_is_missing_or_odd_limits_nothing(
    shape: Shape, name: str, text: str | None, tmp_path: Path
) -> None:
    where = planted(tmp_path, shape.own, {n: t for n, t in shape.files.items() if n != name})
    if text == "folder":
        (where[0] / name).mkdir()
    elif text is not None:
        (where[0] / name).write_text(text)
    is_memory = name in {"memory.max", "memory.current"} or name.startswith("memory/")
    assert tuple(memory_limits(*where)) == (() if is_memory else shape.limits)
    assert cpu_quota(*where) == (shape.quota if is_memory else None)


@pytest.mark.parametrize("text", ["100000 0", "0 100000", "max 0", "100000", "100000 max"])
def test_a_quota_that_cannot_be_is_none(text: str, tmp_path: Path) -> None:
    assert cpu_quota(*planted(tmp_path, "0::/\n", {"cpu.max": text})) is None


def test_where_no_group_is_told_the_mount_is_ones_own(tmp_path: Path) -> None:
    where = planted(tmp_path, None, V2.files)
    assert (tuple(memory_limits(*where)), cpu_quota(*where)) == (V2.limits, V2.quota)


@given(own=st.text() | st.from_regex(r"([0-9]:(cpu|memory|cpu,cpuacct)?:/[a/.\x00:]*\n)*"), text=st.binary())
def test_nothing_in_these_files_is_an_error(own: str, text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        where = planted(Path(folder), None, {**V2.files, **V1.files})
        where[1].write_bytes(own.encode("utf-8", "surrogatepass"))
        for name in (name for _, name in READ):
            (where[0] / name).write_bytes(text)
        total, free = memory(*where)
        assert 0 <= free <= psutil.virtual_memory().total
        assert total >= 0
        assert 1 <= n_processors(*where) <= control_groups.affinity()


# --- and all that counts asks here --------------------------------------------------------------------------------


def test_all_defaults_of_threads_follow_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    config = Config(device=DeviceSettings(rounding="exact"))
    terms = argparse.Namespace(cpus=None, memory=0.0, only_idle=False, only_mains=False)

    def defaults() -> Iterator[int]:
        yield device_settings.knobs_for(config, model).n_threads
        yield device_settings.knobs_for(config, model).n_threads_batch
        yield fleet_join._terms(terms, None).n_threads
        yield EngineSetup().n_threads
        yield Setup().n_threads

    for quota, n in ((None, 32), (1.5, 1), (6.0, 6)):
        monkeypatch.setattr(control_groups, "cpu_quota", lambda *_, quota=quota: quota)
        assert set(defaults()) == {max(1, n - 1)}, "one is kept free"
        assert device_settings.job_for(config, model).n_cores == n
        assert key_of(model, exact=True, kv_type="auto").n_cores == n, "a profile of more threads does not hold"


def test_the_engine_counts_on_what_control_groups_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "memory", lambda: (5000, 4000))
    assert available_bytes() == 4000


# Whoever asks the system itself means the machine as a whole.
OF_THE_MACHINE = {
    "bench/engine.py": "on what it was measured",
    "bench/relay.py": "on what it was measured",
    "cli/doctor/machine.py": "which processor this is; the quota is named beside it",
    "cli/service.py": "the limit of a control group to come",
    "machines/fleet/monitor.py": "the share of it that others take",
    "power/sensors.py": "its cores, which draw power; the threads on them are bounded",
    "system/control_groups.py": "the one place",
}
ASKS = {"cpu_count", "process_cpu_count", "sched_getaffinity", "virtual_memory"}


def asks_the_system(source: str) -> bool:
    """Whether a module asks how many processors or how much memory there is, or names a file of control groups."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ASKS:
            return True
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if "/cgroup" in text or text.startswith(("memory.m", "memory.limit", "cpu.max", "cpu.cfs")):
            return True
    return False


def test_processors_and_memory_are_counted_in_one_place() -> None:
    folder = ROOT / "disco_daemon"
    asking = {
        path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if asks_the_system(path.read_text("utf-8"))
    }
    assert asking == set(OF_THE_MACHINE)
