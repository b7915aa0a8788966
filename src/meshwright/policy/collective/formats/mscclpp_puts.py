"""Thread blocks of an MSCCL++ plan for lanes of sends and receives: puts, signals and waits."""

from collections import Counter
from typing import Any, NamedTuple

from meshwright.policy.collective.buffer_placement import BufferChunk, BufferKind
from meshwright.policy.collective.msccl.program_walk import (
    UNLIMITED_BUFFER,
    ConnectionKey,
    walk_program,
)
from meshwright.policy.collective.msccl.symbolic_run import Cell, SymbolicRun
from meshwright.policy.collective.msccl.thread_block_program import (
    DST_WRITING_KINDS,
    RECEIVING_KINDS,
    SRC_READING_KINDS,
    StepDependency,
    ThreadBlock,
    ThreadBlockProgram,
    ThreadBlockStep,
)

Json = dict[str, Any]
BUFFER_LETTERS: dict[BufferKind, str] = {"input": "i", "output": "o", "scratch": "s"}
MAX_SEMAPHORES = 16
"""Semaphores of an operation (MAX_DEVICE_SEMAPHORES)."""
NOP: Json = {"name": "nop"}
"""All threads of the block meet."""


class MscclppPlan(NamedTuple):
    """The part of a plan that the algorithm decides."""

    gpus: list[Json]
    max_block_operations: int
    """The most operations of a thread block."""
    max_buffer_chunks: int
    """Chunks of the largest buffer."""


class PutTarget(NamedTuple):
    """Where a message is put at its receiver."""

    chunk: BufferChunk
    needs_ready_signal: bool
    """Whether the sender must wait until the receiver says that it may."""


def build_put_plan(program: ThreadBlockProgram, per_node: int, *, shared: bool) -> MscclppPlan:
    """Return the plan of a program whose lanes send or receive, never both."""
    landings, scratch = _landings(program, shared=shared)
    wires = _Wires(program, per_node)
    gpus: list[Json] = []
    for rank, own in enumerate(program.ranks):
        blocks = _Rank(program, rank, wires, landings).blocks()
        gpus.append(
            {
                "id": rank,
                "input_chunks": count_buffer_chunks(program, rank)[0],
                "output_chunks": count_buffer_chunks(program, rank)[1],
                "scratch_chunks": own.scratch_chunks + scratch[rank],
                "threadblocks": blocks.threadblocks,
                "channels": wires.channels(rank),
                "remote_buffers": blocks.remote_buffers,
                "semaphores": [{"init_value": 0} for _ in blocks.semaphores],
            }
        )
    longest = max((len(block["ops"]) for gpu in gpus for block in gpu["threadblocks"]), default=0)
    sizes = ("input_chunks", "output_chunks", "scratch_chunks")
    return MscclppPlan(gpus, longest, max(gpu[size] for gpu in gpus for size in sizes))


def count_buffer_chunks(program: ThreadBlockProgram, rank: int) -> tuple[int, int]:
    """Return the chunks of input and output. The executor divides by both, so none may be 0."""
    own = program.ranks[rank]
    if program.op in ("broadcast", "reduce"):
        return program.chunks, program.chunks
    return own.input_chunks, own.output_chunks


def _landings(
    program: ThreadBlockProgram, *, shared: bool
) -> tuple[dict[tuple[ConnectionKey, int], PutTarget], Counter[int]]:
    """Return where each message of each link lands, and the further scratch chunks of ranks."""
    run = SymbolicRun(program, shared=shared)
    landings: dict[tuple[ConnectionKey, int], PutTarget] = {}
    further: Counter[int] = Counter()
    met: Counter[ConnectionKey] = Counter()
    touched: set[Cell] = set()
    # In a program without races, any order of running has conflicting accesses in their true order.
    for unit in walk_program(program, UNLIMITED_BUFFER).order:
        lane = program.ranks[unit.rank].thread_blocks[unit.thread_block]
        step = lane.steps[unit.step]
        spots = [step.src] if step.kind in SRC_READING_KINDS else []
        spots += [step.dst] if step.kind in DST_WRITING_KINDS else []
        cells = {
            run.get_memory_cell(unit.rank, spot, index)
            for spot in spots
            if spot is not None
            for index in range(step.count)
        }
        if step.kind in RECEIVING_KINDS and step.dst is not None:
            link = lane.recv_peer, unit.rank, lane.channel
            number = met[link]
            met[link] += 1
            if step.kind == "r":
                landings[link, number] = PutTarget(step.dst, not number or bool(cells & touched))
            else:
                first = program.ranks[unit.rank].scratch_chunks + further[unit.rank]
                further[unit.rank] += step.count
                landings[link, number] = PutTarget(BufferChunk("scratch", first), not number)
        touched |= cells
    return landings, further


class _Wires:
    """Channels between ranks: one at each end of a link, in the same order at both ends."""

    def __init__(self, program: ThreadBlockProgram, per_node: int) -> None:
        self.per_node = per_node
        self._peers: dict[tuple[int, str], list[int]] = {}
        self._ids: dict[tuple[int, ConnectionKey], int] = {}
        links = {
            (rank, lane.send_peer, lane.channel)
            for rank, own in enumerate(program.ranks)
            for lane in own.thread_blocks
            if lane.send_peer >= 0
        }
        for link in sorted(links):
            src, dst, _ = link
            for rank, peer in ((src, dst), (dst, src)):
                peers = self._peers.setdefault((rank, self.kind(link)), [])
                self._ids[rank, link] = len(peers)
                peers.append(peer)

    def kind(self, link: ConnectionKey) -> str:
        """Return the sort of channel that a link uses."""
        return "memory" if link[0] // self.per_node == link[1] // self.per_node else "port"

    def number(self, rank: int, link: ConnectionKey) -> int:
        """Return the number of the channel at one end of a link."""
        return self._ids[rank, link]

    def channels(self, rank: int) -> list[Json]:
        """Return the channels of a rank as the plan lists them."""
        return [
            {"channel_type": kind, "connected_to": self._peers[rank, kind]}
            for kind in ("memory", "port")
            if (rank, kind) in self._peers
        ]


class _Rank:
    """Writes the thread blocks of one rank."""

    def __init__(
        self,
        program: ThreadBlockProgram,
        rank: int,
        wires: _Wires,
        landings: dict[tuple[ConnectionKey, int], PutTarget],
    ) -> None:
        self.rank, self.wires, self.landings = rank, wires, landings
        self.lanes = program.ranks[rank].thread_blocks
        self.threadblocks: list[Json] = []
        self.remote_buffers: list[Json] = []
        self.semaphores: dict[tuple[int, int], int] = {}
        self._waiters: dict[StepDependency, list[int]] = {}

    def blocks(self) -> "_Rank":
        for index, lane in enumerate(self.lanes):
            for step in lane.steps:
                if step.dependency is not None:
                    self.semaphores.setdefault(
                        (step.dependency.thread_block, index), len(self.semaphores)
                    )
                    self._waiters.setdefault(step.dependency, []).append(index)
        for index, lane in enumerate(self.lanes):
            self.threadblocks.append(self._block(index, lane))
        return self

    def _block(self, index: int, lane: ThreadBlock) -> Json:
        sends = lane.send_peer >= 0
        link = (
            (self.rank, lane.send_peer, lane.channel)
            if sends
            else (lane.recv_peer, self.rank, lane.channel)
        )
        ops: list[Json] = []
        remote: list[int] = []
        held: list[int] = []
        message = 0
        last = max((n for n, step in enumerate(lane.steps) if step.kind == "s"), default=-1)
        for number, step in enumerate(lane.steps):
            if step.dependency is not None:
                held.append(self.semaphores[step.dependency.thread_block, index])
            if step.kind == "nop":
                continue
            if held:
                ops += [*_semaphores("sem_acquire", held), NOP]
                held = []
            if step.kind == "s":
                landing = self.landings[link, message]
                flush = step.has_dependents or number == last
                ops += self._send(step, link, landing, remote, flush=flush)
            elif step.kind in RECEIVING_KINDS:
                ops += self._receive(step, link, self.landings[link, message])
            else:
                ops += [_local(step), NOP]
            message += step.kind == "s" or step.kind in RECEIVING_KINDS
            waiters = self._waiters.get(StepDependency(index, number), [])
            if waiters:
                numbers = [self.semaphores[index, waiter] for waiter in waiters]
                ops += [NOP, *_semaphores("sem_release", numbers)]
        kind = self.wires.kind(link) if lane.send_peer >= 0 or lane.recv_peer >= 0 else ""
        return {
            "id": index,
            "ops": _met_once(ops),
            "channels": [
                {"channel_type": kind, "channel_ids": [self.wires.number(self.rank, link)]}
            ]
            if kind
            else [],
            "remote_buffer_refs": [{"access_channel_type": kind, "remote_buffer_ids": remote}]
            if remote
            else [],
        }

    def _send(
        self,
        step: ThreadBlockStep,
        link: ConnectionKey,
        landing: PutTarget,
        remote: list[int],
        *,
        flush: bool,
    ) -> list[Json]:
        kind = self.wires.kind(link)
        channel: Json = {"channel_ids": [0], "channel_type": kind}
        buffer = self._remote(link[1], landing.chunk.buffer, kind)
        if buffer not in remote:
            remote.append(buffer)
        moved: Json = {
            "src_buff": [encode_chunk(step.src, step.count)],
            "dst_buff": [
                {
                    "buffer_id": remote.index(buffer),
                    "index": landing.chunk.chunk,
                    "size": step.count,
                }
            ],
        }
        ops = [{"name": "wait", **channel}, NOP] if landing.needs_ready_signal else []
        if kind == "memory":
            put = {"name": "put", **moved, "channel_type": kind}
            return [*ops, put, NOP, {"name": "signal", **channel}]
        # A port reads the chunk later, so it is flushed before anyone may overwrite it.
        return [*ops, {"name": "pwsf" if flush else "pws", **moved, **channel}]

    def _receive(
        self, step: ThreadBlockStep, link: ConnectionKey, landing: PutTarget
    ) -> list[Json]:
        channel: Json = {"channel_ids": [0], "channel_type": self.wires.kind(link)}
        ops: list[Json] = [{"name": "signal", **channel}] if landing.needs_ready_signal else []
        ops += [{"name": "wait", **channel}, NOP]
        if step.kind == "rrc":
            addends = [encode_chunk(step.src, step.count), encode_chunk(landing.chunk, step.count)]
            ops += [_sum(addends, encode_chunk(step.dst, step.count)), NOP]
        return ops

    def _remote(self, rank: int, buffer: BufferKind, kind: str) -> int:
        entry = {"rank": rank, "type": BUFFER_LETTERS[buffer], "access_channel_types": [kind]}
        if entry not in self.remote_buffers:
            self.remote_buffers.append(entry)
        return self.remote_buffers.index(entry)


def encode_chunk(spot: BufferChunk | None, size: int) -> Json:
    """Return chunks of a rank's own buffer as the plan names them."""
    assert spot is not None
    return {"type": BUFFER_LETTERS[spot.buffer], "index": spot.chunk, "size": size}


def _local(step: ThreadBlockStep) -> Json:
    target = encode_chunk(step.dst, step.count)
    if step.kind == "re":
        return _sum([target, encode_chunk(step.src, step.count)], target)
    return {"name": "copy", "src_buff": [encode_chunk(step.src, step.count)], "dst_buff": [target]}


def _sum(addends: list[Json], target: Json) -> Json:
    return {"name": "re", "src_buff": addends, "dst_buff": [target], "reduce_op": "sum"}


def _semaphores(name: str, numbers: list[int]) -> list[Json]:
    """Return operations on semaphores, as many at once as one operation holds."""
    return [
        {"name": name, "semaphore_ids": numbers[first : first + MAX_SEMAPHORES]}
        for first in range(0, len(numbers), MAX_SEMAPHORES)
    ]


def _met_once(ops: list[Json]) -> list[Json]:
    """Leave out meetings of all threads right after another."""
    return [op for index, op in enumerate(ops) if op != NOP or not index or ops[index - 1] != NOP]
