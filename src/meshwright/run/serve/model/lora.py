"""`Adapters`: low-rank additions to a served model, chosen row by row.

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
from meshwright.run.kernels.products import Products
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.huggingface.families import family_of
from meshwright.run.nn.huggingface.family import link_all
from meshwright.run.nn.huggingface.links import Link
from meshwright.run.nn.linear import Linear, linear
from meshwright.run.serve.model.forward import Forward
from meshwright.run.serve.model.peft_folder import LowRank, read_adapter, short_name


@dataclass(frozen=True, slots=True)
class Part:
    """One of their modules within a linear layer of ours."""

    theirs: str
    """Its name from the layer on."""
    links: tuple[Link, ...]
    rows: int
    """Rows of their weight."""


class LoraLinear:
    """A linear layer with what adapters add; `Linear.across` calls it."""

    def __init__(self, layer: Linear, parts: tuple[Part, ...], rank: int, adapters: Any) -> None:
        outputs, inputs = _whole_shape(layer.weight)
        forward: Forward = adapters.forward
        self.layer, self.parts, self.rank, self.now = layer, parts, rank, forward.now
        embedding = forward.decoder.embedding.weight
        where: dict[str, Any] = {"device": embedding.device, "dtype": embedding.dtype}
        self.down = torch.zeros(adapters.slots, len(parts) * rank, inputs, **where)
        """A of every slot, the parts of a fused product one below another."""
        self.up = torch.zeros(adapters.slots, len(parts) * rank, outputs, **where)
        """B of every slot, turned, times its scale."""
        self.grow: Tensor | None = None
        """How much longer each slot makes the rows, as a share; None where none may."""
        if adapters.dora:
            self.grow = torch.zeros(adapters.slots, outputs, device=embedding.device)

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, products: Products, /
    ) -> Tensor:
        """Return the base product, with what each token's adapter adds."""
        chosen_NS = self.now.adapters
        grows = chosen_NS is not None and self.grow is not None
        own_bias = None if grows else bias
        low = self.layer.low_precision
        if low is not None:
            y = low(x, weight, own_bias)
        else:
            y = linear(x, weight, own_bias, products=products)
        if chosen_NS is None:
            return y
        slots, inner, inputs = self.down.shape
        narrow = x.reshape(-1, inputs) @ self.down.view(slots * inner, inputs).t()
        own = narrow.view(-1, slots, inner) * chosen_NS[..., None].to(narrow.dtype)
        added = own.flatten(1) @ self.up.view(slots * inner, -1)
        y = y + added.view(y.shape)
        if not grows:
            return y
        y = (y * self._growth().view(y.shape)).to(x.dtype)
        return y if bias is None else y + bias.to(x.dtype)

    def keys(self, q_NHE: Tensor, weight_HEK: Tensor) -> Tensor:
        """Return what queries of heads read of the inputs, (N, H, K)."""
        heads, width = weight_HEK.shape[:2]
        if self.grow is not None:
            growth_NHE = self._growth().view(len(q_NHE), heads, -1)[..., :width]
            q_NHE = (q_NHE * growth_NHE).to(q_NHE.dtype)
        up = self.up.view(*self.up.shape[:2], heads, -1)[..., :width]
        own = self._own(torch.einsum("nhe,srhe->nhsr", q_NHE, up))
        whole = torch.einsum("nhe,hek->nhk", q_NHE, weight_HEK)
        return whole + torch.einsum("nhsr,srk->nhk", own, self.down)

    def values(self, read_NHK: Tensor, weight_HVK: Tensor) -> Tensor:
        """Return the last outputs of each head, by inputs of its own, (N, H, V)."""
        heads, width = weight_HVK.shape[:2]
        own = self._own(torch.einsum("nhk,srk->nhsr", read_NHK, self.down))
        up = self.up.view(*self.up.shape[:2], heads, -1)[..., -width:]
        whole = torch.einsum("nhk,hvk->nhv", read_NHK, weight_HVK)
        whole = whole + torch.einsum("nhsr,srhv->nhv", own, up)
        if self.grow is None:
            return whole
        growth_NHV = self._growth().view(len(whole), heads, -1)[..., -width:]
        return (whole * growth_NHV).to(whole.dtype)

    def _own(self, narrow_NHSr: Tensor) -> Tensor:
        """Keep what is of each token's own adapter."""
        chosen_NS = self.now.adapters
        assert chosen_NS is not None
        return narrow_NHSr * chosen_NS[:, None, :, None].to(narrow_NHSr.dtype)

    def _growth(self) -> Tensor:
        """Return what each token's rows are multiplied by, (N, M), in fp32."""
        chosen_NS = self.now.adapters
        assert chosen_NS is not None
        assert self.grow is not None
        return 1 + chosen_NS.float() @ self.grow

    def fill(self, slot: int, found: Mapping[str, LowRank]) -> None:
        """Write an adapter into a slot; parts it leaves alone stay nought."""
        self.clear(slot)
        down, up = self.down[slot].float(), self.up[slot].float()
        lengths = torch.full((up.shape[1], 1), torch.nan, device=up.device)
        for place, part in enumerate(self.parts):
            if part.theirs not in found:
                continue
            a, b, scale, magnitude = found[part.theirs]
            begin, rank = place * self.rank, len(a)
            down[begin : begin + rank] = a.to(down)
            columns = up[begin : begin + rank].t()
            for link in part.links:
                link.in_ours(columns).copy_(link.in_theirs(b.to(up) * scale))
                if magnitude is not None:
                    link.in_ours(lengths).copy_(link.in_theirs(magnitude[:, None]))
        self.down[slot], self.up[slot] = down, up
        wanted = lengths.flatten()
        if self.grow is not None and not wanted.isnan().all():
            growth = wanted / row_lengths(self.layer.weight, up.t(), down) - 1
            self.grow[slot] = growth.nan_to_num()

    def clear(self, slot: int) -> None:
        """Set a slot to nought."""
        for each in (self.down, self.up, self.grow):
            if each is not None:
                each[slot].zero_()


_CHUNK = 2048
"""Rows of a weight that are in fp32 at once."""


@torch.no_grad()
def row_lengths(weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return the length of every row of W + U D, in fp32."""
    found = [
        torch.linalg.vector_norm(rows.float().addmm(more, down.float()), dim=1)
        for rows, more in zip(torch.split(weight, _CHUNK), torch.split(up, _CHUNK), strict=True)
    ]
    return torch.cat(found)


class Adapters:
    """The adapters of one served model."""

    def __init__(
        self,
        forward: Forward,
        *,
        slots: int = 8,
        rank: int = 16,
        dora: bool = False,
        modules: Collection[str] = (),
    ) -> None:
        """Make room for `slots` adapters of at most `rank`; `dora` for such as change lengths.

        Where `modules` are named, from the layer on, adapters change no others.
        """
        self.forward, self.slots, self.rank, self.dora = forward, slots, rank, dora
        self.names: dict[str, int] = {}
        """The slot of each adapter that is loaded."""
        self.usual = -1
        """The slot of who chooses none; -1 leaves the model as it is."""
        if forward.now.invariant:
            what = "adapters depend on what else is in the batch"
            raise InputError([Problem("invariant", what, "serve without one of the two")])
        forward.now.adapter_slots = slots
        decoder = forward.decoder
        self._layers: dict[str, LoraLinear] = {}
        for name, parts in parts_of(decoder).items():
            if modules and not any(part.theirs in modules for part in parts):
                continue
            layer = decoder.get_submodule(name)
            assert isinstance(layer, Linear)
            if layer.across is not None:
                what = f"{name} is shared by several ranks"
                raise InputError([Problem("adapters", what, "serve adapters on one device")])
            made = LoraLinear(layer, parts, rank, self)
            layer.across = self._layers[name] = made

    @torch.no_grad()
    def load(self, name: str, folder: str | Path) -> int:
        """Read an adapter from a folder of PEFT's, and return its slot."""
        if name in self.names:
            raise InputError([Problem(name, "an adapter of this name is loaded", "unload it")])
        free = sorted(set(range(self.slots)) - set(self.names.values()))
        if not free:
            what = f"all {self.slots} slots are taken by {', '.join(sorted(self.names))}"
            raise InputError([Problem(name, what, "unload one, or make more slots")])
        found = read_adapter(folder, self.rank, dora=self.dora)
        known = {part.theirs for layer in self._layers.values() for part in layer.parts}
        if strange := sorted(set(found) - known):
            what = f"it changes {strange[0]}, which is no linear layer of {_kind(self.forward)}"
            raise InputError([Problem(str(folder), what, "use an adapter of this very model")])
        self._check_shapes(folder, found)
        self.write(free[0], found)
        self.names[name] = free[0]
        return free[0]

    @torch.no_grad()
    def write(self, slot: int, found: Mapping[str, LowRank]) -> None:
        """Put what an adapter adds to modules, by short names, into a slot; addresses stay."""
        for layer in self._layers.values():
            layer.fill(slot, found)

    @torch.no_grad()
    def unload(self, name: str) -> None:
        """Let an adapter's slot go."""
        slot = self.names.pop(name, None)
        if slot is None:
            known = ", ".join(sorted(self.names)) or "none"
            raise InputError([Problem(name, "no such adapter is loaded", f"loaded are: {known}")])
        for layer in self._layers.values():
            layer.clear(slot)

    def _check_shapes(self, folder: str | Path, found: Mapping[str, LowRank]) -> None:
        for layer in self._layers.values():
            inputs = layer.down.shape[2]
            for part in layer.parts:
                if part.theirs not in found:
                    continue
                a, b, _, magnitude = found[part.theirs]
                if a.shape[1] != inputs or len(b) != part.rows:
                    given = f"{a.shape[1]} inputs and {len(b)} outputs"
                    what = f"{part.theirs} has {given}, not {inputs} and {part.rows}"
                    fix = "use an adapter of this very model"
                    raise InputError([Problem(str(folder), what, fix)])
                if magnitude is not None and layer.layer.weight.itemsize < 2:
                    what = f"{part.theirs} is quantised, so that its rows' lengths are not known"
                    fix = "serve it unquantised, or merge the adapter first"
                    raise InputError([Problem(str(folder), what, fix)])


def _kind(forward: Forward) -> str:
    return f"this {forward.decoder.model.family} model"


def parts_of(decoder: Decoder) -> dict[str, tuple[Part, ...]]:
    """Return, for each linear layer of ours, the modules of theirs that it is made of."""
    # Nothing else: a model may have what its family's checkpoints have no place for.
    shapes = {
        f"{path}.weight": _whole_shape(part.weight)
        for path, part in decoder.named_modules()
        if isinstance(part, Linear) and path.startswith("layers.")
    }
    found: dict[str, dict[str, list[Link]]] = {}
    for ours, link in link_all(family_of(decoder.model), decoder.model, shapes):
        name = ours.removesuffix(".weight")
        if link.shape[1] != shapes[ours][1]:
            what = f"its {link.theirs} is stored the other way round"
            raise InputError([Problem(decoder.model.family, what, "use it without adapters")])
        theirs = short_name(link.theirs.removesuffix(".weight"))
        found.setdefault(name, {}).setdefault(theirs, []).append(link)
    return {
        name: tuple(
            Part(theirs, tuple(links), links[0].shape[0]) for theirs, links in parts.items()
        )
        for name, parts in found.items()
    }


def _whole_shape(weight: Tensor) -> tuple[int, ...]:
    """Return the shape of a weight before its numbers were packed two by two."""
    if weight.dtype == torch.uint8:
        return weight.shape[0], 2 * weight.shape[1]
    return tuple(weight.shape)
