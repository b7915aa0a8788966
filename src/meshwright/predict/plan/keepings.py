"""What ways to share states keep whole on every rank, and what they keep in host memory.

ZeRO stages 0 and 1 keep parameters and gradients whole, stage 2 parameters, stage 3 neither. What
is sharded travels with every microbatch, what goes to the host crosses its links, so memory and
time differ between them, and bounds are worked out for each by itself.
"""

from typing import NamedTuple

from meshwright.predict.plan.question import Question
from meshwright.spec.layout import Layout, Offload


class Keeping(NamedTuple):
    """Ways to share that keep the same whole."""

    stages: tuple[int, ...]
    """Their ZeRO stages."""
    offload: tuple[Offload, ...] = ()
    """What they keep in host memory."""

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded: activations are others then, too."""
        return self.stages == (3,)

    @property
    def moves_activations(self) -> bool:
        """Whether activations of some layers go to the host."""
        return "activations" in self.offload

    @property
    def most(self) -> int:
        """The stage that shards most."""
        return max(self.stages)


_TOGETHER = ((0, 1), (2,), (3,))


def keepings(question: Question, layout: Layout) -> tuple[Keeping, ...]:
    """Return what the ways to share of a question may keep on the replicas of a layout."""
    zeros = question.space.allowed("zero") or ()
    together = _TOGETHER if layout.dp * layout.cp > 1 else ((0,),)
    both = [tuple([zero for zero in some if zero in zeros]) for some in together]
    return tuple(
        Keeping(stages, offload)
        for offload in question.space.allowed("offload") or ()
        for stages in both
        if stages
    )
