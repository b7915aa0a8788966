"""Steps replayed from fixed tensors, padded to a size, equal those computed as they come."""

from collections.abc import Callable

import pytest
import torch

from meshwright.errors import InputError
from meshwright.run.nn.decoder import Decoder
from meshwright.run.serve.model.cache import PagedCache
from meshwright.run.serve.model.forward import Forward
from meshwright.run.serve.model.graphs import Graphs, graph_sizes
from meshwright.run.serve.model.step import Row, step_of
from tests.run.serve.model.greedy import random_prompts
from tests.run.serve.model.small import DEVICE, capped, hybrid, small


def test_sizes_are_dense_where_batches_are_small() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(5) == (1, 2, 4, 5)
    assert graph_sizes(32) == (1, 2, 4, 8, 16, 24, 32)
    assert graph_sizes(30) == (1, 2, 4, 8, 16, 24, 30)


@pytest.mark.parametrize("make", [small, hybrid, capped])
def test_padding_changes_no_logit_and_nothing_in_the_cache(make: Callable[[], Decoder]) -> None:
    decoder = make()
    forward = Forward(decoder, PagedCache(decoder, 16, 4), max_length=32, state_rows=4)
    graphs = Graphs(forward, 8)
    graphs.capture()
    prompts = random_prompts(decoder.model.vocab, (6, 3, 9))
    blocks = [[1, 2], [3], [4, 5, 6]]
    rows = [
        Row(prompt, 0, table, state)
        for state, (prompt, table) in enumerate(zip(prompts, blocks, strict=True))
    ]
    forward.run(step_of(rows, 4, DEVICE))
    kept, states = forward.cache.gather(range(16)), [each.state.clone() for each in forward.states]
    inputs = [each.inputs.clone() for each in forward.states]
    nexts = [Row([7], len(row.tokens), [*row.blocks, 9 + row.state], row.state) for row in rows]
    step = step_of(nexts, 4, DEVICE)
    wanted = forward.run(step)
    after = forward.cache.gather(range(16))
    forward.cache.scatter(range(16), kept)
    for each, state, input_ in zip(forward.states, states, inputs, strict=True):
        each.state.copy_(state)
        each.inputs.copy_(input_)
    assert graphs.covers(step)
    if DEVICE == "cpu":
        # As capturing would make it.
        graphs.room = torch.empty(8, decoder.model.vocab)
    found = graphs.run(step)
    assert graphs.room is not None
    assert found.data_ptr() == graphs.room.data_ptr()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        forward.cache.gather(range(16)).view(torch.float32), after.view(torch.float32)
    )


def test_prompts_are_computed_as_they_come() -> None:
    decoder = small()
    forward = Forward(decoder, PagedCache(decoder, 16, 4), max_length=32)
    step = step_of([Row([1, 2, 3], 0, [0])], 4, DEVICE)
    graphs = Graphs(forward, 2)
    assert not graphs.covers(step)
    assert torch.equal(graphs.run(step), forward.run(step))


def test_sizes_have_to_reach_all_rows() -> None:
    decoder = small()
    forward = Forward(decoder, PagedCache(decoder, 4, 4))
    with pytest.raises(InputError, match="end with 8"):
        Graphs(forward, 8, sizes=(1, 4))
