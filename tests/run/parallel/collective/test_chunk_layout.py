"""Where chunks lie in tensors of any size."""

import pytest

from meshwright.policy.collective import Collective, build_algorithm
from meshwright.run.kernels.collective.buffer_layout import make_buffer_layout
from meshwright.run.parallel.collective.chunk_layout import ChunkLayout


def test_chunks_of_a_split_message_never_cross_from_one_rank_to_the_next() -> None:
    cuts = ChunkLayout(build_algorithm("ring", "all_gather", 3, channels=2), 21)
    assert [cuts.get_chunk_offset(chunk) for chunk in range(6)] == [0, 4, 7, 11, 14, 18]
    assert [cuts.get_chunk_elements(chunk) for chunk in range(6)] == [4, 3, 4, 3, 4, 3]


@pytest.mark.parametrize("elements", [2, 10, 1_000, 4_096, 10_002])
@pytest.mark.parametrize(
    "collective",
    [
        build_algorithm("ring", "all_reduce", 2, channels=3),
        build_algorithm("ring", "reduce_scatter", 2, channels=3),
        build_algorithm("binary_tree", "broadcast", 2, pieces=5),
    ],
    ids=lambda one: one.op,
)
def test_processes_and_kernels_cut_a_message_alike(collective: Collective, elements: int) -> None:
    cuts = ChunkLayout(collective, elements)
    lengths = [cuts.get_chunk_elements(chunk) for chunk in range(collective.chunks)]
    assert make_buffer_layout(collective, elements).chunk_elements.tolist() == lengths
