import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.cluster import read_slurm_topology

THREE_LAYERS = """
# two pods of two leaves, as an administrator would write it
SwitchName=leaf1 Nodes=gpu[001-016] LinkSpeed=400Gb
switchname=leaf2 NODES=gpu[017-032]
SwitchName=leaf3 Nodes=gpu[033-048]   # third
SwitchName=leaf4 \\
    Nodes=gpu[049-060],login1

SwitchName=spine1 Switches=leaf[1-2]
SwitchName=spine2 Switches=leaf[3-4]
SwitchName=core Switches=spine[1-2]
"""


def test_nodes_hang_below_their_leaves() -> None:
    tree = read_slurm_topology(THREE_LAYERS)
    assert [leaf.name for leaf in tree.leaves] == ["leaf1", "leaf2", "leaf3", "leaf4"]
    assert len(tree.nodes) == 61
    assert tree.roots == ("core",)
    assert tree.switches[0].link_speed == "400Gb"


def test_leaves_come_in_the_order_of_the_tree_not_of_the_file() -> None:
    tree = read_slurm_topology(
        "SwitchName=b Nodes=n2\nSwitchName=a Nodes=n1\nSwitchName=top Switches=a,b"
    )
    assert tree.nodes == ("n1", "n2")


def test_the_layer_between_two_nodes() -> None:
    tree = read_slurm_topology(THREE_LAYERS)
    assert tree.layer_between("gpu001", "gpu016") == 0
    assert tree.layer_between("gpu001", "gpu017") == 1
    assert tree.layer_between("gpu001", "login1") == 2


def test_separate_trees_do_not_meet() -> None:
    tree = read_slurm_topology("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2")
    assert tree.layer_between("n1", "n2") is None


def test_an_unknown_node_gets_a_suggestion() -> None:
    with pytest.raises(InputError, match="did you mean gpu0"):
        read_slurm_topology(THREE_LAYERS).layer_between("gpu01", "gpu002")


def test_a_fabric_has_the_trees_layers() -> None:
    fabric = read_slurm_topology(THREE_LAYERS).to_fabric("infiniband", oversubscription=(1, 2))
    assert [(tier.name, tier.nodes) for tier in fabric.tiers] == [
        ("leaf", 16),
        ("spine", 32),
        ("core", None),
    ]
    assert [tier.oversubscription for tier in fabric.tiers] == [1, 2, 1]


def test_an_uneven_tree_is_rounded_up_to_an_even_one() -> None:
    tree = read_slurm_topology(
        "SwitchName=a Nodes=n[1-10]\nSwitchName=b Nodes=n[11-15]\nSwitchName=c Nodes=m[1-4]\n"
        "SwitchName=x Switches=a,b\nSwitchName=y Switches=c"
    )
    assert [tier.nodes for tier in tree.to_fabric("roce").tiers] == [10, 20]


def test_blocks_and_their_sizes() -> None:
    tree = read_slurm_topology(
        "BlockName=rack1 Nodes=n[01-18]\nBlockName=rack2 Nodes=n[19-36]\nBlockSizes=18,36"
    )
    assert [block.name for block in tree.blocks] == ["rack1", "rack2"]
    assert tree.block_sizes == (18, 36)
    assert len(tree.nodes) == 36
    with pytest.raises(InputError, match="no switch"):
        tree.to_fabric("infiniband")


def test_every_fault_is_listed_with_its_line() -> None:
    with pytest.raises(InputError) as caught:
        read_slurm_topology(
            "SwitchName=a\nSwichName=b Nodes=x\nnonsense\nSwitchName=c Nodes=n[1-\n"
            "SwitchName=c Nodes=n1\nBlockSizes=few\nSwitchName=s[1-2] Nodes=n2\nNodes=n3"
        )
    text = str(caught.value)
    for line in range(1, 9):
        assert f"topology.conf: line {line}: " in text
    assert "did you mean switchname" in text
    assert "defined twice" in text


def test_an_undefined_switch_gets_a_suggestion() -> None:
    with pytest.raises(InputError, match="did you mean leaf1"):
        read_slurm_topology("SwitchName=leaf1 Nodes=a\nSwitchName=top Switches=leaf2")


def test_a_circle_of_switches_is_refused() -> None:
    with pytest.raises(InputError, match="below themselves: 'a, b'"):
        read_slurm_topology("SwitchName=a Switches=b\nSwitchName=b Switches=a")


def test_a_tower_of_switches_is_refused() -> None:
    lines = [f"SwitchName=s{n} Switches=s{n + 1}" for n in range(3000)]
    with pytest.raises(InputError, match="too many"):
        read_slurm_topology("\n".join([*lines, "SwitchName=s3000 Nodes=n"]))


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(InputError, match="no switch and no block"):
        read_slurm_topology("# nothing\n")


@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_but_never_crashes(data: st.DataObject) -> None:
    letters = list(THREE_LAYERS)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(letters) - 1))
        letters[at] = data.draw(st.sampled_from(list("\n= []-,#\\0sn")))
    try:
        tree = read_slurm_topology("".join(letters))
        if tree.switches:
            tree.to_fabric("infiniband")
    except InputError as refusal:
        assert all(p.where and p.what and p.fix for p in refusal.problems)  # noqa: PT017


@given(leaves=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_each_node_meets_itself_at_its_leaf(leaves: list[int]) -> None:
    lines = [f"SwitchName=l{i} Nodes=n{i}x[1-{size}]" for i, size in enumerate(leaves)]
    lines.append(f"SwitchName=top Switches=l[0-{len(leaves) - 1}]")
    tree = read_slurm_topology("\n".join(lines))
    assert len(tree.nodes) == sum(leaves)
    assert all(tree.layer_between(node, node) == 0 for node in tree.nodes)
