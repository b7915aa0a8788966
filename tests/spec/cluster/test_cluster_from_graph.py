from collections.abc import Callable

import msgspec
import pytest

from meshwright.errors import InputError
from meshwright.spec.catalog import get_cluster, get_gpu
from meshwright.spec.cluster import (
    Fabric,
    Gpu,
    GraphVertex,
    LinkGraph,
    SwitchTier,
    build_cluster,
    read_nccl_topology,
    read_nvidia_smi_topology,
    read_slurm_topology,
)

Text = Callable[[str], str]


def test_a_dumped_h100_node_matches_the_catalogs(text: Text) -> None:
    machine = build_cluster(read_nccl_topology(text("hgx_h100.xml")), get_gpu("h100"), nodes=4)
    known = get_cluster("h100-superpod")
    assert machine.gpus == 32
    assert machine.scale_up == known.scale_up
    assert machine.nics == known.nics
    assert machine.host.gpu_bytes_per_s == pytest.approx(known.host.gpu_bytes_per_s, rel=0.01)


def test_a_dumped_a100_node_leaves_the_storage_card_out(text: Text) -> None:
    machine = build_cluster(read_nccl_topology(text("dgx_a100.xml")), get_gpu("a100"))
    known = get_cluster("dgx-a100-80g")
    assert machine.nics == known.nics
    assert machine.scale_up == known.scale_up
    assert machine.host.sockets == 4


def test_both_views_of_a_machine_agree(text: Text) -> None:
    dumped = build_cluster(read_nccl_topology(text("dgx_a100.xml")), get_gpu("a100"))
    graph = read_nvidia_smi_topology(text("dgx_a100.txt"), get_gpu("a100"))
    printed = build_cluster(graph, get_gpu("a100"), nic_bytes_per_s=25e9)
    assert printed.scale_up == dumped.scale_up
    assert printed.nics == dumped.nics


def test_hosts_of_one_rack_become_nodes_of_one_domain(text: Text) -> None:
    rack = build_cluster(read_nccl_topology(text("gb200_two_hosts.xml")), get_gpu("gb200"))
    assert (rack.nodes, rack.gpus_per_node, rack.scale_up.gpus) == (2, 4, 8)
    assert rack.tier_between(0, 7) == "scale-up"
    assert rack.host.link == "c2c"


def test_a_mesh_keeps_its_pair_bandwidth(text: Text) -> None:
    machine = build_cluster(read_nccl_topology(text("mi300x.xml")), get_gpu("mi300x"))
    assert machine.scale_up.gpu_bytes_per_s == 448e9
    assert machine.bandwidth_between(0, 5) == 64e9


def test_a_pcie_box_reaches_across_sockets_through_the_host(text: Text) -> None:
    box = build_cluster(
        read_nvidia_smi_topology(text("l40s_pcie.txt"), get_gpu("l40s")), get_gpu("l40s")
    )
    assert box.tier_between(0, 1) == "scale-up"
    assert box.tier_between(0, 2) == "host"
    assert box.bandwidth_between(0, 2) == 16e9


def test_several_nodes_need_cards_of_known_speed(text: Text) -> None:
    graph = read_nvidia_smi_topology(text("hgx_h100.txt"), get_gpu("h100"))
    with pytest.raises(InputError, match="give nic_bytes_per_s"):
        build_cluster(graph, get_gpu("h100"), nodes=2)
    assert build_cluster(graph, get_gpu("h100"), nodes=2, nic_bytes_per_s=50e9).nics is not None


def test_slurms_tree_gives_the_fabric(text: Text) -> None:
    tree = read_slurm_topology(
        "SwitchName=a Nodes=n[1-4]\nSwitchName=b Nodes=n[5-8]\nSwitchName=t Switches=a,b"
    )
    machine = build_cluster(
        read_nccl_topology(text("hgx_h100.xml")),
        get_gpu("h100"),
        nodes=8,
        fabric=tree.to_fabric("infiniband", oversubscription=(1, 2)),
    )
    assert machine.tier_between(0, 8) == "leaf"
    assert machine.bandwidth_between(0, 32) == machine.bandwidth_between(0, 8) / 2


def test_a_given_fabric_is_kept(text: Text) -> None:
    fabric = Fabric(kind="roce", tiers=(SwitchTier(name="flat"),))
    machine = build_cluster(
        read_nccl_topology(text("hgx_h100.xml")), get_gpu("h100"), fabric=fabric
    )
    assert machine.fabric == fabric


def test_a_topology_of_another_gpu_is_refused(text: Text) -> None:
    with pytest.raises(
        InputError, match=r"gpu\d of the topology is sm_80, h200.* is sm_90"
    ) as caught:
        build_cluster(read_nccl_topology(text("dgx_a100.xml")), get_gpu("h200"))
    assert [problem.fix for problem in caught.value.problems] == ["name a GPU of sm_80"]
    with pytest.raises(InputError, match="is gfx942, h200"):
        build_cluster(read_nccl_topology(text("mi300x.xml")), get_gpu("h200"))


def test_a_letter_of_the_architecture_makes_no_other_gpu(text: Text, hopper: Gpu) -> None:
    with_letter = msgspec.structs.replace(hopper, arch="sm_90a")
    assert build_cluster(read_nccl_topology(text("hgx_h100.xml")), with_letter).gpus == 8


def test_a_graph_without_gpus_or_with_loose_ones_is_refused() -> None:
    with pytest.raises(InputError, match="holds no GPU"):
        build_cluster(LinkGraph(vertices=(), links=()), get_gpu("h100"))
    loose = LinkGraph(vertices=(GraphVertex(name="gpu0", kind="gpu"),), links=())
    with pytest.raises(InputError, match="no CPU is linked to gpu0"):
        build_cluster(loose, get_gpu("h100"))
