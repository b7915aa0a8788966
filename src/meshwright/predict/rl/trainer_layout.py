"""`find_trainer_layout`: the fastest layout of the trainer that fits, counted as a step is priced.

How many samples share a microbatch depends on how many replicas share the batch. So each number of
replicas is a question of its own to `predict/plan`, with the very microbatches that `prices` has
for it: whatever is found here fits there, unless a framework fills microbatches up. That depends on
`pp`, which such a question leaves open; runs of such a framework give their layout themselves.
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.predict.cost import Calibration
from meshwright.predict.plan.answer.nearest_layout import NearestLayout, find_nearest_layout
from meshwright.predict.plan.answer.violated_rule import find_last_violation
from meshwright.predict.plan.planner import pause_gc
from meshwright.predict.plan.question.layout_space import LayoutSpace
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.search.branch_and_bound import (
    PlanCandidate,
    PlanSearch,
    restrict_to_common_layouts,
)
from meshwright.predict.plan.space.degree_splits import list_divisors
from meshwright.predict.rl.microbatch_packing import ReplicaShare, pack_update
from meshwright.predict.rl.rl_setup import RolloutBatch
from meshwright.predict.training_run.training_framework import MEGATRON, TrainingFramework
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.layout.layout_names import format_short_name
from meshwright.spec.model import Model
from meshwright.spec.units import format_bytes, format_quantity

Fixed = dict[str, tuple[object, ...]]
_USUAL: Fixed = {
    "cp": (1,), "zero": (0, 1), "schedule": ("1f1b",), "virtual_stages": (1,),
    "order": ("tp-cp-ep-dp-pp",), "overlap_tp": (False,), "overlap_ep": (False,),
}  # fmt: skip
"""Fields that are not searched: a search of all takes far longer than one simulation, and the split
depends little on them."""
_TRIES = 60
"""Splits of the GPUs that are looked at for the layout nearest to fitting."""
_DOUBLINGS = 6
"""How often GPUs are doubled to find how many would do."""


def find_trainer_layout(
    model: Model,
    cluster: Cluster,
    rounds: RolloutBatch,
    fixed: Fixed,
    *,
    software: TrainingFramework = MEGATRON,
    calibration: Calibration | None = None,
) -> Layout:
    """Return the fastest layout that trains on what a step generates, on all GPUs of a cluster.

    Raises:
        InputError: where none fits, with what the nearest one lacks and what would do.
    """
    if model.moe is None and fixed.get("ep", (1,)) != (1,):
        what = f"{model.name} has no experts"
        raise InputError([Problem("trainer_layout.ep", what, "leave it out")])
    trainer = _Trainer(model, cluster, rounds, fixed, software, calibration)
    found = trainer.fastest()
    if found is None:
        raise InputError([trainer.refusal()])
    return found


class _Trainer(NamedTuple):
    """What trains, and which of its fields are given."""

    model: Model
    cluster: Cluster
    rounds: RolloutBatch
    fixed: Fixed
    software: TrainingFramework
    calibration: Calibration | None

    def fastest(self) -> Layout | None:
        """Return the layout with the shortest updates; None where none fits."""
        best: list[PlanCandidate] = []
        with pause_gc():
            for question in self._questions():
                # What is known of other numbers of replicas is to be beaten by this one.
                quick = PlanSearch(restrict_to_common_layouts(question), known=best)
                quick.run()
                search = PlanSearch(question, known=quick.best)
                search.run()
                best = search.best
        return best[0].layout if best else None

    def refusal(self) -> Problem:
        """Say why nothing fits, and what would."""
        gpus = format_quantity(self.cluster.gpus, "GPU")
        refused = find_last_violation(self._undivided())
        if refused is not None:
            what = f"no layout trains on {gpus}: {refused.what}"
            return Problem(f"trainer_layout.{refused.where}", what, refused.fix)
        closest = self._nearest()
        what = f"no layout of {self.model.name} trains on {gpus}"
        if closest is not None:
            needed, there = map(format_bytes, (closest.needed_bytes, closest.capacity_bytes))
            named = format_short_name(closest.layout)
            which = "it" if closest.layout.gpus == 1 else f"the nearest, {named},"
            what += f": {which} needs {needed} of {there}"
        return Problem("trainer_layout", what, self._remedy())

    def _remedy(self) -> str:
        """Return what was found to do."""
        given = [name for name in self.fixed if name not in _USUAL]
        if given and self._replace(fixed={}).fits():
            return "leave out " + " and ".join(f"`trainer_layout.{name}`" for name in given)
        for doubled in range(1, _DOUBLINGS + 1):
            try:
                larger = self.cluster.with_gpus(self.cluster.gpus << doubled)
            except InputError:
                break  # the cluster cannot be that large
            if self._replace(cluster=larger).fits():
                return f"let {larger.gpus} GPUs train: use a larger `gpus`"
        return "use a `cluster` whose GPUs have more memory, or a shorter `longest`"

    def fits(self) -> bool:
        """Tell whether any layout is found soon that fits."""
        closest = self._nearest()
        return closest is not None and closest.fits

    def _nearest(self) -> NearestLayout | None:
        found = (find_nearest_layout(one, tries=_TRIES) for one in self._questions())
        some = [one for one in found if one is not None]
        return min(some, key=lambda one: one.needed_bytes, default=None)

    def _questions(self) -> Iterator[PlanQuestion]:
        """Yield what is asked of each number of replicas, the most first: few are rarely faster."""
        asked = pack_update(self.rounds)
        for replicas in reversed(list_divisors(self.cluster.gpus)):
            yield self._question(asked.split_over_replicas(replicas), {"dp": (replicas,)})

    def _undivided(self) -> PlanQuestion:
        """Return a question whose batch every number of replicas divides, to ask about shapes."""
        share = pack_update(self.rounds).split_over_replicas(self.cluster.gpus)
        return self._question(share, {})

    def _question(self, share: ReplicaShare, more: Fixed) -> PlanQuestion:
        fixed = {**_USUAL, "microbatch": (share.sequences_per_microbatch,), **more, **self.fixed}
        return PlanQuestion(
            model=self.model,
            cluster=self.cluster,
            workload=share.workload,
            space=LayoutSpace(fixed=fixed),
            framework=self.software,
            calibration=self.calibration,
        )
