"""`GgufFile`: the facts and tensors of a GGUF file, llama.cpp's format.

The file is mapped; a tensor is dequantised to fp32 by PyPI's `gguf` when it is asked for.
Dimensions are given in torch's order, rows first.
"""

import mmap
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from meshwright.errors import DamagedFile, InputError, MissingDependency, Problem
from meshwright.run.serve.model.gguf_header import (
    MAGIC,
    InvalidGguf,
    MetadataValue,
    iter_metadata,
    read_header,
)
from meshwright.spec.serialization import format_value

_CONVERT = "use a file of llama.cpp's converter"
_T = TypeVar("_T", str, int, float, bool)


def is_gguf(path: Path) -> bool:
    """Tell whether a path is a GGUF file, by its name or by how it begins."""
    if not path.is_file():
        return path.suffix == ".gguf"
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(len(MAGIC)) == MAGIC


def read_context_length(path: Path) -> int | None:
    """Return the context of a file's model; None where the file does not say it.

    Metadata is read up to there, so that the vocabulary behind it costs no time.
    """
    try:
        for key, value in iter_metadata(_map(path)):
            if key.endswith(".context_length") and type(value) is int:
                return value
    except (InvalidGguf, OSError, ValueError):
        # What is broken is told by who reads all of it.
        pass
    return None


def _map(path: Path) -> memoryview:
    """Map a file for as long as somebody holds a view of it."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class GgufFile:
    """An open file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise InputError([Problem(str(path), "there is no such file", "check the name")])
        self._gguf = _library()
        sizes = {int(kind): size for kind, size in self._gguf.GGML_QUANT_SIZES.items()}
        try:
            self._data = _map(self.path)
            header = read_header(self._data, sizes)
        except (InvalidGguf, OSError, ValueError) as error:
            what = f"is not a whole GGUF file: {error}"
            raise DamagedFile([Problem(str(path), what, "fetch it again")]) from error
        self._metadata, self._tensors = header

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tensors = {}
        self._metadata = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that the file holds."""
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, rows first."""
        return self._tensors[name].shape

    def read(self, name: str) -> Tensor:
        """Return a tensor's numbers in fp32."""
        tensor = self._tensors[name]
        kind = self._gguf.GGMLQuantizationType(tensor.type_id)
        data = np.frombuffer(self._data, np.uint8, tensor.size_bytes, tensor.offset)
        if not tensor.size_bytes:
            return torch.empty(tensor.shape)
        try:
            numbers = self._gguf.dequantize(data.reshape(*tensor.shape[:-1], -1), kind)
        except NotImplementedError as error:
            what = f"is quantised as {kind.name}, which cannot be read"
            fix = "use a file in Q4_0, Q4_1, Q8_0, a K quant, F16, BF16 or F32"
            raise InputError([Problem(f"{self.path}: {name}", what, fix)]) from error
        # A copy: the file may be read-only, and is closed before the numbers are.
        return torch.from_numpy(np.array(numbers, np.float32)).view(tensor.shape)

    def metadata(self, key: str) -> MetadataValue | None:
        """Return what the file says under a key; None where it says nothing."""
        return self._metadata.get(key)

    def metadata_str(self, key: str, default: str | None = None) -> str:
        """Return a text; without a default it has to be there."""
        return self._typed(key, str, default)

    def metadata_int(self, key: str, default: int | None = None) -> int:
        """Return a whole number."""
        return self._typed(key, int, default)

    def metadata_float(self, key: str, default: float | None = None) -> float:
        """Return a number."""
        return float(self._typed(key, float, default))

    def metadata_bool(self, key: str, default: bool) -> bool:
        """Return a switch."""
        return self._typed(key, bool, default)

    def metadata_texts(self, key: str) -> Sequence[str]:
        """Return a list of texts; empty where the file has none."""
        return cast(Sequence[str], self._list(key, (str,), "texts"))

    def metadata_ints(self, key: str) -> Sequence[int]:
        """Return a list of whole numbers; empty where the file has none."""
        return cast(Sequence[int], self._list(key, (int,), "whole numbers"))

    def metadata_floats(self, key: str) -> Sequence[float]:
        """Return a list of numbers; empty where the file has none."""
        return cast(Sequence[float], self._list(key, (int, float), "numbers"))

    def _list(self, key: str, kinds: tuple[type, ...], what: str) -> object:
        found = self.metadata(key)
        if found is None:
            return ()
        # A list of GGUF has values of one kind.
        if isinstance(found, str | int | float) or (found and not isinstance(found[0], kinds)):
            raise InputError([Problem(f"{self.path}: {key}", f"is no list of {what}", _CONVERT)])
        return found

    def _typed(self, key: str, kind: type[_T], default: _T | None) -> _T:
        found = self.metadata(key)
        if found is None:
            if default is not None:
                return default
            what = "the file does not say it"
            raise InputError([Problem(f"{self.path}: {key}", what, "use a complete file")])
        if not isinstance(found, kind) and not (kind is float and isinstance(found, int)):
            what = f"{format_value(found)} is no {kind.__name__}"
            raise InputError([Problem(f"{self.path}: {key}", what, _CONVERT)])
        return kind(found)


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingDependency(
            "GGUF files need gguf, which is not installed", "pip install gguf"
        ) from (error)
    return gguf
