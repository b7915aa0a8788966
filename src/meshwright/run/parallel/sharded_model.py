"""`shard_model`: a decoder as one rank of a layout holds it, with its part of the first weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import DEFAULT_BUILD_OPTIONS, BuildOptions, build_decoder
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.nn.weight_init import materialize
from meshwright.run.parallel.context_parallel.context_parallel import apply_context_parallel
from meshwright.run.parallel.expert_parallel.token_dispatcher import apply_expert_parallel
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.pipeline_parallel.pipeline_stage import (
    PipelineStage,
    drop_other_stages,
)
from meshwright.run.parallel.shard_specs import make_shard_specs
from meshwright.run.parallel.tensor_parallel.tensor_parallel import apply_tensor_parallel
from meshwright.spec.layout.pipeline_chunks import list_chunks_by_rank
from meshwright.spec.model import Model


@dataclass(frozen=True, eq=False)
class ShardedModel:
    """What one rank has of a model."""

    mesh: Mesh
    decoder: Decoder
    """Its modules, with the parameters it holds, under the names of the whole model."""
    shard_specs: dict[str, ShardSpec]
    """How it holds each of them."""
    pipeline_stage: PipelineStage
    """Its chunks of the pipeline."""
    trainable: Mapping[str, nn.Parameter] | None = None
    """What is trained in place of the decoder's own parameters; None trains these."""
    gathered_with: Mapping[str, str] = field(default_factory=dict)
    """For what is no parameter of the decoder's, the name of one that is used when it is."""

    @property
    def replicas_in_lockstep(self) -> bool:
        """Whether replicas go forward together: each needs what others hold, weights or experts."""
        layout = self.mesh.layout
        lent = layout.zero == 3 or layout.ep > 1 or layout.effective_expert_tp > layout.tp
        return layout.dp > 1 and lent

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through what is trained."""
        found = (
            self.decoder.named_parameters() if self.trainable is None else self.trainable.items()
        )
        return iter(found)

    def with_trainable(
        self,
        trained: Mapping[str, nn.Parameter],
        shard_specs: Mapping[str, ShardSpec],
        used_with: Mapping[str, str],
    ) -> "ShardedModel":
        """Return the same with other parameters to train; `shard_specs` are of the new ones."""
        held = self.shard_specs | dict(shard_specs)
        return replace(self, trainable=trained, shard_specs=held, gathered_with=used_with)


def shard_model(
    model: Model,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    seed: int = 0,
    options: BuildOptions = DEFAULT_BUILD_OPTIONS,
) -> ShardedModel:
    """Build this rank's part of a model on its device, with its first weights."""
    decoder, layout = build_decoder(model, dtype=dtype, options=options), mesh.layout
    held = make_shard_specs(decoder, layout, mesh.rank)
    if layout.pp > 1:
        drop_other_stages(decoder, list_chunks_by_rank(layout, model.layers)[mesh.coordinate.pp])
    held = {name: held[name] for name, _ in decoder.named_parameters()}
    shrink_parameters(decoder, held)
    apply_tensor_parallel(decoder, mesh)
    apply_context_parallel(decoder, mesh)
    apply_expert_parallel(decoder, mesh)
    materialize(decoder, mesh.device, seed, held)
    return ShardedModel(mesh, decoder, held, PipelineStage(decoder, layout, mesh.coordinate.pp))


def shrink_parameters(decoder: nn.Module, held: dict[str, ShardSpec]) -> None:
    """Shrink the parameters of a decoder built without memory to what is held of each."""
    for name, holding in held.items():
        if holding.is_unsharded:
            continue
        path, _, own = name.rpartition(".")
        module = decoder.get_submodule(path)
        old = module.get_parameter(own)
        empty = torch.empty(holding.shape, dtype=old.dtype, device=old.device)
        module.register_parameter(own, nn.Parameter(empty, requires_grad=old.requires_grad))
