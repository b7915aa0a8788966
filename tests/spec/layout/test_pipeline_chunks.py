"""Every layer lies on exactly the ranks its schedule puts it on."""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.layout import Layout, list_chunks, list_chunks_by_rank, split_layers


def test_layers_split_evenly_with_the_rest_up_front() -> None:
    assert split_layers(Layout(pp=4), 10) == (3, 3, 2, 2)


def test_a_given_split_is_kept() -> None:
    assert split_layers(Layout(pp=2, stage_layers=(1, 9)), 10) == (1, 9)


def test_interleaved_chunks_go_round_the_ranks() -> None:
    layout = Layout(pp=2, virtual_stages=2, schedule="interleaved")
    assert [chunk.rank for chunk in list_chunks(layout, 8)] == [0, 1, 0, 1]


def test_folded_schedules_turn_around_at_the_last_rank() -> None:
    layout = Layout(pp=3, virtual_stages=2, schedule="zb-v")
    assert [chunk.rank for chunk in list_chunks(layout, 6)] == [0, 1, 2, 2, 1, 0]


def test_dualpipe_holds_every_chunk_twice() -> None:
    held = list_chunks_by_rank(Layout(pp=4, schedule="dualpipe"), 4)
    assert [{chunk.first for chunk in rank} for rank in held] == [{0, 3}, {1, 2}, {2, 1}, {3, 0}]


def test_the_ends_hold_embedding_and_head() -> None:
    first, last = list_chunks_by_rank(Layout(pp=2), 4)
    assert first[0].has_embedding
    assert not first[0].has_head
    assert last[0].has_head


@given(pp=st.integers(1, 6), virtual=st.integers(1, 4), layers=st.integers(1, 60))
def test_every_layer_lies_somewhere_once(pp: int, virtual: int, layers: int) -> None:
    interleaved = virtual > 1 and pp > 1
    layout = Layout(
        pp=pp,
        virtual_stages=virtual if interleaved else 1,
        schedule="interleaved" if interleaved else "1f1b",
    )
    covered = [n for chunk in list_chunks(layout, layers) for n in range(chunk.first, chunk.last)]
    assert covered == list(range(layers))
