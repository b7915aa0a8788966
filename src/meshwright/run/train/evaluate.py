"""The loss on held-out text: the same sequences every time, nothing trained."""

import math
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
    device: torch.device,
    average: WeightAverage | None = None,
) -> float:
    """Return the mean cross-entropy of a token over the first held-out sequences, in nats.

    They are no more than the text has, and the same whatever the size of a batch. With `average`,
    the averaged weights stand in for the decoder's own.
    """
    count, each = min(sequences, batches.sequences), batches.shape.batch
    nats, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    instead: AbstractContextManager[None] = nullcontext()
    if average is not None:
        instead = average.in_place_of(dict(decoder.named_parameters()))
    was_training = decoder.training
    decoder.eval()
    try:
        with instead:
            for step, first in enumerate(range(0, count, each)):
                # The last batch may reach beyond what was asked for.
                batch = batches.at(step).split(min(each, count - first))[0]
                there = batch.to(device)
                loss = decoder.loss(
                    there.tokens_BT,
                    there.labels_BT,
                    positions=there.positions_BT,
                    documents=there.documents,
                )
                nats += loss.nats_sum
                tokens += batch.targets
    finally:
        decoder.train(was_training)
    return float(nats) / tokens if tokens else math.nan
