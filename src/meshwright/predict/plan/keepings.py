"""What ways to share states keep whole on every rank.

ZeRO stages 0 and 1 keep parameters and gradients whole, stage 2 parameters, stage 3 neither. What
is sharded travels with every microbatch, so memory and time differ between them, and bounds are
worked out for each by itself.
"""

from typing import NamedTuple

from meshwright.predict.plan.question import Question
from meshwright.spec.layout import Layout


class Keeping(NamedTuple):
    """Ways to share that keep the same whole."""

    stages: tuple[int, ...]
    """Their ZeRO stages."""

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded: activations are others then, too."""
        return self.stages == (3,)

    @property
    def most(self) -> int:
        """The stage that shards most."""
        return max(self.stages)


_TOGETHER = ((0, 1), (2,), (3,))


def keepings(question: Question, layout: Layout) -> tuple[Keeping, ...]:
    """Return what the ways to share of a question may keep on the replicas of a layout."""
    zeros = question.space.allowed("zero") or ()
    if layout.dp * layout.cp == 1:
        return (Keeping((0,)),) if 0 in zeros else ()
    both = (tuple(zero for zero in some if zero in zeros) for some in _TOGETHER)
    return tuple(Keeping(stages) for stages in both if stages)
