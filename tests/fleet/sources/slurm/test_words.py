"""Slurm's small languages: lists of nodes, resources, spans, states."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.fleet.sources.slurm.formats.hostlist import (
    expand_array,
    expand_hostlist,
    expand_indexes,
)
from meshwright.fleet.sources.slurm.formats.states import parse_job_state, parse_node_state
from meshwright.fleet.sources.slurm.formats.tres import (
    parse_duration_s,
    parse_gres,
    parse_gres_gpus,
    parse_req_mem,
    parse_size_bytes,
    parse_tres,
)
from meshwright.fleet.sources.slurm.slurm_source import parse_renames


@pytest.mark.parametrize(
    ("folded", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-2]", ["n1", "n2"]),
        ("n[1-2,07-09]", ["n1", "n2", "n07", "n08", "n09"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("a[1-2]b[3,5]", ["a1b3", "a1b5", "a2b3", "a2b5"]),
        ("login,n[1-2]-ib,x9", ["login", "n1-ib", "n2-ib", "x9"]),
        ("None assigned", []),
        ("(null)", []),
        ("", []),
    ],
)
def test_lists_of_nodes_are_spelt_out(folded: str, names: list[str]) -> None:
    assert expand_hostlist(folded) == names


@given(st.integers(0, 500), st.integers(0, 60), st.integers(1, 5))
def test_a_range_has_every_number_once_and_keeps_its_width(
    first: int, more: int, width: int
) -> None:
    low = str(first).zfill(width)
    names = expand_hostlist(f"n[{low}-{first + more}]")
    assert names[0] == f"n{low}"
    assert [int(name[1:]) for name in names] == list(range(first, first + more + 1))
    assert all(len(name) >= len(names[0]) for name in names)


def test_a_list_of_far_too_many_nodes_is_refused() -> None:
    with pytest.raises(InputError, match="more than"):
        expand_hostlist("n[1-999999999]")


@pytest.mark.parametrize(
    ("folded", "tasks"),
    [
        ("1-4", [1, 2, 3, 4]),
        ("1-4%2", [1, 2, 3, 4]),
        ("0-20:5", [0, 5, 10, 15, 20]),
        ("3,7-8", [3, 7, 8]),
        ("1-3,9,...", None),  # cut off: the rest is not known
    ],
)
def test_elements_of_arrays(folded: str, tasks: list[int] | None) -> None:
    assert expand_array(folded) == tasks


def test_indexes_of_gpus() -> None:
    assert expand_indexes("0-2,5") == [0, 1, 2, 5]
    assert expand_indexes("N/A") == []


@pytest.mark.parametrize(
    ("text", "gpus", "kind"),
    [
        ("cpu=8,gres/gpu=8,mem=2000M,node=2", 8.0, None),
        ("gres/gpu:a100=4,gres/gpu=4", 4.0, "a100"),  # the same four, told twice
        ("gres/gpu:a100=4", 4.0, "a100"),
        ("gres/gpu:a100=2,gres/gpu:h100=6,gres/gpu=8", 8.0, "h100"),
        ("gres/gpu=8,gres/gpu:a100=2", 8.0, "a100"),
        ("gres/gpu:1g.5gb=7,gres/gpu=7", 1.0, "1g.5gb"),
        ("gres/gpu:a100_3g.20gb=1", 3 / 7, "a100_3g.20gb"),
        ("gres/gpu:1g.6gb=2", 0.5, "1g.6gb"),  # an A30 has four slices
        ("cpu=1,gres/gpu=1,gres/gpumem=80G,gres/gpuutil=0", 1.0, None),
        ("cpu=1,mem=1G,node=1", 0.0, None),
        ("cpu=1,gres/shard=2", None, None),  # which part of a GPU, nobody says
        ("", None, None),
    ],
)
def test_gpus_are_counted_once(text: str, gpus: float | None, kind: str | None) -> None:
    told = parse_tres(text)
    assert told.gpus == (None if gpus is None else pytest.approx(gpus))
    assert told.gpu_kind == kind


def test_generic_resources() -> None:
    assert parse_gres_gpus("gpu:a100:8(S:0-1)") == (8.0, "a100")
    assert parse_gres_gpus("gres:gpu:2") == (2.0, None)
    assert parse_gres_gpus("gpu:a100:2(IDX:0,3),gpu:v100:1(IDX:4)") == (3.0, "a100")
    assert parse_gres_gpus("shard:4") == (None, None)
    assert parse_gres("gpu:a100:2(IDX:0,3)")[0].detail == "IDX:0,3"
    assert parse_gres("(null)") == []


def test_sizes_and_spans() -> None:
    assert parse_size_bytes("2000M") == 2000 * 2**20
    assert parse_size_bytes("1.5T") == 1.5 * 2**40
    assert parse_size_bytes("12044K") == 12044 * 1024
    assert parse_size_bytes("512", bare=2**20) == 512 * 2**20
    assert parse_size_bytes("?") is None
    assert parse_req_mem("64Gn", 2.0, 16.0) == 2 * 64 * 2**30
    assert parse_req_mem("4Gc", 2.0, 16.0) == 16 * 4 * 2**30
    assert parse_req_mem("2000M", 2.0, 16.0) == 2000 * 2**20
    assert parse_duration_s("1-02:03:04") == 93784
    assert parse_duration_s("00:02.447") == pytest.approx(2.447)
    assert parse_duration_s("2-12") == 60 * 3600
    assert parse_duration_s("UNLIMITED") is None


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ("CANCELLED by 0", "cancelled"),
        ("CANCELLED+", "cancelled"),
        ("COMPLETED", "completed"),
        (["COMPLETED"], "completed"),
        (["RUNNING", "COMPLETING"], "running"),
        (["COMPLETED", "COMPLETING"], "completed"),
        (["PENDING", "REQUEUED"], "pending"),
        ("REQUEUED", "requeued"),
        ("BOOT_FAIL", "node_fail"),
        ("OUT_OF_MEMORY", "out_of_memory"),
        ("DEADLINE", "timeout"),
        ("CF", "running"),
        ("", "unknown"),
    ],
)
def test_states_of_jobs(told: str | list[str], state: str) -> None:
    assert parse_job_state(told) == state


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ("IDLE", "up"),
        ("mixed", "up"),
        (["IDLE", "PLANNED"], "up"),
        ("IDLE+DRAIN", "draining"),
        (["MIXED", "DRAIN"], "draining"),
        ("DOWN+DRAIN", "down"),
        ("idle*", "down"),
        ("DOWN*", "down"),
        ("RESERVED", "reserved"),
        ("IDLE+CLOUD+POWERED_DOWN", "down"),
        ("?", "unknown"),
    ],
)
def test_states_of_nodes(told: str | list[str], state: str) -> None:
    assert parse_node_state(told) == state


def test_renames_may_be_folded() -> None:
    assert parse_renames("old=new,a[1-2]=b[01-02]") == {"old": "new", "a1": "b01", "a2": "b02"}
    with pytest.raises(InputError, match="2 old and 1 new"):
        parse_renames("a[1-2]=b")
