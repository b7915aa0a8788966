"""`GgufFile`: the facts and tensors of a GGUF file, llama.cpp's format, read through PyPI's `gguf`.

The file is mapped; a tensor is dequantised to fp32 when it is asked for. Dimensions are given in
torch's order, rows first.
"""

import struct
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from meshwright.errors import DamagedFile, InputError, MissingDependency, Problem

_MAGIC = b"GGUF"
_T = TypeVar("_T", str, int, float, bool)


def is_gguf(path: Path) -> bool:
    """Tell whether a path is a GGUF file, by its name or by how it begins."""
    if not path.is_file():
        return path.suffix == ".gguf"
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(len(_MAGIC)) == _MAGIC


def read_context_length(path: Path) -> int | None:
    """Return the context of a file's model, from its first facts; None where these do not tell.

    The library reads all facts at once, words and all, which takes seconds.
    """
    try:
        with path.open("rb") as file:
            version, _, facts = struct.unpack("<4xIQQ", file.read(24))
            for _ in range(facts if version in _VERSIONS else 0):
                key, kind = _text(file), _number(file, 4)
                if key.endswith(b".context_length") and kind in _WIDTHS:
                    return _number(file, _WIDTHS[kind])
                _skip(file, kind)
    except (struct.error, ValueError, OSError):
        # What is broken is told by who reads all of it.
        pass
    return None


_VERSIONS = (2, 3)
_WIDTHS = dict(enumerate((1, 1, 2, 2, 4, 4, 4, 1))) | {10: 8, 11: 8, 12: 8}
"""Bytes of a fact by the number of its kind, as GGUF's description lists them."""
_TEXT, _LIST = 8, 9
_MANY = 1 << 16
"""No name of a fact is as long, and no list before the words."""


def _number(file: BinaryIO, width: int) -> int:
    data = file.read(width)
    if len(data) < width:
        raise ValueError("the file ends")
    return int.from_bytes(data, "little")


def _text(file: BinaryIO) -> bytes:
    if (length := _number(file, 8)) >= _MANY:
        raise ValueError("a text without end")
    return file.read(length)


def _skip(file: BinaryIO, kind: int) -> None:
    """Go behind a fact's value."""
    kind, count = (_number(file, 4), _number(file, 8)) if kind == _LIST else (kind, 1)
    if kind in _WIDTHS:
        file.seek(_WIDTHS[kind] * count, 1)
    elif kind == _TEXT and count < _MANY:
        for _ in range(count):
            file.seek(_number(file, 8), 1)
    else:
        raise ValueError("a list of lists, or of words")


class GgufFile:
    """An open file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise InputError([Problem(str(path), "there is no such file", "check the name")])
        self._gguf = _library()
        try:
            self._reader = self._gguf.GGUFReader(self.path)
            self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        # What a broken file raises depends on where it breaks: the reader checks nothing itself.
        except (ValueError, IndexError, KeyError, TypeError, OSError, OverflowError) as error:
            what = f"is not a whole GGUF file: {error}"
            raise DamagedFile([Problem(str(path), what, "fetch it again")]) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tensors.clear()
        del self._reader

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that the file holds."""
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, rows first."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str) -> Tensor:
        """Return a tensor's numbers in fp32."""
        tensor = self._tensors[name]
        try:
            numbers = self._gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            what = f"is quantised as {tensor.tensor_type.name}, which cannot be read"
            fix = "use a file in Q4_0, Q4_1, Q8_0, a K quant, F16, BF16 or F32"
            raise InputError([Problem(f"{self.path}: {name}", what, fix)]) from error
        # A copy: the file may be read-only, and is closed before the numbers are.
        return torch.from_numpy(np.array(numbers, np.float32)).view(self.shape(name))

    def metadata(self, key: str) -> Any:
        """Return what the file says under a key; None where it says nothing."""
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

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

    def _typed(self, key: str, kind: type[_T], default: _T | None) -> _T:
        found = self.metadata(key)
        if found is None:
            if default is not None:
                return default
            what = "the file does not say it"
            raise InputError([Problem(f"{self.path}: {key}", what, "use a complete file")])
        if not isinstance(found, kind) and not (kind is float and isinstance(found, int)):
            what = f"{found!r} is no {kind.__name__}"
            raise InputError([Problem(f"{self.path}: {key}", what, "use a file of llama.cpp")])
        return kind(found)


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingDependency(
            "GGUF files need gguf, which is not installed", "pip install gguf"
        ) from (error)
    return gguf
