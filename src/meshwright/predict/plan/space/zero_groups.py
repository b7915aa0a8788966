"""What ways to share states keep whole on every rank, and what they keep in host memory.

ZeRO stages 0 and 1 keep parameters and gradients whole, stage 2 parameters, stage 3 neither. What
is sharded travels with every microbatch, what goes to the host crosses its links, so memory and
time differ between them, and bounds are worked out for each by itself.
"""

from typing import NamedTuple

from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.spec.layout import Layout, Offload


class ZeroGroup(NamedTuple):
    """Ways to share that keep the same whole."""

    zero_stages: tuple[int, ...]
    """Their ZeRO stages."""
    offload: tuple[Offload, ...] = ()
    """What they keep in host memory."""

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded: activations are others then, too."""
        return self.zero_stages == (3,)

    @property
    def offloads_activations(self) -> bool:
        """Whether activations of some layers go to the host."""
        return "activations" in self.offload

    @property
    def max_zero_stage(self) -> int:
        """The stage that shards most."""
        return max(self.zero_stages)


_TOGETHER = ((0, 1), (2,), (3,))


def list_zero_groups(question: PlanQuestion, layout: Layout) -> tuple[ZeroGroup, ...]:
    """Return what the ways to share of a question may keep on the replicas of a layout."""
    zeros = question.space.get_allowed("zero") or ()
    together = _TOGETHER if layout.dp * layout.cp > 1 else ((0,),)
    both = [tuple([zero for zero in some if zero in zeros]) for some in together]
    return tuple(
        ZeroGroup(stages, offload)
        for offload in question.space.get_allowed("offload") or ()
        for stages in both
        if stages
    )
