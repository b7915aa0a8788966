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

from meshwright.predict.block_comm import BlockComm
from meshwright.predict.measured import Curve, Measured, Part
from meshwright.spec.layout import Layout
from meshwright.spec.layout.states import STATE_BYTES

if TYPE_CHECKING:
    from meshwright.run.train.twin.exchanges import ExchangesTimed, Points
    from meshwright.run.train.twin.pieces import Call, PartTimed, PassTimed
    from meshwright.run.train.twin.steps import Timed

SHARED_FIGURES = 3
"""Small collectives of all ranks that a step makes once: losses, norm, and whether all did the
same."""
_SMALL_BYTES = 64.0


def without_recompute(layout: Layout) -> Layout:
    """Return the layout that keeps all activations."""
    return replace(layout, recompute="none", recompute_ops=())


def measured_of(
    layouts: Sequence[Layout], timed: "Sequence[Timed]", layout: Layout, *, cores: int
) -> Measured:
    """Return what the parts of a step of `layout` take, of all that each rank timed.

    `layouts` are those that were timed, `layout` one of them; where it recomputes, the one that
    does not is another. `cores` are those that all ranks had together.
    """
    whole = [rank.parts[layouts.index(layout)] for rank in timed]
    plain = [rank.parts[layouts.index(without_recompute(layout))] for rank in timed]
    prices = _Prices([rank.exchanges for rank in timed])
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
    return Measured(
        blocks={name: part for name, part in parts.items() if name not in _ENDS},
        embedding=parts["embedding"],
        head=parts["head"],
        message=prices.message,
        message_cpu=prices.message_cpu,
        collectives={name: _longer(curve, turns) for name, curve in prices.collectives.items()},
        collect=_longer(prices.collect, turns),
        parameter_s=turns * sum(one.update_s for one in everything) / max(1, updated),
        step_s=turns * SHARED_FIGURES * small,
        shared_cores=cores if turns > 1 else 0,
        number_bytes=STATE_BYTES["fp32" if layout.precision == "fp32" else "bf16"],
    )


_ENDS = frozenset({"embedding", "head"})


class _Prices:
    """What exchanges take, on the mean over ranks."""

    def __init__(self, ranks: "Sequence[ExchangesTimed]") -> None:
        self.collectives = {
            name: _curve([rank.collectives[name] for rank in ranks])
            for name in ranks[0].collectives
        }
        self.message = _curve([rank.message for rank in ranks])
        self.message_cpu = _curve([rank.message_cpu for rank in ranks])
        self.turn = _curve([rank.turn for rank in ranks])
        self.collect = _curve([rank.collect for rank in ranks])

    def collective_s(self, op: str, ranks: int, size_bytes: float) -> float:
        if ranks == 1:
            return 0.0
        return self.collectives[f"{op} {ranks}"].seconds(size_bytes)

    def of(self, call: "Call") -> float:
        if call.op == "message":  # within a pass always of a ring: another comes meanwhile
            return self.turn.seconds(call.size_bytes)
        gathers = call.ranks if call.op == "all_gather" else 1
        op = call.op if call.op != "broadcast" else "all_gather"
        return self.collective_s(op, call.ranks, call.size_bytes * gathers)

    def by_axis(self, passed: "PassTimed") -> dict[str, float]:
        """Return what a pass exchanges along the sequence, and all else."""
        found = {"tp": 0.0, "cp": 0.0}
        for call in passed.calls:
            found["cp" if call.group.startswith("cp") else "tp"] += self.of(call)
        return found


def _curve(ranks: "Sequence[Points]") -> Curve:
    """Return the mean over ranks that timed it; what takes longer for less is levelled."""
    points: list[tuple[float, float]] = []
    for columns in zip(*filter(None, ranks), strict=True):
        seconds = fmean(one[1] for one in columns)
        points.append((columns[0][0], max(seconds, points[-1][1]) if points else seconds))
    return Curve(tuple(points) or ((1.0, 0.0),))


def _longer(curve: Curve, times: int) -> Curve:
    return Curve(tuple((size, times * seconds) for size, seconds in curve.points))


def _part(plain: "Sequence[PartTimed]", whole: "Sequence[PartTimed]", prices: _Prices) -> Part:
    """Return one layer, or an end, on the mean over ranks; `plain` computes nothing twice."""
    layers = max(1, plain[0].part.layers)
    forward, backward, inputs, weights = (
        fmean(getattr(one, name).seconds for one in plain) / layers
        for name in ("forward", "backward", "inputs", "weights")
    )
    again = fmean(one.backward.seconds for one in whole) / layers - backward
    ways = {
        name: {axis: seconds / layers for axis, seconds in prices.by_axis(passed).items()}
        for name, passed in (
            ("forward", whole[0].forward),
            ("backward", whole[0].backward),
            ("weights", whole[0].weights),
        )
    }
    late = sum(ways["weights"].values())
    return Part(
        forward_s=forward,
        backward_s=backward + late,
        inputs_s=inputs,
        weights_s=weights + late,
        recompute_s=max(0.0, again),
        comm=BlockComm(
            ways["forward"]["tp"], ways["backward"]["tp"] - late,
            ways["forward"]["cp"], ways["backward"]["cp"],
        ),
    )  # fmt: skip
