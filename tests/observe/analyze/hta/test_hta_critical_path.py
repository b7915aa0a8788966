"""The critical path as HTA prints it, on every trace with published figures, to 1 µs."""

import json
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.observe.analyze.hta.hta_critical_path import (
    find_hta_critical_path,
    shorten_kernel_name,
)
from meshwright.timeline.readers.kineto.kineto_reader import read_kineto

FILES = {
    "nanogpt8": "modded-nanogpt/8rank-h100-2025-12-11/rank-0.json.gz",
    "v100x2_resnext": "hta/df_index_resolver/df_index_resolver.json.gz",
    "a100_recsys_ctl": "hta/trace_diff/control/control.json.gz",
    "a100_nccl_meta": "hta/nccl_parser_config/nccl_data.json.gz",
    "simple_add": "hta/critical_path/simple_add/benchmark_result_493459_1694039959_trace.json.gz",
    "alexnet": "hta/critical_path/alexnet/benchmark_result_2869224_1695835535_trace.json.gz",
}


@pytest.mark.parametrize("name", FILES)
def test_figures_are_those_of_hta(shared: Path, name: str) -> None:
    path = shared / "validation" / "hta_figures_dev.json"
    wanted = json.loads(path.read_text())["sets"][name]["figures"]["critical_path"]
    trace = read_kineto(shared / "traces" / FILES[name], detail="full")
    found = find_hta_critical_path(trace, annotation=wanted["annotation"], instance=1)
    assert (found.num_nodes, found.num_edges) == (wanted["nodes"], wanted["edges"])
    assert found.num_path_nodes == wanted["path_nodes"]
    assert found.us_by_type == pytest.approx(wanted["edge_us_by_type"], abs=1)
    assert found.us_by_bound == pytest.approx(wanted["edge_us_by_bound"], abs=1)


def test_a_missing_annotation_is_named(shared: Path) -> None:
    trace = read_kineto(shared / "traces" / FILES["simple_add"], detail="full")
    with pytest.raises(InputError, match="no instance 0 of 'nowhere'"):
        find_hta_critical_path(trace, annotation="nowhere")


def test_a_timeline_without_arguments_is_refused(shared: Path) -> None:
    trace = read_kineto(shared / "traces" / FILES["simple_add"])
    with pytest.raises(InputError, match="full"):
        find_hta_critical_path(trace)


def test_names_lose_what_they_take_and_return() -> None:
    assert shorten_kernel_name("void ncclKernel_AllReduce<float, Op<int> >(Args, int)") == (
        "ncclKernel_AllReduce"
    )
    assert (
        shorten_kernel_name("Memcpy HtoD (Pageable -> Device)")
        == "Memcpy HtoD (Pageable -> Device)"
    )
