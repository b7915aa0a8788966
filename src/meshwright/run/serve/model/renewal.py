"""`Renewal`: new weights for a served model while it stands, from tensors at hand.

Training that samples from the model it trains (reinforcement learning) renews all weights every few
minutes. Tensors come under the names of Hugging Face, in any order and in as many batches as one
likes, and are written where the old ones lie: addresses stay, so captured graphs stay valid. Keys
that are cached were made by the old weights; whoever renews them has to forget prefixes.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.huggingface.families import family_of
from meshwright.run.nn.huggingface.family import Linked, link_all
from meshwright.run.nn.linear import Linear
from meshwright.run.serve.model.forward import Forward
from meshwright.run.serve.model.quantise import Fp8Weights, Int4Weights
from meshwright.spec.names import suggestion


class Renewal:
    """Renews the weights of one served model."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        decoder = forward.decoder
        for part in decoder.modules():
            if isinstance(part, Linear) and isinstance(
                part.low_precision, Fp8Weights | Int4Weights
            ):
                what = f"its weights are kept as {part.recipe}"
                fix = "serve it unquantised where weights are renewed"
                raise InputError([Problem(decoder.model.name, what, fix)])
        shapes = {name: tuple(value.shape) for name, value in decoder.named_parameters()}
        self._links: dict[str, list[Linked]] = {}
        for linked in link_all(family_of(decoder.model), decoder.model, shapes):
            self._links.setdefault(linked.link.theirs, []).append(linked)
        self._left: set[str] = set()

    @property
    def left(self) -> frozenset[str]:
        """Tensors that have not come since the renewal began."""
        return frozenset(self._left)

    def begin(self) -> None:
        """Expect every tensor anew."""
        self._left = set(self._links)

    @torch.no_grad()
    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write tensors in the place of those they renew."""
        parameters = dict(self.forward.decoder.named_parameters())
        for name, tensor in tensors:
            links = self._links.get(name)
            if links is None:
                if name == f"{family_of(self.forward.decoder.model).head}.weight":
                    continue  # tied to the embedding, which comes by its own name
                fix = suggestion(name, self._links)
                raise InputError([Problem(name, "the model has no such tensor", fix)])
            if tuple(tensor.shape) != links[0].link.shape:
                what = f"has shape {list(tensor.shape)}, not {list(links[0].link.shape)}"
                raise InputError([Problem(name, what, "renew with weights of this very model")])
            for ours, link in links:
                target = link.in_ours(parameters[ours])
                target.copy_(link.in_theirs(tensor.to(target.device, non_blocking=True)))
            self._left.discard(name)
