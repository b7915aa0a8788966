"""Log-probabilities of answers under the model that a run began with: computed once, then kept.

The model has its first weights when a run begins, and an adapter steps aside at any time, so no
second copy of the model is held. What was found lies in the run's folder for its next sitting.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.run.nn.decoder import Decoder, Loss
from meshwright.run.parallel.runner import Runner
from meshwright.run.parallel.spread import Spread
from meshwright.run.parallel.stage import Microbatch
from meshwright.run.posttrain.adapters import DecoderAdapter
from meshwright.run.posttrain.supervised.examples import Examples, numbers_of, trained_at
from meshwright.run.posttrain.supervised.learner import decoder_words, summed, whole_tokens
from meshwright.run.train.data.batch import Batch
from meshwright.run.train.learner import Together
from meshwright.run.train.spread_step import microbatch_of

FILE = "reference.safetensors"


def answer_logprobs(decoder: Decoder, examples: Examples, x_BTD: Tensor, part: Batch) -> Tensor:
    """Return log p of each answer of a batch: the sum over its trained tokens, [S].

    `x_BTD` is what the output head reads. Logits are made for trained tokens alone: of a pair, most
    are its prompt's.
    """
    at = trained_at(examples, part)
    words = part.labels_BT.flatten()[at.positions]
    found = decoder_words(decoder, x_BTD.flatten(0, 1)[at.positions], words[:, None])
    logprobs = found.logprobs[:, 0]
    sums = logprobs.new_zeros(len(numbers_of(part)))
    return sums.index_add(0, at.owners, logprobs)


@torch.no_grad()
def logprobs_on_all(
    decoder: Decoder, examples: Examples, part: Batch, spread: Spread | None
) -> Tensor:
    """Return the same on every rank of those that share a model; all take part."""
    if spread is None:
        x_BTD = decoder.hidden(
            part.tokens_BT, positions=part.positions_BT, documents=part.documents
        )
        return answer_logprobs(decoder, examples, x_BTD, part)
    found = torch.zeros(len(numbers_of(part)), device=spread.mesh.device)

    def collect(x_BTD: Tensor, _: Microbatch) -> Loss:
        found.copy_(answer_logprobs(decoder, examples, whole_tokens(spread, x_BTD), part))
        return summed(found)

    before, spread.stage.judge = spread.stage.judge, collect
    try:
        Runner(spread).evaluate(microbatch_of(part))
    finally:
        spread.stage.judge = before
    return spread.mesh["pp"].all_reduce(found)  # noughts but of the stage with the head


@torch.no_grad()
def logprobs_of_runs(
    decoder: Decoder,
    examples: Examples,
    runs: Sequence[Sequence[int]],
    spread: Spread | None,
    *,
    size: int,
) -> list[Tensor]:
    """Return log p of the answers of each run, which is one row padded up to a size.

    Replicas may have unlike numbers of runs. Where all have to go forward together, those with
    fewer also go through rows that count for nothing.
    """
    device, most = next(decoder.parameters()).device, len(runs)
    if spread is not None and spread.meets_replicas:
        counts = torch.tensor([most], device=device)
        most = int(spread.mesh["dp"].all_reduce(counts, "max"))
    found = []
    for run in (*runs, *[[0]] * (most - len(runs))):
        row = examples.row(run, device, size=size)
        found.append(logprobs_on_all(decoder, examples, row, spread))
    return found[: len(runs)]


def kept_reference(folder: Path, name: str) -> Tensor | None:
    """Return what an earlier sitting found for the same examples and weights; None for others."""
    try:
        with safe_open(folder / FILE, framework="pt") as file:
            if (file.metadata() or {}).get("of") != name:
                return None
            found: Tensor = file.get_tensor("logprobs")
            return found
    except (OSError, SafetensorError):
        return None


class Replicas(NamedTuple):
    """Others who hold the same model, and share the work."""

    number: int
    """Which of them this is."""
    all_of: int
    together: Together


@torch.no_grad()
def reference_logprobs(
    decoder: Decoder,
    examples: Examples,
    folder: Path,
    name: str,
    *,
    adapter: DecoderAdapter | None,
    most_tokens: int,
    spread: Spread | None = None,
    replicas: Replicas | None = None,
) -> Tensor:
    """Return log p of every answer under the first weights, on the decoder's device.

    `name` says which weights and examples they are; rows have at most so many tokens. Ranks that
    share a model, as `spread` says, find them together, and each of several replicas some of them.
    """
    device = next(decoder.parameters()).device
    kept = _kept_by_all(kept_reference(folder, name), len(examples), device, spread, replicas)
    if kept is not None:
        return kept
    found = torch.zeros(len(examples), device=device)
    first, step = (replicas.number, replicas.all_of) if replicas else (0, 1)
    runs = list(examples.rows(range(len(examples)), most_tokens))[first::step]
    was_training = decoder.training
    decoder.eval()
    with adapter.disabled() if adapter is not None else nullcontext():
        logprobs = logprobs_of_runs(decoder, examples, runs, spread, size=most_tokens)
    decoder.train(was_training)
    for run, each in zip(runs, logprobs, strict=True):
        found[run] = each
    if replicas is not None:
        found = replicas.together(found)
    if spread is None or spread.mesh.rank == 0:
        _keep(found, folder, name)
    return found


def _kept_by_all(
    kept: Tensor | None,
    answers: int,
    device: torch.device,
    spread: Spread | None,
    replicas: Replicas | None,
) -> Tensor | None:
    """Return what an earlier sitting kept, also where only some ranks see its file.

    All have looked for it when this returns: none finds it while others compute it.
    """
    mine = None if kept is None or len(kept) != answers else kept.to(device)
    add_up: Together
    if spread is not None:
        add_up, ranks = spread.mesh.world.all_reduce, spread.mesh.layout.gpus
    elif replicas is not None:
        add_up, ranks = replicas.together, replicas.all_of
    else:
        return mine
    have = int(add_up(torch.tensor([float(mine is not None)], device=device)))
    if have in (0, ranks):
        return mine
    return add_up(torch.zeros(answers, device=device) if mine is None else mine.clone()) / have


def _keep(found: Tensor, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Replicas all have the same, and write it at the same time.
    own = folder / f".{FILE}.{os.getpid()}"
    save_file({"logprobs": found.cpu()}, own, metadata={"of": name})
    own.replace(folder / FILE)
