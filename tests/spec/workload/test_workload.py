from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright.spec.workload as package
from meshwright.errors import InputError, Problem
from meshwright.spec.file_formats import dump
from meshwright.spec.serialization import encode
from meshwright.spec.workload import (
    ConstantArrivals,
    EmpiricalLength,
    FixedConcurrency,
    FixedLength,
    GammaArrivals,
    LogNormalLength,
    LoRASpec,
    LoRATarget,
    PoissonArrivals,
    PrefixSharing,
    RecordedArrivals,
    ServingWorkload,
    TrainingWorkload,
    UniformLength,
    Workload,
    load_workload,
    read_workload,
)

tokens = st.integers(1, 10**9)
lengths = st.one_of(
    st.builds(FixedLength, tokens=tokens),
    st.builds(UniformLength, low=st.integers(1, 1000), high=st.integers(1000, 10**9)),
    st.builds(LogNormalLength, median=st.floats(1, 1e9), sigma=st.floats(0, 5), longest=tokens),
    st.builds(EmpiricalLength, values=st.just((1, 5, 9)), weights=st.just((0.1, 2.0, 1e-9))),
)
rates = st.floats(1e-9, 1e9)
arrivals = st.one_of(
    st.builds(ConstantArrivals, rate_per_s=rates),
    st.builds(PoissonArrivals, rate_per_s=rates),
    st.builds(GammaArrivals, rate_per_s=rates, cv=st.floats(0.01, 100)),
    st.builds(FixedConcurrency, in_flight=st.integers(1, 10**6)),
    st.lists(st.floats(0, 1e6), min_size=1).map(
        lambda at: RecordedArrivals(at_s=tuple(sorted(at)))
    ),
)
prefixes = st.builds(
    PrefixSharing,
    groups=st.integers(1, 10**7),
    tokens=lengths,
    share=st.floats(0, 1),
    skew=st.floats(0, 10),
    block_tokens=tokens,
)
adapters = st.builds(
    LoRASpec,
    rank=tokens,
    targets=st.lists(st.sampled_from(get_args(LoRATarget)), min_size=1, unique=True).map(tuple),
)
workloads = st.one_of(
    st.builds(
        TrainingWorkload,
        tokens=st.integers(1, 10**18),
        sequence_length=tokens,
        global_batch=tokens,
        lengths=st.none() | lengths,
        packing=st.sampled_from(["none", "concat", "pack"]),
        adapter=st.none() | adapters,
        expert_imbalance=st.floats(1, 100),
    ),
    st.builds(
        ServingWorkload,
        arrival=arrivals,
        prompt=lengths,
        output=lengths,
        prefix=st.none() | prefixes,
    ),
)


@given(workloads)
def test_a_workload_survives_plain_data(workload: Workload) -> None:
    assert read_workload(encode(workload)) == workload


@pytest.mark.parametrize("ending", [".toml", ".json", ".yaml"])
def test_a_workload_survives_a_file(tmp_path: Path, ending: str) -> None:
    if ending == ".toml":
        pytest.importorskip("tomli_w")
    path = tmp_path / f"workload{ending}"

    @given(workloads)
    def survives(workload: Workload) -> None:
        path.write_text(dump(workload, ending))
        assert load_workload(path) == workload

    survives()


def test_counts_may_be_written_with_units() -> None:
    workload = read_workload(
        {"kind": "training", "tokens": "15T", "sequence_length": "8Ki", "global_batch": "2k"}
    )
    assert workload == TrainingWorkload(tokens=15 * 10**12, sequence_length=8192, global_batch=2000)


def test_the_kind_says_what_a_workload_is() -> None:
    with pytest.raises(InputError, match="did you mean training"):
        read_workload({"kind": "trainin", "tokens": 1})
    with pytest.raises(InputError, match="use one of training, requests"):
        read_workload({"tokens": 1})


def test_problems_of_every_part_are_listed_with_their_path(tmp_path: Path) -> None:
    path = tmp_path / "chat.toml"
    path.write_text(
        'kind = "requests"\n'
        'arrival = {kind = "poison", rate_per_s = 1.0}\n'
        'prompt = {kind = "uniform", low = 9, high = 3}\n'
        'output = {kind = "fixed", tokens = 0}\n'
    )
    with pytest.raises(InputError) as caught:
        load_workload(path)
    where = {problem.where for problem in caught.value.problems}
    assert where == {f"{path}: arrival.kind", f"{path}: prompt.low", f"{path}: output.tokens"}


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
NAMES = ("tokens", "sequence_length", "global_batch", "lengths", "packing", "arrival", "prompt",
         "adapter", "expert_imbalance")  # fmt: skip
TABLES = st.fixed_dictionaries(
    {"kind": st.sampled_from(["training", "requests"])},
    optional=dict.fromkeys((*NAMES, "output", "prefix"), junk)
    | {
        "lengths": st.fixed_dictionaries(
            {"kind": st.sampled_from(["fixed", "uniform", "lognormal", "empirical"])},
            optional=dict.fromkeys(
                ("tokens", "low", "high", "median", "sigma", "longest", "values", "weights"),
                junk | st.lists(st.integers(0, 5), max_size=3),
            ),
        )
    },
)


def problems_of(data: object) -> tuple[Problem, ...]:
    try:
        read_workload(data)
    except InputError as error:
        return error.problems
    return ()


@given(TABLES)
def test_no_data_makes_reading_fail_otherwise_than_with_named_problems(data: object) -> None:
    assert all(p.where and p.what and p.fix for p in problems_of(data))


def test_exported_names_are_sorted_and_exist() -> None:
    assert package.__all__ == sorted(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)
