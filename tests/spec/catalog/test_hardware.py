import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError, Problem
from meshwright.spec.catalog import (
    get_cluster,
    get_gpu,
    list_clusters,
    list_gpus,
    load_cluster,
    read_cluster,
)
from meshwright.spec.cluster.gpu import NUMERIC_FIELDS
from meshwright.spec.file_formats import dump
from meshwright.spec.serialization import encode


def test_the_catalog_holds_the_gpus_and_clusters_promised() -> None:
    assert len(list_gpus()) >= 20
    assert len(list_clusters()) >= 12
    assert {"h100-80g-sxm", "a100-80g-sxm", "b200-180g-sxm", "gb200"} <= set(list_gpus())
    assert {"h100-superpod", "gb200-nvl72", "aws-p5", "cpu-host"} <= set(list_clusters())


@pytest.mark.parametrize("name", sorted(list_gpus()))
def test_every_figure_of_a_gpu_has_a_source(name: str) -> None:
    device = list_gpus()[name]
    covered = [field for source in device.sources for field in source.fields]
    given_figures = {field for field in NUMERIC_FIELDS if getattr(device, field) is not None}
    assert set(covered) == given_figures
    assert len(covered) == len(set(covered))


@pytest.mark.parametrize("name", sorted(list_clusters()))
def test_every_part_of_a_cluster_has_a_source(name: str) -> None:
    value = list_clusters()[name]
    covered = {field for source in value.sources for field in source.fields}
    parts = ("scale_up", "host", "nics", "storage", "price_per_gpu_hour", "failures_per_gpu_hour")
    assert {part for part in parts if getattr(value, part) is not None} <= covered
    assert value.fabric.kind == "none" or "fabric" in covered


@pytest.mark.parametrize("name", sorted(list_gpus()))
def test_faster_formats_have_higher_peaks(name: str) -> None:
    device = list_gpus()[name]
    order = ("fp32_flops", "tf32_flops", "bf16_flops", "fp8_flops", "fp4_flops")
    peaks = [peak for field in order if (peak := getattr(device, field)) is not None]
    assert peaks == sorted(peaks)
    for measured, peak in (
        (device.bf16_measured_flops, device.bf16_flops),
        (device.fp8_measured_flops, device.fp8_flops),
    ):
        assert measured is None or (peak is not None and measured < peak)


@pytest.mark.parametrize("name", sorted(list_gpus()))
def test_memory_is_near_the_size_on_the_box(name: str) -> None:
    device = list_gpus()[name]
    if device.memory_marketed_gb is not None:
        # Some GB are 10^9 and some 2^30 bytes, and a driver keeps a little back.
        assert 0.9 < device.memory_bytes / (device.memory_marketed_gb * 1e9) < 1.08


@pytest.mark.parametrize("name", sorted(list_clusters()))
def test_a_cluster_does_not_outrun_its_gpus_links(name: str) -> None:
    value = list_clusters()[name]
    links = value.gpu.nvlink_bytes_per_s
    if value.scale_up.kind in ("nvlink", "xgmi"):
        assert links is not None
        assert value.scale_up.gpu_bytes_per_s <= links
    if value.gpu.pcie_bytes_per_s is not None and value.host.link.startswith("pcie"):
        assert value.host.gpu_bytes_per_s <= value.gpu.pcie_bytes_per_s


def test_llama_3_fails_once_in_three_hours() -> None:
    rate = list_clusters()["meta-llama3"].failures_per_gpu_hour
    assert rate is not None
    assert 1 / (rate * 16384) == pytest.approx(54 * 24 / 419, rel=0.001)


def test_meta_offers_a_seventh_between_pods() -> None:
    meta = list_clusters()["meta-llama3"]
    assert meta.bandwidth_between(0, 3072) == pytest.approx(50e9 / 7)
    assert meta.bandwidth_between(0, 3071) == 50e9


def test_jean_zay_gives_each_gpu_50_gbit() -> None:
    assert list_clusters()["jean-zay-a100"].nic_bytes_per_s_per_gpu == 50e9 / 8


def test_the_superpod_grows_to_a_16k_job() -> None:
    pod = get_cluster("h100-superpod").with_gpus(16384)
    assert (pod.nodes, pod.gpus) == (2048, 16384)


def test_names_are_found_whatever_their_case_and_by_alias() -> None:
    assert get_gpu("H100") is get_gpu("h100-80g-sxm")
    assert get_gpu("A100-80G-SXM") is list_gpus()["a100-80g-sxm"]
    assert get_gpu("RTX 4090").name == "rtx-4090"
    assert get_cluster("P5.48xlarge").name == "aws-p5"


def test_a_remark_in_brackets_does_not_hide_a_name() -> None:
    assert get_gpu("H100-96G-SXM (HBM2e 2.4TB/s, 500W)").name == "h100-96g-sxm"


def test_no_two_entries_share_a_name() -> None:
    for catalog in (list_gpus(), list_clusters()):
        names = [name for entry in catalog.values() for name in (entry.name, *entry.aliases)]
        assert len(names) == len(set(names))
        assert all(name == name.lower() and " " not in name for name in names)


def test_an_unknown_name_gets_the_closest_ones() -> None:
    with pytest.raises(InputError, match=r"no GPU named 'h10'.*did you mean h100"):
        get_gpu("h10")
    with pytest.raises(InputError, match="did you mean h100-superpod"):
        get_cluster("h100-superpd")


def test_the_catalog_cannot_be_changed_by_its_readers() -> None:
    with pytest.raises(TypeError):
        list_gpus()["mine"] = get_gpu("h100")  # type: ignore[index]


def test_the_gpus_of_published_runs_are_known(shared: Path) -> None:
    runs = json.loads((shared / "validation" / "training_runs.json").read_text())
    for name in {run["gpu"] for run in runs}:
        assert get_gpu(name).name in list_gpus()


def test_the_figures_of_the_shared_list_are_kept_or_explained(shared: Path) -> None:
    listed = json.loads((shared / "validation" / "gpus.json").read_text())["gpus"]
    changed = {"B300-SXM": {"fp4_flops"}, "MI300X": {"int8_ops"}, "MI325X": {"int8_ops"}}
    for entry in listed:
        device = get_gpu(entry["name"])
        for precision, tflops in entry["peak_dense_tflops"].items():
            field = f"{precision}_ops" if precision == "int8" else f"{precision}_flops"
            if isinstance(tflops, int | float) and field in NUMERIC_FIELDS:
                same = getattr(device, field) == pytest.approx(tflops * 1e12)
                assert same or field in changed.get(entry["name"], set()), (entry["name"], field)


@pytest.mark.parametrize("ending", [".toml", ".json", ".yaml"])
def test_a_cluster_survives_every_file_format(tmp_path: Path, ending: str) -> None:
    for value in list_clusters().values():
        path = tmp_path / f"mine{ending}"
        path.write_text(dump(value, ending))
        assert load_cluster(path) == value


def test_a_file_may_name_a_catalog_gpu(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        name = "mine"
        title = "Mine"
        gpu = "H100"
        nodes = 1
        scale_up = { kind = "nvlink", gpus = 8, gpu_bytes_per_s = "450GB/s", latency_s = "1us" }
        host = { gpu_bytes_per_s = "63GB/s", latency_s = "1us" }
        """
    )
    value = load_cluster(path)
    assert value.gpu is get_gpu("h100")
    assert value.scale_up.gpu_bytes_per_s == 450e9


def test_an_unknown_gpu_is_listed_beside_the_other_faults(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\ntitle = "Mine"\ngpu = "h1000"\nnodes = 1\n')
    with pytest.raises(InputError) as caught:
        load_cluster(path)
    places = [problem.where for problem in caught.value.problems]
    assert places == [f"{path}: gpu", f"{path}: scale_up", f"{path}: host"]


def _paths(data: object, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    if isinstance(data, dict):
        return [
            p for key, item in data.items() for p in [(*prefix, key), *_paths(item, (*prefix, key))]
        ]
    if isinstance(data, list):
        return [
            p for i, item in enumerate(data) for p in [(*prefix, i), *_paths(item, (*prefix, i))]
        ]
    return []


@given(
    data=st.data(),
    name=st.sampled_from(["h100-superpod", "gb200-nvl72", "cpu-host"]),
    junk=st.none() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers()),
)
def test_a_fuzzed_cluster_is_read_or_refused_with_a_place(
    data: st.DataObject, name: str, junk: object
) -> None:
    table = msgspec.json.decode(msgspec.json.encode(encode(list_clusters()[name])))
    *way, last = data.draw(st.sampled_from(_paths(table)))
    inner = table
    for step in way:
        inner = inner[step]
    inner[last] = junk
    problems: tuple[Problem, ...] = ()
    try:
        read_cluster(table)
    except InputError as error:
        problems = error.problems
    assert all(problem.where and problem.what and problem.fix for problem in problems)
