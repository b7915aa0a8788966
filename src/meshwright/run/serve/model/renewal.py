"""`Renewal`: new weights for a served model while it stands, and memory given back in between.

Training that samples from the model it trains (reinforcement learning) renews all weights every few
minutes and wants the device's memory meanwhile. Tensors come under the names of Hugging Face, in
any order and in as many batches as one likes, and are written where the old ones lie: addresses
stay, so captured graphs stay valid. Keys that are cached were made by the old weights; whoever
renews them has to forget prefixes.

Asleep, weights lie in host memory (or nowhere, if new ones will come) and the cache is gone. Awake
again they may lie elsewhere: graphs have to be captured anew.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.huggingface.families import family_of
from meshwright.run.nn.huggingface.family import Linked, link_all
from meshwright.run.nn.linear import Linear
from meshwright.run.serve.model.forward import Forward
from meshwright.spec.names import suggestion


class Renewal:
    """Renews the weights of one served model."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        decoder = forward.decoder
        for part in decoder.modules():
            if isinstance(part, Linear) and part.low_precision is not None:
                what = f"its weights are kept as {part.recipe}"
                fix = "serve it unquantised where weights are renewed"
                raise InputError([Problem(decoder.model.name, what, fix)])
        self._shapes = {name: tuple(value.shape) for name, value in decoder.named_parameters()}
        self._links: dict[str, list[Linked]] = {}
        for linked in link_all(family_of(decoder.model), decoder.model, self._shapes):
            self._links.setdefault(linked.link.theirs, []).append(linked)
        self._left: set[str] = set()
        self._host: dict[str, Tensor] | None = None

    @property
    def left(self) -> frozenset[str]:
        """Tensors that have not come since the renewal began."""
        return frozenset(self._left)

    @property
    def asleep(self) -> bool:
        """Whether the device's memory is given back."""
        return self._host is not None

    def begin(self) -> None:
        """Expect every tensor anew."""
        self._left = set(self._links)

    @torch.no_grad()
    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write tensors in the place of those they renew."""
        self._check_awake()
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

    @torch.no_grad()
    def sleep(self, *, keep_weights: bool = True) -> None:
        """Give memory back; weights that are not kept have to come anew after `wake`."""
        if self.asleep:
            return
        self._host = {}
        for name, parameter in self.forward.decoder.named_parameters():
            if keep_weights:
                self._host[name] = parameter.data.to("cpu")
            parameter.data = parameter.data.new_empty(0)
        self.forward.cache.sleep()

    @torch.no_grad()
    def wake(self) -> None:
        """Take the memory again, and the weights that were kept."""
        if self._host is None:
            return
        device = self.forward.cache.device
        for name, parameter in self.forward.decoder.named_parameters():
            kept = self._host.get(name)
            if kept is None:
                parameter.data = parameter.data.new_empty(self._shapes[name])
            else:
                parameter.data = kept.to(device)
        if not self._host:
            self.begin()
        self._host = None
        self.forward.cache.wake()

    def _check_awake(self) -> None:
        if self.asleep:
            raise InputError([Problem("model", "its memory is given back", "wake it first")])
