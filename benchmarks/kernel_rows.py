"""What `benchmarks.kernels` measures: a row is a name and a function that gives bytes and a call.

To add a row, write a function that takes a `Place`, makes its tensors there, and returns `Work`:
the bytes that the job cannot do without, and a call that does the job once. Then name it in the
table at the end of this module, or of the one beside it. Sizes are those of 1B and 8B models.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from meshwright.run.kernels.triton_compat import KernelBackend
    from meshwright.spec.model.feedforward import Activation

ELEMENTS = 2**26
"""Of one activation tensor: 128 MiB of bfloat16, far beyond the second-level cache."""
EPS = 1e-5
GLUS: "tuple[tuple[Activation, int], ...]" = (
    ("silu", 8192),
    ("silu", 14336),
    ("gelu-tanh", 8192),
)


class Work(NamedTuple):
    """A job that moves bytes."""

    bytes_moved: int
    """What has to be read and written, counted once."""
    call: Callable[[], object]
    """Does the job once."""
    error: Callable[[], float] | None = None
    """Says how far results are from float64's, as a share of the largest element."""
    torch: Callable[[], object] | None = None
    """The same job with torch's own operations, where it has a fast one."""


class Place(NamedTuple):
    """Where rows run: on the GPU, or interpreted in a size that only shows that they work."""

    device: str
    backend: "KernelBackend"
    elements: int
    """Of an activation tensor."""

    def draw(self, *shape: int, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
        """Return normal numbers, bfloat16 unless said otherwise."""
        import torch

        return torch.randn(*shape, device=self.device, dtype=dtype or torch.bfloat16)

    def rows(self, width: int) -> int:
        """Say how many rows of a width make an activation tensor."""
        return max(2, self.elements // width)


class Row(NamedTuple):
    """A line of the table."""

    name: str
    make: Callable[[Place], Work]


def largest_error(got: "Sequence[torch.Tensor]", exact: "Sequence[torch.Tensor]") -> float:
    """Return the largest difference, as a share of each tensor's largest element."""
    return max(
        float((one.detach().double() - two.detach()).abs().max() / two.detach().abs().max())
        for one, two in zip(got, exact, strict=True)
    )


class Differentiated(NamedTuple):
    """A function with its float64 counterpart, at some tensors, with gradients of its results."""

    function: "Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]"
    plain: "Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]"
    inputs: "tuple[torch.Tensor, ...]"
    grads: "tuple[torch.Tensor, ...]"

    def forward(self) -> "tuple[torch.Tensor, ...]":
        """Return its results."""
        results = self.function(*self.inputs)
        return results if isinstance(results, tuple) else (results,)

    def backward(self) -> "Callable[[], tuple[torch.Tensor, ...]]":
        """Go forward, and return what goes back."""
        import torch

        for each in self.inputs:
            each.requires_grad_()
        results = self.forward()
        return lambda: torch.autograd.grad(results, self.inputs, self.grads, retain_graph=True)

    def error(self) -> float:
        """Compare results and gradients with those of float64."""
        import torch

        exact_inputs = tuple(each.detach().double().requires_grad_() for each in self.inputs)
        exact = self.plain(*exact_inputs)
        exact = exact if isinstance(exact, tuple) else (exact,)
        exact_grads = torch.autograd.grad(
            exact, exact_inputs, [each.double() for each in self.grads]
        )
        with torch.enable_grad():
            got_grads = self.backward()()
        return largest_error((*self.forward(), *got_grads), (*exact, *exact_grads))


def _rms_norm(width: int, *, backward: bool) -> Callable[[Place], Work]:
    def make(place: Place) -> Work:
        from torch.nn import functional

        from meshwright.run.kernels.norm.rms_norm import rms_norm, rms_norm_reference

        rows = place.rows(width)
        x, dy, weight = place.draw(rows, width), place.draw(rows, width), place.draw(width)
        job = Differentiated(
            lambda x, weight: rms_norm(x, weight, EPS, backend=place.backend),
            lambda x, weight: rms_norm_reference(x, weight, EPS),
            (x, weight),
            (dy,),
        )
        theirs = job._replace(function=lambda x, w: functional.rms_norm(x, (width,), w, EPS))
        moved = (3 if backward else 2) * 2 * x.numel()
        if backward:
            return Work(moved, job.backward(), job.error, theirs.backward())
        return Work(moved, job.forward, None, theirs.forward)

    return make


def _add_rms_norm(width: int, *, backward: bool) -> Callable[[Place], Work]:
    def make(place: Place) -> Work:
        import torch

        from meshwright.run.kernels.norm.rms_norm import add_rms_norm, rms_norm_reference

        rows = place.rows(width)
        x, residual, weight = *(place.draw(rows, width) for _ in range(2)), place.draw(width)
        grads = place.draw(rows, width), place.draw(rows, width)
        if not backward:
            return Work(
                4 * 2 * x.numel(),
                lambda: add_rms_norm(x, residual, weight, EPS, backend=place.backend),
            )
        # The norm is that of the rounded sum; a zero residual leaves nothing to round.
        job = Differentiated(
            lambda x, w: add_rms_norm(x, torch.zeros_like(x), w, EPS, backend=place.backend),
            lambda x, w: (rms_norm_reference(x, w, EPS), x * 1),
            (x, weight),
            grads,
        )
        return Work(4 * 2 * x.numel(), job.backward(), job.error)

    return make


def _head_norm(*, backward: bool) -> Callable[[Place], Work]:
    def make(place: Place) -> Work:
        from meshwright.run.kernels.norm.rms_norm import rms_norm, rms_norm_reference

        # Query heads of a fused projection with 32 + 2·8 heads of 128, of a model 4096 wide.
        rows, weight = place.rows(4096), place.draw(128)
        qkv = place.draw(1, rows, 48, 128)
        q = qkv[:, :, :32].detach()
        job = Differentiated(
            lambda q, weight: rms_norm(q, weight, EPS, backend=place.backend),
            lambda q, weight: rms_norm_reference(q, weight, EPS),
            (q, weight),
            (place.draw(*q.shape),),
        )
        if backward:
            return Work(3 * 2 * q.numel(), job.backward(), job.error)
        return Work(2 * 2 * q.numel(), job.forward)

    return make


def _split_rotate(head_dim: int, *, backward: bool) -> Callable[[Place], Work]:
    def make(place: Place) -> Work:
        import torch

        from meshwright.run.kernels.rotary.rotary import (
            split_qkv_apply_rotary,
            split_qkv_apply_rotary_reference,
        )

        # As many tokens as make an activation of a model that is as wide as its query heads.
        heads, kv_heads, positions = 32, 8, min(4096, place.rows(32 * head_dim))
        batch = max(1, place.rows(32 * head_dim) // positions)
        angle = place.draw(positions, head_dim // 2, dtype=torch.float32)
        sizes = heads, kv_heads, head_dim, angle.cos(), angle.sin()
        qkv = place.draw(batch, positions, 48 * head_dim)
        job = Differentiated(
            # A leaf would be copied first; the gradient of a clone is passed on as it is.
            lambda qkv: split_qkv_apply_rotary(qkv.clone(), *sizes, backend=place.backend),
            lambda qkv: split_qkv_apply_rotary_reference(qkv, *sizes),
            (qkv,),
            # Attention allocates dq, dk and dv like q, k and v, without the gaps between tokens.
            tuple(
                place.draw(batch, positions, number, head_dim)
                for number in (heads, kv_heads, kv_heads)
            ),
        )
        if backward:
            return Work(2 * 2 * qkv.numel(), job.backward(), job.error)
        turned = qkv.clone()
        moved = 2 * 2 * qkv.numel() * (heads + kv_heads) // 48
        return Work(moved, lambda: split_qkv_apply_rotary(turned, *sizes, backend=place.backend))

    return make


def _split_norm_rotate(*, backward: bool) -> Callable[[Place], Work]:
    def make(place: Place) -> Work:
        import torch

        from meshwright.run.kernels.rotary.qk_norm_rope import (
            QKNorms,
            split_qkv_norm_rope,
            split_qkv_norm_rope_reference,
        )
        from meshwright.run.kernels.rotary.rotary import QKVSizes

        sizes, positions = QKVSizes(32, 4, 128), place.rows(2048)  # Qwen3-30B-A3B
        angle = place.draw(positions, 64, dtype=torch.float32)
        turns = angle.cos(), angle.sin()
        grads = (place.draw(1, positions, each, 128) for each in (32, 4, 4))
        job = Differentiated(
            lambda qkv, q, k: split_qkv_norm_rope(
                qkv, *sizes, *turns, QKNorms(q, k, EPS), backend=place.backend
            ),
            lambda qkv, q, k: split_qkv_norm_rope_reference(qkv, sizes, *turns, QKNorms(q, k, EPS)),
            (place.draw(1, positions, sizes.width), place.draw(128), place.draw(128)),
            tuple(grads),
        )
        if backward:
            return Work(2 * 128 * positions * (3 * 36 + 2 * 4), job.backward(), job.error)
        return Work(2 * 128 * positions * 2 * 36, job.forward)

    return make


def _glu(activation: "Activation", width: int, *, backward: bool) -> Callable[[Place], Work]:
    def make(place: Place) -> Work:
        from meshwright.run.kernels.activation.glu import glu, glu_reference

        rows = place.rows(width)
        job = Differentiated(
            lambda gate_up: glu(gate_up, activation, backend=place.backend),
            lambda gate_up: glu_reference(gate_up, activation),
            (place.draw(rows, 2 * width),),
            (place.draw(rows, width),),
        )
        if backward:
            return Work(5 * 2 * rows * width, job.backward(), job.error)
        return Work(3 * 2 * rows * width, job.forward)

    return make


def _glu_again(width: int) -> Callable[[Place], Work]:
    def make(place: Place) -> Work:
        from meshwright.run.kernels.activation.glu import (
            DEFAULT_CLAMP_LIMIT,
            glu_backward,
            glu_reference,
        )

        rows = place.rows(width)
        gate_up, dgated = place.draw(rows, 2 * width), place.draw(rows, width)

        def call() -> "tuple[torch.Tensor, torch.Tensor | None]":
            return glu_backward(gate_up, dgated, "silu", DEFAULT_CLAMP_LIMIT, again=True)

        def error() -> float:
            gated = call()[1]
            assert gated is not None
            return largest_error((gated,), (glu_reference(gate_up.double(), "silu"),))

        return Work(6 * 2 * rows * width, call, error)

    return make


MODEL_ROWS = (
    *(
        Row(f"rms_norm {way}, rows of {width}", _rms_norm(width, backward=way == "backward"))
        for width in (2048, 4096)
        for way in ("forward", "backward")
    ),
    *(
        Row(
            f"add_rms_norm {way}, rows of {width}", _add_rms_norm(width, backward=way == "backward")
        )
        for width in (2048, 4096)
        for way in ("forward", "backward")
    ),
    Row("rms_norm of heads forward, 32 of 48 by 128", _head_norm(backward=False)),
    Row("rms_norm of heads backward, 32 of 48 by 128", _head_norm(backward=True)),
    *(
        Row(f"split_rotate {way}, heads of {size}", _split_rotate(size, backward=way == "backward"))
        for size in (64, 128)
        for way in ("forward", "backward")
    ),
    Row("split_norm_rotate forward, 32+4+4 by 128", _split_norm_rotate(backward=False)),
    Row("split_norm_rotate backward, 32+4+4 by 128", _split_norm_rotate(backward=True)),
    *(
        Row(f"glu {kind} {way}, {width} wide", _glu(kind, width, backward=way == "backward"))
        for kind, width in GLUS
        for way in ("forward", "backward")
    ),
    Row("glu silu backward and its result again, 14336 wide", _glu_again(14336)),
)
"""Kernels of a model's forward and backward pass."""
