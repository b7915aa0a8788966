"""What was timed of a step's parts on this machine, as the simulator reads it.

Prices of collectives come from their curves: the passes were timed where collectives cost nothing,
and say which they make. All of them count in full: gloo carries them out on the cores that compute.

Where ranks share cores, what was timed is what each needs of a core. Passes keep that, as the
simulator knows who computes beside whom; exchange and update come to all ranks at once, so each
core does those of all its ranks one after another.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from msgspec.structs import replace

from meshwright.predict.step.block_comm import BlockComm
from meshwright.predict.step.measured_costs import MeasuredCosts, MeasuredLayer, SizeCurve
from meshwright.spec.layout import Layout
from meshwright.spec.layout.model_states import BYTES_PER_ELEMENT

if TYPE_CHECKING:
    from meshwright.run.train.profiling.collective_timing import CollectiveTimings, SizeTimes
    from meshwright.run.train.profiling.layer_timing import PartTiming, PassTiming, TimedCollective
    from meshwright.run.train.profiling.multi_rank_steps import RankTimings

NUM_SHARED_COLLECTIVES = 3
"""Small collectives of all ranks that a step makes once: losses, norm, and whether all did the
same."""
_SMALL_BYTES = 64.0


def disable_recompute(layout: Layout) -> Layout:
    """Return the layout that keeps all activations."""
    return replace(layout, recompute="none", recompute_ops=())


def build_measured_costs(
    layouts: Sequence[Layout], timed: "Sequence[RankTimings]", layout: Layout, *, cores: int
) -> MeasuredCosts:
    """Return what the parts of a step of `layout` take, of all that each rank timed.

    `layouts` are those that were timed, `layout` one of them; where it recomputes, the one that
    does not is another. `cores` are those that all ranks had together.
    """
    whole = [rank.part_timings[layouts.index(layout)] for rank in timed]
    plain = [rank.part_timings[layouts.index(disable_recompute(layout))] for rank in timed]
    prices = _CollectiveTimes([rank.collective_timings for rank in timed])
    parts = {
        columns[0][0].part.name: _part([one for one, _ in columns], [one for _, one in columns],
                                       prices)
        for columns in (list(zip(one, other, strict=True)) for one, other in
                        zip(zip(*plain, strict=True), zip(*whole, strict=True), strict=True))
    }  # fmt: skip
    everything = [one for rank in plain for one in rank]
    updated = sum(one.parameters for one in everything)
    ranks = len(timed)
    turns = -(-ranks // cores)
    small = prices.collective_s("all_reduce", ranks, _SMALL_BYTES)
    return MeasuredCosts(
        blocks={name: part for name, part in parts.items() if name not in _ENDS},
        embedding=parts["embedding"],
        head=parts["head"],
        stage_transfer=prices.message,
        stage_transfer_cpu=prices.message_cpu,
        collectives={name: _longer(curve, turns) for name, curve in prices.collectives.items()},
        bucket_copy=_longer(prices.collect, turns),
        update_s_per_parameter=turns * sum(one.update_s for one in everything) / max(1, updated),
        fixed_step_s=turns * NUM_SHARED_COLLECTIVES * small,
        shared_cores=cores if turns > 1 else 0,
        element_bytes=BYTES_PER_ELEMENT["fp32" if layout.precision == "fp32" else "bf16"],
    )


_ENDS = frozenset({"embedding", "head"})


class _CollectiveTimes:
    """What exchanges take, on the mean over ranks."""

    def __init__(self, ranks: "Sequence[CollectiveTimings]") -> None:
        self.collectives = {
            name: _curve([rank.collectives[name] for rank in ranks])
            for name in ranks[0].collectives
        }
        self.message = _curve([rank.message_times for rank in ranks])
        self.message_cpu = _curve([rank.message_cpu_times for rank in ranks])
        self.turn = _curve([rank.send_recv_times for rank in ranks])
        self.collect = _curve([rank.flatten_times for rank in ranks])

    def collective_s(self, op: str, ranks: int, size_bytes: float) -> float:
        if ranks == 1:
            return 0.0
        return self.collectives[f"{op} {ranks}"].predict_s(size_bytes)

    def of(self, call: "TimedCollective") -> float:
        if call.op == "message":  # within a pass always of a ring: another comes meanwhile
            return self.turn.predict_s(call.size_bytes)
        gathers = call.ranks if call.op == "all_gather" else 1
        op = call.op if call.op != "broadcast" else "all_gather"
        return self.collective_s(op, call.ranks, call.size_bytes * gathers)

    def by_axis(self, passed: "PassTiming") -> dict[str, float]:
        """Return what a pass exchanges along the sequence, and all else."""
        found = {"tp": 0.0, "cp": 0.0}
        for call in passed.collectives:
            found["cp" if call.group.startswith("cp") else "tp"] += self.of(call)
        return found


def _curve(ranks: "Sequence[SizeTimes]") -> SizeCurve:
    """Return the mean over ranks that timed it; what takes longer for less is levelled."""
    points: list[tuple[float, float]] = []
    for columns in zip(*filter(None, ranks), strict=True):
        seconds = fmean(one[1] for one in columns)
        points.append((columns[0][0], max(seconds, points[-1][1]) if points else seconds))
    return SizeCurve(tuple(points) or ((1.0, 0.0),))


def _longer(curve: SizeCurve, times: int) -> SizeCurve:
    return SizeCurve(tuple((size, times * seconds) for size, seconds in curve.points))


def _part(
    plain: "Sequence[PartTiming]", whole: "Sequence[PartTiming]", prices: _CollectiveTimes
) -> MeasuredLayer:
    """Return one layer, or an end, on the mean over ranks; `plain` computes nothing twice."""
    layers = max(1, plain[0].part.layers)
    forward, backward, inputs, weights = (
        fmean(getattr(one, name).time_s for one in plain) / layers
        for name in ("forward", "backward", "backward_input", "backward_weight")
    )
    again = fmean(one.backward.time_s for one in whole) / layers - backward
    ways = {
        name: {axis: seconds / layers for axis, seconds in prices.by_axis(passed).items()}
        for name, passed in (
            ("forward", whole[0].forward),
            ("backward", whole[0].backward),
            ("backward_weight", whole[0].backward_weight),
        )
    }
    late = sum(ways["backward_weight"].values())
    return MeasuredLayer(
        forward_s=forward,
        backward_s=backward + late,
        dgrad_s=inputs,
        wgrad_s=weights + late,
        recompute_s=max(0.0, again),
        comm=BlockComm(
            ways["forward"]["tp"], ways["backward"]["tp"] - late,
            ways["forward"]["cp"], ways["backward"]["cp"],
        ),
    )  # fmt: skip
