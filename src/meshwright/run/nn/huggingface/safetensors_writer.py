"""`write_safetensors`: a file of tensors that has the mode of other new files."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_safetensors(
    tensors: Mapping[str, Tensor], path: Path, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file with the mode that the umask gives to new files.

    The library writes to a temporary file, which its owner alone may read, and renames it.
    """
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=dict(metadata) if metadata else None)
    path.chmod(mode & 0o777)
