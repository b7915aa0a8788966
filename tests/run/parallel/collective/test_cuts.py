"""Where chunks lie in tensors of any size."""

import pytest

from meshwright.policy.collective import Collective, build
from meshwright.run.kernels.collective.layout import layout
from meshwright.run.parallel.collective.cuts import Cuts


def test_chunks_of_a_split_message_never_cross_from_one_rank_to_the_next() -> None:
    cuts = Cuts(build("ring", "all_gather", 3, channels=2), 21)
    assert [cuts.start(chunk) for chunk in range(6)] == [0, 4, 7, 11, 14, 18]
    assert [cuts.length(chunk) for chunk in range(6)] == [4, 3, 4, 3, 4, 3]


@pytest.mark.parametrize("elements", [2, 10, 1_000, 4_096, 10_002])
@pytest.mark.parametrize(
    "collective",
    [
        build("ring", "all_reduce", 2, channels=3),
        build("ring", "reduce_scatter", 2, channels=3),
        build("binary_tree", "broadcast", 2, pieces=5),
    ],
    ids=lambda one: one.op,
)
def test_processes_and_kernels_cut_a_message_alike(collective: Collective, elements: int) -> None:
    cuts = Cuts(collective, elements)
    lengths = [cuts.length(chunk) for chunk in range(collective.chunks)]
    assert layout(collective, elements).part_elements.tolist() == lengths
