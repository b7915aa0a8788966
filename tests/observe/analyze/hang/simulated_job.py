"""A small simulated training job whose ranks stop by planted faults, and the dumps it leaves.

Ranks lie tp fastest, then dp, then pp. Hosts enqueue ahead of their GPU until an operation whose
result they need; a GPU works its queue in order, sends aside. Nothing here knows the analysis.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

FAULTS = (
    "host stops", "gpu error", "gpu hangs, timed", "gpu hangs, untimed", "mismatch", "order",
    "dead without dump", "group crashes",
)  # fmt: skip


class Op(NamedTuple):
    """One operation of a rank's program."""

    group: str
    name: str
    shape: tuple[int, ...]
    peer: int = -1
    needs_result: bool = False


class Job:
    """Ranks, groups and programs."""

    def __init__(self, tp: int, pp: int, dp: int, rng: random.Random) -> None:
        self.world = tp * pp * dp
        self.rng = rng
        self.groups: dict[str, tuple[str, list[int]]] = {
            "0": ("default_pg", list(range(self.world)))
        }
        self.of: list[dict[str, str]] = [{"WORLD": "0"} for _ in range(self.world)]
        stage = tp * dp
        for p in range(pp):
            self._add("EXPERT", [p * stage + i for i in range(stage)])
            for d in range(dp):
                self._add("TENSOR", [p * stage + d * tp + t for t in range(tp)])
            for t in range(tp):
                self._add("DATA", [p * stage + d * tp + t for d in range(dp)])
        for i in range(stage):
            self._add("PIPELINE", [p * stage + i for p in range(pp)])
        self.programs = [self._program(rank, stage, pp, steps=3) for rank in range(self.world)]

    def _add(self, role: str, ranks: list[int]) -> None:
        name = str(len(self.groups))
        self.groups[name] = (f"{role}_PARALLEL_GROUP", ranks)
        for rank in ranks:
            self.of[rank][role] = name

    def _program(self, rank: int, stage: int, pp: int, steps: int) -> list[Op]:
        place, of, program = rank // stage, self.of[rank], []
        layer = [
            Op(of["TENSOR"], "_all_gather_base", (64, 8)),
            Op(of["EXPERT"], "_all_gather_base", (4,), needs_result=True),
            Op(of["EXPERT"], "all_to_all", (64, 8)),
            Op(of["EXPERT"], "all_to_all", (64,)),
            Op(of["TENSOR"], "_reduce_scatter_base", (64, 8)),
        ]
        for _ in range(steps):
            for way in (1, -1):
                for _ in range(3):
                    before, after = place - way, place + way
                    if 0 <= before < pp:
                        program.append(Op(of["PIPELINE"], "recv", (64, 8), rank - way * stage))
                    program += layer
                    if 0 <= after < pp:
                        program.append(Op(of["PIPELINE"], "send", (64, 8), rank + way * stage))
            program.append(Op(of["DATA"], "_reduce_scatter_base", (512,)))
            program.append(Op(of["WORLD"], "all_reduce", (1,), needs_result=True))
            program.append(Op(of["DATA"], "_all_gather_base", (256,)))
        return program


class Rank:
    """What happens on one rank."""

    def __init__(self, program: list[Op]) -> None:
        self.program = program
        self.enqueued = 0
        self.done: set[int] = set()
        self.reported: set[int] = set()
        self.host_stopped = self.gpu_stopped = self.silent = self.dead = False
        self.program_changed = False
        self.grace = 0
        """Operations a failed GPU still carries out without reporting."""
        self.head_at = 0

    def head(self) -> int | None:
        """Return the operation the GPU is at, sends aside."""
        while self.head_at < self.enqueued and (
            self.head_at in self.done or self.program[self.head_at].name == "send"
        ):
            self.head_at += 1
        return self.head_at if self.head_at < self.enqueued else None

    def finish(self, index: int) -> None:
        """Note that the GPU came through an operation."""
        self.done.add(index)
        if self.silent:
            self.grace -= 1
            self.gpu_stopped = self.gpu_stopped or self.grace <= 0
        else:
            self.reported.add(index)

    def run_host(self) -> None:
        """Enqueue one operation, if nothing keeps the host."""
        if self.host_stopped or self.enqueued >= len(self.program):
            return
        last = self.enqueued - 1
        if last >= 0 and self.program[last].needs_result and last not in self.done:
            return
        self.enqueued += 1


class Run:
    """A job on its way into a hang."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ranks = [Rank(list(program)) for program in job.programs]
        self.numbers: list[list[int]] = []
        self.renumber()

    def renumber(self) -> None:
        """Count each rank's operations within their groups, sends and receives by pair."""
        self.numbers = []
        for rank in self.ranks:
            counts: dict[tuple[object, ...], int] = {}
            numbers = []
            for op in rank.program:
                key = (op.group, op.name, op.peer) if op.peer >= 0 else (op.group,)
                counts[key] = counts.get(key, 0) + 1
                numbers.append(counts[key])
            self.numbers.append(numbers)

    def advance(self, ranks: Sequence[int]) -> bool:
        """Let some ranks go on a little; say whether anything moved."""
        moved = False
        for r in ranks:
            rank = self.ranks[r]
            before = rank.enqueued
            rank.run_host()
            moved |= rank.enqueued > before
            head = rank.head()
            if head is not None and not rank.gpu_stopped:
                moved |= self._work(r, head)
        return moved

    def _work(self, r: int, head: int) -> bool:
        op = self.ranks[r].program[head]
        if op.name == "recv":
            sender = self.ranks[op.peer]
            for index in range(sender.enqueued):
                theirs = sender.program[index]
                if theirs.name == "send" and theirs.peer == r and index not in sender.done:
                    before = [i for i in range(index) if sender.program[i].name != "send"]
                    if sender.gpu_stopped or any(i not in sender.done for i in before):
                        return False
                    self.ranks[r].finish(head)
                    sender.finish(index)
                    return True
            return False
        heads = {}
        for member in self.job.groups[op.group][1]:
            there = self.ranks[member].head()
            if there is None or self.ranks[member].gpu_stopped:
                return False
            theirs = self.ranks[member].program[there]
            same = (theirs.group, theirs.name, theirs.shape) == (op.group, op.name, op.shape)
            if not same or self.numbers[member][there] != self.numbers[r][head]:
                return False
            heads[member] = there
        for member, index in heads.items():
            self.ranks[member].finish(index)
        return True


def strike(run: Run, fault: str, rank: int) -> set[int] | None:
    """Plant a fault; return the ranks at fault, or None where it cannot be planted there."""
    rng, it = run.job.rng, run.ranks[rank]
    if fault == "host stops":
        it.host_stopped = True
    elif fault == "gpu error":
        it.silent, it.grace = True, rng.randint(2, 20)
        it.host_stopped = rng.random() < 0.5
    elif fault.startswith("gpu hangs"):
        it.gpu_stopped = True
    elif fault == "dead without dump":
        it.host_stopped = it.gpu_stopped = it.dead = True
    elif fault == "group crashes":
        group = run.job.groups[run.job.of[rank][rng.choice(("TENSOR", "EXPERT"))]][1]
        for each in group:
            strike(run, "dead without dump", each)
        return set(group)
    else:
        return _disagree(run, fault, rank)
    return {rank}


def _disagree(run: Run, fault: str, rank: int) -> set[int] | None:
    it = run.ranks[rank]
    groups = run.job.groups
    ahead = [
        index for index in range(it.enqueued, min(it.enqueued + 12, len(it.program) - 1))
        if it.program[index].peer < 0 and len(groups[it.program[index].group][1]) > 2
    ]  # fmt: skip
    if fault == "mismatch":  # rows of an uneven all-to-all may differ: its columns may not
        ahead = [
            i for i in ahead if (it.program[i].name, len(it.program[i].shape)) != ("all_to_all", 1)
        ]
    if fault == "order":
        ahead = [
            i for i in ahead
            if it.program[i + 1].peer < 0 and len(groups[it.program[i + 1].group][1]) > 2
            and it.program[i][:3] != it.program[i + 1][:3]
        ]  # fmt: skip
    if not ahead:
        return None
    at = ahead[0]
    it.program_changed = True
    if fault == "order":
        it.program[at], it.program[at + 1] = it.program[at + 1], it.program[at]
        run.renumber()
    else:
        it.program[at] = it.program[at]._replace(shape=(*it.program[at].shape[:-1], 7))
    return {rank}


class Case(NamedTuple):
    """A hang with its cause."""

    faults: tuple[str, ...]
    culprits: frozenset[int]
    dumps: dict[int, dict[str, Any]]
    world: int


def make_case(seed: int) -> Case | None:
    """Make one case; None where the fault struck too late to hold anything up."""
    rng = random.Random(seed)
    job = Job(rng.choice((1, 2, 4)), rng.choice((1, 2, 4)), rng.choice((2, 4)), rng)
    run = Run(job)
    everyone = list(range(job.world))
    for _ in range(rng.randint(20, 120)):
        run.advance(rng.sample(everyone, max(1, job.world // 2)))
    faults, culprits = [], set()
    for fault in [rng.choice(FAULTS)] if rng.random() < 0.7 else rng.choices(FAULTS[:2], k=2):
        at_fault = strike(run, fault, rng.choice([r for r in everyone if r not in culprits]))
        if at_fault is not None:
            faults.append(fault)
            culprits |= at_fault
    order = everyone[:]
    moved = True
    while moved:
        rng.shuffle(order)
        moved = run.advance(order)
    culprits = {r for r in culprits if _left_a_trace(run.ranks[r])}
    stuck = [r for r in run.ranks if len(r.done) < len(r.program) and not r.dead]
    if not culprits or not stuck or len(culprits) == job.world:
        return None
    timed = any("timed" in f and "un" not in f for f in faults)
    ring, status = rng.random() < 0.3, rng.random() < 0.8
    dumps = {
        r: _dump(run, r, timed=timed, ring=ring, status=status)
        for r in everyone if not run.ranks[r].dead
    }  # fmt: skip
    return Case(tuple(faults), frozenset(culprits), dumps, job.world)


def _left_a_trace(rank: Rank) -> bool:
    """Tell whether a fault changed anything: a rank already held up by others shows none."""
    if rank.dead or rank.gpu_stopped or rank.program_changed:
        return True
    if rank.done != rank.reported:
        return True
    last = rank.enqueued - 1
    kept = last >= 0 and rank.program[last].needs_result and last not in rank.done
    return rank.host_stopped and not kept and rank.enqueued < len(rank.program)


def _dump(run: Run, r: int, *, timed: bool, ring: bool, status: bool) -> dict[str, Any]:
    rank, job = run.ranks[r], run.job
    head = rank.head()
    mine = {name: group for name, group in job.groups.items() if r in group[1]}
    entries = []
    counters: dict[str, list[int]] = {}
    for index in range(rank.enqueued):
        op, number = rank.program[index], run.numbers[r][index]
        done = index in rank.reported
        count = counters.setdefault(op.group, [-1, -1, -1])
        count[0] = number
        if done:
            count[2] = number
        if done and not (ring and index > rank.enqueued - 30):
            continue
        at_it = index == head or (op.name == "send" and (head is None or index < head))
        began = timed and not done and at_it and not rank.gpu_stopped
        place = job.groups[op.group][1].index
        name = f"nccl:{op.name}"
        if op.peer >= 0:
            arrow = "->" if op.name == "send" else "<-"
            name += f" {place(r)}{arrow}{place(op.peer)}"
        entries.append(
            {
                "record_id": index, "pg_id": int(op.group),
                "process_group": (op.group, job.groups[op.group][0]),
                "collective_seq_id": 0 if op.peer >= 0 else number,
                "p2p_seq_id": number if op.peer >= 0 else 0,
                "profiling_name": name, "is_p2p": op.peer >= 0,
                "state": "completed" if done else "started" if began else "scheduled",
                "time_created_ns": 1000 + index,
                "time_discovered_started_ns": 1 if began or (done and timed) else None,
                "time_discovered_completed_ns": 2000 + index if done else None,
                "input_sizes": [list(op.shape)], "output_sizes": [list(op.shape)],
                "input_dtypes": ["BFloat16"], "output_dtypes": ["BFloat16"],
            }
        )  # fmt: skip
    found: dict[str, Any] = {
        "version": "2.9",
        "pg_config": {
            name: {"name": name, "desc": group[0], "ranks": str(group[1])}
            for name, group in mine.items()
        },
        "entries": entries,
    }
    if status:
        found["pg_status"] = {
            name: dict(
                zip(
                    ("last_enqueued_collective", "last_started_collective",
                     "last_completed_collective"),
                    counters.get(name, [-1, -1, -1]),
                    strict=True,
                )
            )
            for name in mine
        }  # fmt: skip
    return found


def hangs(seeds: Iterable[int], *, delete: bool) -> Iterator[tuple[Case, dict[int, Any]]]:
    """Yield cases with their dumps; `delete` takes one culprit's away, where others are enough."""
    for seed in seeds:
        case = make_case(seed)
        if case is None:
            continue
        dumps = dict(case.dumps)
        if delete:
            present = sorted(case.culprits & dumps.keys())
            if not present or len(dumps) < 4:
                continue
            del dumps[present[seed % len(present)]]
        yield case, dumps


def tally(score: Counter[str], named: set[int], case: Case) -> None:
    """Count a case: exactly named, rightly, wrongly and not named ranks."""
    score["cases"] += 1
    score["exact"] += named == case.culprits
    score["right"] += len(named & case.culprits)
    score["wrong"] += len(named - case.culprits)
    score["missed"] += len(case.culprits - named)
