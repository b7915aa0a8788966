"""Log-probabilities of answers under the model that a run began with: computed once, then kept.

The model has its first weights when a run begins, and an adapter steps aside at any time, so no
second copy of the model is held. What was found lies in the run's folder for its next sitting.
"""

import os
from contextlib import nullcontext
from pathlib import Path

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
from meshwright.run.train.spread_step import microbatch_of

FILE = "reference.safetensors"


def answer_logprobs(decoder: Decoder, examples: Examples, x_BTD: Tensor, part: Batch) -> Tensor:
    """Return log p of each answer of a batch: the sum over its trained tokens, [S].

    `x_BTD` is what the output head reads. Logits are made for trained tokens alone: of a pair, most
    are its prompt's.
    """
    at = trained_at(examples, part)
    words = part.labels_BT.flatten()[at.positions]
    logprobs = decoder_words(decoder, x_BTD.flatten(0, 1)[at.positions], words[:, None])[:, 0]
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
) -> Tensor:
    """Return log p of every answer under the first weights, on the decoder's device.

    `name` says which weights and examples they are; rows have at most so many tokens. Ranks that
    share a model, as `spread` says, all find them together.
    """
    device = next(decoder.parameters()).device
    kept = kept_reference(folder, name)
    if kept is not None and len(kept) == len(examples):
        return kept.to(device)
    found = torch.zeros(len(examples), device=device)
    was_training = decoder.training
    decoder.eval()
    with adapter.disabled() if adapter is not None else nullcontext():
        for numbers in examples.rows(range(len(examples)), most_tokens):
            row = examples.row(numbers, device, size=most_tokens)
            found[numbers] = logprobs_on_all(decoder, examples, row, spread)
    decoder.train(was_training)
    if spread is not None:
        # All have looked for the file by now: none may find it while others compute it.
        spread.mesh.world.all_reduce(torch.zeros(1, device=device))
        if spread.mesh.rank:
            return found
    folder.mkdir(parents=True, exist_ok=True)
    # Replicas all find the same, and write it at the same time.
    own = folder / f".{FILE}.{os.getpid()}"
    save_file({"logprobs": found.cpu()}, own, metadata={"of": name})
    own.replace(folder / FILE)
    return found
