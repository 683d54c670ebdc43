"""Array types, checks at the border, compiled functions and the one Newton iteration."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]
LabelArray: TypeAlias = NDArray[np.int8]
IdArray: TypeAlias = NDArray[Any]
CodeArray: TypeAlias = NDArray[np.integer[Any]]
