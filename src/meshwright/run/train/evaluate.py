"""The loss on held-out text: the same sequences every time, nothing trained."""

from contextlib import AbstractContextManager, nullcontext

import torch

from meshwright.run.nn.decoder import Decoder
from meshwright.run.train.data.batches import Batches
from meshwright.run.train.optimizer.average import WeightAverage


@torch.no_grad()
def held_out_loss(
    decoder: Decoder,
    batches: Batches,
    *,
    sequences: int,
    microbatch: int,
    device: torch.device,
    average: WeightAverage | None = None,
) -> float:
    """Return the mean cross-entropy of a token over the first held-out sequences, in nats.

    With `average`, the averaged weights stand in for the decoder's own.
    """
    steps = -(-min(sequences, batches.sequences) // batches.shape.batch)
    nats, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    instead: AbstractContextManager[None] = nullcontext()
    if average is not None:
        instead = average.in_place_of(dict(decoder.named_parameters()))
    was_training = decoder.training
    decoder.eval()
    with instead:
        for step in range(max(1, steps)):
            batch = batches.at(step)
            for part in batch.split(microbatch):
                there = part.to(device)
                loss = decoder.loss(
                    there.tokens_BT,
                    there.labels_BT,
                    positions=there.positions_BT,
                    documents=there.documents,
                )
                nats += loss.nats_sum
                tokens += part.targets
    decoder.train(was_training)
    return float(nats) / max(1, tokens)
