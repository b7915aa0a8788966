"""Log-probabilities of answers under the model that a run began with: computed once, then kept.

The model has its first weights when a run begins, and an adapter steps aside at any time, so no
second copy of the model is held. What was found lies in the run's folder for its next sitting.
"""

from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.adapters import DecoderAdapter
from meshwright.run.posttrain.data.batches import counted
from meshwright.run.posttrain.objectives.chosen import decoder_logprobs
from meshwright.run.posttrain.supervised.examples import Examples, places_of
from meshwright.run.train.data.batch import Batch

FILE = "reference.safetensors"


def answer_logprobs(decoder: Decoder, part: Batch) -> Tensor:
    """Return log p of each answer of a batch: the sum over its trained tokens, [S]."""
    hidden = decoder.hidden(part.tokens_BT, positions=part.positions_BT, documents=part.documents)
    logprobs, _ = decoder_logprobs(decoder, hidden, part.labels_BT)
    return counted(part).sums(logprobs)[places_of(part)]


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
            found[numbers] = answer_logprobs(decoder, examples.row(numbers, device))
    decoder.train(was_training)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"logprobs": found.cpu()}, folder / f".{FILE}", metadata={"of": name})
    (folder / f".{FILE}").replace(folder / FILE)
    return found
