"""The tasks of a program carried out with plain torch operations, on any device.

It is what the kernel is compared with: the same sums in the same order, so results agree in every
bit.
"""

import torch

from meshwright.run.kernels.collective.kernel_program import (
    ELEMENTS,
    MORE,
    SECOND_SOURCE,
    SOURCE,
    SOURCES,
    TARGET,
    TARGETS,
    KernelProgram,
)

SUM_TYPES: dict[torch.dtype, torch.dtype] = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.int32: torch.int32,
}
"""The types that can be moved, and the type that their sums are formed in."""


def run_program_reference(program: KernelProgram, buffer: torch.Tensor) -> None:
    """Carry out a program over a buffer."""
    flat = buffer.view(-1)
    more = program.more.tolist()
    for row in program.tasks.tolist():
        elements, sources, targets = row[ELEMENTS], row[SOURCES], row[TARGETS]
        first = flat[row[SOURCE] : row[SOURCE] + elements]
        target = flat[row[TARGET] : row[TARGET] + elements]
        if sources == 1:
            target.copy_(first)
            for start in more[row[MORE] : row[MORE] + targets - 1]:
                flat[start : start + elements].copy_(first)
            continue
        rest = more[row[MORE] : row[MORE] + sources - 2]
        if sources == 2 and row[SOURCE] == row[TARGET]:
            # Torch adds two 16-bit numbers in float32 as well, and rounds once.
            target.add_(flat[row[SECOND_SOURCE] : row[SECOND_SOURCE] + elements])
            continue
        total = first.to(SUM_TYPES[flat.dtype], copy=True)
        for start in (row[SECOND_SOURCE], *rest):
            total.add_(flat[start : start + elements])
        target.copy_(total)
