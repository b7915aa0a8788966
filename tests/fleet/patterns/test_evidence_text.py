"""Numbers in words."""

import pytest

from meshwright.fleet.patterns.evidence_text import format_gpus


@pytest.mark.parametrize(
    ("number", "said"),
    [(1.0, "1 GPU"), (0.5, "0.5 GPUs"), (8.0, "8 GPUs"), (16384.0, "16,384 GPUs"), (0, "0 GPUs")],
)
def test_one_gpu_is_one(number: float, said: str) -> None:
    assert format_gpus(number) == said
