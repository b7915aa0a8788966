"""`Executor`: carries out a collective on real processes, in place or not."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.chunking import in_place_elements, message_elements
from meshwright.policy.collective.collective import EXCHANGED, REDUCING, Collective
from meshwright.policy.collective.hosting import hosted
from meshwright.policy.collective.soundness import verify
from meshwright.run.parallel.collective.agreement import Call, digest
from meshwright.run.parallel.collective.combine import Reduce, combiner
from meshwright.run.parallel.collective.cuts import Cuts, Sizes
from meshwright.run.parallel.collective.ledger import Spot
from meshwright.run.parallel.collective.plan import Plan, plan
from meshwright.run.parallel.collective.record import Record
from meshwright.run.parallel.collective.team import Team
from meshwright.run.parallel.collective.turn import turn

if TYPE_CHECKING:
    from meshwright.timeline import TimelineWriter


class _Key(NamedTuple):
    elements: int
    dtype: torch.dtype
    in_place: bool


class _Prepared(NamedTuple):
    cuts: Cuts
    plan: Plan
    call: Call
    signature: int
    spots: Callable[[int, int], Spot]


class Executor:
    """One collective, ready to be run by a team again and again.

        ring = Executor(build("ring", "all_reduce", team.ranks), team)
        ring.run_in_place(tensor)
        total = ring.run(tensor)    # the input stays as it is

    A collective is proved before it runs; `proved=True` says that the caller has seen to that.
    """

    def __init__(
        self,
        collective: Collective,
        team: Team,
        *,
        reduce: Reduce = "sum",
        proved: bool = False,
        timeline: "TimelineWriter | None" = None,
    ) -> None:
        if collective.ranks != team.ranks:
            what = f"{collective.name} is for {collective.ranks} ranks, the team has {team.ranks}"
            raise InputError([Problem("collective", what, f"build it for {team.ranks} ranks")])
        self._mark = digest(collective)
        if not proved and self._mark not in team.proved:
            _prove(collective)
        team.proved.add(self._mark)
        self.collective, self.team, self._reduce = collective, team, reduce
        self._hosted = hosted(collective)
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
        elements = message_elements(
            self._hosted, rank, given=given, wanted=wanted, chunk=chunk_elements
        )
        ready = self._prepared(_Key(elements, some.dtype, False))
        sizes = ready.cuts.sizes(rank)
        _check_sizes(sizes, rank, given, wanted)
        if sizes.wanted is None:
            self._carry_out(ready, some, tensor, None)
            return None
        if out is None:
            out = some.new_empty(sizes.wanted)
        target = out
        if tensor is not None and self.collective.op in EXCHANGED and _overlap(tensor, out):
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
        if op in EXCHANGED:
            return self.run(message, message)
        _checked(message, None, rank)
        elements = in_place_elements(self._hosted, rank, message.numel())
        ready = self._prepared(_Key(elements, message.dtype, True))
        self._carry_out(ready, message, message, None)
        wanted = ready.cuts.sizes(rank).wanted
        if wanted is None:
            return None
        if wanted == elements:
            return self._averaged(message)
        start = rank * ready.cuts.part_elements
        return self._averaged(message.view(-1)[start : start + wanted])

    def _prepared(self, key: _Key) -> _Prepared:
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = self._prepare(key)
        return ready

    def _prepare(self, key: _Key) -> _Prepared:
        team, collective, elements = self.team, self._hosted, key.elements
        frame = max(1, team.frame_bytes // key.dtype.itemsize)
        call = Call(
            digest=self._mark,
            title=f"{collective.name} {collective.op}",
            dtype=str(key.dtype).removeprefix("torch."),
            elements=elements,
            reduce=self._reduce if collective.op in REDUCING else "",
            frame=frame,
            transport=team.transport,
        )
        made = plan(collective, team.rank, elements, frame=frame, in_place=key.in_place)

        @cache
        def tasks(rank: int) -> Plan:
            return plan(collective, rank, elements, frame=frame, in_place=False)

        def spot(rank: int, number: int) -> Spot:
            return tasks(rank).tasks[number].spot

        return _Prepared(Cuts(collective, elements), made, call, call.signature, spot)

    def _carry_out(
        self,
        ready: _Prepared,
        some: torch.Tensor,
        tensor: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> None:
        team = self.team
        combine = combiner(self._reduce, some.dtype)
        tensors = [(some if one is None else one).view(-1) for one in (tensor, out)]
        tensors.append(some.new_empty(ready.plan.workspace))
        with turn(team, ready.call, ready.signature, ready.spots):
            record = None
            if self._timeline is not None:
                record = Record(self._timeline, self.collective, some.dtype, team.sequence)
            team.carry_out(ready.plan, tensors, combine, signature=ready.signature, record=record)

    def _averaged(self, result: torch.Tensor) -> torch.Tensor:
        if self._reduce == "avg" and self.collective.op in REDUCING:
            result.div_(self.collective.ranks)
        return result


def execute(
    collective: Collective,
    tensor: torch.Tensor | None,
    team: Team,
    *,
    out: torch.Tensor | None = None,
    reduce: Reduce = "sum",
) -> torch.Tensor | None:
    """Carry out a collective once; keep an `Executor` where it is run again and again."""
    return Executor(collective, team, reduce=reduce).run(tensor, out)


def _prove(collective: Collective) -> None:
    proof = verify(collective)
    if not proof.sound:
        raise InputError(proof.problems)


def _checked(tensor: torch.Tensor | None, out: torch.Tensor | None, rank: int) -> torch.Tensor:
    """Return one of the tensors; raises `InputError` where they do not fit each other."""
    given = [(name, one) for name, one in (("tensor", tensor), ("out", out)) if one is not None]
    if not given:
        raise InputError([Problem("tensor", f"rank {rank} gave no tensor", "give one")])
    problems = [
        Problem(name, f"the memory of rank {rank} has gaps", f"pass {name}.contiguous()")
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


def _check_sizes(right: Sizes, rank: int, given: int | None, wanted: int | None) -> None:
    problems = [
        Problem(name, f"rank {rank} has {has:,} elements", f"use {should:,}")
        for name, has, should in (("tensor", given, right.given), ("out", wanted, right.wanted))
        if has is not None and should is not None and has != should
    ]
    if given is None and right.given:
        problems.append(Problem("tensor", f"rank {rank} gives nothing", f"give {right.given:,}"))
    if problems:
        raise InputError(problems)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
