"""Slurm's small languages: lists of nodes, resources, spans, states."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.observe.fleet.sources.slurm import renames_of
from meshwright.observe.fleet.sources.slurm.hostlist import indexes_of, names_of, tasks_of
from meshwright.observe.fleet.sources.slurm.states import job_state, node_state
from meshwright.observe.fleet.sources.slurm.tres import (
    asked_memory,
    gpus_of_gres,
    gres_of,
    size_bytes,
    span_s,
    tres_of,
)


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
    assert names_of(folded) == names


@given(st.integers(0, 500), st.integers(0, 60), st.integers(1, 5))
def test_a_range_has_every_number_once_and_keeps_its_width(
    first: int, more: int, width: int
) -> None:
    low = str(first).zfill(width)
    names = names_of(f"n[{low}-{first + more}]")
    assert names[0] == f"n{low}"
    assert [int(name[1:]) for name in names] == list(range(first, first + more + 1))
    assert all(len(name) >= len(names[0]) for name in names)


def test_a_list_of_far_too_many_nodes_is_refused() -> None:
    with pytest.raises(InputError, match="more than"):
        names_of("n[1-999999999]")


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
    assert tasks_of(folded) == tasks


def test_indexes_of_gpus() -> None:
    assert indexes_of("0-2,5") == [0, 1, 2, 5]
    assert indexes_of("N/A") == []


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
    told = tres_of(text)
    assert told.gpus == (None if gpus is None else pytest.approx(gpus))
    assert told.gpu_kind == kind


def test_generic_resources() -> None:
    assert gpus_of_gres("gpu:a100:8(S:0-1)") == (8.0, "a100")
    assert gpus_of_gres("gres:gpu:2") == (2.0, None)
    assert gpus_of_gres("gpu:a100:2(IDX:0,3),gpu:v100:1(IDX:4)") == (3.0, "a100")
    assert gpus_of_gres("shard:4") == (None, None)
    assert gres_of("gpu:a100:2(IDX:0,3)")[0].detail == "IDX:0,3"
    assert gres_of("(null)") == []


def test_sizes_and_spans() -> None:
    assert size_bytes("2000M") == 2000 * 2**20
    assert size_bytes("1.5T") == 1.5 * 2**40
    assert size_bytes("12044K") == 12044 * 1024
    assert size_bytes("512", bare=2**20) == 512 * 2**20
    assert size_bytes("?") is None
    assert asked_memory("64Gn", 2.0, 16.0) == 2 * 64 * 2**30
    assert asked_memory("4Gc", 2.0, 16.0) == 16 * 4 * 2**30
    assert asked_memory("2000M", 2.0, 16.0) == 2000 * 2**20
    assert span_s("1-02:03:04") == 93784
    assert span_s("00:02.447") == pytest.approx(2.447)
    assert span_s("2-12") == 60 * 3600
    assert span_s("UNLIMITED") is None


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
    assert job_state(told) == state


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
    assert node_state(told) == state


def test_renames_may_be_folded() -> None:
    assert renames_of("old=new,a[1-2]=b[01-02]") == {"old": "new", "a1": "b01", "a2": "b02"}
    with pytest.raises(InputError, match="2 old and 1 new"):
        renames_of("a[1-2]=b")
