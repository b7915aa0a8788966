"""Opens safetensors files: what the library checks, and that no tensor stands there twice.

The library takes the last of two entries of one name, so two programs may read other weights from
the same file.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from meshwright.errors import DamagedFile, InputError, Problem

_LENGTH_BYTES = 8
_AGAIN = "fetch it again"


def open_safetensors(path: Path) -> Any:
    """Open a file for reading on the CPU; what is wrong with it is an `InputError`."""
    try:
        opened = safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise InputError([Problem(str(path), "there is no such file", "fetch it")]) from error
    except (SafetensorError, OSError) as error:
        what = f"is not a whole safetensors file: {error}"
        raise DamagedFile([Problem(str(path), what, _AGAIN)]) from error
    # The library has read the header by now: it is whole, and has the form that it should have.
    _refuse_repeated_names(path)
    return opened


def load_safetensors(path: Path) -> dict[str, Any]:
    """Read all tensors of a file."""
    with open_safetensors(path) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _refuse_repeated_names(path: Path) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        text = file.read(length)
    twice: list[str] = []

    def look(pairs: list[tuple[str, object]]) -> None:
        """Look at the names of an object, and keep none: a header has millions of numbers."""
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                twice.append(name)
            seen.add(name)

    json.loads(text, object_pairs_hook=look)
    if twice:
        what = f"has {twice[0][:80]!r} twice in its header"
        raise DamagedFile([Problem(str(path), what, _AGAIN)])
