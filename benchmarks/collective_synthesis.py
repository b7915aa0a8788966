"""How synthesised schedules compare with the library's best and with the bound, per machine."""

import time
from typing import NamedTuple

from benchmarks.collective_machines import Machine, machines, rival
from meshwright.policy.collective import verify_collective
from meshwright.policy.collective.collective import CollectiveOp
from meshwright.policy.collective.synthesis import SynthesizedCollective, synthesize

NAME = "collective_synthesis"
QUESTION = "Do synthesised collectives beat the library's best algorithm, and how near the bound?"

OPS: tuple[CollectiveOp, ...] = ("all_gather", "all_reduce")


class Outcome(NamedTuple):
    """One comparison."""

    machine: Machine
    op: CollectiveOp
    made: SynthesizedCollective
    seconds: float
    rival_name: str
    rival_bytes_per_s: float

    @property
    def gain(self) -> float:
        """Our rate over that of the library's best."""
        return self.made.rate_bytes_per_s / self.rival_bytes_per_s


def compare(machine: Machine, op: CollectiveOp) -> Outcome:
    """Make a schedule, refuse it where it is unsound, and find the library's best."""
    start = time.perf_counter()
    made = synthesize(machine.graph, op, gpus=machine.gpus)
    seconds = time.perf_counter() - start
    proof = verify_collective(made.collective)
    if not proof.is_correct:
        raise AssertionError(proof.problems)
    best = rival(machine, op)
    return Outcome(machine, op, made, seconds, best.name, best.rate_bytes_per_s)


def figures(outcome: Outcome) -> list[dict[str, object]]:
    """Return what one comparison shows."""
    machine = outcome.machine
    title = f"{machine.title}, {outcome.op}"
    ranks = len(machine.members)
    return [
        {
            "name": f"{title}: rate over the library's best",
            "value": outcome.gain,
            "unit": "×",
            "target": ">= 0.999",
        },
        {"name": f"{title}: share of the bound", "value": outcome.made.bound_share, "unit": ""},
        {
            "name": f"{title}: time to synthesise",
            "value": outcome.seconds,
            "unit": "s",
            "target": "< 60" if ranks > 16 else "< 15",
        },
    ]


def measure(quick: bool) -> dict[str, object]:
    """Measure and return the figures."""
    chosen = [machine for machine in machines() if not quick or len(machine.members) <= 8]
    outcomes = [compare(machine, op) for machine in chosen for op in OPS]
    return {
        "figures": [figure for outcome in outcomes for figure in figures(outcome)],
        "peers": [
            {
                "name": f"{each.machine.title}, {each.op}: {each.rival_name}",
                "value": each.rival_bytes_per_s / 1e9,
                "unit": "GB/s",
            }
            for each in outcomes
        ],
        "notes": "Rates from the bytes on the busiest link, transfers on their best ways; "
        "waiting for steps is not counted, for either side. The library has all algorithms that "
        "reduce in GPUs, on 1 to 8 channels, and up to 8 GPUs with rings searched for the machine. "
        "The bound lets data take any way; every schedule is verified. Two cores shared with "
        "other work.",
    }
