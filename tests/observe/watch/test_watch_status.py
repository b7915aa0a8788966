"""The status of a watch: written whole, read back, refused where another version wrote it."""

from pathlib import Path

import msgspec
import pytest

from meshwright.errors import DamagedFile, InputError
from meshwright.observe.watch.watch_status import WatchStatus, read_status, write_status

STATUS = WatchStatus(
    command="train.py", watcher_pid=1, job_pid=2, started_unix_s=0.0, elapsed_s=60.0, processes=1,
    steps=7, overhead_share=0.01, max_overhead=0.02, ranks=(),
)  # fmt: skip


def test_a_status_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_status(tmp_path / "status.json", STATUS)
    assert read_status(tmp_path / "status.json") == STATUS


@pytest.mark.parametrize("fields", [{"format": "meshwright.watch.status/1"}, {}])
def test_a_status_of_an_older_version_is_refused(tmp_path: Path, fields: dict[str, str]) -> None:
    """Before the second version the file did not name its format."""
    (tmp_path / "status.json").write_bytes(msgspec.json.encode({"steps": 7, **fields}))
    with pytest.raises(InputError, match=r"has the format 'meshwright\.watch\.status/1', not"):
        read_status(tmp_path / "status.json")


def test_a_damaged_status_is_refused(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"format": "meshwright.watch.status/2", ')
    with pytest.raises(DamagedFile, match="cannot read"):
        read_status(tmp_path / "status.json")
