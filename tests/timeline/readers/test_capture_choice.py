"""Several captures of one rank: one of each is read, and it is said which."""

import json
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.timeline.readers.trace_folder import iter_timelines, read_trace


def capture(path: Path, start_us: int, rank: int | None, *, step: int = 0) -> Path:
    event = {"ph": "X", "cat": "kernel", "name": f"of step {step}", "pid": 0, "tid": 7, "dur": 4}
    info = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank}}
    document = {**info, "traceEvents": [{**event, "ts": start_us}]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def handler_name(worker: str, start_us: int) -> str:
    """What `tensorboard_trace_handler` calls a file."""
    return f"{worker}.{start_us * 1000}.pt.trace.json"


def shown(folder: Path, number: int | None = None) -> list[tuple[tuple[int, ...], str]]:
    return [
        (part.ranks, part.string_column("name").values[part.string_column("name").codes[0]])
        for part in iter_timelines(folder, capture=number)
    ]


def test_the_last_capture_of_each_rank_is_read(tmp_path: Path) -> None:
    for rank in (0, 1):
        for step in (10, 20, 30):
            start = 10_000_000 * step + rank
            capture(tmp_path / handler_name(f"node_{rank}", start), start, rank, step=step)
    assert shown(tmp_path) == [((0,), "of step 30"), ((1,), "of step 30")]
    assert shown(tmp_path, 1) == [((0,), "of step 10"), ((1,), "of step 10")]
    note = next(iter_timelines(tmp_path)).metadata["notes"]
    assert note.startswith("capture 3 of 3 of rank 0, node_0.")


def test_times_in_the_files_tell_their_order_not_names(tmp_path: Path) -> None:
    capture(tmp_path / "a.json", 900, 0, step=2)
    capture(tmp_path / "b.json", 100, 0, step=1)
    assert shown(tmp_path) == [((0,), "of step 2")]


def test_a_rank_that_stopped_earlier_is_compared_with_what_all_have(tmp_path: Path) -> None:
    for rank, count in ((0, 3), (1, 2)):
        for step in range(count):
            capture(tmp_path / f"{rank}-{step}.json", 1000 * step, rank, step=step)
    assert shown(tmp_path) == [((0,), "of step 1"), ((1,), "of step 1")]


def test_captures_of_one_process_without_a_rank_are_not_ranks(tmp_path: Path) -> None:
    for step in (1, 2):
        start = 1_700_000_000_000 + step
        capture(tmp_path / handler_name("box_77", start), start, None, step=step)
    assert shown(tmp_path) == [((0,), "of step 2")]
    start = 1_700_000_000_003
    capture(tmp_path / handler_name("box_78", start), start, None, step=9)
    assert shown(tmp_path) == [((0,), "of step 1"), ((1,), "of step 9")]


def test_a_capture_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    for step in (1, 2):
        capture(tmp_path / f"{step}.json", 1000 * step, 4, step=step)
    with pytest.raises(InputError, match=r"rank 4 has 2 captures, not 3.*give 1 to 2"):
        read_trace(tmp_path, capture=3)


def test_single_captures_have_no_note(tmp_path: Path) -> None:
    for rank in (0, 1):
        capture(tmp_path / f"{rank}.json", 5, rank)
    assert all("notes" not in part.metadata for part in iter_timelines(tmp_path))
