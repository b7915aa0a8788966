"""Every layout of a small question, one by one: what the planner's answers are held against.

Nothing here prunes, bounds or shares work; the only thing it takes from the planner is which splits
of layers the space holds (`ScheduleOptions.splits`), because that is part of the question. So are
four rules: experts' products do not cross the network, tensor-parallel overlap needs sequence
parallelism (as in Megatron), states are shared only among replicas, and shard sizes only where they
are.
"""

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.network.placement import count_domain_gpus
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.search.branch_and_bound import PlanCandidate
from meshwright.predict.plan.space.degree_splits import DegreeSplits
from meshwright.predict.plan.space.layer_shapes import KernelTimeCache
from meshwright.predict.plan.space.pipeline_schedules import ScheduleOptions
from meshwright.predict.step.step_prediction import predict_step
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import AXIS_ORDERS, RECOMPUTE_OPS
from meshwright.spec.layout.ranks import get_mesh_shape, list_process_groups

Fields = dict[str, Any]

_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v")
_SWITCHES = ("overlap_gradients", "overlap_parameters", "overlap_pp", "overlap_ep")


class Every:
    """The layouts of one question."""

    def __init__(self, question: PlanQuestion) -> None:
        self.question, self.model = question, question.model
        meshes = DegreeSplits(question)
        self._pipes = ScheduleOptions(meshes, KernelTimeCache(question))

    def layouts(self) -> Iterator[Layout]:
        """Yield every layout that can be built at all."""
        for fields in self.fields():
            try:
                yield replace(self.question.space.base, **fields)
            except InputError:
                continue

    def fields(self) -> Iterator[Fields]:
        """Yield the fields of every layout, sound or not."""
        for degrees in self._degrees():
            for pipe in self._pipelines(degrees):
                for again, shared in product(self._again(pipe), self._shared(degrees)):
                    for switches, moved in product(self._switches(degrees), self._moved(pipe)):
                        for order in self._values("order", sorted(AXIS_ORDERS)):
                            yield {**pipe, **again, **shared, **switches, **moved, "order": order}

    def _values(self, name: str, usual: Any) -> Any:
        return self.question.space.fixed.get(name, usual)

    def _degrees(self) -> Iterator[Fields]:
        gpus, batch = self.question.gpus, self.question.workload.global_batch
        numbers = range(1, gpus + 1)
        experts = self.model.moe is not None
        base = self.question.space.base
        for tp, cp, pp in product(*(self._values(name, numbers) for name in ("tp", "cp", "pp"))):
            if gpus % (tp * cp * pp):
                continue
            dp = gpus // (tp * cp * pp)
            if dp not in self._values("dp", numbers) or batch % dp:
                continue
            kinds = ("ring", "allgather", "ulysses")
            for microbatch, split, kind, precision, ep, width in product(
                self._values("microbatch", range(1, batch // dp + 1)),
                self._values("sequence_parallel", (False, True)) if tp > 1 else (False,),
                self._values("cp_kind", kinds) if cp > 1 else (base.cp_kind,),
                self._values("precision", (base.precision,)),
                self._values("ep", range(1, tp * cp * dp + 1)) if experts else (1,),
                self._values("expert_tp", range(1, tp * cp * dp + 1)) if experts else (None,),
            ):
                if (batch // dp) % microbatch or (tp * cp * dp) % (ep * (width or tp)):
                    continue
                if (width or 1) > count_domain_gpus(self.question.cluster):
                    continue
                yield {
                    "tp": tp, "cp": cp, "pp": pp, "dp": dp, "microbatch": microbatch, "ep": ep,
                    "sequence_parallel": split, "cp_kind": kind, "precision": precision,
                    "expert_tp": width,
                }  # fmt: skip

    def _pipelines(self, degrees: Fields) -> Iterator[Fields]:
        layers, pp = self.model.layers, degrees["pp"]
        if pp == 1:
            yield degrees | {"schedule": "1f1b", "virtual_stages": 1}
            return
        for schedule in self._values("schedule", _SCHEDULES):
            for chunks in self._values("virtual_stages", range(1, layers + 1)):
                if pp * chunks > layers:
                    continue
                run = self.question.build_run(Layout(**degrees))
                for split in self._pipes.list_layer_splits(run, pp * chunks):
                    yield degrees | {
                        "schedule": schedule,
                        "virtual_stages": chunks,
                        "stage_layers": split,
                    }

    def _again(self, pipe: Fields) -> Iterator[Fields]:
        """Yield what is computed again, on every number of layers."""
        deepest = max(pipe.get("stage_layers") or (self.model.layers,))
        subsets = [
            some
            for size in range(1, len(RECOMPUTE_OPS) + 1)
            for some in combinations(sorted(RECOMPUTE_OPS), size)
        ]
        for kind in self._values("recompute", ("none", "selective", "full")):
            if kind == "none":
                yield {"recompute": "none"}
                continue
            sets = self._values("recompute_ops", subsets) if kind == "selective" else [()]
            for ops, layers in product(sets, range(1, deepest + 1)):
                yield {"recompute": kind, "recompute_ops": ops, "recompute_layers": layers}

    def _moved(self, pipe: Fields) -> Iterator[Fields]:
        """Yield what goes to the host, activations of every number of layers."""
        deepest = max(pipe.get("stage_layers") or (self.model.layers,))
        for kind in self._values("offload", ((),)):
            counts = (*range(1, deepest), None) if "activations" in kind else (None,)
            for layers in counts:
                yield {"offload": kind, "offload_layers": layers}

    def _shared(self, degrees: Fields) -> Iterator[Fields]:
        spread = degrees["dp"] * degrees["cp"]
        for zero in self._values("zero", (0, 1, 2, 3)):
            if zero == 0:
                yield {"zero": 0}
            elif spread > 1:
                for shard in self._values("shard", (None, *range(2, spread))):
                    if shard is None or spread % shard == 0:
                        yield {"zero": zero, "shard": shard}

    def _switches(self, degrees: Fields) -> Iterator[Fields]:
        names = [*_SWITCHES, "overlap_tp"] if degrees["sequence_parallel"] else [*_SWITCHES]
        for values in product(*(self._values(name, (False, True)) for name in names)):
            yield dict(zip(names, values, strict=True))

    def fastest(self, most: int = 1) -> list[PlanCandidate]:
        """Return the fastest layout that fits of each family, the fastest first."""
        best: dict[object, PlanCandidate] = {}
        for layout in self.layouts():
            if not self.sound(layout):
                continue
            run = self.question.build_run(layout)
            one = PlanCandidate(layout, predict_step(run))
            known = best.get(one.layout_family)
            if known is not None and known.step.step_s <= one.step.step_s:
                continue
            if predict_memory(run).fits:
                best[one.layout_family] = one
        return sorted(best.values(), key=lambda one: one.step.step_s)[:most]

    def sound(self, layout: Layout) -> bool:
        """Tell whether a layout breaks no rule but that of memory."""
        question = self.question
        found = layout.check(question.model, question.cluster, question.workload)
        if any(problem.where != "memory" for problem in found):
            return False
        try:
            get_mesh_shape(layout)
        except InputError:
            return False
        return not question.space.fit_scale_up_domain or _stays_inside(question, layout)


def _stays_inside(question: PlanQuestion, layout: Layout) -> bool:
    """Tell whether groups that talk inside a layer lie in one unit each."""
    unit = count_domain_gpus(question.cluster)
    kinds = ["tp", "cp"] if question.model.moe is None else ["tp", "cp", "expert_tp", "ep"]
    return all(
        len({rank // unit for rank in group}) == 1
        for axes in kinds
        for group in list_process_groups(layout, axes)
    )
