"""How our build changes llama.cpp (`native/llama_cpp.cmake`): the code that it adds, and the file that it makes."""

import ctypes
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from disco_daemon.engine.llama import build_features

CI = Path(__file__).parents[3] / "native"
HIDDEN = 0xFC00  # minus infinity in 16 bits
LIMIT_S = 120.0
LOOP = "        for (int64_t ic = ic_start; ic < ic_end; ++ic) {\n            f(mp[ic]);\n        }\n"
CALL = "    const bool use_ref = params->use_ref;\n"
TILE = "            if (mask) {\n                bool can_skip = true;\n            }\n"
ROWS = "static void ggml_compute_forward_flash_attn_ext_f16_one_chunk(\n        int n) {\n"
V_TYPE = """    GGML_ASSERT((v->type == GGML_TYPE_F32 || v_to_float  ) && "fattn: unsupported V-type");

    int ith = params->ith;

    for (;;) {}
"""
OPERATIONS = """    for (;;) {
        if (is_src1_contiguous_rows) {
            // src1 is broadcastable across src0 and dst in i1, i2, i3
        }
    }
"""
KNOWN = ROWS + V_TYPE + LOOP + TILE + CALL
PROJECT = """cmake_minimum_required(VERSION 3.21)
project(llama_cpp C CXX)
add_library(ggml STATIC ggml-cpu/vec.cpp)
set(SKBUILD_PLATLIB_DIR "${CMAKE_BINARY_DIR}/wheel")
"""
ONE = "add_library(ggml-cpu STATIC ggml-cpu/ops.cpp ggml-cpu/vec.cpp)\n"
SGEMM = "llamafile/sgemm.cpp ggml-cpu/repack.cpp ggml-cpu/tiled/tiled.cpp ggml-cpu/arch/x86/quants.c ggml-cpu/vec.cpp"
MODELS = """add_library(ggml-base STATIC ggml-cpu/vec.cpp)
add_library(llama SHARED llama.cpp llama-chat.cpp models/a.cpp ${CMAKE_SOURCE_DIR}/models/llama.cpp)
set_target_properties(llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
set_source_files_properties(llama.cpp llama-chat.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
target_compile_definitions(llama PRIVATE SHARED_BY_ALL)
target_include_directories(llama PRIVATE models)
"""
VARIANTS = """add_library(ggml-cpu-x64 MODULE ggml-cpu/ops.cpp ggml-cpu/vec.cpp)
add_library(ggml-cpu-x64-feats OBJECT ggml-cpu/vec.cpp)
add_library(ggml-cpu-zen4 MODULE ggml-cpu/ops.cpp ggml-cpu/vec.cpp)
"""


def program(name: str) -> str:
    """Return where a program is; without it the test is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on this machine")
    return found


def compiled(folder: Path, text: str, *options: str) -> ctypes.CDLL:
    """Make a library of this text."""
    source, made = folder / "made.cpp", folder / "made.so"
    source.write_text(text)
    command = [program("c++"), "-O2", "-Wall", "-Werror", *options, "-shared", "-fPIC", str(source)]
    subprocess.run([*command, "-o", str(made)], check=True, timeout=LIMIT_S)
    return ctypes.CDLL(str(made))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The header, compiled by itself."""
    calls = """
extern "C" {
int64_t next_seen(const uint16_t * m, int64_t a, int64_t b) { return disco_next_seen(m, a, b); }
void begin_call() { disco_begin_call(); }
int64_t next_seen_by(const uint16_t * m, int64_t c, int64_t a, int64_t b) { return disco_next_seen_by(m, c, a, b); }
int sees_none(const uint16_t * m, int64_t a, int64_t b, int64_t end) { return disco_sees_none(m, a, b, end); }
}
"""
    found = compiled(tmp_path_factory.mktemp("header"), f'#include "{CI / "masked_cells.h"}"\n{calls}')
    found.next_seen.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    found.next_seen.restype = found.next_seen_by.restype = ctypes.c_int64
    found.next_seen_by.argtypes = found.sees_none.argtypes = (ctypes.c_void_p, *[ctypes.c_int64] * 3)
    found.begin_call.restype = None
    return found


@pytest.mark.parametrize("seen", [0.0, 0.005, 0.05, 0.5, 1.0])
def test_each_cell_that_is_not_hidden_is_seen_in_its_order_and_no_other(library: ctypes.CDLL, seen: float) -> None:
    random = np.random.default_rng(int(1000 * seen))
    for n in (1, 31, 32, 33, 64, 257, 1000):
        mask = np.where(random.random(n) < seen, random.choice([0, 0x8000, 0x3C00, 0xFBFF, 0x7C00], n), HIDDEN)
        mask = np.ascontiguousarray(mask, np.uint16)
        start = int(random.integers(n))
        found, cell = [], start
        while cell < n and (cell := library.next_seen(mask.ctypes.data, cell, n)) < n:
            found.append(cell)
            cell += 1
        assert found == [start + int(i) for i in np.flatnonzero(mask[start:] != HIDDEN)]


def test_all_heads_of_a_call_see_the_same_cells_and_the_next_call_sees_others(library: ctypes.CDLL) -> None:
    random = np.random.default_rng(2)
    n_rows, n = 7, 320
    place = np.empty((n_rows, n), np.uint16)  # of all masks, as where a graph is used again
    for _ in range(60):
        place[:] = HIDDEN
        for row in place:
            first, last = sorted(random.integers(0, n + 1, 2))
            row[first:last] = np.where(random.random(last - first) < 0.7, 0, HIDDEN)
        library.begin_call()
        start, end = sorted(random.integers(0, n + 1, 2)) if random.random() < 0.5 else (0, n)
        for _head in range(3):
            for row in place:
                found, cell = [], int(start)
                while cell < end and (cell := library.next_seen_by(row.ctypes.data, cell, start, end)) < end:
                    found.append(cell)
                    cell += 1
                assert found == [start + int(i) for i in np.flatnonzero(row[start:end] != HIDDEN)]
                for at in range(0, n, 64):
                    seen = bool((row[at : at + 64] != HIDDEN).any())
                    assert bool(library.sees_none(row.ctypes.data, at, min(n, at + 64), n)) is not seen


def test_no_cell_behind_the_end_is_seen(library: ctypes.CDLL) -> None:
    mask = np.full(128, HIDDEN, np.uint16)
    mask[70] = 0
    assert library.next_seen(mask.ctypes.data, 3, 70) == 70
    assert library.next_seen(mask.ctypes.data, 3, 128) == 70


def test_a_cell_costs_less_where_the_library_passes_hidden_ones_quickly(library: ctypes.CDLL, tmp_path: Path) -> None:
    other = compiled(tmp_path, "")
    assert build_features.passes_quickly(library)
    assert not build_features.passes_quickly(other)
    assert build_features.skip_s(library, 270, 1) < build_features.skip_s(other, 270, 1) / 5
    assert build_features.skip_s(library, 270, 2) == build_features.skip_s(library, 270, 1) / 2


def configured(
    folder: Path, ops: str, targets: str = ONE, name: str = "ggml-cpu", operations: str = ""
) -> tuple[str, str]:
    """Configure a project with these two files; return what CMake says, and how the library is linked."""
    (folder / "ggml-cpu").mkdir()
    (folder / "CMakeLists.txt").write_text(PROJECT + targets)
    (folder / "ggml-cpu" / "ops.cpp").write_text(ops)
    (folder / "ggml-cpu" / "binary-ops.cpp").write_text(operations)
    (folder / "ggml-cpu" / "vec.cpp").write_text("")
    for name_of_file in ("llamafile/sgemm.cpp", "tiled/tiled.cpp", "repack.cpp", "arch/x86/quants.c"):
        (folder / "ggml-cpu" / name_of_file).parent.mkdir(parents=True, exist_ok=True)
        (folder / "ggml-cpu" / name_of_file).write_text("")
    (folder / "models").mkdir()
    for name_of_file in ("llama.cpp", "llama-chat.cpp", "models/a.cpp", "models/llama.cpp"):
        (folder / name_of_file).write_text("")
    hook = f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={CI / 'llama_cpp.cmake'}"
    command = [program("cmake"), "-S", str(folder), "-B", str(folder / "build"), "-G", "Unix Makefiles", hook]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    return done.stderr, (folder / "build" / "CMakeFiles" / f"{name}.dir" / "link.txt").read_text()


def test_the_file_with_attention_is_compiled_from_a_copy_that_passes_hidden_cells(tmp_path: Path) -> None:
    told, linked = configured(tmp_path, f"int a[2] = {{1; 2}};\n{KNOWN}")
    made = (tmp_path / "build" / "disco" / "ops.cpp").read_text()
    assert "ops.cpp is not the one" not in told
    assert "disco/ops.cpp.o" in linked
    assert "ggml-cpu/ops.cpp.o" not in linked
    assert "ggml-cpu/vec.cpp.o" in linked
    assert made.startswith(f'#include "{CI / "masked_cells.h"}"\nint a[2] = {{1; 2}};\n')
    assert (
        made.index("ic < ic_end; ++ic")
        < made.index("disco_next_seen_by(mp, ic, ic_start, ic_end)) == ic_end")
        < made.index("f(mp")
    )
    assert made.index("disco_sees_none(mp, ic, ic + kv_tile, nek1)") < made.index("can_skip")
    assert made.index("disco_begin_call();") < made.index("use_ref = params->use_ref || disco_attends(dst);")
    assert made.index("disco_attends(dst)") < made.index(CALL)  # which it is without that attention
    assert made.index("exact_attention.h") < made.index(ROWS)
    assert made.index("disco_attend_rows(dst, ir0, ir1, q_to_vec_dot)") < made.index("fattn: unsupported V-type")


@pytest.mark.parametrize("name", ["ggml-cpu-x64", "ggml-cpu-zen4"])
def test_each_library_of_kernels_has_that_copy_and_is_installed_beside_those_that_load_it(
    tmp_path: Path, name: str
) -> None:
    told, linked = configured(tmp_path, KNOWN, VARIANTS, name)
    assert "ops.cpp is not the one" not in told
    assert "disco/ops.cpp.o" in linked
    assert "ggml-cpu/ops.cpp.o" not in linked
    installed = (tmp_path / "build" / "cmake_install.cmake").read_text()
    assert f"/wheel/llama_cpp/lib/lib{name}.so" in installed
    assert "feats" not in installed


@pytest.mark.parametrize(
    "ops",
    ["", *(KNOWN.replace(part, "") for part in (ROWS, V_TYPE, LOOP, TILE, CALL)), LOOP + KNOWN],
    ids=["none", "no rows", "no types", "no loop", "no tile", "no call", "two loops"],
)
def test_another_file_than_the_known_one_stays_as_it_is_and_that_is_said(tmp_path: Path, ops: str) -> None:
    told, linked = configured(tmp_path, ops)
    assert "ops.cpp is not the one" in told
    assert "ggml-cpu/ops.cpp.o" in linked
    assert not (tmp_path / "build" / "disco").exists()


@pytest.mark.parametrize(("targets", "name"), [(ONE, "ggml-cpu"), (VARIANTS, "ggml-cpu-zen4")], ids=["one", "variants"])
def test_one_number_for_a_row_is_taken_a_row_at_a_time_by_each_library(tmp_path: Path, targets: str, name: str) -> None:
    targets = targets.replace("ggml-cpu/ops.cpp", "ggml-cpu/ops.cpp ggml-cpu/binary-ops.cpp")
    told, linked = configured(tmp_path, KNOWN, targets, name, OPERATIONS)
    made = (tmp_path / "build" / "disco" / "binary-ops.cpp").read_text()
    assert "binary-ops.cpp is another" not in told
    assert "disco/binary-ops.cpp.o" in linked
    assert "ggml-cpu/binary-ops.cpp.o" not in linked
    assert "disco/ops.cpp.o" in linked
    assert made.index("for (;;)") < made.index("if (ne10 == 1) {") < made.index("if (is_src1_contiguous_rows) {")


@pytest.mark.parametrize("operations", ["", 2 * OPERATIONS], ids=["none", "two"])
def test_other_operations_than_the_known_ones_stay_as_they_are_and_that_is_said(
    tmp_path: Path, operations: str
) -> None:
    targets = ONE.replace("ggml-cpu/ops.cpp", "ggml-cpu/ops.cpp ggml-cpu/binary-ops.cpp")
    told, linked = configured(tmp_path, KNOWN, targets, operations=operations)
    assert "binary-ops.cpp is another" in told
    assert "ggml-cpu/binary-ops.cpp.o" in linked


@pytest.mark.parametrize(
    ("targets", "name"),
    [(ONE.replace("vec.cpp", SGEMM), "ggml-cpu"), (VARIANTS.replace("vec.cpp", SGEMM), "ggml-cpu-zen4")],
    ids=["one", "variants"],
)
def test_products_are_asked_of_ours_first_and_the_others_have_another_name(
    tmp_path: Path, targets: str, name: str
) -> None:
    told, linked = configured(tmp_path, KNOWN, targets, name)
    assert "there is no llamafile/sgemm.cpp" not in told
    assert "products.cpp.o" in linked
    made = (tmp_path / "build" / "CMakeFiles" / f"{name}.dir" / "flags.make").read_text()
    for file, definition in (
        ("sgemm.cpp", "llamafile_sgemm=disco_other_products"),
        ("repack.cpp", "ggml_cpu_has_avx2=disco_interleaves"),
        ("tiled.cpp", "ggml_compute_forward_mul_mat_tiled=disco_other_tiles"),
        ("tiled.cpp", "ggml_compute_forward_mul_mat_id_tiled=disco_other_expert_tiles"),
        ("quants.c", "quantize_row_q8_K=disco_other_packing"),
        ("products.cpp", "DISCO_OTHER_TILES"),
        ("products.cpp", "DISCO_PACKS"),
    ):
        defined = [line for line in made.splitlines() if definition in line]
        assert len(defined) == 1
        assert file in defined[0]


def test_without_tiles_of_ggml_products_are_its_own_and_that_is_said(tmp_path: Path) -> None:
    told, linked = configured(tmp_path, KNOWN)
    assert "there is no llamafile/sgemm.cpp" in told
    assert "products.cpp" not in linked


def test_changes_of_a_build_are_told_with_their_versions(tmp_path: Path) -> None:
    text = f'#include "{CI / "told.h"}"\nDISCO_TOLD(disco_exact_attention, 0)\nDISCO_TOLD(disco_products, 7)\n'
    assert build_features.changes(compiled(tmp_path, text)) == "products 7"


def test_models_and_what_computes_no_token_are_compiled_with_less_optimisation(tmp_path: Path) -> None:
    _, linked = configured(tmp_path, KNOWN, ONE + MODELS, "llama")
    made = tmp_path / "build" / "CMakeFiles"
    hot, quick = ((made / f"{name}.dir" / "flags.make").read_text() for name in ("llama", "llama-quick"))
    objects = [word.rpartition("/")[2] for word in shlex.split(linked) if word.endswith(".o")]
    assert sorted(objects) == ["llama-chat.cpp.o", "llama.cpp.o", "unity_0_cxx.cxx.o"]  # the models are one
    for text in (hot, quick):
        assert "SHARED_BY_ALL" in text
        assert "-fPIC" in text
        assert f"-I{tmp_path / 'models'}" in text
    assert " -O1" in quick
    assert "-O1" not in hot


@pytest.mark.parametrize("native", ["ON", "OFF"])
def test_what_lays_weights_out_anew_is_left_out_where_nothing_would_be(tmp_path: Path, native: str) -> None:
    used = f"target_compile_definitions(ggml-cpu PRIVATE USED GGML_USE_CPU_REPACK)\nset(GGML_NATIVE {native})\n"
    _, linked = configured(tmp_path, KNOWN, ONE.replace("vec.cpp", SGEMM) + used)
    flags = (tmp_path / "build" / "CMakeFiles" / "ggml-cpu.dir" / "flags.make").read_text()
    asked = [program("cc"), "-march=native", "-dM", "-E", "-x", "c", "/dev/null"]
    has = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout
    is_left_out = native == "ON" and "__AVX2__" in has and "__AVX512F__" not in has
    assert ("repack.cpp.o" not in linked) is is_left_out
    assert ("GGML_USE_CPU_REPACK" not in flags) is is_left_out
    assert "-DUSED" in flags
    assert "sgemm.cpp.o" in linked
