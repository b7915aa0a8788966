"""The states of one layer: the bytes that a rank keeps of them, the seconds that they travel.

Both at the least, as bounds need them: whatever the order of the axes and the size of a shard.
"""

import numpy as np
from msgspec.structs import replace

from meshwright.predict.network import min_s_per_byte
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.space.axis_orders import list_expert_placements
from meshwright.predict.plan.space.memory_fit import Array
from meshwright.predict.plan.space.sharding_cost import get_sharding_key
from meshwright.predict.plan.space.zero_groups import ZeroGroup
from meshwright.spec.layout import Layout, RankParameters, rank_state_bytes
from meshwright.spec.layout.model_states import BYTES_PER_ELEMENT, count_block_parameters

_ROUNDED = 8
"""Bytes that rounding up shards of a layer may add."""


class LayerStateBounds:
    """The states of one question's kinds of layers, kept by what they depend on."""

    def __init__(self, question: PlanQuestion) -> None:
        self.question = question
        self._bytes: dict[object, Array] = {}
        self._seconds: dict[object, Array] = {}
        self._rates: dict[object, float] = {}

    def min_state_bytes(self, layout: Layout, keeping: ZeroGroup, *, experts: bool) -> Array:
        """Return the bytes that one layer of every kind keeps on a rank at the least.

        `experts` says whether the layout knows where its experts lie; they count nothing if not.
        """
        key = (
            layout.tp, layout.dp * layout.cp, layout.precision, layout.pp == 1, keeping,
            (layout.ep, layout.expert_tp) if experts else None,
        )  # fmt: skip
        known = self._bytes.get(key)
        if known is None:
            held = self._parameters(layout, experts=experts)
            known = np.array([self._kept(layout, keeping, one) for one in held])
            self._bytes[key] = known
        return known

    def _parameters(self, layout: Layout, *, experts: bool) -> list[RankParameters]:
        model = self.question.model
        every = [count_block_parameters(layout, model, block, 1) for block in model.blocks]
        return every if experts else [one._replace(experts=0) for one in every]

    def _kept(self, layout: Layout, keeping: ZeroGroup, held: RankParameters) -> float:
        frozen, away = self.question.workload.adapter is not None, keeping.offload
        gradients = 0.0 if frozen else float(BYTES_PER_ELEMENT[layout.gradient_precision])
        if keeping.shards_parameters:
            if away:
                return 0.0
            # Beside a pipeline gathered weights and gradients stay whole through the step.
            return held.total * (2.0 + gradients) if layout.pp > 1 else 0.0
        # One byte where products are in eight bits, as some devices keep no more.
        number = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}.get(layout.precision, 1.0)
        number = 0.0 if "parameters" in away else number
        if frozen:
            return held.total * number
        shared = rank_state_bytes(
            replace(layout, zero=keeping.max_zero_stage), held
        ).without_offloaded(away)
        whole = number * held.total + shared.gradients + shared.optimizer
        return max(0.0, whole - _ROUNDED)

    def min_comm_s(self, layout: Layout, keeping: ZeroGroup) -> Array:
        """Return the seconds that one layer of every kind travels for a microbatch at the least.

        Only experts count: dense layers may be sharded in groups as small as two.
        """
        key = (*get_sharding_key(layout), keeping)
        known = self._seconds.get(key)
        if known is None:
            known = np.zeros(len(self.question.model.blocks))
            frozen = self.question.workload.adapter is not None
            if layout.expert_dp > 1 and keeping.max_zero_stage > 1 and not frozen:
                number = [one.experts for one in self._parameters(layout, experts=True)]
                known = np.array(number) * self._seconds_each(layout, keeping)
            self._seconds[key] = known
        return known

    def _seconds_each(self, layout: Layout, keeping: ZeroGroup) -> float:
        """Return the seconds for one parameter of an expert."""
        key = (*get_sharding_key(layout), layout.gradient_precision, keeping)
        known = self._rates.get(key)
        if known is None:
            places = [one for (one,) in list_expert_placements(self.question, layout, "dp")]
            gradients = BYTES_PER_ELEMENT[layout.gradient_precision]
            known = gradients * min(min_s_per_byte(one, "reduce_scatter") for one in places)
            if keeping.shards_parameters:
                # Both passes gather two bytes.
                known += 4.0 * min(min_s_per_byte(one, "all_gather") for one in places)
            self._rates[key] = known
        return known
