import json
from pathlib import Path

from meshwright.observe.watch.capture_store import CaptureRequest, CaptureStore, IncomingTrace
from meshwright.observe.watch.watch_folder import WatchFolder, create_watch_folder


def trace(folder: WatchFolder, name: str, step: int, operators: dict[str, int]) -> IncomingTrace:
    """The trace of a step of 10 ms with these operators, in µs."""
    event = {"ph": "X", "pid": 1, "tid": 1}
    events = [
        event | {"cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": 0, "dur": 10_000}
    ]
    start = 0
    for operator, long in operators.items():
        events.append(event | {"cat": "cpu_op", "name": operator, "ts": start, "dur": long})
        start += long
    path = folder.incoming / name
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return IncomingTrace(path, 0)


def take(
    captures: CaptureStore, folder: WatchFolder, number: int, mm: int, slow: int | None = None
) -> str:
    file = trace(folder, f"{number}.json", 10 * number, {"aten::mm": mm})
    judged = captures.add(CaptureRequest(number, 10 * number, 1, slow), [file])
    assert judged.status is not None
    return judged.status.reason


def test_only_the_first_the_newest_two_and_what_differs_are_kept(tmp_path: Path) -> None:
    folder = create_watch_folder(tmp_path / "w", {})
    captures = CaptureStore(folder, keep=40, keep_bytes=10**9)
    whys = [take(captures, folder, number, 2000 + number) for number in range(1, 8)]
    assert whys == ["first", *["reference"] * 6]
    assert take(captures, folder, 8, 6000) == "changed"
    assert sorted(captures.captures) == [1, 6, 7, 8]
    assert captures.captures[8].differences.startswith("aten::mm 2.00 → 6.00 ms")
    names = sorted(path.name for path in folder.captures.iterdir())
    assert names == ["0001-step-10", "0006-step-60", "0007-step-70", "0008-step-80"]
    assert not list(folder.incoming.iterdir())


def test_a_slowdown_is_held_against_a_capture_from_before_it(tmp_path: Path) -> None:
    folder = create_watch_folder(tmp_path / "w", {})
    captures = CaptureStore(folder, keep=40, keep_bytes=10**9)
    for number in range(1, 4):
        take(captures, folder, number, 2000)
    file = trace(folder, "4.json", 40, {"aten::mm": 2000, "aten::sort": 4000})
    judged = captures.add(CaptureRequest(4, 40, 1, slow_since=25), [file])
    assert judged.reference == "captures/0002-step-20"
    assert judged.changes == ("aten::sort 0.00 → 4.00 ms",)
    # What a slowdown refers to stays, however many references follow.
    for number in range(5, 9):
        take(captures, folder, number, 2000)
    assert {2, 4} <= captures.captures.keys()


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = create_watch_folder(tmp_path / "w", {})
    captures = CaptureStore(folder, keep=40, keep_bytes=10**9)
    file = trace(folder, "1.json", 10, {"aten::mm": 5})
    folder.captures.rmdir()  # as good as full: nothing can be made in it
    judged = captures.add(CaptureRequest(1, 10, 1), [file])
    assert judged.status is None
    assert "could not be kept" in judged.changes[0]
    assert not file.path.exists()


def test_a_trace_that_cannot_be_read_is_dropped(tmp_path: Path) -> None:
    folder = create_watch_folder(tmp_path / "w", {})
    captures = CaptureStore(folder, keep=40, keep_bytes=10**9)
    broken = folder.incoming / "1.json"
    broken.write_text("{nothing")
    judged = captures.add(CaptureRequest(1, 10, 1), [IncomingTrace(broken, 0)])
    assert judged.status is None
    assert not captures.captures
    assert not list(folder.captures.iterdir())


def test_ring_is_bounded(tmp_path: Path) -> None:
    folder = create_watch_folder(tmp_path / "w", {})
    captures = CaptureStore(folder, keep=3, keep_bytes=10**9)
    for number in range(1, 12):
        take(captures, folder, number, 1000 * (number % 9 + 1))
    assert len(captures.captures) <= 3
    assert len(list(folder.captures.iterdir())) == len(captures.captures)
