"""Log-probabilities of answers under the model that a run began with: computed once, then kept.

The model has its first weights when a run begins, and an adapter steps aside at any time, so no
second copy of the model is held. What was found lies in the run's folder for its next session.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.run.nn.decoder import BatchLoss, Decoder
from meshwright.run.nn.huggingface.safetensors_writer import write_safetensors
from meshwright.run.parallel.forward_backward import ForwardBackwardRunner
from meshwright.run.parallel.microbatch import Microbatch
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.posttrain.lora import DecoderAdapter
from meshwright.run.posttrain.supervised.example_index import (
    ExampleIndex,
    find_trained_positions,
    list_example_ids,
)
from meshwright.run.posttrain.supervised.recipe_objective import (
    as_summed_loss,
    compute_decoder_token_logprobs,
    gather_sequence_outputs,
)
from meshwright.run.train.data.batch import TrainBatch
from meshwright.run.train.objective import AllReduceFn
from meshwright.run.train.step_backend import microbatch_of

CACHE_FILE = "reference.safetensors"


def compute_completion_logprobs(
    decoder: Decoder, examples: ExampleIndex, x_BTD: Tensor, part: TrainBatch
) -> Tensor:
    """Return log p of each answer of a batch: the sum over its trained tokens, [S].

    `x_BTD` is what the output head reads. Logits are made for trained tokens alone: of a pair, most
    are its prompt's.
    """
    at = find_trained_positions(examples, part)
    words = part.labels_BT.flatten()[at.positions]
    found = compute_decoder_token_logprobs(
        decoder, x_BTD.flatten(0, 1)[at.positions], words[:, None]
    )
    logprobs = found.logprobs[:, 0]
    sums = logprobs.new_zeros(len(list_example_ids(part)))
    return sums.index_add(0, at.example_indices, logprobs)


@torch.no_grad()
def compute_logprobs_all_ranks(
    decoder: Decoder, examples: ExampleIndex, part: TrainBatch, sharded_model: ShardedModel | None
) -> Tensor:
    """Return the same on every rank of those that share a model; all take part."""
    if sharded_model is None:
        x_BTD = decoder.compute_hidden_states(
            part.tokens_BT, positions=part.positions_BT, documents=part.documents
        )
        return compute_completion_logprobs(decoder, examples, x_BTD, part)
    found = torch.zeros(len(list_example_ids(part)), device=sharded_model.mesh.device)

    def collect(x_BTD: Tensor, _: Microbatch) -> BatchLoss:
        found.copy_(
            compute_completion_logprobs(
                decoder, examples, gather_sequence_outputs(sharded_model, x_BTD), part
            )
        )
        return as_summed_loss(found)

    before, sharded_model.pipeline_stage.head_loss = sharded_model.pipeline_stage.head_loss, collect
    try:
        ForwardBackwardRunner(sharded_model).evaluate(microbatch_of(part))
    finally:
        sharded_model.pipeline_stage.head_loss = before
    return sharded_model.mesh["pp"].all_reduce(found)  # noughts but of the stage with the head


@torch.no_grad()
def compute_packed_logprobs(
    decoder: Decoder,
    examples: ExampleIndex,
    runs: Sequence[Sequence[int]],
    sharded_model: ShardedModel | None,
    *,
    size: int,
) -> list[Tensor]:
    """Return log p of the answers of each run, which is one row padded up to a size.

    Replicas may have unlike numbers of runs. Where all have to go forward together, those with
    fewer also go through rows that count for nothing.
    """
    device, most = next(decoder.parameters()).device, len(runs)
    if sharded_model is not None and sharded_model.replicas_in_lockstep:
        counts = torch.tensor([most], device=device)
        most = int(sharded_model.mesh["dp"].all_reduce(counts, "max"))
    found = []
    for run in (*runs, *[[0]] * (most - len(runs))):
        row = examples.pack_row(run, device, size=size)
        found.append(compute_logprobs_all_ranks(decoder, examples, row, sharded_model))
    return found[: len(runs)]


def load_cached_reference(folder: Path, name: str) -> Tensor | None:
    """Return what an earlier session found for the same examples and weights; None for others."""
    try:
        with safe_open(folder / CACHE_FILE, framework="pt") as file:
            if (file.metadata() or {}).get("of") != name:
                return None
            found: Tensor = file.get_tensor("logprobs")
            return found
    except (OSError, SafetensorError):
        return None


class ReplicaGroupInfo(NamedTuple):
    """Others who hold the same model, and share the work."""

    replica_index: int
    """Which of them this is."""
    num_replicas: int
    all_reduce: AllReduceFn


@torch.no_grad()
def compute_reference_logprobs(
    decoder: Decoder,
    examples: ExampleIndex,
    folder: Path,
    name: str,
    *,
    adapter: DecoderAdapter | None,
    most_tokens: int,
    sharded_model: ShardedModel | None = None,
    replicas: ReplicaGroupInfo | None = None,
) -> Tensor:
    """Return log p of every answer under the first weights, on the decoder's device.

    `name` says which weights and examples they are; rows have at most so many tokens. Ranks that
    share a model, as `sharded_model` says, find them together, and each of several replicas some of
    them.
    """
    device = next(decoder.parameters()).device
    kept = _kept_by_all(
        load_cached_reference(folder, name), len(examples), device, sharded_model, replicas
    )
    if kept is not None:
        return kept
    found = torch.zeros(len(examples), device=device)
    first, step = (replicas.replica_index, replicas.num_replicas) if replicas else (0, 1)
    runs = list(examples.group_by_tokens(range(len(examples)), most_tokens))[first::step]
    was_training = decoder.training
    decoder.eval()
    with adapter.disable_adapter() if adapter is not None else nullcontext():
        logprobs = compute_packed_logprobs(decoder, examples, runs, sharded_model, size=most_tokens)
    decoder.train(was_training)
    for run, each in zip(runs, logprobs, strict=True):
        found[run] = each
    if replicas is not None:
        found = replicas.all_reduce(found)
    if sharded_model is None or sharded_model.mesh.rank == 0:
        _keep(found, folder, name)
    return found


def _kept_by_all(
    kept: Tensor | None,
    answers: int,
    device: torch.device,
    sharded_model: ShardedModel | None,
    replicas: ReplicaGroupInfo | None,
) -> Tensor | None:
    """Return what an earlier session kept, also where only some ranks see its file.

    All have looked for it when this returns: none finds it while others compute it.
    """
    mine = None if kept is None or len(kept) != answers else kept.to(device)
    add_up: AllReduceFn
    if sharded_model is not None:
        add_up, ranks = sharded_model.mesh.world.all_reduce, sharded_model.mesh.layout.gpus
    elif replicas is not None:
        add_up, ranks = replicas.all_reduce, replicas.num_replicas
    else:
        return mine
    have = int(add_up(torch.tensor([float(mine is not None)], device=device)))
    if have in (0, ranks):
        return mine
    return add_up(torch.zeros(answers, device=device) if mine is None else mine.clone()) / have


def _keep(found: Tensor, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Replicas all have the same, and write it at the same time.
    own = folder / f".{CACHE_FILE}.{os.getpid()}"
    write_safetensors({"logprobs": found.cpu()}, own, metadata={"of": name})
    own.replace(folder / CACHE_FILE)
