"""`Kernel`: a kernel of the trainer that is bound by memory, with the sizes it is measured at."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from meshwright.observe.bench.case import Case, Value
from meshwright.observe.bench.timing import Call

if TYPE_CHECKING:
    import torch

Sizes = dict[str, Value]


class Tensors(NamedTuple):
    """Makes tensors of random numbers."""

    device: "torch.device"
    dtype: "torch.dtype"
    """Of activations and weights: 16 bits on a GPU, 32 on a processor, as training has them."""

    def __call__(self, *shape: int, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
        """Draw normal numbers."""
        import torch

        return torch.randn(shape, device=self.device).to(dtype or self.dtype)

    def whole(self, below: int, *shape: int) -> "torch.Tensor":
        """Draw whole numbers below one."""
        import torch

        return torch.randint(below, shape, device=self.device)

    @property
    def on_triton(self) -> bool:
        """Whether Triton's kernels run here."""
        from meshwright.run.kernels.language import HAS_TRITON

        return HAS_TRITON and self.device.type == "cuda"


class Kernel(NamedTuple):
    """What is measured of one kernel."""

    op: str
    """The class of `predict/cost` that prices it; a name of its own where none does."""
    name: str
    """What it is called."""
    sizes: tuple[Sizes, ...]
    """Of a GPU, the most telling first."""
    host: Sizes
    """Of a processor."""
    make: Callable[[Case, Tensors], Call]
    """Make inputs, and return a call that works on them."""
    moved: Callable[[Case, int], float]
    """Bytes of one call as predictions count them, for numbers of so many bytes."""
    eight_bits: bool = False
    """Whether it needs a GPU that knows 8-bit floats."""
    quick: bool = True
    """Whether a quick bench measures it: another kernel may stand for its class."""

    def case(self, sizes: Sizes) -> Case:
        """Return the case of some sizes."""
        return Case(family="elementwise", name=self.op, sizes={"kernel": self.name, **sizes})
