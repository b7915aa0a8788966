import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.cluster import (
    NcclGraphChannel,
    NcclGraphGpu,
    NcclSearchGraph,
    read_nccl_graphs,
    write_nccl_graphs,
)
from meshwright.spec.cluster.readers.nccl_graph import KINDS, PATH_TYPES, PATTERNS

RING = (
    '<graph id="0" pattern="4" crossnic="0" nchannels="{count}" speedintra="24" speedinter="12.5" '
    'latencyinter="1.5" typeintra="NVL" typeinter="PXN" samechannels="0">\n{channels}\n</graph>'
)
ONE = '<channel><net dev="3"/><gpu dev="0"/><gpu dev="1"/><net dev="0"/></channel>'
OTHER = '<channel><net dev="0"/><gpu dev="1"/><gpu dev="0"/><net dev="3"/></channel>'
# NCCL 2.30: devices in base 16, the host of a rack's domain in the upper bits, ranks beside them.
NVLS = """<graph id="3" pattern="5" crossnic="0" nchannels="2" speedintra="40.1" speedinter="40.1"
 latencyinter="0" typeintra="NVL" typeinter="LOC" samechannels="0">
<channel><gpu dev="0" rank="0"/></channel>
<channel><gpu dev="0x10000000000000a" rank="10"/></channel>
</graph>"""
NONE = (
    '<graph id="2" pattern="3" crossnic="0" nchannels="0" speedintra="0" speedinter="0" '
    'latencyinter="0" typeintra="LOC" typeinter="LOC" samechannels="0"/>'
)


def _file(*graphs: str) -> str:
    return "\n".join(['<graphs version="1">', *graphs, "</graphs>"])


def _ring(*channels: str) -> str:
    return RING.format(count=len(channels), channels="\n".join(channels))


@st.composite
def search_graphs(draw: st.DrawFn) -> NcclSearchGraph:
    gpus = draw(st.lists(st.integers(0, 1 << 60), min_size=1, max_size=4, unique=True))
    cards = draw(st.booleans())
    channels = []
    for _ in range(draw(st.integers(0, 4))):
        order = draw(st.permutations(gpus))
        ends = draw(st.tuples(st.integers(0, 99), st.integers(0, 99))) if cards else (None, None)
        ranks = draw(st.none() | st.integers(0, 9999))
        members = tuple(NcclGraphGpu(device=device, rank=ranks) for device in order)
        channels.append(NcclGraphChannel(gpus=members, entry_nic=ends[0], exit_nic=ends[1]))
    speeds = st.sampled_from([0.12, 2.4, 17.5, 20.6, 45.1, 48.0, 721.8])
    return NcclSearchGraph(
        kind=draw(st.sampled_from(KINDS)),
        pattern=draw(st.sampled_from(PATTERNS)),
        cross_nic=draw(st.integers(0, 2)),
        intra_bytes_per_s=draw(speeds) * 1e9,
        inter_bytes_per_s=draw(speeds) * 1e9,
        inter_latency_s=draw(st.integers(0, 30)) * 1e-6,
        type_intra=draw(st.sampled_from(PATH_TYPES)),
        type_inter=draw(st.sampled_from(PATH_TYPES)),
        same_channels=draw(st.booleans()),
        channels=tuple(channels),
    )


def test_a_ring_keeps_its_order_speeds_and_cards() -> None:
    (ring,) = read_nccl_graphs(_file(_ring(ONE, OTHER)))
    assert (ring.kind, ring.pattern, ring.type_intra, ring.type_inter) == (
        *("ring", "ring"),
        *("NVL", "PXN"),
    )
    assert (ring.intra_bytes_per_s, ring.inter_bytes_per_s) == (24e9, 12.5e9)
    assert ring.inter_latency_s == pytest.approx(1.5e-6)
    assert ring.bus_bytes_per_s == 48e9
    assert not ring.same_channels
    first, second = ring.channels
    assert [gpu.device for gpu in first.gpus] == [0, 1]
    assert [gpu.device for gpu in second.gpus] == [1, 0]
    assert (first.entry_nic, first.exit_nic) == (3, 0)


def test_newer_dumps_carry_ranks_and_count_in_base_sixteen() -> None:
    (nvls,) = read_nccl_graphs(_file(NVLS))
    heads = [channel.gpus[0] for channel in nvls.channels]
    assert [head.rank for head in heads] == [0, 10]
    assert heads[1].device == (1 << 56) + 10
    assert nvls.channels[0].entry_nic is None


def test_graphs_that_nccl_did_not_find_have_no_channel() -> None:
    ring, none = read_nccl_graphs(_file(_ring(ONE), NONE))
    assert (none.kind, none.channels) == ("collnet_chain", ())
    assert ring.channels


@given(st.lists(search_graphs(), min_size=1, max_size=5, unique_by=lambda graph: graph.kind))
def test_what_is_written_reads_back_the_same(graphs: list[NcclSearchGraph]) -> None:
    text = write_nccl_graphs(tuple(graphs))
    back = read_nccl_graphs(text)
    assert write_nccl_graphs(back) == text
    assert [graph.channels for graph in back] == [graph.channels for graph in graphs]
    for graph, again in zip(graphs, back, strict=True):
        assert again.intra_bytes_per_s == pytest.approx(graph.intra_bytes_per_s, rel=1e-12)


def test_devices_are_written_in_the_base_that_nccl_reads() -> None:
    gpus = tuple(NcclGraphGpu(device=device, rank=device) for device in (9, 10))
    graph = NcclSearchGraph(kind="ring", pattern="ring", channels=(NcclGraphChannel(gpus=gpus),))
    assert '<gpu dev="0xa" rank="10"/>' in write_nccl_graphs((graph,))


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (ONE.replace('dev="1"', 'dev="0"'), "GPU 0x0 is named twice"),
        (ONE.replace('<gpu dev="1"/>', ""), "not those of the first channel"),
        (ONE.replace('<net dev="3"/>', ""), "a channel has 1 <net>"),
        (ONE.replace('<net dev="3"/>', "").replace('<net dev="0"/>', ""), "some have none"),
        (ONE.replace('dev="1"', 'dev="two"'), "'two' of <gpu> is not a device number"),
        ("<channel/>", "names no GPU"),
    ],
)
def test_a_channel_that_nccl_would_hang_on_is_named_with_its_line(wrong: str, fault: str) -> None:
    with pytest.raises(InputError) as caught:
        read_nccl_graphs(_file(_ring(OTHER, wrong)), "graph.xml")
    assert all(problem.where == "graph.xml: line 4" for problem in caught.value.problems)
    assert any(fault in problem.what for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("old", "new", "fault", "fix"),
    [
        ('id="0"', 'id="7"', "no graph has the id 7", "0 to 4"),
        ('pattern="4"', 'pattern="0"', "no pattern has the number 0", "1 to 6"),
        ('typeintra="NVL"', 'typeintra="NVLINK"', "'NVLINK' is not a type of path", "NVL"),
        ('nchannels="2"', 'nchannels="3"', "says 3, but 2 are listed", 'nchannels="2"'),
        ('speedintra="24"', 'speedintra="fast"', "speedintra 'fast'", "0 to 1e12"),
        ('crossnic="0"', 'crossnic="-1"', "crossnic '-1'", 'crossnic="0"'),
        ('version="1"', 'version="2"', "version '2'", 'version="1"'),
    ],
)
def test_each_fault_of_a_graph_names_its_fix(old: str, new: str, fault: str, fix: str) -> None:
    with pytest.raises(InputError) as caught:
        read_nccl_graphs(_file(_ring(ONE, OTHER)).replace(old, new))
    (problem,) = caught.value.problems
    assert fault in problem.what
    assert fix in problem.fix
    assert re.search(r"line [12]$", problem.where)


def test_a_second_graph_of_one_kind_is_refused() -> None:
    with pytest.raises(InputError, match="a second graph for ring"):
        read_nccl_graphs(_file(_ring(ONE), _ring(ONE)))


def test_a_topology_is_told_from_a_graph() -> None:
    with pytest.raises(InputError, match="NCCL_GRAPH_DUMP_FILE, not of NCCL_TOPO_DUMP_FILE"):
        read_nccl_graphs('<system version="1"></system>')


def test_a_file_without_graphs_or_cut_short_is_refused() -> None:
    with pytest.raises(InputError, match="holds no graph"):
        read_nccl_graphs(_file())
    with pytest.raises(InputError, match="is not whole XML"):
        read_nccl_graphs(_file(_ring(ONE))[:-20])


def test_more_channels_than_nccl_has_are_refused() -> None:
    channel = NcclGraphChannel(gpus=(NcclGraphGpu(device=0),))
    with pytest.raises(InputError, match="65 channels are more than NCCL's 64"):
        NcclSearchGraph(kind="ring", pattern="ring", channels=(channel,) * 65)


@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_but_never_crashes(data: st.DataObject) -> None:
    letters = list(_file(_ring(ONE, OTHER), NVLS, NONE))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(letters) - 1))
        letters[at] = data.draw(st.sampled_from(list('"<>/=0xn 9-e')))
    try:
        read_nccl_graphs("".join(letters))
    except InputError as refusal:
        assert all(p.where and p.what and p.fix for p in refusal.problems)  # noqa: PT017
