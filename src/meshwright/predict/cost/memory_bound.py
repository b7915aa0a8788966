"""Time of work that only moves bytes: norms, activations, casts, permutations, the optimizer.

    t = kernel + bytes / (share × memory bandwidth)

The share is measured per class of work. Callers count the bytes; `bytes_moved` does it for the
usual classes. Data small enough to stay in the last cache moves faster than said here.
"""

from functools import lru_cache

from meshwright.predict.cost.curves import MemoryOp
from meshwright.predict.cost.device_costs import DeviceCosts

ACCESSES_PER_ELEMENT: dict[MemoryOp, float] = {
    "copy": 2.0,
    "residual": 3.0,
    "norm": 2.0,
    "norm_backward": 3.0,
    "activation": 1.5,
    "activation_backward": 2.5,
    "rotary": 2.0,
    "softmax": 2.0,
    "cross_entropy": 1.0,
    "cross_entropy_backward": 2.0,
    "loss_in_place": 2.0,
    "permute": 2.0,
    "unpermute": 2.0,
    "quantise": 1.5,
    "cast": 3.0,
    "gradient_norm": 1.0,
}
"""Reads and writes per input element, in input elements.

`activation` is a gated one: it reads both halves of its input and writes half as much.
`residual` adds one tensor to another. `quantise` goes from 2 bytes to 1, `cast` from 2 to 4.
`optimizer` and `accumulate` are not listed: their bytes depend on the states that a layout keeps.
"""


@lru_cache(maxsize=1 << 16)
def memory_s(device: DeviceCosts, op: MemoryOp, size_bytes: float) -> float:
    """Return the seconds of one kernel of a class that reads and writes `size_bytes` in all."""
    if size_bytes <= 0:
        return 0.0
    rate = device.memory_efficiency[op] * device.bytes_per_s
    return device.launch.kernel_s + size_bytes / rate


def bytes_moved(op: MemoryOp, elements: float, element_bytes: float = 2.0) -> float:
    """Return the bytes that a usual kernel of the class moves for so many input elements."""
    return ACCESSES_PER_ELEMENT[op] * elements * element_bytes


def optimizer_s(device: DeviceCosts, size_bytes: float) -> float:
    """Return the seconds of an optimizer step that reads and writes `size_bytes` of state.

    AdamW on fp32 weights with fp32 gradients moves 28 bytes per parameter: it reads weight,
    gradient and both moments and writes all but the gradient; a 16-bit copy adds 2.
    """
    return memory_s(device, "optimizer", size_bytes)
