"""`Memory`: tells whether the memory of a tensor is free."""

from typing import Any

from torch import Tensor
from torch.multiprocessing import reductions


class Memory:
    """Where a tensor lay, which this does not keep."""

    def __init__(self, tensor: Tensor) -> None:
        untyped: Any = reductions
        self._storage = untyped.StorageWeakRef(tensor.untyped_storage())

    @property
    def is_free(self) -> bool:
        return bool(self._storage.expired())
