"""`MultiTokenPredictionLayer`: predicts one more token (DeepSeek-V3, arXiv 2412.19437 §2.2).

Head k reads what the one before it (or the model) gave for a token and the embedding of the token
k places later, joins them by one product, runs a block, and predicts the token after that one. The
embedding and the output head are the model's own. The product reads embedding | hidden, as
DeepSeek's checkpoints lay it out.

Shapes: B sequences, T positions, D hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.run.nn.decoder_layer import DecoderLayer
from meshwright.run.nn.linear.linear import Linear
from meshwright.run.nn.norm import NormLayer
from meshwright.run.nn.positions import PositionInfo
from meshwright.spec.model import Model


class MultiTokenPredictionLayer(nn.Module):
    """One head; a model has `multi_token.depth` of them in a row."""

    def __init__(self, model: Model, **where: Any) -> None:
        super().__init__()
        assert model.multi_token is not None
        spec = model.block(model.multi_token.block)
        self.norm_embedding = NormLayer(model.hidden, model.norm, **where)
        self.norm_hidden = NormLayer(model.hidden, model.norm, **where)
        self.join = Linear(2 * model.hidden, model.hidden, bias=False, **where)
        alibi = model.positions == "alibi"
        self.block = DecoderLayer(spec, model.hidden, model.norm, alibi=alibi, **where)
        self.final_norm = NormLayer(model.hidden, model.norm, **where)

    def forward(self, x_BTD: Tensor, later_BTD: Tensor, places: PositionInfo) -> Tensor:
        """Return what the output head reads: the model's vectors joined with later embeddings."""
        both = torch.cat((self.norm_embedding(later_BTD), self.norm_hidden(x_BTD)), -1)
        normed, _ = self.final_norm.add_and_norm(*self.block(self.join(both), None, places))
        return normed


def shift_tokens(numbers_BT: Tensor, steps: int, fill: int, ids_BT: Tensor | None) -> Tensor:
    """Return for every token the number `steps` places on in its document, `fill` past its end.

    `ids_BT` numbers the document of each token; None where sequences are whole.
    """
    steps = min(steps, numbers_BT.shape[1])
    moved = torch.full_like(numbers_BT, fill)
    moved[:, : numbers_BT.shape[1] - steps] = numbers_BT[:, steps:]
    if ids_BT is not None:
        here, there = ids_BT[:, : ids_BT.shape[1] - steps], ids_BT[:, steps:]
        moved[:, : ids_BT.shape[1] - steps].masked_fill_(here != there, fill)
    return moved
