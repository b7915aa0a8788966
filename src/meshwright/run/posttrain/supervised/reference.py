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

from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.adapters import DecoderAdapter
from meshwright.run.posttrain.supervised.examples import Examples, numbers_of, trained_at
from meshwright.run.posttrain.supervised.learner import decoder_words
from meshwright.run.train.data.batch import Batch

FILE = "reference.safetensors"


def answer_logprobs(decoder: Decoder, examples: Examples, part: Batch) -> Tensor:
    """Return log p of each answer of a batch: the sum over its trained tokens, [S].

    Logits are made for these tokens alone: of a pair, most are its prompt's.
    """
    hidden = decoder.hidden(part.tokens_BT, positions=part.positions_BT, documents=part.documents)
    at = trained_at(examples, part)
    words = part.labels_BT.flatten()[at.positions]
    logprobs = decoder_words(decoder, hidden.flatten(0, 1)[at.positions], words[:, None])[:, 0]
    sums = logprobs.new_zeros(len(numbers_of(part)))
    return sums.index_add(0, at.owners, logprobs)


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
) -> Tensor:
    """Return log p of every answer under the first weights, on the decoder's device.

    `name` says which weights and examples they are; rows have at most so many tokens.
    """
    device = decoder.embedding.weight.device
    kept = kept_reference(folder, name)
    if kept is not None and len(kept) == len(examples):
        return kept.to(device)
    found = torch.zeros(len(examples), device=device)
    was_training = decoder.training
    decoder.eval()
    with adapter.disabled() if adapter is not None else nullcontext():
        for numbers in examples.rows(range(len(examples)), most_tokens):
            row = examples.row(numbers, device, size=most_tokens)
            found[numbers] = answer_logprobs(decoder, examples, row)
    decoder.train(was_training)
    folder.mkdir(parents=True, exist_ok=True)
    # Replicas all find the same, and write it at the same time.
    own = folder / f".{FILE}.{os.getpid()}"
    save_file({"logprobs": found.cpu()}, own, metadata={"of": name})
    own.replace(folder / FILE)
    return found
