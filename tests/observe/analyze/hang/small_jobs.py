"""Small jobs written by hand: who enqueued what in which group, and what each rank saw end."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from meshwright.observe.analyze.hang import DumpDiagnosis, diagnose_hang
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import DumpSet, parse_dump

Groups = Mapping[str, tuple[str, tuple[int, ...]]]


class SmallJob:
    """Ranks in groups; each call adds one operation to some ranks' dumps."""

    def __init__(self, world: int, groups: Groups | None = None) -> None:
        self.world = world
        self.groups: dict[str, tuple[str, tuple[int, ...]]] = {
            "0": ("default_pg", tuple(range(world))), **(groups or {}),
        }  # fmt: skip
        self.entries: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(world)}
        self._counts: dict[tuple[int, str, bool], int] = defaultdict(int)
        self._records: dict[int, int] = defaultdict(int)

    def collective(
        self, name: str, group: str = "0", *, ranks: Iterable[int] | None = None,
        done: Collection[int] | bool = False, first: Mapping[str, int] | None = None, **more: Any,
    ) -> "SmallJob":  # fmt: skip
        """Let ranks enqueue a collective; `done` are those that saw it end."""
        for rank in self.groups[group][1] if ranks is None else ranks:
            self._counts[rank, group, False] += 1
            number = self._counts[rank, group, False] + (first or {}).get(group, 0)
            ended = done if isinstance(done, bool) else rank in done
            self._add(rank, group, f"nccl:{name}", ended, collective_seq_id=number, **more)
        return self

    def send(
        self, source: int, target: int, group: str = "0", *, done: bool = False, **more: Any
    ) -> "SmallJob":
        """Let a rank enqueue a send."""
        return self._p2p(source, ("send", "->", target), group, done=done, **more)

    def receive(
        self, target: int, source: int, group: str = "0", *, done: bool = False, **more: Any
    ) -> "SmallJob":
        """Let a rank enqueue a receive."""
        return self._p2p(target, ("recv", "<-", source), group, done=done, **more)

    def _p2p(
        self, rank: int, what: tuple[str, str, int], group: str, *, done: bool, **more: Any
    ) -> "SmallJob":
        name, arrow, peer = what
        place = self.groups[group][1].index
        self._counts[rank, group, True] += 1
        title = f"nccl:{name} {place(rank)}{arrow}{place(peer)}"
        number = self._counts[rank, group, True]
        self._add(rank, group, title, done, is_p2p=True, p2p_seq_id=number, **more)
        return self

    def _add(self, rank: int, group: str, title: str, done: bool, **more: Any) -> None:
        record = self._records[rank]
        self._records[rank] += 1
        self.entries[rank].append(
            {
                "record_id": record, "pg_id": int(group), "collective_seq_id": 0, "p2p_seq_id": 0,
                "process_group": (group, self.groups[group][0]), "profiling_name": title,
                "is_p2p": False, "state": "completed" if done else "scheduled",
                "time_created_ns": 1_000 + record,
                "time_discovered_completed_ns": 2_000 if done else None,
                "input_sizes": [[8]], "output_sizes": [[8]], "input_dtypes": ["Float"],
                "output_dtypes": ["Float"], "retired": done,
            }
            | more
        )  # fmt: skip

    def dump(self, rank: int, **more: Any) -> dict[str, Any]:
        """Return one rank's dump."""
        mine = {name: group for name, group in self.groups.items() if rank in group[1]}
        config = {
            name: {"name": name, "desc": group[0], "ranks": str(list(group[1]))}
            for name, group in mine.items()
        }
        return {"version": "2.9", "pg_config": config, "entries": self.entries[rank]} | more

    def verdict(self, *, without: Collection[int] = ()) -> DumpDiagnosis:
        """Diagnose the dumps."""
        read = tuple(
            parse_dump(self.dump(rank), f"d_{rank}", rank, 10**6)
            for rank in range(self.world)
            if rank not in without
        )
        return diagnose_hang(DumpSet(read, {}, ()))

    def culprits(self, *, without: Collection[int] = ()) -> dict[int, str]:
        """Return who is named, and for what."""
        return {each.rank: each.kind for each in self.verdict(without=without).culprits}
