"""Types of numpy arrays for signatures, and `distinct`; shapes stand in the docstrings, such as [n, 2]."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
IndexArray = NDArray[np.intp]
Scalar = TypeVar("Scalar", bound=np.generic)


def distinct(values: NDArray[Scalar]) -> NDArray[Scalar]:
    """Return the values that differ, ascending, [m]: as np.unique, which loads numpy.ma, a thirtieth of a start."""
    ordered = np.sort(values, axis=None)
    is_new = np.ones(len(ordered), bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new]
