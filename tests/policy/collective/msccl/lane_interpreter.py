"""Runs a lane program in a random order, on counters: a second opinion on `verify_program`.

It shares nothing with the proof but the meaning of steps and buffers.
"""

import random
from collections import Counter, deque

from meshwright.policy.collective.buffer_placement import BufferChunk
from meshwright.policy.collective.contract import list_input_slots
from meshwright.policy.collective.msccl.thread_block_program import (
    PIECES_IN_FLIGHT,
    ThreadBlock,
    ThreadBlockProgram,
    ThreadBlockStep,
)

Value = Counter[tuple[int, int]]
"""Contributions: (rank, slot of its input), and how often."""


class Failed(AssertionError):
    """The run hung or read what nobody wrote."""


def outputs(program: ThreadBlockProgram, seed: int, *, shared: bool) -> list[list[Value | None]]:
    """Return the outputs of every rank; raise `Failed` where the run goes wrong."""
    return _Run(program, seed, shared=shared).run()


def _index(
    program: ThreadBlockProgram, rank: int, spot: BufferChunk, *, shared: bool
) -> tuple[str, int]:
    part = program.chunks // len(program.ranks)
    if not shared or spot.buffer == "scratch":
        return spot.buffer, spot.chunk
    nested = {"all_gather": "input", "gather": "input", "reduce_scatter": "output"}
    nested["scatter"] = "output"
    return "both", spot.chunk + (rank * part if nested.get(program.op) == spot.buffer else 0)


class _Run:
    def __init__(self, program: ThreadBlockProgram, seed: int, *, shared: bool) -> None:
        self.program, self.shared = program, shared
        self.chance = random.Random(seed)
        self.memory: list[dict[tuple[str, int], Value]] = []
        for rank in range(len(program.ranks)):
            given = list_input_slots(program.specification, rank)
            self.memory.append(
                {
                    self.where(rank, BufferChunk("input", index), 0): Counter({(rank, slot): 1})
                    for index, slot in enumerate(given)
                }
            )
        self.wires: dict[tuple[int, int, int], deque[Value]] = {}
        self.told: dict[tuple[int, int], int] = {}

    def where(self, rank: int, spot: BufferChunk | None, by: int) -> tuple[str, int]:
        assert spot is not None
        moved = BufferChunk(spot.buffer, spot.chunk + by)
        return _index(self.program, rank, moved, shared=self.shared)

    def run(self) -> list[list[Value | None]]:
        lanes = [
            (rank, index, lane)
            for rank, own in enumerate(self.program.ranks)
            for index, lane in enumerate(own.thread_blocks)
        ]
        at = {(rank, index): (0, 0) for rank, index, _ in lanes}
        live = [entry for entry in lanes if entry[2].steps]
        while live:
            moved = False
            for rank, index, lane in self.chance.sample(live, len(live)):
                for _ in range(self.chance.randrange(1, 4)):
                    number, chunk = at[rank, index]
                    if number == len(lane.steps):
                        break
                    step = lane.steps[number]
                    if not self.ready(rank, lane, step, chunk):
                        break
                    self.do(rank, lane, step, chunk)
                    chunk += 1
                    moved = True
                    if chunk >= step.count:
                        if step.has_dependents and step.kind != "nop":
                            self.told[rank, index] = number
                        number, chunk = number + 1, 0
                    at[rank, index] = number, chunk
            live = [entry for entry in live if at[entry[:2]][0] < len(entry[2].steps)]
            if live and not moved:
                raise Failed("hangs")
        sizes = [own.output_chunks for own in self.program.ranks]
        return [
            [
                self.memory[rank].get(self.where(rank, BufferChunk("output", c), 0))
                for c in range(size)
            ]
            for rank, size in enumerate(sizes)
        ]

    def ready(self, rank: int, lane: ThreadBlock, step: ThreadBlockStep, chunk: int) -> bool:
        wires, room = self.wires, PIECES_IN_FLIGHT[self.program.protocol]
        wait = step.dependency if chunk == 0 else None
        if wait is not None and self.told.get((rank, wait.thread_block), -1) < wait.step:
            return False
        takes = step.kind in ("r", "rcs", "rrs", "rrc", "rrcs")
        if takes and not wires.get((lane.recv_peer, rank, lane.channel)):
            return False
        sends = step.kind in ("s", "rcs", "rrs", "rrcs")
        return not sends or len(wires.get((rank, lane.send_peer, lane.channel), ())) < room

    def do(self, rank: int, lane: ThreadBlock, step: ThreadBlockStep, chunk: int) -> None:
        if step.kind == "nop":
            return
        memory = self.memory[rank]
        value: Value = Counter()
        if step.kind in ("r", "rcs", "rrs", "rrc", "rrcs"):
            value = self.wires[lane.recv_peer, rank, lane.channel].popleft()
        if step.kind in ("s", "rrs", "rrc", "rrcs", "cpy", "re"):
            value = value + self.read(memory, self.where(rank, step.src, chunk))
        if step.kind == "re":
            value = value + self.read(memory, self.where(rank, step.dst, chunk))
        if step.kind in ("r", "rcs", "rrc", "rrcs", "cpy", "re"):
            memory[self.where(rank, step.dst, chunk)] = value
        if step.kind in ("s", "rcs", "rrs", "rrcs"):
            self.wires.setdefault((rank, lane.send_peer, lane.channel), deque()).append(value)

    def read(self, memory: dict[tuple[str, int], Value], cell: tuple[str, int]) -> Value:
        if cell not in memory:
            raise Failed(f"reads {cell}, which holds nothing")
        return memory[cell]


def promised(program: ThreadBlockProgram) -> list[list[Value] | None]:
    """Return what every rank must hold; nothing where it does not matter."""
    ranks, chunks, root, op = len(program.ranks), program.chunks, program.root, program.op
    part = chunks // ranks
    sums = [Counter({(r, c): 1 for r in range(ranks)}) for c in range(chunks)]
    gathered = [Counter({(c // max(1, part), c): 1}) for c in range(chunks)]
    rooted = [Counter({(root, c): 1}) for c in range(chunks)]
    wanted: list[list[Value] | None] = []
    for rank in range(ranks):
        own = slice(rank * part, (rank + 1) * part)
        exchanged = [Counter({(r, rank * part + c): 1}) for r in range(ranks) for c in range(part)]
        wanted.append(
            {
                "all_reduce": sums,
                "reduce": sums if rank == root else None,
                "reduce_scatter": sums[own],
                "all_gather": gathered,
                "gather": gathered if rank == root else None,
                "broadcast": rooted,
                "scatter": rooted[own],
                "all_to_all": exchanged,
            }[op]
        )
    return wanted


def right(program: ThreadBlockProgram, seed: int) -> bool:
    """Whether one random run, in each way that the program allows, gives what was promised."""
    for shared, allowed in ((False, program.out_of_place), (True, program.in_place)):
        if not allowed:
            continue
        try:
            found = outputs(program, seed, shared=shared)
        except Failed:
            return False
        for held, wanted in zip(found, promised(program), strict=True):
            if wanted is not None and held != wanted:
                return False
    return True
