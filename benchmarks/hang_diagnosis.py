"""How often the ranks that hung simulated jobs are named, and what reading dumps costs."""

import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.result import figure
from meshwright.observe.analyze.hang import diagnose_hang
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import (
    DumpSet,
    parse_dump,
    read_flight_recorder,
)
from tests.observe.analyze.hang.simulated_job import hangs, tally

NAME = "hang_diagnosis"
QUESTION = "How often are the ranks that hung a job named, and how long does that take?"

FIRST_SEED = 1_000
"""The tests look at the seeds below."""
RANKS, ENTRIES = 16, 2_000
SAME = "gpu hangs, untimed"
"""Without timing such a rank looks like all its peers: judged apart."""


def named(dumps: Mapping[int, Any]) -> set[int]:
    """Return the ranks that are named as culprits."""
    read = tuple(parse_dump(data, f"d_{rank}", rank, 10**6) for rank, data in sorted(dumps.items()))
    return {each.rank for each in diagnose_hang(DumpSet(read, {}, ())).culprits}


def count(cases: int, *, delete: bool) -> dict[bool, Counter[str]]:
    """Judge simulated hangs; by whether it is the fault that cannot be told."""
    scores = {True: Counter[str](), False: Counter[str]()}
    for case, dumps in hangs(range(FIRST_SEED, FIRST_SEED + cases), delete=delete):
        tally(scores[SAME in case.faults], named(dumps), case)
    return scores


def ring(rank: int) -> dict[str, Any]:
    """Return a full ring of one rank: all has ended but the last, which rank 3 never enqueued."""
    enqueued = ENTRIES - 1 if rank == 3 else ENTRIES
    entries = [
        {
            "record_id": 10**5 + number, "pg_id": 0, "process_group": ("0", "default_pg"),
            "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number,
            "profiling_name": "nccl:all_reduce", "time_created_ns": 10**18 + 10**6 * number,
            "input_sizes": [[4096, number % 7]], "input_dtypes": ["BFloat16"],
            "output_sizes": [[4096, number % 7]], "output_dtypes": ["BFloat16"],
            "state": "completed" if number < ENTRIES - 1 else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns":
                10**18 + 10**6 * number + 5_000 if number < ENTRIES - 1 else None,
            "retired": number < ENTRIES - 1, "timeout_ms": 600_000, "is_p2p": False,
            "frames": _FRAMES[number % 8 :],
        }
        for number in range(enqueued)
    ]  # fmt: skip
    world = {"name": "0", "desc": "default_pg", "ranks": str(list(range(RANKS)))}
    return {"version": "2.10", "pg_config": {"0": world}, "pg_status": {}, "entries": entries}


_FRAMES = [{"name": f"f{n}", "filename": "/jobs/train.py", "line": n} for n in range(24)]


def rings_s(repeats: int) -> float:
    """Return the least CPU seconds of reading full rings and naming the culprit."""
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(RANKS):
            raw = pickle.dumps(ring(rank), 2)
            Path(folder, f"nccl_trace_rank_{rank}").write_bytes(raw)
        spent = []
        for _ in range(repeats):
            began = time.process_time()
            verdict = diagnose_hang(read_flight_recorder([folder]))
            spent.append(time.process_time() - began)
            if [each.rank for each in verdict.culprits] != [3]:
                sys.exit("the rank that stopped was not named")
    return min(spent)


def measure(quick: bool) -> dict[str, object]:
    """Measure and return the figures."""
    cases = 100 if quick else 1_300
    figures = []
    for title, delete in (("", False), (", a culprit's dump deleted", True)):
        scores = count(cases, delete=delete)
        told = scores[False]
        figures += [
            figure(f"simulated hangs{title}", told["cases"], "jobs"),
            figure(f"named exactly{title}", 100 * told["exact"] / told["cases"], "%"),
            figure(f"precision{title}", 100 * told["right"] / (told["right"] + told["wrong"]), "%"),
            figure(f"recall{title}", 100 * told["right"] / (told["right"] + told["missed"]), "%"),
        ]
        same = scores[True]
        if not delete and same["cases"]:
            figures += [
                figure("GPUs that hung without timing", same["cases"], "jobs"),
                figure("of these named alone", 100 * same["exact"] / same["cases"], "%"),
                figure("of these not named", same["missed"], "ranks"),
            ]
    title = f"{RANKS} full rings of {ENTRIES:,} entries, read and judged"
    figures.append(figure(title, rings_s(1 if quick else 5), "cpu-s", "< 1"))
    return {
        "figures": figures,
        "notes": "Jobs of 2 to 64 ranks with one planted fault of eight kinds, or two; the "
        "simulator knows nothing of the analysis. CPU seconds are the least of five, pickles with "
        "stacks.",
    }
