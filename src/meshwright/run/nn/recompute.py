"""Recompute: what backward needs is dropped in forward and made again when backward asks for it.

Two ways, both through autograd's hooks on saved tensors, so that memory is freed by nobody holding
it and gradients are those of the same numbers:

drop_saved_tensors  one tensor that is cheap to make again from what is kept anyway: the output of a
                    norm (from the stream), of an activation (from its input), of attention's up
                    projections (from the latents). While it is read, whoever saves it saves a note
                    instead. Megatron calls this output-discarding recompute.
RecomputedFunction  a whole function: what it saves is dropped, and backward runs it once more.

`apply_recompute` says which of them a decoder uses, as a `Layout` describes it. Modules read their
own `recompute`, a set of operation names; a layer whose set holds `FULL_RECOMPUTE` is replayed
whole.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import RecomputeOp

FULL_RECOMPUTE: Literal["full"] = "full"
RecomputeOpOrFull = RecomputeOp | Literal["full"]
NO_RECOMPUTE: frozenset[RecomputeOpOrFull] = frozenset()


class _Note:
    """Stands for a view of a dropped tensor among the saved ones."""

    def __init__(self, source: "_Dropped", view: Tensor) -> None:
        self.source = source
        self.geometry = (view.size(), view.stride(), view.storage_offset())

    def tensor(self) -> Tensor:
        return torch.as_strided(self.source.take(), *self.geometry)


class _Dropped:
    """A tensor that is made again when first asked for, and kept until all have asked."""

    def __init__(self, again: Callable[[], Tensor]) -> None:
        self.again = again
        self.notes = self.taken = 0
        self.made: Tensor | None = None

    def take(self) -> Tensor:
        if self.made is None:
            with torch.no_grad():
                self.made = self.again()
        made = self.made
        self.taken += 1
        if self.taken >= self.notes:
            self.made, self.taken = None, 0
        return made


def drop_saved_tensors(*pairs: tuple[Tensor, Callable[[], Tensor]]) -> AbstractContextManager[Any]:
    """Keep those inside from saving some tensors for backward, where each is made anew.

    Each function has to return the same numbers in the same layout; it runs without gradients.
    Of nested uses the innermost counts.
    """
    sources = {_storage(tensor): _Dropped(again) for tensor, again in pairs}

    def pack(saved: Tensor) -> Tensor | _Note:
        source = sources.get(_storage(saved))
        if source is None or isinstance(saved, nn.Parameter):
            return saved
        source.notes += 1
        return _Note(source, saved)

    def unpack(saved: Tensor | _Note) -> Tensor:
        return saved.tensor() if isinstance(saved, _Note) else saved

    return saved_tensors_hooks(pack, unpack)


def _storage(tensor: Tensor) -> int:
    # What tells storages apart; their address is nought for empty ones.
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001
    return key


class _Tensor(NamedTuple):
    """Marks where a function's inputs have a tensor."""

    requires_grad: bool


class _Enough(Exception):
    """A replay has made everything that was saved; what would follow is not needed."""


class _Hold(torch.autograd.Function):
    """Keeps tensors as operations do, so that who drops saved tensors drops these as well."""

    @staticmethod
    def forward(ctx: Any, mark: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return mark.clone()

    @staticmethod
    def backward(*_: Any) -> Any:
        raise AssertionError("nobody runs backward through what is only kept")


class RecomputedFunction:
    """A function that saves nothing but its inputs; backward runs it again for the rest.

    Call it once. Its results can be dropped too, with `recompute_output` to make them again: the
    same second run serves both.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._inputs: tuple[Any, ...] = ()
        self._held: Any = None
        self._count = 0
        self._made: dict[int, Tensor] = {}
        self._outputs: tuple[Tensor, ...] = ()
        self._wants_outputs = False

    def __call__(self, *inputs: Any) -> Any:
        """Run the function on tensors and other values."""
        if not torch.is_grad_enabled():
            return self.function(*inputs)
        tensors = [item for item in inputs if isinstance(item, Tensor)]
        # Where a tensor stands only what has to be known of it is kept here.
        self._inputs = tuple(
            _Tensor(item.requires_grad) if isinstance(item, Tensor) else item for item in inputs
        )
        mark = torch.empty((), requires_grad=True)
        # The tensor, not only its node: where torch drops the one, it drops what the other saved.
        self._held = _Hold.apply(mark, *tensors)  # type: ignore[no-untyped-call]
        with saved_tensors_hooks(self._pack, self._unpack):
            return self.function(*inputs)

    def recompute_output(self, index: int = 0) -> Tensor:
        """Make one of the results again."""
        if not self._outputs:
            self._wants_outputs = True
            self._replay()
        return self._outputs[index]

    def _pack(self, saved: Tensor) -> Tensor | int:
        if isinstance(saved, nn.Parameter):
            return saved
        self._count += 1
        return self._count - 1

    def _unpack(self, saved: Tensor | int) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved not in self._made:
            self._replay()
        made = self._made.pop(saved)
        if not self._made:
            self._outputs = ()
        return made

    def _replay(self) -> None:
        def keep(saved: Tensor) -> Tensor | None:
            if isinstance(saved, nn.Parameter):
                return saved
            self._made[len(self._made)] = saved.detach()
            if len(self._made) == self._count and not self._wants_outputs:
                raise _Enough
            return None

        self._made = {}
        tensors = iter(self._held.grad_fn.saved_tensors)
        inputs = [
            next(tensors).detach().requires_grad_(item.requires_grad)
            if isinstance(item, _Tensor)
            else item
            for item in self._inputs
        ]
        try:
            with torch.enable_grad(), saved_tensors_hooks(keep, _never):
                found = self.function(*inputs)
        except _Enough:
            return
        many = isinstance(found, tuple)
        assert len(self._made) == self._count, "a replay saved other tensors than the first run"
        self._outputs = tuple(item.detach() for item in (found if many else (found,)))


def _never(_: object) -> Tensor:
    raise AssertionError("nobody runs backward through a replay")


def list_recompute_ops(layout: Layout, layers: int) -> tuple[frozenset[RecomputeOpOrFull], ...]:
    """Return what each of some layers recomputes: the first `recompute_layers`, or all."""
    ops: frozenset[RecomputeOpOrFull] = frozenset(layout.recompute_ops)
    if layout.recompute == "full":
        ops = frozenset({FULL_RECOMPUTE})
    elif layout.recompute == "none":
        ops = NO_RECOMPUTE
    covered = layers if layout.recompute_layers is None else min(layers, layout.recompute_layers)
    return (ops,) * covered + (NO_RECOMPUTE,) * (layers - covered)


def apply_recompute(layers: Iterable[nn.Module], layout: Layout) -> None:
    """Have the layers of one pipeline chunk recompute what a layout says."""
    found = list(layers)
    for layer, ops in zip(found, list_recompute_ops(layout, len(found)), strict=True):
        _tell(layer, ops)
        if getattr(layer, "mlp_recompute_op", None) == "moe":
            # Shared experts follow their own operation; what runs whole drops nothing inside.
            experts = getattr(layer, "mlp", None)
            _tell(experts if "moe" in ops else getattr(experts, "shared", None), NO_RECOMPUTE)


def _tell(module: nn.Module | None, ops: frozenset[RecomputeOpOrFull]) -> None:
    for each in () if module is None else module.modules():
        if hasattr(each, "recompute"):
            # `nn.Module` takes any attribute; these declare theirs as a set of operations.
            each.recompute = ops  # type: ignore[assignment]
