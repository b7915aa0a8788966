from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.catalog import get_gpu
from meshwright.spec.cluster import Gpu, find_closest_nics, read_nvidia_smi_topology

Text = Callable[[str], str]

DATA = Path(__file__).parents[1] / "data"


def test_dgx_a100_with_colour_codes_and_a_legend(text: Text) -> None:
    graph = read_nvidia_smi_topology(text("dgx_a100.txt"), get_gpu("a100"))
    assert len(graph.vertices_of_kind("gpu")) == 8
    assert graph.path_bytes_per_s("gpu0", "gpu7") == 300e9
    assert find_closest_nics(graph)["gpu5"] == ("nic:mlx5_4", "nic:mlx5_5")


def test_hgx_h100_pasted_with_spaces_under_a_prompt(text: Text) -> None:
    graph = read_nvidia_smi_topology(text("hgx_h100.txt"), get_gpu("h100"))
    assert graph.path_bytes_per_s("gpu0", "gpu7") == 450e9
    assert find_closest_nics(graph)["gpu4"] == ("nic:mlx5_5",)
    assert len(graph.vertices_of_kind("cpu")) == 2


def test_a_mesh_keeps_each_pairs_own_links(text: Text) -> None:
    graph = read_nvidia_smi_topology(text("dgx1_v100.txt"), get_gpu("v100"))
    assert graph.vertices_of_kind("nvswitch") == ()
    assert graph.path_bytes_per_s("gpu0", "gpu1") == 25e9
    assert graph.path_bytes_per_s("gpu0", "gpu3") == 50e9
    # Not neighbours in the mesh: PCIe and the link between sockets.
    assert graph.path_bytes_per_s("gpu0", "gpu7") == 16e9


def test_old_columns_without_numa_still_tell_the_sockets(text: Text) -> None:
    graph = read_nvidia_smi_topology(text("dgx1_v100.txt"), get_gpu("v100"))
    assert len(graph.vertices_of_kind("cpu")) == 2
    assert find_closest_nics(graph)["gpu3"] == ("nic:mlx5_1",)


def test_a_box_without_nvlink_crosses_sockets_slowly(text: Text) -> None:
    graph = read_nvidia_smi_topology(
        text("l40s_pcie.txt"), get_gpu("l40s"), socket_bytes_per_s=10e9
    )
    assert graph.path_bytes_per_s("gpu0", "gpu1") == 31e9
    assert graph.path_bytes_per_s("gpu0", "gpu2") == 10e9


def test_a_gb200_node_hangs_on_a_switch(text: Text) -> None:
    graph = read_nvidia_smi_topology(text("gb200.txt"), get_gpu("gb200"))
    assert len(graph.vertices_of_kind("nvswitch")) == 1
    assert graph.path_bytes_per_s("gpu0", "gpu3") == 900e9


def test_a_single_gpu_as_a_real_driver_prints_it(text: Text) -> None:
    graph = read_nvidia_smi_topology(text("h200_one_gpu.txt"), get_gpu("h200"))
    assert [vertex.name for vertex in graph.vertices_of_kind("gpu")] == ["gpu0"]
    assert graph.path_bytes_per_s("gpu0", "cpu0") == 63e9


def test_a_visible_subset_of_gpus_reads_too() -> None:
    table = "\tGPU2\tGPU5\tCPU Affinity\nGPU2\t X \tNV12\t0-15\nGPU5\tNV12\t X \t16-31\n"
    graph = read_nvidia_smi_topology(table, get_gpu("a100"))
    assert graph.path_bytes_per_s("gpu2", "gpu5") == 300e9


def test_every_bad_row_is_listed_with_its_line(text: Text) -> None:
    lines = text("l40s_pcie.txt").splitlines()
    lines[1] = lines[1].replace("NODE", "NOED")
    lines[3] = "GPU2\tSYS\tSYS"
    with pytest.raises(InputError) as caught:
        read_nvidia_smi_topology("\n".join(lines), get_gpu("l40s"), "topo.txt")
    assert [problem.where for problem in caught.value.problems] == [
        "topo.txt: line 2",
        "topo.txt: line 4",
    ]


def test_a_missing_row_is_named(text: Text) -> None:
    lines = [line for line in text("l40s_pcie.txt").splitlines() if not line.startswith("NIC1")]
    with pytest.raises(InputError, match="no row for NIC1"):
        read_nvidia_smi_topology("\n".join(lines), get_gpu("l40s"))


def test_a_matrix_that_disagrees_with_itself_is_refused() -> None:
    table = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPIX\t0\nGPU1\tSYS\t X \t0\n"
    with pytest.raises(InputError, match="GPU0 to GPU1 is PIX, but GPU1 to GPU0 is SYS"):
        read_nvidia_smi_topology(table, get_gpu("l40s"))


def test_nvlinks_on_a_gpu_without_them_are_questioned(text: Text) -> None:
    with pytest.raises(InputError, match="name the GPU of this machine"):
        read_nvidia_smi_topology(text("dgx_a100.txt"), get_gpu("mi300x"))


def test_a_gpu_without_a_pcie_figure_is_questioned(text: Text, hopper: Gpu) -> None:
    bare = msgspec.structs.replace(hopper, pcie_bytes_per_s=None)
    with pytest.raises(InputError, match="no pcie_bytes_per_s"):
        read_nvidia_smi_topology(text("hgx_h100.txt"), bare)


def test_text_without_a_table_is_refused() -> None:
    with pytest.raises(InputError, match="no table"):
        read_nvidia_smi_topology("NVIDIA-SMI has failed", get_gpu("h100"))


def test_more_links_than_the_gpu_has_are_questioned(text: Text) -> None:
    with pytest.raises(InputError, match="is NV18, but a100-80g-sxm has 12 NVLinks") as caught:
        read_nvidia_smi_topology(text("hgx_h100.txt"), get_gpu("a100"))
    assert caught.value.problems[0].fix == "name the GPU of this machine"


def test_links_of_a_gpu_without_a_known_figure_are_taken_as_printed(
    text: Text, hopper: Gpu
) -> None:
    assert hopper.nvlink_bytes_per_s is None
    assert (
        read_nvidia_smi_topology(text("hgx_h100.txt"), hopper).path_bytes_per_s("gpu0", "gpu7")
        == 450e9
    )


PRINTED = {"dgx_a100.txt": "a100", "hgx_h100.txt": "h100", "dgx1_v100.txt": "v100"}


@given(data=st.data(), name=st.sampled_from(sorted(PRINTED)))
def test_a_damaged_table_is_read_or_refused_but_never_crashes(
    data: st.DataObject, name: str
) -> None:
    letters = list((DATA / name).read_text())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(letters) - 1))
        letters[at] = data.draw(st.sampled_from(list("\t\nGPUNIXSYV0129 :-")))
    try:
        graph = read_nvidia_smi_topology("".join(letters), get_gpu(PRINTED[name]))
    except InputError as refusal:
        assert all(p.where and p.what and p.fix for p in refusal.problems)  # noqa: PT017
    else:
        assert graph.vertices_of_kind("gpu")
