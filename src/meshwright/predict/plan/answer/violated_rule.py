"""Which rule refuses the last candidates of a question that has no sound layout at all.

Candidates go through the rules in the order a search asks them, and the one that comes furthest
names the rule. Memory is no matter here: a layout may be sound and too large.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

from meshwright.errors import InputError, Problem
from meshwright.predict.network.placement import count_domain_gpus
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.space.axis_orders import list_allowed_orders
from meshwright.predict.plan.space.degree_splits import DegreeSplit, DegreeSplits, list_divisors
from meshwright.predict.plan.space.layer_shapes import LayerShapes
from meshwright.predict.plan.space.pipeline_schedules import ScheduleOptions
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import CHOICES
from meshwright.spec.layout.field_rules import largest_divisor, nearest_multiple

_MOST = 2000
"""Splits of the GPUs whose experts, orders and schedules are asked about."""


def find_last_violation(question: PlanQuestion) -> Problem | None:
    """Return what refuses the last candidates; None where some layout is sound."""
    gpu, precisions = question.cluster.gpu, question.space.get_allowed("precision") or ()
    if not any(name in gpu.precisions for name in precisions):
        usable = ", ".join(name for name in gpu.precisions if name in CHOICES["precision"])
        what = f"a {gpu.name} has no {' or '.join(precisions)}"
        return Problem("precision", what, f"use {usable}")
    return _Walk(question).refusal()


class _Walk:
    """Takes candidates through the rules and remembers the one that came furthest."""

    def __init__(self, question: PlanQuestion) -> None:
        self.question, self.space = question, question.space
        self.meshes = DegreeSplits(question)
        self.shapes = LayerShapes(question, self.meshes)
        self.pipes = ScheduleOptions(self.meshes, self.shapes.kernel_times)
        self._furthest, self._problem = -1, Problem("layout", "no split of the GPUs is sound")

    def refusal(self) -> Problem | None:
        """Return the last rule, or None where a candidate passed all."""
        degrees = self._degrees()
        if any(self._passes(core) for core in islice(self._cores(degrees), _MOST)):
            return None
        return self._problem

    def _refuse(self, step: int, problem: Problem) -> None:
        if step > self._furthest:
            self._furthest, self._problem = step, problem

    def _values(self, name: str, usual: Iterable[int]) -> Iterable[int]:
        return self.space.fixed.get(name, tuple(usual))

    def _degrees(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the splits of the GPUs that the model takes."""
        gpus, layers = self.question.gpus, self.question.model.layers
        for tp in self._values("tp", list_divisors(gpus)):
            if gpus % tp:
                fix = f"use tp={largest_divisor(gpus, tp)}"
                self._refuse(0, Problem("tp", f"{tp} does not divide the {gpus:,} GPUs", fix))
            elif tp not in self.meshes.tp_degrees:
                self._refuse(1, self._ruled({"tp": tp}, ("tp",)) or self._leaves_node("tp", tp))
            else:
                for cp in self._values("cp", list_divisors(gpus // tp)):
                    if gpus // tp % cp:
                        self._refuse(2, self._undivided("cp", tp=tp, cp=cp))
                    elif not self._in_context(tp, cp):
                        continue
                    else:
                        for pp in self._values("pp", list_divisors(gpus // (tp * cp))):
                            if gpus // (tp * cp) % pp:
                                self._refuse(4, self._undivided("pp", tp=tp, cp=cp, pp=pp))
                            elif pp > layers:
                                what = f"{pp} stages are more than the {layers} layers"
                                self._refuse(5, Problem("pp", what, f"use pp={layers} or less"))
                            else:
                                yield tp, cp, pp, gpus // (tp * cp * pp)

    def _undivided(self, name: str, **degrees: int) -> Problem:
        gpus = self.question.gpus
        product = " × ".join(f"{axis}={size}" for axis, size in degrees.items() if size > 1)
        rest = gpus
        for axis, size in degrees.items():
            rest //= size if axis != name else 1
        fix = f"use {name}={largest_divisor(rest, degrees[name])}"
        return Problem(name, f"{product} does not divide the {gpus:,} GPUs", fix)

    def _in_context(self, tp: int, cp: int) -> bool:
        """Tell whether a sequence can be split so; remember why not."""
        if self.meshes.list_context_options(tp, cp):
            unit = count_domain_gpus(self.question.cluster)
            inside = unit % (tp * cp) == 0 or self.question.gpus <= unit
            if inside or not self.space.fit_scale_up_domain:
                return True
            self._refuse(3, self._leaves_node("tp × cp", tp * cp))
            return False
        splits = (self.space.get_allowed("sequence_parallel") or ()) if tp > 1 else (False,)
        kinds = (self.space.get_allowed("cp_kind") or ()) if cp > 1 else (self.space.base.cp_kind,)
        for split in splits:
            for kind in kinds:
                fields = {"tp": tp, "cp": cp, "cp_kind": kind, "sequence_parallel": split}
                ruled = self._ruled(fields, ("cp", "sequence_length"))
                if ruled is not None:
                    self._refuse(3, ruled)
        return False

    def _leaves_node(self, name: str, ranks: int) -> Problem:
        unit = count_domain_gpus(self.question.cluster)
        what = f"{name} = {ranks} does not stay inside the {unit} GPUs of a scale-up domain"
        return Problem("fit_scale_up_domain", what, f"use {name} up to {unit}, or leave it out")

    def _ruled(self, fields: dict[str, object], about: tuple[str, ...]) -> Problem | None:
        """Return the first rule about some fields that a layout with just those breaks."""
        question = self.question
        try:
            layout = Layout(**fields)  # type: ignore[arg-type]
        except InputError as error:
            first = error.problems[0]
            return first._replace(where=first.where.removeprefix("layout."))
        found = layout.check(question.model, question.cluster, question.workload)
        return next((problem for problem in found if problem.where in about), None)

    def _cores(self, degrees: Iterable[tuple[int, int, int, int]]) -> Iterator[DegreeSplit]:
        """Yield the splits that the batch divides over, with every microbatch."""
        batch, precisions = self.question.workload.global_batch, self.space.get_allowed("precision")
        usable = self.question.cluster.gpu.precisions
        precision = next(name for name in precisions or () if name in usable)
        for tp, cp, pp, dp in degrees:
            if not self.space.list_allowed("dp", [dp]):
                given = " or ".join(map(str, self.space.fixed["dp"]))
                named = ", ".join(f"{n}={v}" for n, v in (("tp", tp), ("cp", cp), ("pp", pp)))
                what = f"{named} leave dp={dp} of {self.question.gpus:,} GPUs, not {given}"
                self._refuse(6, Problem("dp", what, f"use dp={dp}"))
            elif batch % dp:
                what = f"{batch:,} sequences do not divide over dp={dp} replicas"
                fix = f"use a global_batch of {nearest_multiple(batch, dp):,}"
                self._refuse(7, Problem("global_batch", what, fix))
            else:
                each = batch // dp
                for microbatch in self._values("microbatch", list_divisors(each)):
                    if each % microbatch:
                        what = f"{microbatch} does not divide the {each:,} sequences of a replica"
                        fix = f"use microbatch={largest_divisor(each, microbatch)}"
                        self._refuse(8, Problem("microbatch", what, fix))
                    else:
                        yield DegreeSplit(tp, cp, pp, dp, microbatch, precision)

    def _passes(self, core: DegreeSplit) -> bool:
        """Tell whether any layout of a core is sound; remember what refuses the last of them."""
        spreads = self.meshes.list_expert_splits(core)
        if not spreads:
            self._refuse(10, self._unspread(core))
            return False
        if not self.meshes.list_schedules(core):
            self._refuse(11, self._unscheduled(core))
            return False
        layout = self.shapes.build_layout(core, spreads[0])
        counts = {one.virtual_stages for one in self.meshes.list_schedules(core)}
        run = self.question.build_run(layout)
        if not any(self.pipes.list_layer_splits(run, core.pp * count) for count in counts):
            layers = self.question.model.layers
            what = f"no split given has {core.pp} stages that sum to {layers} layers"
            self._refuse(12, Problem("stage_layers", what, "leave stage_layers out"))
            return False
        if not any(
            list_allowed_orders(self.question, self.shapes.build_layout(core, one))
            for one in spreads
        ):
            where = "fit_scale_up_domain" if self.space.fit_scale_up_domain else "order"
            named = f"tp={core.tp} cp={core.cp} pp={core.pp} dp={core.dp}"
            what = f"no order of the axes allowed puts {named} on allowed ranks"
            self._refuse(13, Problem(where, what, f"leave {where} out"))
            return False
        return self._shared(core)

    def _unspread(self, core: DegreeSplit) -> Problem:
        experts, space = self.question.model.moe, self.space
        ranks = core.tp * core.cp * core.dp
        for ep in space.fixed.get("ep", ()):
            ruled = self._ruled({"dp": ep, "ep": ep}, ("ep",))
            if ruled is not None:
                return ruled
        given = [name for name in ("ep", "expert_tp") if name in space.fixed]
        named = " × ".join(f"{name}={'|'.join(map(str, space.fixed[name]))}" for name in given)
        count = experts.count if experts is not None else 0
        what = f"{named or 'no ep'} divides neither the {ranks} GPUs of a stage nor {count} experts"
        where = given[-1] if given else "fit_scale_up_domain"
        return Problem(where, what, f"leave {where} out")

    def _unscheduled(self, core: DegreeSplit) -> Problem:
        """Return why no schedule runs on a core's pipeline."""
        space, layers = self.space, self.question.model.layers
        most = layers // core.pp
        for schedule in space.get_allowed("schedule") or ():
            for count in space.list_allowed("virtual_stages", range(1, most + 1)):
                fields = {
                    "pp": core.pp, "dp": core.dp, "microbatch": core.microbatch,
                    "schedule": schedule, "virtual_stages": count,
                }  # fmt: skip
                ruled = self._ruled(fields, ("global_batch",))
                if ruled is not None:
                    return ruled
        chunks = " or ".join(map(str, space.fixed.get("virtual_stages", ())))
        what = f"{chunks} chunks on each of pp={core.pp} ranks are more than the {layers} layers"
        return Problem("virtual_stages", what, f"use virtual_stages={max(1, most)}")

    def _shared(self, core: DegreeSplit) -> bool:
        """Tell whether replicas may share states in any way."""
        zeros = self.space.get_allowed("zero") or ()
        if 0 in zeros:
            return True
        if core.dp * core.cp == 1:
            what = f"zero={zeros[0]} shares states between replicas, and dp and cp are 1"
            self._refuse(14, Problem("zero", what, "use zero=0"))
            return False
        spread, allowed = core.dp * core.cp, self.space.get_allowed("shard")
        sound = (None, *list_divisors(spread)[1:-1])
        if allowed is not None and not any(shard in allowed for shard in sound):
            what = f"shard={allowed[0]} is no part of the dp × cp = {spread} replicas"
            self._refuse(15, Problem("shard", what, "leave shard out"))
            return False
        return True
