"""What sources share: rows from some columns, secrets that stay so, names without credentials."""

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.fleet.sources.source import Secret, SourceOptions, make_rows, strip_credentials
from meshwright.fleet.sources.source_registry import open_source


def test_columns_that_are_not_given_are_unknown() -> None:
    rows = make_rows("gpu_samples", {"gpu": np.arange(2), "gpu_util": np.array([0.0, np.nan])})
    assert rows["gpu_util"].to_pylist() == [0.0, None]
    assert rows["power_w"].null_count == 2
    with pytest.raises(InputError, match="power: is no column of gpu_samples"):
        make_rows("gpu_samples", {"power": [1.0]})


def test_a_secret_does_not_show_itself() -> None:
    asked = SourceOptions(token=Secret("s3cret"))
    assert "s3cret" not in f"{asked} {asked!r} {asked.token} {asked.token!r}"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(asked)
    assert asked.token.reveal() == "s3cret"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:pw@host:9090/prom/?token=x#y", "https://host:9090/prom"),
        ("http://[::1]:9090", "http://[::1]:9090"),
        ("http://host", "http://host"),
    ],
)
def test_what_is_shown_of_a_url_has_no_credentials(url: str, shown: str) -> None:
    assert strip_credentials(url) == shown


def test_a_place_that_is_nobodys_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        open_source(str(tmp_path / "nowhere"), SourceOptions())
    with pytest.raises(InputError, match="kind of source"):
        open_source(str(tmp_path), SourceOptions(), "prometeus")


def test_files_that_nobody_claims_are_told_of_by_what_is_wrong(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.csv"
    jobs.write_text("job,gpus\n1,8\n")
    with pytest.raises(InputError, match="lacks attempt"):
        list(open_source(str(jobs), SourceOptions("east")).read_batches())
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(gzip.compress(np.random.default_rng(0).bytes(5000))[:2000])
    with pytest.raises(InputError, match="cut off or damaged"):
        open_source(str(packed), SourceOptions())
    other = tmp_path / "notes.txt"
    other.write_text("nothing here\n")
    with pytest.raises(InputError, match="of no kind of telemetry"):
        open_source(str(other), SourceOptions())


def test_folders_within_a_folder_and_empty_files_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "monday").mkdir()
    (tmp_path / "empty.csv").touch()
    with pytest.raises(InputError, match="name one: monday"):
        open_source(str(tmp_path), SourceOptions())
    with pytest.raises(InputError, match="the file is empty"):
        open_source(str(tmp_path / "empty.csv"), SourceOptions())
