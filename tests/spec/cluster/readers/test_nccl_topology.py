import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.cluster import read_nccl_topology

DATA = Path(__file__).parents[1] / "data"

Text = Callable[[str], str]


def _small(
    inner: str, cpu: str = 'numaid="0" arch="x86_64" vendor="GenuineIntel" modelid="85"'
) -> str:
    return f'<system version="1">\n<cpu {cpu}>\n{inner}\n</cpu>\n</system>'


def _gpu(bus: str, body: str = "", attributes: str = 'dev="0" sm="90"') -> str:
    return (
        f'<pci busid="{bus}" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">'
        f"<gpu {attributes}>{body}</gpu></pci>"
    )


def test_dgx_a100_has_its_switch_bandwidth_and_cards(text: Text) -> None:
    graph = read_nccl_topology(text("dgx_a100.xml"))
    assert len(graph.vertices_of_kind("gpu")) == 8
    assert len(graph.vertices_of_kind("nvswitch")) == 1
    assert graph.path_bytes_per_s("gpu0", "gpu7") == 300e9
    speeds = {nic.label: nic.port_bytes_per_s for nic in graph.vertices_of_kind("nic")}
    assert speeds["mlx5_0"] == 25e9
    assert speeds["mlx5_9"] == 12.5e9


def test_hgx_h100_sums_the_nvlinks_of_all_switches(text: Text) -> None:
    graph = read_nccl_topology(text("hgx_h100.xml"))
    assert graph.path_bytes_per_s("gpu0", "gpu7") == 450e9
    assert len(graph.vertices_of_kind("nic")) == 9


def test_a_card_behind_the_same_switch_gets_full_pcie(text: Text) -> None:
    graph = read_nccl_topology(text("hgx_h100.xml"))
    near = graph.widest_path("gpu2", "nic:mlx5_2")
    far = graph.widest_path("gpu2", "nic:mlx5_7")
    assert near is not None
    assert far is not None
    assert len(near.vertices) == 3
    assert near.path_bytes_per_s == pytest.approx(63e9, rel=0.01)
    assert far.path_bytes_per_s == 22e9


def test_bridged_cards_share_nvlink_and_others_cross_sockets(text: Text) -> None:
    graph = read_nccl_topology(text("a100_pcie_bridged.xml"))
    assert graph.path_bytes_per_s("gpu0", "gpu1") == 300e9
    assert graph.path_bytes_per_s("gpu0", "gpu2") == 10e9


def test_a_narrow_or_unknown_slot_limits_its_gpu(text: Text) -> None:
    graph = read_nccl_topology(text("a100_pcie_bridged.xml"))
    assert graph.path_bytes_per_s("gpu0", "cpu0") == pytest.approx(31.5e9, rel=0.01)
    assert graph.path_bytes_per_s("gpu2", "cpu1") == pytest.approx(15.75e9, rel=0.01)
    # NCCL takes an unknown speed for generation 3.
    assert graph.path_bytes_per_s("gpu3", "cpu1") == pytest.approx(15.75e9, rel=0.01)


def test_a_rack_dump_keeps_hosts_apart_and_joins_them_by_nvlink(text: Text) -> None:
    graph = read_nccl_topology(text("gb200_two_hosts.xml"))
    assert {vertex.node for vertex in graph.vertices_of_kind("gpu")} == {"host0", "host1"}
    assert graph.path_bytes_per_s("gpu0", "host1.gpu3") == 900e9
    assert graph.path_bytes_per_s("gpu0", "cpu0") == pytest.approx(223.56e9)


def test_xgmi_links_are_direct(text: Text) -> None:
    graph = read_nccl_topology(text("mi300x.xml"))
    assert graph.vertices_of_kind("nvswitch") == ()
    assert all(graph.path_bytes_per_s("gpu0", f"gpu{other}") == 64e9 for other in range(1, 8))


def test_an_injected_file_counts_gpus_by_their_class(text: Text) -> None:
    graph = read_nccl_topology(text("cloud_injected.xml"))
    assert [gpu.name for gpu in graph.vertices_of_kind("gpu")] == ["gpu0", "gpu1", "gpu2", "gpu3"]
    assert len(graph.vertices_of_kind("nic")) == 4


def test_cards_keep_what_their_plugin_states() -> None:
    net = (
        '<net name="mlx5_0" dev="0" latency="1.5" speed="400000" port="2" rail="3" plane="1" '
        'guid="0xAB00"/><net name="mlx5_1" dev="1" speed="400000" rail="-1" guid="0x0"/>'
    )
    card = f'<pci busid="0000:03:00.0" class="0x020000"><nic>{net}</nic></pci>'
    full, bare = read_nccl_topology(_small(_gpu("0000:01:00.0") + card)).vertices_of_kind("nic")
    assert (full.rail, full.plane, full.port, full.guid) == (3, 1, 2, "0xab00")
    assert full.port_latency_s == pytest.approx(1.5e-6)
    assert full.port_bytes_per_s == 50e9
    assert (bare.rail, bare.plane, bare.port, bare.guid) == (None, None, None, "")
    assert bare.port_latency_s is None


@pytest.mark.parametrize("fact", ['rail="first"', 'plane="-2"', 'port="1.5"', 'latency="slow"'])
def test_a_faulty_fact_of_a_card_is_named(fact: str) -> None:
    card = f'<pci busid="0000:03:00.0"><nic><net name="a" {fact}/></nic></pci>'
    with pytest.raises(InputError, match=f"line 4: {fact.partition('=')[0]} .* of <net>"):
        read_nccl_topology(_small(_gpu("0000:01:00.0") + "\n" + card))


def test_links_to_gpus_the_process_did_not_see_are_left_out() -> None:
    wires = '<nvlink target="0000:99:00.0" count="4" tclass="0x030200"/>'
    graph = read_nccl_topology(_small(_gpu("0000:01:00.0", wires)))
    assert [link.kind for link in graph.links] == ["pcie", "pcie"]


def test_a_given_link_speed_replaces_the_architectures(text: Text) -> None:
    graph = read_nccl_topology(text("dgx_a100.xml"), link_bytes_per_s=10e9)
    assert graph.path_bytes_per_s("gpu0", "gpu1") == 120e9


def test_every_fault_is_listed_with_its_line() -> None:
    body = "\n".join(
        [
            _gpu("0000:01:00.0", '<nvlink target="x" count="many" tclass="0x068000"/>'),
            '<pci class="0x060400"/>',
            _gpu("0000:02:00.0", attributes='dev="first" sm="90"'),
            '<pci busid="0000:03:00.0"><nic><net name="a" speed="-5"/></nic></pci>',
        ]
    )
    with pytest.raises(InputError) as caught:
        read_nccl_topology(_small(body), "node.xml")
    lines = sorted(int(re.findall(r"line (\d+)", p.where)[0]) for p in caught.value.problems)
    assert set(lines) == {3, 4, 5, 6}


def test_an_architecture_without_known_links_asks_for_their_speed() -> None:
    wires = '<nvlink target="0000:02:00.0" count="4" tclass="0x068000"/>'
    small = _small(_gpu("0000:01:00.0", wires, 'dev="0" sm="35"'))
    with pytest.raises(InputError, match="give link_bytes_per_s"):
        read_nccl_topology(small)


def test_a_truncated_file_says_where_it_ends(text: Text) -> None:
    whole = text("dgx_a100.xml")
    with pytest.raises(InputError, match=r"cut.xml: line \d+: is not whole XML"):
        read_nccl_topology(whole[: len(whole) // 2], "cut.xml")


def test_a_graph_dump_is_told_from_a_topology() -> None:
    with pytest.raises(InputError, match="NCCL_TOPO_DUMP_FILE, not of NCCL_GRAPH_DUMP_FILE"):
        read_nccl_topology('<graphs version="1"></graphs>')


def test_a_file_without_gpus_is_refused() -> None:
    with pytest.raises(InputError, match="names no GPU"):
        read_nccl_topology(_small(""))


def test_entities_are_not_expanded() -> None:
    bomb = '<!DOCTYPE s [<!ENTITY a "x"><!ENTITY b "&a;&a;&a;">]><system version="1">&b;</system>'
    with pytest.raises(InputError, match="document type"):
        read_nccl_topology(bomb)


def test_endless_nesting_is_refused() -> None:
    with pytest.raises(InputError, match="nested too deeply"):
        read_nccl_topology("<system>" + "<pci>" * 5000)


@given(data=st.data(), name=st.sampled_from(["dgx_a100.xml", "gb200_two_hosts.xml", "mi300x.xml"]))
def test_a_damaged_file_is_read_or_refused_but_never_crashes(
    data: st.DataObject, name: str
) -> None:
    letters = list((DATA / name).read_text())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(letters) - 1))
        letters[at] = data.draw(st.sampled_from(list('"<>/=0xn 9-e')))
    try:
        graph = read_nccl_topology("".join(letters))
    except InputError as refusal:
        assert all(p.where and p.what and p.fix for p in refusal.problems)  # noqa: PT017
    else:
        assert all(link.link_bytes_per_s > 0 for link in graph.links)


@given(st.text(max_size=80))
def test_any_text_is_refused_politely(anything: str) -> None:
    with pytest.raises(InputError) as caught:
        read_nccl_topology(anything)
    assert all(problem.fix for problem in caught.value.problems)
