"""`spread`: a decoder as one rank of a layout holds it, with its part of the first weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from meshwright.run.nn.build import DEFAULTS, Options, build
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.holding import Holding
from meshwright.run.nn.initialise import materialise
from meshwright.run.parallel.context import share_context
from meshwright.run.parallel.experts import share_experts
from meshwright.run.parallel.holdings import holdings
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.stage import Stage, keep_layers
from meshwright.run.parallel.tensor import share_tensors
from meshwright.spec.layout.stages import rank_chunks
from meshwright.spec.model import Model


@dataclass(frozen=True, eq=False)
class Spread:
    """What one rank has of a model."""

    mesh: Mesh
    decoder: Decoder
    """Its modules, with the parameters it holds, under the names of the whole model."""
    holdings: dict[str, Holding]
    """How it holds each of them."""
    stage: Stage
    """Its chunks of the pipeline."""
    trained: Mapping[str, nn.Parameter] | None = None
    """What is trained in place of the decoder's own parameters; None trains these."""
    used_with: Mapping[str, str] = field(default_factory=dict)
    """For what is no parameter of the decoder's, the name of one that is used when it is."""

    @property
    def meets_replicas(self) -> bool:
        """Whether replicas go forward together: each needs what others hold, weights or experts."""
        layout = self.mesh.layout
        lent = layout.zero == 3 or layout.ep > 1 or layout.experts_tp > layout.tp
        return layout.dp > 1 and lent

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through what is trained."""
        found = self.decoder.named_parameters() if self.trained is None else self.trained.items()
        return iter(found)

    def training(
        self,
        trained: Mapping[str, nn.Parameter],
        holdings: Mapping[str, Holding],
        used_with: Mapping[str, str],
    ) -> "Spread":
        """Return the same with something else to train; `holdings` are of what is not known yet."""
        held = self.holdings | dict(holdings)
        return replace(self, trained=trained, holdings=held, used_with=used_with)


def spread(
    model: Model, mesh: Mesh, *, dtype: torch.dtype, seed: int = 0, options: Options = DEFAULTS
) -> Spread:
    """Build this rank's part of a model on its device, with its first weights."""
    decoder, layout = build(model, dtype=dtype, options=options), mesh.layout
    held = holdings(decoder, layout, mesh.rank)
    if layout.pp > 1:
        keep_layers(decoder, rank_chunks(layout, model.layers)[mesh.place.pp])
    held = {name: held[name] for name, _ in decoder.named_parameters()}
    hold(decoder, held)
    share_tensors(decoder, mesh)
    share_context(decoder, mesh)
    share_experts(decoder, mesh)
    materialise(decoder, mesh.device, seed, held)
    return Spread(mesh, decoder, held, Stage(decoder, layout, mesh.place.pp))


def hold(decoder: nn.Module, held: dict[str, Holding]) -> None:
    """Shrink the parameters of a decoder built without memory to what is held of each."""
    for name, holding in held.items():
        if holding.is_whole:
            continue
        path, _, own = name.rpartition(".")
        module = decoder.get_submodule(path)
        old = module.get_parameter(own)
        empty = torch.empty(holding.shape, dtype=old.dtype, device=old.device)
        module.register_parameter(own, nn.Parameter(empty, requires_grad=old.requires_grad))
