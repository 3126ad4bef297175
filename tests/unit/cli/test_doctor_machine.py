"""What the doctor says of Python, the compiler, the processor and the service: by what the system's programs tell."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from disco_daemon.cli.doctor import machine
from disco_daemon.cli.doctor.finding import Finding, Level
from disco_daemon.cli.doctor.machine import Processor, of_linux, of_macos
from disco_daemon.engine.measure.checkup_messages import Bindings
from disco_daemon.service.managers import ServiceError, ServiceStatus, Systemd
from disco_daemon.service.spec import Spec

OK, WARN, WRONG = Level
BUILT = Bindings("0.3.36", ["SSE3", "AVX", "AVX2", "F16C", "FMA"], 0)


# --- Python -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "bits", "level"),
    [
        ((3, 11, 0), 64, OK),
        ((3, 14, 2), 64, OK),
        ((3, 10, 9), 64, WRONG),
        ((2, 7, 18), 64, WRONG),
        ((3, 12, 1), 32, WRONG),
    ],
)
def test_old_and_small_pythons_are_wrong(version: tuple[int, ...], bits: int, level: Level) -> None:
    found = machine.python(version, bits=bits)
    assert found.level is level
    assert f"{'.'.join(map(str, version))}, {bits} bits" in found.found
    assert (found.mend == "") == (level is OK)


def test_the_python_that_runs_this_is_well() -> None:
    found = machine.python()
    assert found.level is OK
    assert sys.executable in found.found


# --- the compiler -----------------------------------------------------------------------------------------------------


def program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    return folder


def test_a_compiler_is_named_with_its_version(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(empty_path, "g++", "echo g++ 12.2; echo more")
    assert machine.compiler(engine_works=True) == Finding("compiler", OK, f"g++ 12.2 ({empty_path / 'g++'})")
    program(empty_path, "mine", "echo mine 3")
    monkeypatch.setenv("CXX", "mine -O2")
    assert machine.compiler(engine_works=True).found.startswith("mine 3")
    program(empty_path, "mine", "exit 1")
    assert machine.compiler(engine_works=True).found.startswith("g++ 12.2")


def test_without_a_compiler_an_engine_that_works_goes_on_working(empty_path: Path) -> None:
    assert machine.compiler(engine_works=True).level is OK
    found = machine.compiler(engine_works=False)
    assert (found.level, found.mend) == (WRONG, "install a C++ compiler with your system's package manager")
    program(empty_path, "dnf", "")
    assert machine.compiler(engine_works=False).mend == "`sudo dnf install gcc-c++`"


def test_a_mac_is_not_made_to_open_a_window(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There `c++` is a stand-in that offers to install one."""
    monkeypatch.setattr(sys, "platform", "darwin")
    program(empty_path, "c++", f"touch {empty_path}/asked")
    assert machine.compiler(engine_works=False).mend == "`xcode-select --install`"
    assert not (empty_path / "asked").exists()
    program(empty_path, "xcode-select", "echo /Library/Developer/CommandLineTools")
    program(empty_path, "c++", "echo Apple clang version 17.0.0")
    assert machine.compiler(engine_works=False).found.startswith("Apple clang version 17.0.0")


def test_the_single_binary_needs_neither_compiler_nor_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert machine.compiler(engine_works=False).level is OK
    slow = machine.processor(Processor("Some CPU", ("AVX2", "AVX512")), BUILT)
    assert slow.level is OK
    assert "install.sh" in slow.mend


# --- the processor ----------------------------------------------------------------------------------------------------


EPYC = """\
processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9R14
flags\t\t: fpu sse3 avx f16c fma avx2 avx512f avx512_vnni
bogomips\t: 5200.00

processor\t: 1
model name\t: something else
flags\t\t: fpu
"""
GRAVITON = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd asimdhp asimddp sve i8mm
CPU implementer\t: 0x41
"""
M2 = "machdep.cpu.brand_string: Apple M2\nhw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: 1\n"
M1 = "machdep.cpu.brand_string: Apple M1\nhw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: 0\n"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (of_linux(EPYC), Processor("AMD EPYC 9R14", ("AVX2", "FMA", "F16C", "AVX512", "AVX512_VNNI"))),
        (of_linux(GRAVITON), Processor("", ("DOTPROD", "MATMUL_INT8"))),
        (of_linux(""), Processor()),
        (of_macos(M2), Processor("Apple M2", ("DOTPROD", "MATMUL_INT8"))),
        (of_macos(M1), Processor("Apple M1", ("DOTPROD",))),
        (of_macos("machdep.cpu.brand_string: Intel(R) Core(TM) i7\n"), Processor("Intel(R) Core(TM) i7")),
        (of_macos(""), Processor()),
    ],
)
def test_what_the_system_tells_of_the_processor(found: Processor, expected: Processor) -> None:
    assert found == expected


def test_a_build_that_leaves_out_what_the_processor_can_is_slow() -> None:
    found = machine.processor(of_linux(EPYC), BUILT)
    assert found.level is WARN
    assert found.found.endswith("llama.cpp was built without AVX512 AVX512_VNNI")
    assert "llama-cpp-python==0.3.36" in found.mend
    whole = Bindings("0.3.36", [*BUILT.features, "AVX512", "AVX512_VNNI"], 0)
    assert machine.processor(of_linux(EPYC), whole).level is OK
    assert machine.processor(of_linux(EPYC), None).level is OK, "the line on llama.cpp tells"
    assert machine.processor(Processor(), BUILT).level is OK


@pytest.mark.parametrize(
    ("quota", "mask", "said"),
    [(1.5, 32, "quota allows 1.5"), (0.25, 2, "quota allows 0.25"), (None, 32, ""), (40.0, 32, ""), (1.5, 1, "")],
)
def test_a_quota_is_named_if_it_takes_threads(
    quota: float | None, mask: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "affinity", lambda: mask)
    found = machine.processor(of_linux(EPYC), None, quota)
    assert found.level is OK
    assert said in found.found
    assert bool(said) == ("quota" in found.found)


def test_this_machine_tells_something() -> None:
    found = machine.processor(machine.this_processor(), None)
    assert found.level is OK
    assert "cores" in found.found


# --- the service ------------------------------------------------------------------------------------------------------


@dataclass
class Told(Systemd):
    """A manager whose answer is known."""

    answer: ServiceStatus | ServiceError

    def status(self) -> ServiceStatus:
        if isinstance(self.answer, ServiceError):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "level", "words"),
    [
        (ServiceStatus(False, "not-installed"), OK, "disco service install"),
        (ServiceStatus(True, "running", 42), OK, "systemd: running, process 42"),
        (ServiceStatus(True, "stopped"), OK, "disco service start"),
        (ServiceStatus(True, "failed", None, "ended by oom-kill"), WRONG, "failed (ended by oom-kill)"),
        (ServiceError("`systemctl` cannot be run"), WARN, "cannot be run"),
    ],
)
def test_the_service(answer: ServiceStatus | ServiceError, level: Level, words: str) -> None:
    found = machine.service_of(Told(answer))
    assert found.level is level
    assert words in f"{found.found} {found.mend}"
    assert level is OK or found.mend


def test_a_machine_without_a_service_manager_is_no_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "of_this_machine", lambda: (_ for _ in ()).throw(ServiceError("none")))
    assert machine.service(Spec(("disco",))).level is OK


def test_a_service_that_is_not_as_the_settings_say_is_to_be_installed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Told(ServiceStatus(True, "running", 42))
    for differs, level in (("", OK), ("its unit listens on 0.0.0.0:4747", WARN)):
        monkeypatch.setattr(Told, "differs", lambda self, spec, told=differs: told)
        found = machine.service_of(manager, Spec(("disco",)))
        assert found.level is level
        assert differs in found.found
        assert ("disco service install" in found.mend) is bool(differs)
