"""A simulated fleet: nodes, GPUs, jobs one after the other, and what a monitor would see of them.

Samples are made each minute and rolled up to five, as the store does, with noise, minutes without a
sample, nodes whose exporter is away for a while, and nodes without profiling counters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.fleet.tables import ALLOCATIONS, EVENTS, JOBS, NODES, PROGRESS

BEGIN_S = 1_790_000_400.0
DAYS = 4
MINUTE_S = 60.0
MINUTES = DAYS * 1440
WINDOW = 5
PER_NODE = 8
GIB = float(2**30)
METRICS = ("gpu_util", "sm_active", "tensor_active", "dram_active", "fp64_active", "fp32_active",
           "memory_used", "power_w", "temperature_c", "sm_clock_mhz", "pcie_rx",
           "nvlink_tx")  # fmt: skip
HOST_METRICS = (
    "cpu_util",
    "memory_used",
    "storage_read",
    "storage_write",
    "metadata_ops",
    "io_wait",
)


class Kind(NamedTuple):
    """A kind of GPU and of the nodes it is in."""

    name: str
    memory: float
    watts: float
    clock: float
    pcie: float
    cores: float
    host_memory: float


H100 = Kind("NVIDIA H100 80GB HBM3", 80 * GIB, 700, 1980, 55e9, 128, 2048 * GIB)
A100 = Kind("NVIDIA A100-SXM4-80GB", 80 * GIB, 400, 1410, 27e9, 96, 1024 * GIB)


class Slot(NamedTuple):
    """Where and when a job runs: nodes, their GPUs, minutes."""

    places: tuple[tuple[int, tuple[int, ...]], ...]
    first: int
    last: int

    @property
    def rows(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Rows of its GPUs."""
        return np.array([node * PER_NODE + gpu for node, gpus in self.places for gpu in gpus])

    @property
    def minutes(self) -> int:
        """How long it has it."""
        return self.last - self.first

    @property
    def nodes(self) -> list[int]:
        """Its nodes."""
        return [node for node, _ in self.places]


class Label(NamedTuple):
    """A fault that was planted: its pattern, and what shows it."""

    pattern: str
    jobs: frozenset[str]
    nodes: frozenset[str]
    hours: float | None = None
    """What it cost by construction, where that is known."""
    also: tuple[str, ...] = ()
    """Patterns that the same fault is by its nature as well."""


class World:
    """Everything there is, while it is made."""

    def __init__(self, seed: int, h100: int = 20, a100: int = 8) -> None:
        self.rng = np.random.default_rng(seed)
        self.kinds = [H100] * h100 + [A100] * a100
        self.names = [f"{'h' if kind is H100 else 'a'}{at:03d}" for at, kind in
                      enumerate(self.kinds)]  # fmt: skip
        gpus = len(self.kinds) * PER_NODE
        self.free_at = np.zeros(gpus, dtype=np.int64)
        self.samples = {name: np.zeros((gpus, MINUTES), dtype=np.float32) for name in METRICS}
        self.throttle = np.zeros((gpus, MINUTES), dtype=np.int64)
        self.hosts = {name: np.zeros((len(self.kinds), MINUTES)) for name in HOST_METRICS}
        self.jobs: list[dict[str, Any]] = []
        self.held: list[dict[str, Any]] = []
        self.progress: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.nodes: list[dict[str, Any]] = []
        self.labels: list[Label] = []
        self.slow = np.ones(gpus)
        """What a hidden fault leaves of each GPU's clock."""
        self.silicon = self.rng.normal(1, 0.012, gpus)
        """Chips differ: with the same watts some clock higher than others."""
        self.closed: set[int] = set()
        self.later: list[Callable[[], None]] = []
        """What is done to the samples when all jobs have run."""
        self._rest()

    def _rest(self) -> None:
        """What GPUs and nodes show when nothing runs."""
        rng, shape = self.rng, self.samples["power_w"].shape
        for row in range(shape[0]):
            kind = self.kinds[row // PER_NODE]
            self.samples["power_w"][row] = 0.1 * kind.watts * rng.uniform(0.9, 1.2)
            self.samples["sm_clock_mhz"][row] = 0.2 * kind.clock
            self.samples["memory_used"][row] = rng.uniform(0.4, 0.7) * GIB
            self.samples["temperature_c"][row] = rng.uniform(27, 35)
        self.throttle[:] = 1
        self.hosts["cpu_util"] += rng.uniform(0.005, 0.02, (shape[0] // PER_NODE, 1))
        self.hosts["metadata_ops"] += rng.uniform(1, 10, (shape[0] // PER_NODE, 1))
        self.hosts["memory_used"] += 20 * GIB

    def kind(self, node: int) -> Kind:
        """The kind of a node."""
        return self.kinds[node]

    def place(
        self, gpus: int, minutes: int, *, nodes: int = 1, kind: Kind | None = None,
        only: list[int] | None = None, delay: int | None = None,
    ) -> Slot | None:  # fmt: skip
        """The first place where so many GPUs on so many nodes are free for so long, at random."""
        each = gpus // nodes
        able = [at for at in (only if only is not None else range(len(self.kinds)))
                if at not in self.closed and (kind is None or self.kinds[at] is kind)]  # fmt: skip
        self.rng.shuffle(able)
        if nodes > 1 and able:
            # Nobody trains over two kinds of GPU at once.
            able = [at for at in able if self.kinds[at] is self.kinds[able[0]]]
        found = []
        for at in able:
            own = self.free_at[at * PER_NODE : (at + 1) * PER_NODE]
            order = np.argsort(own, kind="stable")[:each]
            found.append((int(own[order].max()), at, tuple(sorted(order.tolist()))))
        found.sort(key=lambda one: one[0])
        chosen = found[:nodes]
        if len(chosen) < nodes:
            return None
        wait = int(self.rng.integers(3, 40)) if delay is None else delay
        first = chosen[-1][0] + wait
        slot = Slot(tuple((at, own) for _, at, own in chosen), first, first + minutes)
        if slot.last > MINUTES - 2:
            return None
        self.free_at[slot.rows] = slot.last + 2
        return slot

    def time_s(self, minute: float) -> float:
        """Seconds since 1970 of a minute."""
        return BEGIN_S + minute * MINUTE_S

    def job(self, slot: Slot, number: str = "", attempt: int = 0, **given: Any) -> str:
        """Write a job into accounting; returns its number."""
        number = number or str(10_000 + len(self.jobs))
        gpus = sum(len(own) for _, own in slot.places)
        kind = self.kinds[slot.nodes[0]]
        start = self.time_s(slot.first) + float(self.rng.uniform(0, 59))
        end = self.time_s(slot.last) - float(self.rng.uniform(0, 59))
        cpus = float(given.pop("cpus", gpus * kind.cores / PER_NODE * self.rng.uniform(0.5, 1.0)))
        asked = given.pop("memory_requested", gpus * kind.host_memory / PER_NODE
                          * self.rng.uniform(0.4, 1.0))  # fmt: skip
        row: dict[str, Any] = {
            "cluster": "sim", "job": number, "attempt": attempt, "name": f"run-{number}",
            "user": f"u{int(self.rng.integers(0, 40)):02d}", "team": "lab", "partition": "gpu",
            "qos": "normal", "state": "completed", "exit_code": 0, "signal": 0,
            "interactive": False, "submit_s": start - float(self.rng.exponential(300)),
            "start_s": start, "end_s": end,
            "time_limit_s": (end - start) * float(self.rng.uniform(1.1, 4)),
            "gpus": float(gpus), "gpu_kind": kind.name, "num_nodes": len(slot.places),
            "nodes": [self.names[at] for at in slot.nodes], "cpus": cpus,
            "memory_requested": float(asked),
            "memory_peak": float(asked * self.rng.uniform(0.35, 0.9)),
            "cpu_s": cpus * (end - start) * float(self.rng.uniform(0.1, 0.7)),
            "seen_s": end,
        }  # fmt: skip
        row |= given
        row.setdefault("eligible_s", row["submit_s"])
        self.jobs.append(row)
        self.held += [
            {"cluster": "sim", "job": number, "attempt": attempt, "node": self.names[at],
             "gpu": gpu, "start_s": start, "end_s": end, "gpu_fraction": 1.0, "seen_s": end}
            for at, own in slot.places for gpu in own
        ]  # fmt: skip
        return number

    def phase(self, number: str, phase: str, first: float, last: float, attempt: int = 0) -> None:
        """Let a job tell of a phase, in minutes."""
        self.progress.append(
            {"cluster": "sim", "job": number, "attempt": attempt, "start_s": self.time_s(first),
             "end_s": self.time_s(last), "phase": phase, "seen_s": self.time_s(last)}
        )  # fmt: skip

    def event(self, node: int, minute: float, kind: str, gpu: int | None = None, *,
              code: int | None = None, count: float = 1.0, text: str = "") -> None:  # fmt: skip
        """Let something happen."""
        self.events.append(
            {"cluster": "sim", "node": self.names[node], "gpu": gpu,
             "time_s": self.time_s(minute), "kind": kind, "code": code, "count": count,
             "text": text}
        )  # fmt: skip

    def label(
        self, pattern: str, jobs: Any = (), nodes: Any = (), *, hours: float | None = None,
        also: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Note what was planted."""
        self.labels.append(
            Label(pattern, frozenset(jobs), frozenset(self.names[at] for at in nodes), hours, also)
        )

    def stand(
        self, node: int, first: int, last: int | None, state: str, *, reason: str = "",
        partition: str = "gpu",
    ) -> None:  # fmt: skip
        """How a node stood for some time."""
        kind = self.kinds[node]
        self.nodes.append(
            {"cluster": "sim", "node": self.names[node], "since_s": self.time_s(first),
             "until_s": None if last is None else self.time_s(last), "state": state,
             "reason": reason or None, "gpus": PER_NODE, "gpu_kind": kind.name,
             "partitions": [partition], "cpus": kind.cores, "memory": kind.host_memory,
             "seen_s": self.time_s(MINUTES)}
        )  # fmt: skip

    def tables(self) -> dict[str, pa.Table]:
        """Everything as the tables of a fleet; samples as windows of five minutes."""
        told = {row["node"] for row in self.nodes}
        for at, name in enumerate(self.names):
            if name not in told:
                self.stand(at, 0, None, "up")
        named = {"jobs": (self.jobs, JOBS), "allocations": (self.held, ALLOCATIONS),
                 "nodes": (self.nodes, NODES), "events": (self.events, EVENTS),
                 "progress": (self.progress, PROGRESS)}  # fmt: skip
        found = {
            name: pa.Table.from_pylist(rows, schema=schema)
            for name, (rows, schema) in named.items()
        }
        found["gpu_samples"] = self._rolled()
        found["node_samples"] = self._host_rolled()
        return found

    def _missing(self) -> "np.ndarray[tuple[int, int], np.dtype[np.bool_]]":
        rng, gpus = self.rng, self.free_at.size
        gone = rng.random((gpus, MINUTES)) < 0.01
        for _ in range(2 * len(self.kinds)):
            node, first = int(rng.integers(len(self.kinds))), int(rng.integers(MINUTES))
            gone[
                node * PER_NODE : (node + 1) * PER_NODE, first : first + int(rng.integers(5, 60))
            ] = True
        return gone

    def _rolled(self) -> pa.Table:
        gone = self._missing()
        gpus, bins = self.free_at.size, MINUTES // WINDOW
        shape = (gpus, bins, WINDOW)
        columns: dict[str, Any] = {
            "cluster": pa.array(["sim"] * (gpus * bins)),
            "node": pa.array(np.repeat(np.array(self.names), PER_NODE * bins)),
            "gpu": np.tile(np.repeat(np.arange(PER_NODE, dtype=np.int32), bins), len(self.kinds)),
            "time_s": np.tile(BEGIN_S + np.arange(bins) * WINDOW * MINUTE_S, gpus),
        }
        # A node whose profiling counters are off, as they are by default.
        dark = len(self.kinds) - 1
        kept = (~gone).reshape(shape)
        count = kept.sum(axis=2).ravel()
        columns["count"] = count.astype(np.int32)
        for name, value in self.samples.items():
            block = np.where(gone, np.nan, value).reshape(shape)
            if name in ("sm_active", "tensor_active", "dram_active", "fp64_active", "fp32_active"):
                block[dark * PER_NODE : (dark + 1) * PER_NODE] = np.nan
            with np.errstate(invalid="ignore"):
                total = np.nansum(block, axis=2).ravel()
                known = (~np.isnan(block)).sum(axis=2).ravel()
                mean = np.where(known > 0, total / np.maximum(known, 1), np.nan)
                most = np.nanmax(np.where(np.isnan(block), -np.inf, block), axis=2).ravel()
            columns[f"{name}_mean"] = pa.array(mean, pa.float32(), from_pandas=True)
            most = np.where(np.isfinite(most), most, np.nan)
            columns[f"{name}_max"] = pa.array(most, pa.float32(), from_pandas=True)
        zero = (np.where(gone, 1.0, self.samples["gpu_util"]) == 0).reshape(shape).sum(axis=2)
        columns["gpu_util_zero"] = (zero.ravel() / np.maximum(count, 1)).astype(np.float32)
        memory = np.array([kind.memory for kind in self.kinds for _ in range(PER_NODE)])
        columns["memory_total_mean"] = np.repeat(memory, bins).astype(np.float32)
        columns["memory_total_max"] = columns["memory_total_mean"]
        bits = np.bitwise_or.reduce(np.where(gone, 0, self.throttle).reshape(shape), axis=2)
        columns["throttle_any"] = bits.ravel()
        return pa.table(columns).filter(pa.array(count > 0))

    def _host_rolled(self) -> pa.Table:
        nodes, bins = len(self.kinds), MINUTES // WINDOW
        columns: dict[str, Any] = {
            "cluster": pa.array(["sim"] * (nodes * bins)),
            "node": pa.array(np.repeat(np.array(self.names), bins)),
            "time_s": np.tile(BEGIN_S + np.arange(bins) * WINDOW * MINUTE_S, nodes),
        }
        for name, value in self.hosts.items():
            noisy = value * self.rng.normal(1, 0.05, value.shape)
            if name in ("cpu_util", "io_wait"):
                noisy = np.clip(noisy, 0, 1)
            columns[f"{name}_mean"] = noisy.reshape(nodes, bins, WINDOW).mean(axis=2).ravel()
        return pa.table(columns)
