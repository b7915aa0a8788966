"""`BenchKernel`: a memory-bound kernel of the trainer, with the sizes it is measured at."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from meshwright.observe.bench.bench_case import BenchCase, SizeValue
from meshwright.observe.bench.timing import Call

if TYPE_CHECKING:
    import torch

Sizes = dict[str, SizeValue]


class TensorFactory(NamedTuple):
    """Makes tensors of random numbers."""

    device: "torch.device"
    dtype: "torch.dtype"
    """Of activations and weights: 16 bits on a GPU, 32 on a processor, as training has them."""

    def __call__(self, *shape: int, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
        """Draw normal numbers."""
        import torch

        return torch.randn(shape, device=self.device).to(dtype or self.dtype)

    def make_integers(self, below: int, *shape: int) -> "torch.Tensor":
        """Draw whole numbers below one."""
        import torch

        return torch.randint(below, shape, device=self.device)

    @property
    def has_triton(self) -> bool:
        """Whether Triton's kernels run here."""
        from meshwright.run.kernels.triton_compat import HAS_TRITON

        return HAS_TRITON and self.device.type == "cuda"


class BenchKernel(NamedTuple):
    """What is measured of one kernel."""

    op: str
    """The class of `predict/cost` that prices it; a name of its own where none does."""
    name: str
    """What it is called."""
    gpu_sizes: tuple[Sizes, ...]
    """Of a GPU, the most telling first."""
    cpu_sizes: Sizes
    """Of a processor."""
    make: Callable[[BenchCase, TensorFactory], Call]
    """Make inputs, and return a call that works on them."""
    count_bytes: Callable[[BenchCase, int], float]
    """Bytes of one call as predictions count them, for numbers of so many bytes."""
    needs_fp8: bool = False
    """Whether it needs a GPU that knows 8-bit floats."""
    in_quick_bench: bool = True
    """Whether a quick bench measures it: another kernel may stand for its class."""

    def build_case(self, sizes: Sizes) -> BenchCase:
        """Return the case of some sizes."""
        return BenchCase(family="memory_bound", name=self.op, sizes={"kernel": self.name, **sizes})
