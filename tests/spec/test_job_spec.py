"""A work file is read into sound values or refused with every reason, whatever it holds."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec import catalog
from meshwright.spec.file_formats import dump, dump_data, load_data
from meshwright.spec.job_spec import read_job_spec
from meshwright.spec.model.huggingface import write_config
from meshwright.spec.workload import ServingWorkload

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama3-70b.toml"

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(
        ["", "8", "llama3.1-8b", "h100-superpod", "1e999", "-1", "16k", "nan", "\x00"]
    )
    | st.text(max_size=4)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


def faults(data: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(InputError) as caught:
        read_job_spec(data)
    return {problem.where: f"{problem.what} {problem.fix}" for problem in caught.value.problems}


def test_the_example_is_sound() -> None:
    work = read_job_spec(load_data(EXAMPLE))
    assert work.model == catalog.get_model("llama3.1-70b")
    assert work.layout.dp == 32
    assert work.cluster.gpus == 512
    assert work.check() == ()


def test_parts_may_be_written_out() -> None:
    model = load_data(EXAMPLE)
    model["model"] = {
        "name": "mine",
        "hidden": 64,
        "vocab": 100,
        "pattern": "2*a",
        "blocks": [{"name": "a", "mlp": {"kind": "mlp", "width": 128}}],
    }
    assert read_job_spec(model).model.layers == 2


def test_a_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    config = write_config(catalog.get_model("qwen3-8b"))
    (tmp_path / "config.json").write_text(dump_data(config, ".json"))
    work = read_job_spec({"model": str(tmp_path), "cluster": "h100-superpod"})
    assert work.model.hidden == catalog.get_model("qwen3-8b").hidden


def test_gpus_that_do_not_divide_are_refused_with_the_nearest() -> None:
    data = {"model": "llama3.1-8b", "cluster": "h100-superpod", "gpus": 100, "layout": {"tp": 8}}
    assert "use 96" in faults(data)["gpus"]


def test_gpus_and_degrees_must_agree() -> None:
    data = {"model": "llama3.1-8b", "cluster": "h100-superpod", "gpus": 64, "layout": {"dp": 8}}
    assert "= 8" in faults(data)["gpus"]


def test_a_cluster_of_ones_own_keeps_its_size(tmp_path: Path) -> None:
    lab = tmp_path / "lab.toml"
    lab.write_text(dump(catalog.get_cluster("h100-superpod").with_gpus(32)))
    work = read_job_spec(
        {"model": "llama3.1-8b", "cluster": str(lab), "gpus": 64, "layout": {"zero": 1}}
    )
    assert "dp" in {problem.where for problem in work.check()}


def test_a_request_stream_is_a_workload() -> None:
    requests = {
        "kind": "requests",
        "arrival": {"kind": "poisson", "rate_per_s": 2.0},
        "prompt": {"kind": "fixed", "tokens": 512},
        "output": {"kind": "fixed", "tokens": 128},
    }
    work = read_job_spec({"model": "llama3.1-8b", "cluster": "h100-superpod", "workload": requests})
    assert isinstance(work.workload, ServingWorkload)


def test_missing_parts_are_named() -> None:
    assert {"model", "cluster"} <= faults({}).keys()


def test_faults_of_all_parts_come_together() -> None:
    found = faults({"model": "lama", "cluster": {}, "layout": {"tp": -1}, "colour": 1})
    assert {"model", "layout.tp", "colour"} <= found.keys()
    assert any(where.startswith("cluster") for where in found)


def mutated(data: Any, path: list[int], value: Any) -> Any:
    """Put `value` somewhere inside `data`: the path says which branch to take at each level."""
    if not path or not isinstance(data, dict) or not data:
        return value
    key = sorted(data)[path[0] % len(data)]
    return {**data, key: mutated(data[key], path[1:], value)}


@given(path=st.lists(st.integers(0, 10), min_size=1, max_size=3), value=JSON)
def test_a_mutated_work_file_never_ends_in_a_traceback(path: list[int], value: Any) -> None:
    data = mutated(load_data(EXAMPLE), path, value)
    try:
        work = read_job_spec(data)
    except InputError as error:
        reasons = error.problems
    else:
        reasons = work.check()
    assert all(problem.what and problem.fix for problem in reasons)


@given(
    st.dictionaries(
        st.sampled_from(["model", "cluster", "layout", "workload", "gpus"]) | st.text(max_size=3),
        JSON,
    )
)
def test_no_data_ends_in_a_traceback(data: dict[str, Any]) -> None:
    try:
        read_job_spec(data)
    except InputError as error:
        reasons = error.problems
    else:
        reasons = ()
    assert all(problem.what and problem.fix for problem in reasons)
