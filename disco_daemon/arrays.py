"""Types of numpy arrays for signatures; shapes stand in the docstrings, such as [n, 2]."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
IndexArray = NDArray[np.intp]
