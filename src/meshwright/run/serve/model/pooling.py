"""`pool_embeddings`: a unit vector for each prompt, pooled from the last hidden states.

Shapes: N tokens, R prompts, D hidden.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.errors import InputError
from meshwright.run.serve.model.forward_batch import BatchRow, build_forward_batch
from meshwright.run.serve.model.served_model import ServedModel
from meshwright.spec.name_suggestions import build_unknown_name_problem

PoolingType = Literal["mean", "last"]
"""The mean over all tokens, or the last token alone (models trained to embed by it)."""


@torch.no_grad()
def pool_embeddings(
    forward: ServedModel,
    prompts: Sequence[Sequence[int]],
    tables: Sequence[Sequence[int]],
    *,
    pooling: PoolingType = "mean",
    batch_tokens: int = 8192,
    states: Sequence[int] | None = None,
    adapter: int = -1,
) -> Tensor:
    """Return the vectors of prompts, (R, D) in fp32.

    `tables` are blocks for each prompt to use, nobody else's; `states` are places of recurrent
    states; `adapter` is the slot of the LoRA adapter to compute with, -1 for none. At most
    `batch_tokens` are computed at a time, so long prompts come in pieces.
    """
    if pooling not in get_args(PoolingType):
        raise InputError(
            [build_unknown_name_problem("pooling", pooling, get_args(PoolingType), "pooling")]
        )
    device, size = forward.kv_cache.device, forward.kv_cache.block_size
    hidden = forward.decoder.model.hidden
    sums_RD = torch.zeros(len(prompts), hidden, device=device)
    done = [0] * len(prompts)
    while waiting := [at for at, prompt in enumerate(prompts) if done[at] < len(prompt)]:
        rows, owners, room = [], [], batch_tokens
        for at in waiting:
            piece = prompts[at][done[at] : done[at] + room]
            rows.append(
                BatchRow(piece, done[at], tables[at], states[at] if states else at, adapter)
            )
            owners += [at] * len(piece)
            room -= len(piece)
            if not room:
                break
        x_ND = forward.compute_hidden_states(
            build_forward_batch(rows, size, device, all_wanted=True)
        ).float()
        for at, row in zip(waiting, rows, strict=False):
            done[at] += len(row.tokens)
        if pooling == "mean":
            sums_RD.index_add_(0, torch.tensor(owners, device=device), x_ND)
        else:
            begin = 0
            for at, row in zip(waiting, rows, strict=False):
                begin += len(row.tokens)
                # Of a prompt in pieces the last one is written last.
                sums_RD[at] = x_ND[begin - 1]
    # The length of a sum is that of its mean but for a factor, which goes.
    return functional.normalize(sums_RD, dim=1)
