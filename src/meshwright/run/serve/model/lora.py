"""`LoRAManager`: low-rank additions to a served model, chosen row by row.

    y = W x + b + B A x            A, B the adapter's of the token's row (Hu et al., 2106.09685)
    y = g ∘ (W x + B A x) + b      DoRA's, g = m / ‖W + B A‖ row by row (Liu et al., 2402.09353)

Adapters live in a fixed number of slots, so that graphs stay valid when one comes or goes. All
slots are multiplied at once and what is not a token's own is set to nought: two dense products and
no sorting of rows, at slots · rank / width of the base product's work. That is little for the
handful of adapters of one server; hundreds would want a kernel that reads only their own rows.

A fused product of ours stacks several of theirs (queries, keys and values); each keeps its own A,
and B has their blocks on its diagonal. Folders are PEFT's.

Shapes: N tokens, K inputs, M outputs, S slots, r rank of a fused product.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.gemm.gemm import GemmBackend
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.huggingface.model_registry import get_weight_map
from meshwright.run.nn.huggingface.tensor_mapping import TensorMapping
from meshwright.run.nn.huggingface.weight_map import map_all_parameters
from meshwright.run.nn.linear.linear import Linear, linear
from meshwright.run.serve.model.peft_checkpoint import (
    LoRALayerWeights,
    read_adapter,
    strip_module_prefix,
)
from meshwright.run.serve.model.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class PackedModule:
    """One of their modules within a linear layer of ours."""

    hf_name: str
    """Its name from the layer on."""
    links: tuple[TensorMapping, ...]
    num_rows: int
    """Rows of their weight."""


class LoRALinear:
    """A linear layer with what adapters add; `Linear.tp_overlap` holds it."""

    def __init__(
        self,
        base_layer: Linear,
        packed_modules: tuple[PackedModule, ...],
        rank: int,
        adapters: "LoRAManager",
    ) -> None:
        outputs, inputs = _whole_shape(base_layer.weight)
        forward = adapters.model
        self.base_layer, self.packed_modules, self.rank, self.forward_context = (
            base_layer,
            packed_modules,
            rank,
            forward.forward_context,
        )
        embedding = forward.decoder.embedding.weight
        where: dict[str, Any] = {"device": embedding.device, "dtype": embedding.dtype}
        self.lora_a = torch.zeros(adapters.slots, len(packed_modules) * rank, inputs, **where)
        """A of every slot, the parts of a fused product one below another."""
        self.lora_b = torch.zeros(adapters.slots, len(packed_modules) * rank, outputs, **where)
        """B of every slot, turned, times its scale."""
        self.dora_row_growth: Tensor | None = None
        """How much longer each slot makes the rows, as a share; None where none may."""
        if adapters.dora:
            self.dora_row_growth = torch.zeros(adapters.slots, outputs, device=embedding.device)

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: GemmBackend, /
    ) -> Tensor:
        """Return the base product, with what each token's adapter adds."""
        chosen_NS = self.forward_context.lora_mask
        grows = chosen_NS is not None and self.dora_row_growth is not None
        own_bias = None if grows else bias
        low = self.base_layer.linear_method
        if low is not None:
            y = low(x, weight, own_bias)
        else:
            y = linear(x, weight, own_bias, gemm=gemm)
        if chosen_NS is None:
            return y
        slots, inner, inputs = self.lora_a.shape
        narrow = x.reshape(-1, inputs) @ self.lora_a.view(slots * inner, inputs).t()
        own = narrow.view(-1, slots, inner) * chosen_NS[..., None].to(narrow.dtype)
        added = own.flatten(1) @ self.lora_b.view(slots * inner, -1)
        y = y + added.view(y.shape)
        if not grows:
            return y
        y = (y * self._growth().view(y.shape)).to(x.dtype)
        return y if bias is None else y + bias.to(x.dtype)

    def project_queries(self, q_NHE: Tensor, weight_HEK: Tensor) -> Tensor:
        """Return what queries of heads read of the inputs, (N, H, K)."""
        heads, width = weight_HEK.shape[:2]
        if self.dora_row_growth is not None:
            growth_NHE = self._growth().view(len(q_NHE), heads, -1)[..., :width]
            q_NHE = (q_NHE * growth_NHE).to(q_NHE.dtype)
        up = self.lora_b.view(*self.lora_b.shape[:2], heads, -1)[..., :width]
        own = self._own(torch.einsum("nhe,srhe->nhsr", q_NHE, up))
        whole = torch.einsum("nhe,hek->nhk", q_NHE, weight_HEK)
        return whole + torch.einsum("nhsr,srk->nhk", own, self.lora_a)

    def project_values(self, read_NHK: Tensor, weight_HVK: Tensor) -> Tensor:
        """Return the last outputs of each head, by inputs of its own, (N, H, V)."""
        heads, width = weight_HVK.shape[:2]
        own = self._own(torch.einsum("nhk,srk->nhsr", read_NHK, self.lora_a))
        up = self.lora_b.view(*self.lora_b.shape[:2], heads, -1)[..., -width:]
        whole = torch.einsum("nhk,hvk->nhv", read_NHK, weight_HVK)
        whole = whole + torch.einsum("nhsr,srhv->nhv", own, up)
        if self.dora_row_growth is None:
            return whole
        growth_NHV = self._growth().view(len(whole), heads, -1)[..., -width:]
        return (whole * growth_NHV).to(whole.dtype)

    def _own(self, narrow_NHSr: Tensor) -> Tensor:
        """Keep what is of each token's own adapter."""
        chosen_NS = self.forward_context.lora_mask
        assert chosen_NS is not None
        return narrow_NHSr * chosen_NS[:, None, :, None].to(narrow_NHSr.dtype)

    def _growth(self) -> Tensor:
        """Return what each token's rows are multiplied by, (N, M), in fp32."""
        chosen_NS = self.forward_context.lora_mask
        assert chosen_NS is not None
        assert self.dora_row_growth is not None
        return 1 + chosen_NS.float() @ self.dora_row_growth

    def write_slot(self, slot: int, found: Mapping[str, LoRALayerWeights]) -> None:
        """Write an adapter into a slot; parts it leaves alone stay nought."""
        self.clear_slot(slot)
        down, up = self.lora_a[slot].float(), self.lora_b[slot].float()
        lengths = torch.full((up.shape[1], 1), torch.nan, device=up.device)
        for place, part in enumerate(self.packed_modules):
            if part.hf_name not in found:
                continue
            a, b, scale, magnitude = found[part.hf_name]
            begin, rank = place * self.rank, len(a)
            down[begin : begin + rank] = a.to(down)
            columns = up[begin : begin + rank].t()
            for link in part.links:
                link.view_parameter(columns).copy_(link.view_checkpoint(b.to(up) * scale))
                if magnitude is not None:
                    link.view_parameter(lengths).copy_(link.view_checkpoint(magnitude[:, None]))
        self.lora_a[slot], self.lora_b[slot] = down, up
        wanted = lengths.flatten()
        if self.dora_row_growth is not None and not wanted.isnan().all():
            growth = wanted / compute_row_norms(self.base_layer.weight, up.t(), down) - 1
            self.dora_row_growth[slot] = growth.nan_to_num()

    def clear_slot(self, slot: int) -> None:
        """Set a slot to nought."""
        for each in (self.lora_a, self.lora_b, self.dora_row_growth):
            if each is not None:
                each[slot].zero_()


_CHUNK = 2048
"""Rows of a weight that are in fp32 at once."""


@torch.no_grad()
def compute_row_norms(weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return the length of every row of W + U D, in fp32."""
    found = [
        torch.linalg.vector_norm(rows.float().addmm(more, down.float()), dim=1)
        for rows, more in zip(torch.split(weight, _CHUNK), torch.split(up, _CHUNK), strict=True)
    ]
    return torch.cat(found)


class LoRAManager:
    """The adapters of one served model."""

    def __init__(
        self,
        model: ServedModel,
        *,
        slots: int = 8,
        max_lora_rank: int = 16,
        dora: bool = False,
        modules: Collection[str] = (),
    ) -> None:
        """Allocate `slots` adapters of rank `max_lora_rank` or less; `dora` allows DoRA adapters.

        With `modules`, adapters may change only the modules of these names.
        """
        self.model, self.slots, self.max_lora_rank, self.dora = model, slots, max_lora_rank, dora
        self.slots_by_name: dict[str, int] = {}
        """The slot of each adapter that is loaded."""
        self.default_slot = -1
        """The slot of who chooses none; -1 leaves the model as it is."""
        if model.forward_context.batch_invariant:
            what = "adapters depend on what else is in the batch"
            raise InputError([Problem("batch_invariant", what, "serve without one of the two")])
        model.forward_context.num_lora_slots = slots
        decoder = model.decoder
        self._layers: dict[str, LoRALinear] = {}
        for name, parts in list_packed_modules(decoder).items():
            if modules and not any(part.hf_name in modules for part in parts):
                continue
            layer = decoder.get_submodule(name)
            assert isinstance(layer, Linear)
            if layer.tp_overlap is not None:
                what = f"{name} is shared by several ranks"
                raise InputError([Problem("lora_modules", what, "serve adapters on one device")])
            made = LoRALinear(layer, parts, max_lora_rank, self)
            layer.tp_overlap = self._layers[name] = made

    @torch.no_grad()
    def load(self, name: str, folder: str | Path) -> int:
        """Read an adapter from a folder of PEFT's, and return its slot."""
        if name in self.slots_by_name:
            raise InputError([Problem(name, "an adapter of this name is loaded", "unload it")])
        free = sorted(set(range(self.slots)) - set(self.slots_by_name.values()))
        if not free:
            what = f"all {self.slots} slots are taken by {', '.join(sorted(self.slots_by_name))}"
            raise InputError([Problem(name, what, "unload one, or make more slots")])
        found = read_adapter(folder, self.max_lora_rank, dora=self.dora)
        known = {part.hf_name for layer in self._layers.values() for part in layer.packed_modules}
        if strange := sorted(set(found) - known):
            what = f"it changes {strange[0]}, which is no linear layer of {_kind(self.model)}"
            raise InputError([Problem(str(folder), what, "use an adapter of this very model")])
        self._check_shapes(folder, found)
        self.write_slot(free[0], found)
        self.slots_by_name[name] = free[0]
        return free[0]

    @torch.no_grad()
    def write_slot(self, slot: int, found: Mapping[str, LoRALayerWeights]) -> None:
        """Put what an adapter adds to modules, by short names, into a slot; addresses stay."""
        for layer in self._layers.values():
            layer.write_slot(slot, found)

    @torch.no_grad()
    def unload(self, name: str) -> None:
        """Let an adapter's slot go."""
        slot = self.slots_by_name.pop(name, None)
        if slot is None:
            known = ", ".join(sorted(self.slots_by_name)) or "none"
            raise InputError([Problem(name, "no such adapter is loaded", f"loaded are: {known}")])
        for layer in self._layers.values():
            layer.clear_slot(slot)

    def _check_shapes(self, folder: str | Path, found: Mapping[str, LoRALayerWeights]) -> None:
        for layer in self._layers.values():
            inputs = layer.lora_a.shape[2]
            for part in layer.packed_modules:
                if part.hf_name not in found:
                    continue
                a, b, _, magnitude = found[part.hf_name]
                if a.shape[1] != inputs or len(b) != part.num_rows:
                    given = f"{a.shape[1]} inputs and {len(b)} outputs"
                    what = f"{part.hf_name} has {given}, not {inputs} and {part.num_rows}"
                    fix = "use an adapter of this very model"
                    raise InputError([Problem(str(folder), what, fix)])
                if magnitude is not None and layer.base_layer.weight.itemsize < 2:
                    what = f"{part.hf_name} is quantised, so that its rows' lengths are not known"
                    fix = "serve it unquantised, or merge the adapter first"
                    raise InputError([Problem(str(folder), what, fix)])


def _kind(forward: ServedModel) -> str:
    return f"this {forward.decoder.model.family} model"


def list_packed_modules(decoder: Decoder) -> dict[str, tuple[PackedModule, ...]]:
    """Return, for each linear layer of ours, the modules of theirs that it is made of."""
    # Nothing else: a model may have what its family's checkpoints have no place for.
    shapes = {
        f"{path}.weight": _whole_shape(part.weight)
        for path, part in decoder.named_modules()
        if isinstance(part, Linear) and path.startswith("layers.")
    }
    found: dict[str, dict[str, list[TensorMapping]]] = {}
    for ours, link in map_all_parameters(get_weight_map(decoder.model), decoder.model, shapes):
        name = ours.removesuffix(".weight")
        if link.shape[1] != shapes[ours][1]:
            what = f"its {link.checkpoint_name} is stored the other way round"
            raise InputError([Problem(decoder.model.family, what, "use it without adapters")])
        theirs = strip_module_prefix(link.checkpoint_name.removesuffix(".weight"))
        found.setdefault(name, {}).setdefault(theirs, []).append(link)
    return {
        name: tuple(
            PackedModule(theirs, tuple(links), links[0].shape[0]) for theirs, links in parts.items()
        )
        for name, parts in found.items()
    }


def _whole_shape(weight: Tensor) -> tuple[int, ...]:
    """Return the shape of a weight before its numbers were packed two by two."""
    if weight.dtype == torch.uint8:
        return weight.shape[0], 2 * weight.shape[1]
    return tuple(weight.shape)
