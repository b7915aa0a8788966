"""Runs an MSCCL++ execution plan on symbols, from the plan's text alone and in a random order.

A reading of its own of the executor: thread blocks go through their operations, puts through ports
happen some time later, and only signals, waits, flushes and semaphores order anything.
"""

import json
import random
from collections import Counter, deque
from typing import Any

Value = Counter[tuple[int, int]]
"""Contributions: (rank, chunk of its input), and how often."""
Cell = tuple[int, str, int]


class Stuck(AssertionError):
    """No thread block can go on."""


class Interpreter:
    def __init__(self, text: str, seed: int) -> None:
        self.plan = json.loads(text)
        self.chance = random.Random(seed)
        self.gpus: list[dict[str, Any]] = self.plan["gpus"]
        self.memory: dict[Cell, Value] = {}
        self.inbound: Counter[tuple[int, str, int]] = Counter()
        self.semaphores = {
            (gpu["id"], index): entry["init_value"]
            for gpu in self.gpus
            for index, entry in enumerate(gpu["semaphores"])
        }
        self.ends = self._pair()
        self.ports: dict[tuple[int, int], deque[tuple[list[Cell], list[Cell], bool]]] = {}
        for gpu in self.gpus:
            for index in range(gpu["input_chunks"]):
                cell = self.cell(gpu["id"], "i", index)
                self.memory[cell] = Counter({(gpu["id"], index): 1})

    def _pair(self) -> dict[tuple[int, str, int], tuple[int, str, int]]:
        """The n-th channel of a sort from a to b belongs to the n-th from b to a."""
        by_peer: dict[tuple[int, int, str], list[int]] = {}
        for gpu in self.gpus:
            for entry in gpu["channels"]:
                if entry["channel_type"] != "switch":
                    for number, peer in enumerate(entry["connected_to"]):
                        key = gpu["id"], peer, entry["channel_type"]
                        by_peer.setdefault(key, []).append(number)
        return {
            (rank, kind, number): (peer, kind, by_peer[peer, rank, kind][index])
            for (rank, peer, kind), numbers in by_peer.items()
            for index, number in enumerate(numbers)
        }

    def cell(self, rank: int, letter: str, index: int) -> Cell:
        gpu = self.gpus[rank]
        sizes = {"i": "input_chunks", "o": "output_chunks", "s": "scratch_chunks"}
        assert 0 <= index < gpu[sizes[letter]], f"rank {rank}: {letter}[{index}] is outside"
        if self.plan["inplace"] and letter != "s":
            ins, outs = gpu["input_chunks"], gpu["output_chunks"]
            inside = (ins < outs and letter == "i") or (outs < ins and letter == "o")
            return rank, "shared", index + (rank * min(ins, outs) if inside else 0)
        return rank, letter, index

    def run(self) -> None:
        blocks = [(gpu["id"], block) for gpu in self.gpus for block in gpu["threadblocks"]]
        for _, block in blocks:
            assert len(block["ops"]) <= 64
        at = [0] * len(blocks)
        live = list(range(len(blocks)))
        while live or any(self.ports.values()):
            moved = False
            for number in self.chance.sample(live, len(live)):
                rank, block = blocks[number]
                burst = self.chance.randrange(1, 4)
                while burst and at[number] < len(block["ops"]):
                    if not self._ready(rank, block, block["ops"][at[number]]):
                        break
                    self._do(rank, block, block["ops"][at[number]])
                    at[number] += 1
                    burst, moved = burst - 1, True
            for key, queue in self.ports.items():
                moved = moved or bool(queue)
                if queue and self.chance.random() < 0.3:
                    self._carry(key)
            live = [number for number in live if at[number] < len(blocks[number][1]["ops"])]
            if live and not moved:
                raise Stuck
        assert not any(self.inbound.values()), "a signal is left over for the next run"
        assert not any(self.semaphores.values()), "a semaphore is left changed"

    def _ends(self, rank: int, block: dict[str, Any], op: dict[str, Any]) -> list[Any]:
        kind = op["channel_type"]
        (known,) = [c for c in block["channels"] if c["channel_type"] == kind]
        return [(rank, kind, known["channel_ids"][number]) for number in op["channel_ids"]]

    def _ready(self, rank: int, block: dict[str, Any], op: dict[str, Any]) -> bool:
        if op["name"] == "wait":
            return all(self.inbound[end] for end in self._ends(rank, block, op))
        if op["name"] == "sem_acquire":
            return all(self.semaphores[rank, number] > 0 for number in op["semaphore_ids"])
        if op["name"] == "nop":
            # A flush keeps its thread until everything before has left.
            return not any(
                flush
                for entry in block["channels"]
                if entry["channel_type"] == "port"
                for number in entry["channel_ids"]
                for _, _, flush in self.ports.get((rank, number), ())
            )
        return True

    def _do(self, rank: int, block: dict[str, Any], op: dict[str, Any]) -> None:
        name = op["name"]
        if name == "wait":
            self.inbound.subtract(self._ends(rank, block, op))
        elif name == "signal":
            self.inbound.update(self.ends[end] for end in self._ends(rank, block, op))
        elif name in ("sem_acquire", "sem_release"):
            for number in op["semaphore_ids"]:
                self.semaphores[rank, number] += 1 if name == "sem_release" else -1
        elif name == "copy":
            self._move(*self._pairs(rank, block, op))
        elif name == "put":
            assert op["channel_type"] == "memory"
            self._move(*self._pairs(rank, block, op))
        elif name in ("pws", "pwsf"):
            (end,) = self._ends(rank, block, op)
            job = (*self._pairs(rank, block, op), name == "pwsf")
            self.ports.setdefault((rank, end[2]), deque()).append(job)
        elif name == "re":
            (target,) = op["dst_buff"]
            for index in range(target["size"]):
                total: Value = Counter()
                for source in op["src_buff"]:
                    assert source["size"] == target["size"]
                    total.update(self._read(self._own(rank, source, index)))
                self.memory[self._own(rank, target, index)] = total
        elif name in ("glres", "gstore"):
            self._switch(rank, block, op)
        else:
            assert name == "nop", name

    def _carry(self, key: tuple[int, int]) -> None:
        sources, targets, _ = self.ports[key].popleft()
        self._move(sources, targets)
        self.inbound[self.ends[key[0], "port", key[1]]] += 1

    def _move(self, sources: list[Cell], targets: list[Cell]) -> None:
        values = [self._read(cell) for cell in sources]
        self.memory.update(zip(targets, values, strict=True))

    def _read(self, cell: Cell) -> Value:
        assert cell in self.memory, f"{cell} holds nothing yet"
        return self.memory[cell]

    def _own(self, rank: int, buffer: dict[str, Any], index: int) -> Cell:
        return self.cell(rank, buffer["type"], buffer["index"] + index)

    def _pairs(self, rank: int, block: dict[str, Any], op: dict[str, Any]) -> Any:
        (source,), (target,) = op["src_buff"], op["dst_buff"]
        assert source["size"] == target["size"]
        sources = [self._own(rank, source, index) for index in range(source["size"])]
        if "type" in target:
            return sources, [self._own(rank, target, index) for index in range(target["size"])]
        (refs,) = block["remote_buffer_refs"]
        assert refs["access_channel_type"] == op["channel_type"]
        remote = self.gpus[rank]["remote_buffers"][refs["remote_buffer_ids"][target["buffer_id"]]]
        assert op["channel_type"] in remote["access_channel_types"]
        targets = [
            self.cell(remote["rank"], remote["type"], target["index"] + index)
            for index in range(target["size"])
        ]
        return sources, targets

    def _switch(self, rank: int, block: dict[str, Any], op: dict[str, Any]) -> None:
        switches = [c for c in self.gpus[rank]["channels"] if c["channel_type"] == "switch"]
        (known,) = [c for c in block["channels"] if c["channel_type"] == "switch"]
        (source,), (target,) = op["src_buff"], op["dst_buff"]
        there = switches[known["channel_ids"][target["switch_channel_id"]]]
        (group,) = there["rank_groups"]
        for index in range(target["size"]):
            if op["name"] == "gstore":
                value = self._read(self._own(rank, source, index))
            else:
                here = switches[known["channel_ids"][source["switch_channel_id"]]]
                value = Counter()
                for member in here["rank_groups"][0]["ranks"]:
                    letter = here["buffer_type"]
                    value.update(self._read(self.cell(member, letter, source["index"] + index)))
            for member in group["ranks"]:
                cell = self.cell(member, there["buffer_type"], target["index"] + index)
                self.memory[cell] = value

    def outputs(self, rank: int) -> list[Value]:
        gpu = self.gpus[rank]
        return [
            self.memory.get(self.cell(rank, "o", index), Counter())
            for index in range(gpu["output_chunks"])
        ]


def expected(op: str, ranks: int, chunks: int, rank: int, root: int) -> list[Value] | None:
    """What must lie in the output of a rank; nothing where it does not matter."""
    part = chunks // ranks
    everyone = range(ranks)
    if op == "all_reduce" or (op == "reduce" and rank == root):
        return [Counter({(r, c): 1 for r in everyone}) for c in range(chunks)]
    if op == "reduce":
        return None
    if op == "reduce_scatter":
        own = range(rank * part, (rank + 1) * part)
        return [Counter({(r, c): 1 for r in everyone}) for c in own]
    if op == "all_gather":
        return [Counter({(r, c): 1}) for r in everyone for c in range(part)]
    if op == "broadcast":
        return [Counter({(root, c): 1}) for c in range(chunks)]
    assert op == "all_to_all"
    return [Counter({(r, rank * part + c): 1}) for r in everyone for c in range(part)]
