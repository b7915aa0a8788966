"""`compute_base_fingerprint`: identifies the base weights of an adapter run.

A run reads it whenever it begins or goes on, so not every byte is read: of each tensor its name,
type, shape and a few pages. Whatever trains a tensor changes nearly all its numbers. Which file
holds a tensor does not count, so weights may be written anew in other files.
"""

import json
from pathlib import Path
from typing import BinaryIO

from meshwright.run.nn.huggingface.safetensors_folder import SafetensorsFolder
from meshwright.run.posttrain.rl.config.rl_config import RLConfig
from meshwright.run.train.data.fingerprint import compute_fingerprint

_PAGE = 4096
"""Bytes that are read at the beginning, in the middle and at the end of a tensor."""


def compute_base_fingerprint(settings: RLConfig) -> str:
    """Return a name of the frozen weights of a run; empty where its checkpoints hold all weights.

    Raises:
        InputError: where there are no weights, or not whole ones.
    """
    if settings.adapter is None or not settings.model:
        return ""
    folder = Path(settings.model)
    with SafetensorsFolder(folder) as weights:  # says what is wrong with a folder
        files = [file for file, _ in weights.files()]
    return compute_fingerprint(*sorted(part for file in files for part in _tensors(folder / file)))


def _tensors(path: Path) -> list[str]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return [
            compute_fingerprint(
                name, one["dtype"], str(one["shape"]), _pages(file, 8 + length, one["data_offsets"])
            )
            for name, one in header.items()
        ]


def _pages(file: BinaryIO, data: int, offsets: tuple[int, int]) -> bytes:
    begin, end = offsets
    found = b""
    for place in (begin, (begin + end) // 2, max(begin, end - _PAGE)):
        file.seek(data + place)
        found += file.read(min(_PAGE, end - place))
    return found
