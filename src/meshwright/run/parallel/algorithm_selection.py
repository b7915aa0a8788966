"""Collectives by choice: a group's operations carried by algorithms of `policy.collective`.

`find_algorithm_problems` finds what cannot be before any process group forms; `SelectedAlgorithms`
runs the rest on a `RankCommunicator`. They are carried out at once and waited for, where the
backend's own may run beside other work. Rows of unequal number (`all_to_all` with counts) always
take the backend's way, as an algorithm for them would have to be made anew for every call.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.algorithms.library import ALGORITHMS, build_algorithm
from meshwright.policy.collective.collective import CollectiveOp
from meshwright.run.parallel.collective.communicator import RankCommunicator
from meshwright.run.parallel.collective.executor import CollectiveExecutor
from meshwright.run.parallel.collective.reduction import REDUCE_OPS, ReduceOpName

AlgorithmsByGroup = Mapping[str, Mapping[str, str]]
"""For axes of a mesh and an operation the name of an algorithm: {"tp": {"all_reduce": "ring"}}."""
SELECTABLE_OPS: tuple[CollectiveOp, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
)
_OPS: dict[str, CollectiveOp] = {op: op for op in SELECTABLE_OPS}
_REDUCTIONS: dict[str, ReduceOpName] = {each: each for each in REDUCE_OPS}


def find_algorithm_problems(
    algorithms: AlgorithmsByGroup, ranks: Callable[[str], int], axes: tuple[str, ...]
) -> list[Problem]:
    """Return what of a choice there is not, each with a fix."""
    problems: list[Problem] = []
    for group, choices in algorithms.items():
        if group not in axes:
            fix = f"use one of {', '.join(axes)}"
            problems.append(Problem(f"algorithms.{group}", "the mesh has no such group", fix))
            continue
        for op, name in choices.items():
            problems += _faults(f"algorithms.{group}.{op}", op, name, ranks(group))
    return problems


def _faults(where: str, op: str, name: str, ranks: int) -> list[Problem]:
    if op not in SELECTABLE_OPS:
        return [Problem(where, "no operation to choose for", f"use {', '.join(SELECTABLE_OPS)}")]
    fitting = [each.name for each in ALGORITHMS if op in each.ops and not each.needs]
    if name not in fitting:
        # Those that need to know how ranks lie in nodes are known, but cannot be had by name alone.
        known = name in {each.name for each in ALGORITHMS if op in each.ops}
        what = f"{name!r} needs to be told of nodes" if known else f"{name!r} is no {op}"
        return [Problem(where, what, f"use one of {', '.join(fitting)}")]
    if ranks == 1:
        return []
    try:
        build_algorithm(name, _OPS[op], ranks)
    except InputError as error:
        return [each._replace(where=where) for each in error.problems]
    return []


class SelectedAlgorithms:
    """The algorithms of one group."""

    def __init__(self, choices: Mapping[str, str], team: RankCommunicator) -> None:
        self._choices, self._team = dict(choices), team
        self._ready: dict[tuple[str, ReduceOpName], CollectiveExecutor] = {}

    def supports(self, op: str, reduce: str = "sum") -> bool:
        """Whether an algorithm was chosen for this."""
        return op in self._choices and reduce in REDUCE_OPS

    def all_reduce(self, tensor: Tensor, reduce: str) -> None:
        """Combine in place."""
        flat = tensor.contiguous().view(-1)
        self._executor("all_reduce", reduce).run_in_place(flat)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view_as(tensor))

    def run(self, op: str, given: Tensor, out: Tensor) -> None:
        """Carry out another operation from one tensor to another."""
        self._executor(op, "sum").run(given.view(-1), out.view(-1))

    def _executor(self, op: str, reduce: str) -> CollectiveExecutor:
        kind = _REDUCTIONS[reduce]
        ready = self._ready.get((op, kind))
        if ready is None:
            made = build_algorithm(self._choices[op], _OPS[op], self._team.ranks)
            ready = self._ready[op, kind] = CollectiveExecutor(made, self._team, reduce=kind)
        return ready
