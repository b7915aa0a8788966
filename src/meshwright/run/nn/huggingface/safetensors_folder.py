"""A folder of safetensors files as one set of named tensors, read a tensor at a time.

Only headers are read when a folder is opened. Files are mapped, so a tensor's bytes are touched
when it is asked for and never before. Pickled weights are refused: opening them can run code.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.run.nn.huggingface.quantized_weights import (
    BLOCK,
    dequantize_fp8,
    dequantize_mxfp4,
    is_scale_shape_valid,
)
from meshwright.run.nn.huggingface.safetensors_header import find_repeated_names
from meshwright.spec.file_formats import load_data
from meshwright.spec.serialization import format_value

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOATS = {"F64", "F32", "F16", "BF16"}
_FP8 = {"F8_E4M3", "F8_E5M2"}
_SCALES = ("_scale_inv", "_scale")
_UNUSED = ("input_scale", "k_scale", "v_scale")
"""Scales of activations, which training does not use."""


class TensorSource(Protocol):
    """Named tensors, wherever they come from."""

    folder: Path
    """Where they lie, for messages."""
    shapes: dict[str, tuple[int, ...]]
    """Shape of every tensor."""

    def files(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each file with the names of the tensors in it."""

    def read(self, name: str, device: torch.device) -> Tensor:
        """Read one tensor."""

    def unreadable(self, name: str) -> str:
        """Say why the values of a tensor cannot be read; empty where they can."""


class TensorHeader(NamedTuple):
    """A tensor as a file holds it."""

    file: str
    shape: tuple[int, ...]
    dtype_name: str
    """Type of its numbers, in the file's words: BF16, F8_E4M3, U8."""


class SafetensorsFolder:
    """The tensors of a folder, by name, with quantised ones shown as the numbers they stand for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        self._stored: dict[str, TensorHeader] = {}
        try:
            self._read_headers()
            self._block = self._scale_block()
        except BaseException:
            self._open.close()
            raise
        self.shapes: dict[str, tuple[int, ...]] = self._find_shapes()
        """Shape of every tensor, once dequantised."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._open.close()

    def files(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each file with the names of the tensors in it, in the order of the files."""
        homes: dict[str, list[str]] = {}
        for name in self.shapes:
            home = self._stored.get(name) or self._stored[f"{name}_blocks"]
            homes.setdefault(home.file, []).append(name)
        yield from sorted(homes.items())

    def read(self, name: str, device: torch.device) -> Tensor:
        """Read one tensor; a quantised one as fp32 (fp8) or bf16 (mxfp4), made on the device."""
        if name not in self._stored:
            parts = (self._raw(f"{name}_{part}").to(device) for part in ("blocks", "scales"))
            return dequantize_mxfp4(*parts)
        raw = self._raw(name)
        if self._stored[name].dtype_name not in _FP8:
            return raw
        scale = self._raw(self._scale_of(name))
        return dequantize_fp8(raw.to(device), scale.to(device), self._block)

    def unreadable(self, name: str) -> str:
        """Say why the values of a tensor cannot be read; empty where they can."""
        stored = self._stored.get(name)
        if stored is None or stored.dtype_name in _FLOATS:
            return ""
        if stored.dtype_name not in _FP8:
            return f"holds {stored.dtype_name}, not floating-point values"
        scale = self._scale_of(name)
        if not scale:
            return f"holds {stored.dtype_name} without scales"
        found = self._stored[scale].shape
        if is_scale_shape_valid(stored.shape, found, self._block):
            return ""
        return f"has scales of shape {list(found)}, which fit no blocks of {list(self._block)}"

    def _scale_of(self, name: str) -> str:
        return next((name + end for end in _SCALES if name + end in self._stored), "")

    def _raw(self, name: str) -> Tensor:
        tensor = self._files[self._stored[name].file].get_tensor(name)
        assert isinstance(tensor, Tensor)
        return tensor

    def _read_headers(self) -> None:
        problems: list[Problem] = []
        files = _find_files(self.folder)
        for file in files:
            self._read_header(file, problems)
        listed = (
            _index(self.folder) if (self.folder / INDEX_FILE).exists() and len(files) > 1 else {}
        )
        problems += [
            Problem(str(self.folder / INDEX_FILE), f"lists {name}, which {file} does not hold",
                    "fetch the file again, or mend the index")
            for name, file in listed.items()
            if file in self._files and name not in self._stored
        ]  # fmt: skip
        if problems:
            raise InputError(problems)

    def _read_header(self, file: str, problems: list[Problem]) -> None:
        path = self.folder / file
        try:
            opened = self._open.enter_context(safe_open(path, framework="pt", device="cpu"))
        except FileNotFoundError:
            problems.append(Problem(str(path), "there is no such file", "fetch it"))
            return
        except (SafetensorError, OSError) as error:
            what = f"is not a whole safetensors file: {error}"
            problems.append(Problem(str(path), what, "fetch it again"))
            return
        if (problem := find_repeated_names(path)) is not None:
            problems.append(problem)
            return
        self._files[file] = opened
        for name in opened.keys():  # noqa: SIM118 - an open file is no mapping
            if name in self._stored:
                what = f"holds {name}, which {self._stored[name].file} holds as well"
                problems.append(Problem(str(path), what, "keep one of them"))
                continue
            header = opened.get_slice(name)
            self._stored[name] = TensorHeader(file, tuple(header.get_shape()), header.get_dtype())

    def _scale_block(self) -> tuple[int, int]:
        path = self.folder / CONFIG_FILE
        quantised = load_data(path).get("quantization_config") if path.exists() else None
        block = quantised.get("weight_block_size") if isinstance(quantised, dict) else None
        if block is None:
            return BLOCK, BLOCK
        match block:
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                return rows, columns
        where = f"{path}: quantization_config.weight_block_size"
        raise InputError(
            [Problem(where, f"{format_value(block)} is not two sizes", "such as [128, 128]")]
        )

    def _find_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, stored in self._stored.items():
            owner = next((name.removesuffix(end) for end in _SCALES if name.endswith(end)), "")
            if owner in self._stored or name.endswith(_UNUSED):
                continue
            packed = name.removesuffix("_blocks")
            if packed != name and self._is_mxfp4(packed):
                experts, out, groups, half = stored.shape
                shapes[packed] = (experts, groups * half * 2, out)
            elif not self._is_mxfp4(name.removesuffix("_scales")):
                shapes[name] = stored.shape
        return shapes

    def _is_mxfp4(self, name: str) -> bool:
        blocks, scales = (self._stored.get(f"{name}_{part}") for part in ("blocks", "scales"))
        if blocks is None or scales is None:
            return False
        return len(blocks.shape) == 4 and scales.shape == blocks.shape[:-1]


def _find_files(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise InputError([Problem(str(folder), "there is no such folder", "check the path")])
    if (folder / SINGLE_FILE).exists():
        return [SINGLE_FILE]
    if (folder / INDEX_FILE).exists():
        return sorted(set(_index(folder).values()))
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        what = f"holds only pickled weights ({pickled[0]}), and opening those can run code"
        fix = "save it once as safetensors, on a machine you can lose"
        raise InputError([Problem(str(folder), what, fix)])
    what = f"holds neither {SINGLE_FILE} nor {INDEX_FILE}"
    raise InputError([Problem(str(folder), what, "give a folder of a Hugging Face checkpoint")])


def _index(folder: Path) -> Mapping[str, str]:
    path = folder / INDEX_FILE
    listed = load_data(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        what = f"weight_map is {format_value(listed)}, not a table of tensors and files"
        raise DamagedFile([Problem(str(path), what, "fetch it again")])
    for name, file in listed.items():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or not file.endswith(".safetensors")
        ):
            what = (
                f"{name} is stored in {format_value(file)}, which is not a safetensors file of the "
                f"folder"
            )
            raise InputError([Problem(str(path), what, "fetch the checkpoint again")])
    return listed
