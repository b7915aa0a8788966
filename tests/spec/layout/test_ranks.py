from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.layout.choices import AXIS_ORDERS
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.ranks import (
    NAMED_GROUPS,
    ExpertRankCoordinate,
    RankCoordinate,
    get_coordinate,
    get_expert_coordinate,
    get_expert_mesh_shape,
    get_mesh_shape,
    get_process_group,
    get_rank,
    has_matching_expert_stages,
    list_process_groups,
)

DENSE_AXES = RankCoordinate._fields
EXPERT_AXES = ExpertRankCoordinate._fields


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, cp, dp, pp = (draw(st.integers(1, 4)) for _ in range(4))
    stage = tp * cp * dp
    expert_tp = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    rest = stage // expert_tp
    ep = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    shard = draw(st.sampled_from([None, *(n for n in range(1, dp * cp + 1) if dp * cp % n == 0)]))
    order = draw(st.sampled_from(sorted(AXIS_ORDERS)))
    return Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, expert_tp=expert_tp, shard=shard, order=order)


@st.composite
def axes(draw: st.DrawFn) -> str:
    part = draw(st.sampled_from([DENSE_AXES, EXPERT_AXES]))
    return "-".join(draw(st.lists(st.sampled_from(part), min_size=1, unique=True)))


@given(layouts())
def test_every_rank_has_one_coordinate_and_every_coordinate_one_rank(layout: Layout) -> None:
    ranks = range(layout.gpus)
    dense = [get_coordinate(layout, rank) for rank in ranks]
    expert = [get_expert_coordinate(layout, rank) for rank in ranks]
    assert len(set(dense)) == len(set(expert)) == layout.gpus
    assert [get_rank(layout, place) for place in dense] == list(ranks)
    assert [get_rank(layout, place) for place in expert] == list(ranks)


@given(layouts(), axes())
def test_groups_partition_the_ranks(layout: Layout, words: str) -> None:
    members = [rank for group in list_process_groups(layout, words) for rank in group]
    assert sorted(members) == list(range(layout.gpus))


@given(layouts(), axes())
def test_groups_have_the_size_of_their_axes(layout: Layout, words: str) -> None:
    sizes = {
        "tp": layout.tp,
        "cp": layout.cp,
        "dp": layout.dp,
        "pp": layout.pp,
        "ep": layout.ep,
        "expert_tp": layout.effective_expert_tp,
        "expert_dp": layout.expert_dp,
    }
    expected = prod(sizes[word] for word in words.split("-"))
    assert {len(group) for group in list_process_groups(layout, words)} == {expected}


@given(layouts(), axes())
def test_members_of_a_group_agree_on_every_other_axis(layout: Layout, words: str) -> None:
    expert = set(words.split("-")) & {"ep", "expert_tp", "expert_dp"}
    place = get_expert_coordinate if expert else get_coordinate
    others = set(EXPERT_AXES if expert else DENSE_AXES) - set(words.split("-"))
    for group in list_process_groups(layout, words):
        places = [place(layout, rank) for rank in group]
        assert all(len({getattr(p, other) for p in places}) == 1 for other in others)


@given(layouts(), st.one_of(axes(), st.sampled_from(["shard", "replicate"])))
def test_a_rank_finds_its_own_group(layout: Layout, words: str) -> None:
    every = list_process_groups(layout, words)
    for rank in range(0, layout.gpus, 3):
        assert get_process_group(layout, rank, words) == next(
            group for group in every if rank in group
        )


def test_the_order_in_which_axes_are_written_does_not_matter() -> None:
    layout = Layout(tp=2, cp=2, dp=3)
    assert list_process_groups(layout, "cp-dp") == list_process_groups(layout, "dp-cp")


def test_neighbouring_gpus_share_the_first_axis_of_the_order() -> None:
    assert list_process_groups(Layout(tp=2, dp=2), "tp") == ((0, 1), (2, 3))
    assert list_process_groups(Layout(tp=2, dp=2, order="dp-tp-cp-ep-pp"), "dp") == ((0, 1), (2, 3))


def test_tied_embeddings_are_shared_by_the_first_and_last_stage() -> None:
    layout = Layout(tp=2, pp=3)
    assert list_process_groups(layout, "embedding") == ((0, 4), (1, 5))
    assert list_process_groups(layout, "position_embedding") == ((0,), (1,))
    assert get_process_group(layout, 4, "embedding") == (0, 4)
    assert get_process_group(layout, 2, "embedding") == ()
    assert get_process_group(layout, 4, "position_embedding") == ()


def test_without_a_pipeline_each_rank_keeps_its_embeddings_to_itself() -> None:
    assert list_process_groups(Layout(tp=2), "embedding") == ((0,), (1,))


def test_hybrid_sharding_cuts_the_data_parallel_ranks_into_copies() -> None:
    layout = Layout(tp=2, dp=4, shard=2, zero=3)
    assert list_process_groups(layout, "shard") == ((0, 2), (4, 6), (1, 3), (5, 7))
    assert list_process_groups(layout, "replicate") == ((0, 4), (2, 6), (1, 5), (3, 7))


@given(layouts())
def test_one_shard_group_and_one_replicate_group_meet_in_one_rank(layout: Layout) -> None:
    for rank in range(layout.gpus):
        shard = set(get_process_group(layout, rank, "shard"))
        replicate = set(get_process_group(layout, rank, "replicate"))
        assert shard & replicate == {rank}
        assert len(shard) * len(replicate) == layout.dp * layout.cp


def test_mesh_lists_the_slowest_axis_first() -> None:
    layout = Layout(tp=2, cp=3, dp=4, pp=5)
    assert get_mesh_shape(layout) == (("pp", "dp", "cp", "tp"), (5, 4, 3, 2))
    layout = Layout(tp=2, dp=6, pp=5, ep=3)
    assert get_expert_mesh_shape(layout) == (("pp", "expert_dp", "ep", "expert_tp"), (5, 2, 3, 2))


def test_hybrid_mesh_splits_data_parallel_into_replicas_and_shards() -> None:
    layout = Layout(tp=2, cp=2, dp=8, shard=8, zero=3)
    names, sizes = get_mesh_shape(layout)
    assert names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert sizes == (1, 2, 4, 2, 2)


def test_hybrid_mesh_splits_context_parallel_where_a_copy_covers_a_part_of_it() -> None:
    names, sizes = get_mesh_shape(Layout(cp=4, dp=2, shard=2, zero=3))
    assert names == ("pp", "dp_replicate", "dp_shard", "cp_replicate", "cp_shard", "tp")
    assert sizes == (1, 2, 1, 2, 2, 1)


def test_a_shard_that_no_mesh_can_express_is_refused_with_a_fix() -> None:
    with pytest.raises(InputError, match=r"layout.shard.*6 cuts the 4 ranks of cp.*divisor of 4"):
        get_mesh_shape(Layout(cp=4, dp=3, shard=6, zero=3))


@given(layouts())
def test_meshes_cover_the_layout(layout: Layout) -> None:
    assert prod(get_expert_mesh_shape(layout).sizes) == layout.gpus
    try:
        assert prod(get_mesh_shape(layout).sizes) == layout.gpus
    except InputError:
        assert layout.shard is not None


@given(layouts())
def test_experts_stay_in_their_stage_exactly_when_pipelines_agree(layout: Layout) -> None:
    same = all(
        get_coordinate(layout, rank).pp == get_expert_coordinate(layout, rank).pp
        for rank in range(layout.gpus)
    )
    assert has_matching_expert_stages(layout) is same


def test_pipelines_agree_when_pp_is_last() -> None:
    assert has_matching_expert_stages(Layout(tp=2, cp=2, dp=4, pp=2, ep=4, expert_tp=1))


@pytest.mark.parametrize("words", ["pt", "", "tp-xx", "embeding", "TP"])
def test_an_unknown_axis_is_refused_with_the_nearest_name(words: str) -> None:
    with pytest.raises(InputError, match="there is no axis named"):
        list_process_groups(Layout(tp=2), words)


def test_dense_and_expert_axes_do_not_mix() -> None:
    with pytest.raises(InputError, match="mixes axes"):
        list_process_groups(Layout(tp=2, dp=2, ep=2), "tp-ep")


@pytest.mark.parametrize("rank", [-1, 8, 10**30])
def test_a_rank_outside_the_layout_is_refused(rank: int) -> None:
    with pytest.raises(InputError, match="use 0 to 7"):
        get_coordinate(Layout(tp=8), rank)


def test_a_coordinate_outside_the_layout_lists_every_wrong_axis() -> None:
    with pytest.raises(InputError) as caught:
        get_rank(Layout(tp=2, dp=2), RankCoordinate(tp=2, cp=0, dp=-1, pp=0))
    assert {problem.where for problem in caught.value.problems} == {"tp", "dp"}


@pytest.mark.parametrize("name", NAMED_GROUPS)
def test_named_groups_never_hold_a_rank_twice(name: str) -> None:
    members = [
        r
        for group in list_process_groups(Layout(tp=2, cp=2, dp=2, pp=3, shard=2), name)
        for r in group
    ]
    assert len(members) == len(set(members))
