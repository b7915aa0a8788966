"""`LabelEncoder`: encodes values as integer codes in order of first appearance."""

from typing import Any

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.int32]


class LabelEncoder(dict[Any, int]):
    """Numbers each distinct value in the order of appearance."""

    def __missing__(self, value: Any) -> int:
        number = self[value] = len(self)
        return number

    def encode(self, values: Any, count: int) -> Codes:
        """The number of each value."""
        return np.fromiter(map(self.__getitem__, values), np.int32, count)
