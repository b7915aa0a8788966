"""Where there is no GPU, Triton interprets the kernels: it has to know before they are imported."""

import os
from importlib.util import find_spec


def _gpu() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


if not _gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")
