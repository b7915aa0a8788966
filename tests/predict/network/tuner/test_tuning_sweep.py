"""Training data of the tuner's optimizer, read as a measured sweep."""

import pytest

from meshwright.errors import InputError
from meshwright.predict.network.tuner.tuning_sweep import read_training_csv

HEAD = (
    "collective,size_bytes,algorithm,protocol,channels,nodes,ranks,pipeOps,regBuff,"
    "cost_metric,bandwidth_gbps,latency_us\n"
)


def test_rows_are_read_with_their_time() -> None:
    text = HEAD + "allreduce,1024,tree,ll,2,1,8,-1,0,0.18,41.3,15.5\n\n# more\n"
    (row,) = read_training_csv(text)
    assert (row.op, row.nbytes, row.algorithm, row.protocol) == ("all_reduce", 1024, "tree", "ll")
    assert (row.channels, row.nodes, row.ranks) == (2, 1, 8)
    assert (row.pipe_ops, row.registered) == (None, 0)
    assert row.seconds == pytest.approx(15.5e-6)


def test_columns_are_found_by_name() -> None:
    text = (
        "latency_us,regBuff,pipeOps,ranks,nodes,channels,protocol,algorithm,size_bytes,collective\n"
        "7.5,-1,-1,16,2,8,simple,ring,65536,allgather\n"
    )
    (row,) = read_training_csv(text)
    assert (row.op, row.ranks) == ("all_gather", 16)
    assert row.seconds == pytest.approx(7.5e-6)


def test_every_fault_is_listed_with_its_line() -> None:
    text = (
        HEAD
        + "allredcue,1024,tree,ll,2,1,8,-1,-1,0,0,15.5\n"
        + "allreduce,1024,tree,ll,-1,1,8,-1,-1,0,0,15.5\n"
        + "allreduce,1k,tree,ll,2,1,8,-1,-1,0,0,15.5\n"
        + "allreduce,1024,tree,ll,2,1,8,-1,-1,0,0,0\n"
        + "allreduce,1024,tree\n"
    )
    with pytest.raises(InputError) as caught:
        read_training_csv(text, "data.csv")
    problems = caught.value.problems
    assert [p.where for p in problems] == [f"data.csv: line {line}" for line in (2, 3, 4, 5, 6)]
    assert "NCCL_MIN_NCHANNELS" in problems[1].fix
    assert all(problem.fix for problem in problems)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(InputError, match="the heading has no ranks, latency_us"):
        read_training_csv(HEAD.replace("ranks,", "").replace(",latency_us", ""))


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(InputError, match="holds no row"):
        read_training_csv("\n# nothing\n")
