"""Every way to split a model over a number of GPUs, as far as shapes and batches divide.

The rules themselves stand in `spec.layout.constraints`; here they are asked about one field at a
time, so that a value which cannot be is left out once and not in millions of layouts.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from meshwright.errors import InputError
from meshwright.predict.network.placement import count_domain_gpus
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import V_SCHEDULES, Precision, ScheduleKind


class DegreeSplit(NamedTuple):
    """What decides the dense products of a rank."""

    tp: int
    cp: int
    pp: int
    dp: int
    microbatch: int
    precision: Precision


class ExpertParallelSplit(NamedTuple):
    """How experts lie on the ranks of a stage."""

    ep: int = 1
    expert_tp: int | None = None


class ChunkedSchedule(NamedTuple):
    """A schedule and the chunks it runs on each rank."""

    schedule: ScheduleKind
    virtual_stages: int


def list_divisors(number: int) -> list[int]:
    """Return the divisors of a number, rising."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


class DegreeSplits:
    """The splits of one question, each found sound once."""

    def __init__(self, question: PlanQuestion) -> None:
        self.question, self.space = question, question.space
        self._known: dict[tuple[object, ...], bool] = {}

    def _sound(self, fields: dict[str, object], about: tuple[str, ...], *, batch: bool) -> bool:
        """Tell whether the rules about some fields hold for a layout with just those fields."""
        key = (*fields.items(), about)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._ask(fields, about, batch)
        return known

    def _ask(self, fields: dict[str, object], about: tuple[str, ...], batch: bool) -> bool:
        question = self.question
        try:
            layout = Layout(**fields)  # type: ignore[arg-type]
        except InputError:
            return False  # no layout at all has such values
        workload = question.workload if batch else None
        found = layout.check(question.model, question.cluster, workload)
        return not any(problem.where in about for problem in found)

    @cached_property
    def tp_degrees(self) -> list[int]:
        """Tensor-parallel degrees that divide heads and widths."""
        question = self.question
        return [
            tp
            for tp in self.space.list_allowed("tp", list_divisors(question.gpus))
            if self._fits_node(tp) and self._sound({"tp": tp}, ("tp",), batch=False)
        ]

    def _fits_node(self, ranks: int) -> bool:
        unit = count_domain_gpus(self.question.cluster)
        inside = unit % ranks == 0 or self.question.gpus <= unit
        return not self.space.fit_scale_up_domain or inside

    def list_splits(self) -> Iterator[DegreeSplit]:
        """Yield every split of the GPUs with every microbatch."""
        question, space = self.question, self.space
        batch, layers = question.workload.global_batch, question.model.layers
        precisions = space.get_allowed("precision") or ()
        usable = [name for name in precisions if name in question.cluster.gpu.precisions]
        for tp in self.tp_degrees:
            for cp in space.list_allowed("cp", list_divisors(question.gpus // tp)):
                if not self._fits_node(tp * cp) or not self.list_context_options(tp, cp):
                    continue
                for pp in space.list_allowed("pp", list_divisors(question.gpus // (tp * cp))):
                    dp = question.gpus // (tp * cp * pp)
                    if pp > layers or batch % dp or not space.list_allowed("dp", [dp]):
                        continue
                    for microbatch in space.list_allowed("microbatch", list_divisors(batch // dp)):
                        for precision in usable:
                            yield DegreeSplit(tp, cp, pp, dp, microbatch, precision)

    def list_context_options(self, tp: int, cp: int) -> list[tuple[bool, str]]:
        """Return the sound choices of sequence parallelism and of the kind of context parallel."""
        space = self.space
        splits = (space.get_allowed("sequence_parallel") or ()) if tp > 1 else (False,)
        kinds = space.get_allowed("cp_kind") or ()
        if cp == 1:
            kinds = (space.base.cp_kind,)
        return [
            (split, kind)
            for split in splits
            for kind in kinds
            if self._sound(
                {"tp": tp, "cp": cp, "cp_kind": kind, "sequence_parallel": split},
                ("cp", "sequence_length"),
                batch=True,
            )
        ]

    def list_expert_splits(self, core: DegreeSplit) -> list[ExpertParallelSplit]:
        """Return every way to lay experts on the ranks of a stage."""
        space = self.space
        if self.question.model.moe is None:
            return [ExpertParallelSplit()]
        ranks, found = core.tp * core.cp * core.dp, []
        for ep in space.list_allowed("ep", list_divisors(ranks)):
            if not self._sound({"dp": ep, "ep": ep}, ("ep",), batch=False):
                continue
            for width in space.list_allowed("expert_tp", list_divisors(ranks // ep)):
                if not self._fits_node(ep * width) or width > count_domain_gpus(
                    self.question.cluster
                ):
                    continue
                if self._sound({"tp": width, "expert_tp": width}, ("expert_tp",), batch=False):
                    found.append(ExpertParallelSplit(ep, width))
        return found

    def list_schedules(self, core: DegreeSplit) -> list[ChunkedSchedule]:
        """Return the schedules that a core's pipeline and microbatches allow."""
        if core.pp == 1:
            return [ChunkedSchedule("1f1b", 1)]
        space, layers = self.space, self.question.model.layers
        chunks = space.list_allowed("virtual_stages", range(1, layers // core.pp + 1))
        found = []
        for schedule in space.get_allowed("schedule") or ():
            if schedule == "dualpipe" and core.pp % 2:
                continue
            for count in self._chunks_of(schedule, chunks):
                fields = {
                    "pp": core.pp,
                    "dp": core.dp,
                    "microbatch": core.microbatch,
                    "schedule": schedule,
                    "virtual_stages": count,
                }
                if self._sound(fields, ("global_batch",), batch=True):
                    found.append(ChunkedSchedule(schedule, count))
        return found

    @staticmethod
    def _chunks_of(schedule: ScheduleKind, chunks: list[int]) -> list[int]:
        if schedule in V_SCHEDULES:
            return [count for count in chunks if count == 2]
        if schedule == "interleaved":
            return [count for count in chunks if count > 1]
        return [count for count in chunks if count == 1]
