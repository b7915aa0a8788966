"""Small dumps and snapshots, made by hand: what the readers' tests and the fuzzer start from."""

from typing import Any

STACK = [
    {"name": "forward", "filename": "/jobs/mine/model.py", "line": 12},
    {"name": "_call_impl", "filename": "/x/site-packages/torch/nn/modules/module.py", "line": 9},
]


def entry(record: int, **changes: Any) -> dict[str, Any]:
    """Make one entry of a flight-recorder dump: a pending all-reduce of the world."""
    made = {
        "record_id": record, "pg_id": 0, "process_group": ("0", "default_pg"),
        "collective_seq_id": record, "p2p_seq_id": 0, "op_id": record,
        "profiling_name": "nccl:all_reduce", "time_created_ns": 1_000 + record,
        "input_sizes": [[4, 2]], "input_dtypes": ["Float"], "output_sizes": [[4, 2]],
        "output_dtypes": ["Float"], "state": "scheduled", "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None, "retired": False, "timeout_ms": 600_000,
        "is_p2p": False,
    }  # fmt: skip
    return made | changes


def dump(entries: list[dict[str, Any]], world: int = 4, **changes: Any) -> dict[str, Any]:
    """Make a flight-recorder dump of a job with one group."""
    last = max((each["collective_seq_id"] for each in entries), default=0)
    made: dict[str, Any] = {
        "version": "2.9",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}},
        "pg_status": {
            "0": {
                "last_enqueued_collective": last,
                "last_started_collective": -1,
                "last_completed_collective": last - len(entries),
            }
        },
        "entries": entries,
    }
    return made | changes


def event(action: str, address: int, size: int, **changes: Any) -> dict[str, Any]:
    """Make one event of an allocator."""
    made = {"action": action, "addr": address, "size": size, "stream": 0, "frames": STACK}
    return made | changes


def snapshot(events: list[dict[str, Any]], *, active: int = 0, total: int = 4096) -> dict[str, Any]:
    """Make a memory snapshot of one segment, used from its start on."""
    timed = [{"time_us": number} | each for number, each in enumerate(events)]
    blocks = [
        {"address": 0, "size": active, "requested_size": active, "state": "active_allocated",
         "frames": STACK},
        {"address": active, "size": total - active, "requested_size": 0, "state": "inactive",
         "frames": []},
    ]  # fmt: skip
    return {
        "segments": [
            {
                "device": 0, "address": 0, "total_size": total, "allocated_size": active,
                "active_size": active, "requested_size": active, "stream": 0,
                "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
                "frames": STACK, "blocks": [block for block in blocks if block["size"]],
            }
        ],
        "device_traces": [timed],
        "allocator_settings": {"expandable_segments": False},
        "external_annotations": [],
    }  # fmt: skip
