"""`CollectiveExecutor`: carries out a collective on real processes, in place or not."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.chunk_edges import count_in_place_elements, count_message_elements
from meshwright.policy.collective.collective import REDUCING_OPS, SEPARATE_OUTPUT_OPS, Collective
from meshwright.policy.collective.switch_lowering import lower_switches
from meshwright.policy.collective.verification.verifier import verify_collective
from meshwright.run.parallel.collective.call_check import (
    CollectiveSignature,
    enter_collective,
    hash_collective,
)
from meshwright.run.parallel.collective.chunk_layout import ChunkLayout, TensorSizes
from meshwright.run.parallel.collective.collective_spans import CollectiveSpans
from meshwright.run.parallel.collective.communicator import RankCommunicator
from meshwright.run.parallel.collective.progress_table import PlanPosition
from meshwright.run.parallel.collective.rank_plan import RankPlan, make_rank_plan
from meshwright.run.parallel.collective.reduction import ReduceOpName, get_reduce_function

if TYPE_CHECKING:
    from meshwright.timeline import TimelineWriter


class _Key(NamedTuple):
    elements: int
    dtype: torch.dtype
    in_place: bool


class _Prepared(NamedTuple):
    cuts: ChunkLayout
    plan: RankPlan
    call: CollectiveSignature
    signature: int
    spots: Callable[[int, int], PlanPosition]


class CollectiveExecutor:
    """One collective, ready to be run by a team again and again.

        ring = Executor(build("ring", "all_reduce", team.ranks), team)
        ring.run_in_place(tensor)
        total = ring.run(tensor)    # the input stays as it is

    A collective is proved before it runs; `proved=True` says that the caller has seen to that.
    """

    def __init__(
        self,
        collective: Collective,
        team: RankCommunicator,
        *,
        reduce: ReduceOpName = "sum",
        proved: bool = False,
        timeline: "TimelineWriter | None" = None,
    ) -> None:
        if collective.ranks != team.ranks:
            what = f"{collective.name} is for {collective.ranks} ranks, the team has {team.ranks}"
            raise InputError([Problem("collective", what, f"build it for {team.ranks} ranks")])
        self._mark = hash_collective(collective)
        if not proved and self._mark not in team.verified_collectives:
            _prove(collective)
        team.verified_collectives.add(self._mark)
        self.collective, self.team, self._reduce = collective, team, reduce
        self._hosted = lower_switches(collective)
        self._timeline = timeline
        self._ready: dict[_Key, _Prepared] = {}

    def run(
        self,
        tensor: torch.Tensor | None,
        out: torch.Tensor | None = None,
        *,
        chunk_elements: int | None = None,
    ) -> torch.Tensor | None:
        """Carry it out, leaving the input as it is; return the result, or None for no result.

        A rank brings what `torch.distributed` asks of it: its own part for a gather, the whole
        message for a scatter's root. Without `out` the result lies in a new tensor. For
        all_to_all_v, a rank that neither sends nor gets gives `chunk_elements`.
        """
        rank = self.team.rank
        some = _checked(tensor, out, rank)
        given = None if tensor is None else tensor.numel()
        wanted = None if out is None else out.numel()
        elements = count_message_elements(
            self._hosted, rank, given=given, wanted=wanted, chunk=chunk_elements
        )
        ready = self._prepared(_Key(elements, some.dtype, False))
        sizes = ready.cuts.get_tensor_sizes(rank)
        _check_sizes(sizes, rank, given, wanted)
        if sizes.output_elements is None:
            self._carry_out(ready, some, tensor, None)
            return None
        if out is None:
            out = some.new_empty(sizes.output_elements)
        target = out
        if (
            tensor is not None
            and self.collective.op in SEPARATE_OUTPUT_OPS
            and _overlap(tensor, out)
        ):
            target = torch.empty_like(out)  # what is sent later must not be overwritten
        self._carry_out(ready, some, tensor, target)
        if target is not out:
            out.copy_(target)
        return self._averaged(out)

    def run_in_place(self, message: torch.Tensor) -> torch.Tensor | None:
        """Carry it out within one tensor that holds the whole message; return the result in it.

        Of the message a rank gives and gets its part; what else lies there may be overwritten.
        """
        rank, op = self.team.rank, self.collective.op
        if op in SEPARATE_OUTPUT_OPS:
            return self.run(message, message)
        _checked(message, None, rank)
        elements = count_in_place_elements(self._hosted, rank, message.numel())
        ready = self._prepared(_Key(elements, message.dtype, True))
        self._carry_out(ready, message, message, None)
        wanted = ready.cuts.get_tensor_sizes(rank).output_elements
        if wanted is None:
            return None
        if wanted == elements:
            return self._averaged(message)
        start = rank * ready.cuts.rank_part_elements
        return self._averaged(message.view(-1)[start : start + wanted])

    def _prepared(self, key: _Key) -> _Prepared:
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = self._prepare(key)
        return ready

    def _prepare(self, key: _Key) -> _Prepared:
        team, collective, elements = self.team, self._hosted, key.elements
        frame = max(1, team.frame_bytes // key.dtype.itemsize)
        call = CollectiveSignature(
            digest=self._mark,
            collective_name=f"{collective.name} {collective.op}",
            dtype=str(key.dtype).removeprefix("torch."),
            elements=elements,
            reduce=self._reduce if collective.op in REDUCING_OPS else "",
            frame=frame,
            transport=team.transport,
        )
        made = make_rank_plan(collective, team.rank, elements, frame=frame, in_place=key.in_place)

        @cache
        def tasks(rank: int) -> RankPlan:
            return make_rank_plan(collective, rank, elements, frame=frame, in_place=False)

        def spot(rank: int, number: int) -> PlanPosition:
            return tasks(rank).tasks[number].position

        return _Prepared(ChunkLayout(collective, elements), made, call, call.signature, spot)

    def _carry_out(
        self,
        ready: _Prepared,
        some: torch.Tensor,
        tensor: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> None:
        team = self.team
        combine = get_reduce_function(self._reduce, some.dtype)
        tensors = [(some if one is None else one).view(-1) for one in (tensor, out)]
        tensors.append(some.new_empty(ready.plan.workspace_elements))
        with enter_collective(team, ready.call, ready.signature, ready.spots):
            record = None
            if self._timeline is not None:
                record = CollectiveSpans(self._timeline, self.collective, some.dtype, team.sequence)
            team.run_plan(ready.plan, tensors, combine, signature=ready.signature, record=record)

    def _averaged(self, result: torch.Tensor) -> torch.Tensor:
        if self._reduce == "avg" and self.collective.op in REDUCING_OPS:
            result.div_(self.collective.ranks)
        return result


def run_collective(
    collective: Collective,
    tensor: torch.Tensor | None,
    team: RankCommunicator,
    *,
    out: torch.Tensor | None = None,
    reduce: ReduceOpName = "sum",
) -> torch.Tensor | None:
    """Carry out a collective once; keep an `CollectiveExecutor` where it is run again and again."""
    return CollectiveExecutor(collective, team, reduce=reduce).run(tensor, out)


def _prove(collective: Collective) -> None:
    proof = verify_collective(collective)
    if not proof.is_correct:
        raise InputError(proof.problems)


def _checked(tensor: torch.Tensor | None, out: torch.Tensor | None, rank: int) -> torch.Tensor:
    """Return one of the tensors; raises `InputError` where they do not fit each other."""
    given = [(name, one) for name, one in (("tensor", tensor), ("out", out)) if one is not None]
    if not given:
        raise InputError([Problem("tensor", f"rank {rank} gave no tensor", "give one")])
    problems = [
        Problem(name, f"the tensor of rank {rank} is not contiguous", f"pass {name}.contiguous()")
        for name, one in given
        if not one.is_contiguous()
    ]
    kinds = [(one.dtype, one.device) for _, one in given]
    if kinds[0] != kinds[-1]:
        what = f"rank {rank} gives {' on '.join(map(str, kinds[0]))}, but wants "
        fix = "use the same for both"
        problems.append(Problem("out", what + " on ".join(map(str, kinds[-1])), fix))
    if problems:
        raise InputError(problems)
    return given[0][1]


def _check_sizes(right: TensorSizes, rank: int, given: int | None, wanted: int | None) -> None:
    problems = [
        Problem(name, f"rank {rank} has {has:,} elements", f"use {should:,}")
        for name, has, should in (
            ("tensor", given, right.input_elements),
            ("out", wanted, right.output_elements),
        )
        if has is not None and should is not None and has != should
    ]
    if given is None and right.input_elements:
        problems.append(
            Problem("tensor", f"rank {rank} gives nothing", f"give {right.input_elements:,}")
        )
    if problems:
        raise InputError(problems)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
