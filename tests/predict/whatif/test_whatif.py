"""One thing changed: the right figure moves, the rest follows or stays, reasons are given."""

import pytest

from meshwright.errors import InputError
from meshwright.predict.whatif.whatif import WhatIfCase, read_changes, what_if
from meshwright.predict.whatif.whatif_parameters import (
    WHATIF_PARAMETERS,
    find_parameter,
    parse_scaled,
)
from meshwright.spec import JobSpec, Layout, TrainingWorkload, catalog
from meshwright.spec.units import parse_rate

WORK = JobSpec(
    model=catalog.get_model("llama3.1-70b"),
    cluster=catalog.get_cluster("h100-superpod").with_gpus(128),
    layout=Layout(tp=4, sequence_parallel=True, pp=4, dp=8, zero=1),
    workload=TrainingWorkload(tokens=10**12, sequence_length=8192, global_batch=256),
)


def cases(*texts: str) -> list[WhatIfCase]:
    return list(what_if(WORK, read_changes(texts)))[1:]


def varied(text: str) -> JobSpec:
    thing, _, value = text.partition("=")
    return WHATIF_PARAMETERS[find_parameter(thing)].apply(WORK, value).job


@pytest.mark.parametrize(
    ("text", "value"),
    [("100GB/s", 100e9), ("800Gb/s", 100e9), ("x2", 100e9), ("×2", 100e9), ("/2", 25e9),
     ("+10%", 55e9), ("-50%", 25e9)],
)  # fmt: skip
def test_values_are_absolute_or_relative(text: str, value: float) -> None:
    assert parse_scaled(text, 50e9, parse_rate, "nic") == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("nic=x2", WORK.cluster.nic_bytes_per_s_per_gpu, 100e9),
        ("nvlink=900GB/s", WORK.cluster.scale_up.gpu_bytes_per_s, 900e9),
        ("nvlink_domain=72", WORK.cluster.scale_up.gpus, 72),
        ("memory_bandwidth=x2", WORK.cluster.gpu.memory_bytes_per_s, 6.7e12),
        ("memory=141GB", WORK.cluster.gpu.memory_bytes, 141 * 10**9),
        ("flops=x2", WORK.cluster.gpu.bf16_flops, 2 * 989e12),
        ("price=2", WORK.cluster.price_per_gpu_hour, 2.0),
    ],
)
def test_a_figure_of_the_hardware_takes_its_value(text: str, before: float, after: float) -> None:
    changed = varied(text).cluster
    figures = {
        "nic": changed.nic_bytes_per_s_per_gpu,
        "nvlink": changed.scale_up.gpu_bytes_per_s,
        "nvlink_domain": changed.scale_up.gpus,
        "memory_bandwidth": changed.gpu.memory_bytes_per_s,
        "memory": changed.gpu.memory_bytes,
        "flops": changed.gpu.bf16_flops,
        "price": changed.price_per_gpu_hour,
    }
    assert figures[text.partition("=")[0]] == pytest.approx(after) != before


def test_every_peak_moves_with_flops() -> None:
    gpu = varied("flops=x2").cluster.gpu
    assert gpu.fp8_flops == pytest.approx(2 * (WORK.cluster.gpu.fp8_flops or 0))


@pytest.mark.parametrize("text", ["tp=8", "pp=8", "cp=2"])
def test_degrees_keep_the_number_of_gpus(text: str) -> None:
    assert varied(text).layout.gpus == WORK.layout.gpus


def test_gpus_share_the_same_batch() -> None:
    more = varied("gpus=x2")
    assert more.layout.dp == 16
    assert more.cluster.gpus == 256
    assert more.workload == WORK.workload


def test_fp8_takes_its_full_name() -> None:
    assert [case.value for case in cases("precision=fp8")] == ["fp8-tensorwise"]


def test_lists_are_joined_by_plus_signs() -> None:
    assert varied("stage_layers=19+20+20+21").layout.stage_layers == (19, 20, 20, 21)


def test_another_model_is_divided_over_the_same_stages() -> None:
    split = varied("model=llama3.1-405b").layout.stage_layers
    assert split is not None
    assert sum(split) == 126


def test_faster_parts_never_make_a_step_longer() -> None:
    before = what_if(WORK, ())[0].step
    assert before is not None
    for case in cases("nic=x2", "nvlink=x2", "flops=x2", "memory_bandwidth=x2", "nic_latency=/2"):
        assert case.step is not None
        assert case.step.step_s <= before.step_s


def test_what_follows_is_named() -> None:
    (case,) = cases("tp=1")
    assert case.dependent_changes == {"sequence_parallel": False, "dp": 32}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tp=3", "no multiple"),
        ("tp=0", "0 is not a whole number"),
        ("precision=nvfp4", "has no nvfp4"),
        ("nic=nan", "'nan' is not a size"),
        ("nic=x0", "leaves nothing"),
        ("nic=-5GB/s", "not a finite number above 0"),
        ("nvlink_domain=7", "does not line up"),
        ("cluster=nowhere", "no cluster named"),
        ("microbatch=x1.5", "no whole number"),
        ("batch=100", "not a multiple"),
        ("sequence_length=8191", "does not divide"),
        ("schedule=foo", "is not one of"),
        ("overlap_tp=maybe", "is not true or false"),
        ("recompute_ops=layernorm", "no meaning"),
    ],
)
def test_a_value_that_cannot_be_is_kept_with_its_reason(text: str, reason: str) -> None:
    (case,) = cases(text)
    assert case.step is None
    assert reason in case.problems[0].what
    assert case.problems[0].fix


def test_what_does_not_fit_is_predicted_and_says_so() -> None:
    (case,) = cases("memory=16GB")
    assert case.step is not None
    assert case.memory is not None
    assert not case.memory.fits


@pytest.mark.parametrize("alias", ["hbm", "NIC", "seq", "nvlink-domain", "global_batch"])
def test_things_have_the_names_people_use(alias: str) -> None:
    assert find_parameter(alias) in WHATIF_PARAMETERS


def test_unknown_things_are_all_listed_with_what_there_is() -> None:
    with pytest.raises(InputError) as caught:
        read_changes(["nik=x2", "tp", "zzz=1"])
    first, second, third = caught.value.problems
    assert "did you mean nic" in first.fix
    assert "nvlink_domain" in first.fix
    assert "write it like" in second.fix
    assert third.where == "zzz"
