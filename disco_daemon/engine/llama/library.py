"""llama.cpp's own library, and the kernels that it computes with: compiled in, or the best of several for this CPU.

A build with `GGML_BACKEND_DL` has its kernels in libraries of their own, with `GGML_CPU_ALL_VARIANTS` one for each
generation of processors. Somebody has to say where they are, before a model is loaded: who imports this has done so.
From then on llama.cpp shows nothing but errors, on stderr. The single binary has such a build.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import llama_cpp

from . import build_features

LIBRARY: ctypes.CDLL = llama_cpp.llama_cpp._lib  # with the libraries that it needs
FOLDER = Path(llama_cpp.__file__).parent / "lib"
VARIANTS = "libggml-cpu-*.so"  # on macOS as well
ERROR = 4  # of llama.cpp's log levels; 5 only continues a line, such as the dots while it loads


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def show_errors(level: int, text: bytes, _data: object) -> None:
    """Show what llama.cpp says if it is an error, on stderr."""
    if level == ERROR:
        os.write(2, text)


def _choose_kernels() -> None:
    """Let llama.cpp take the kernels that suit this processor best, and a GPU's, where they are apart from it."""
    if any(FOLDER.glob(VARIANTS)):
        LIBRARY.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
        LIBRARY.ggml_backend_load_all_from_path.restype = None
        LIBRARY.ggml_backend_load_all_from_path(os.fsencode(FOLDER))


def kernels() -> ctypes.CDLL:
    """Return the library with the kernels for this CPU that are in use."""
    for path in sorted(FOLDER.glob(VARIANTS)):
        try:
            return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:  # not the one that was taken
            continue
    return LIBRARY


def usable_threads(n: int) -> int:
    """Return how many threads of `n` may compute: one alone where a build is wrong with more."""
    return 1 if build_features.fault(kernels()) else n


llama_cpp.llama_log_set(show_errors, ctypes.c_void_p(0))
_choose_kernels()
if FAULT := build_features.fault(kernels()):
    os.write(2, f"llama.cpp has to be compiled anew, see `disco doctor`: {FAULT}\n".encode())
