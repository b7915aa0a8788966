"""One kernel reads for rows that decode what a dozen operations read."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="rows are tensors")
pytest.importorskip("triton", reason="the kernel is written in Triton")

from meshwright.run.serve.engine.model_runner.decode_inputs import RowTensors, gather_decode_inputs  # noqa: E402
from meshwright.run.serve.model.forward_batch import ForwardBatch  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PADDING = 5


def held(blocks: int) -> RowTensors:
    whole: dict[str, Any] = {"dtype": torch.int64, "device": DEVICE}
    tables = torch.arange((PADDING + 1) * blocks, dtype=torch.int32, device=DEVICE)
    return RowTensors(
        torch.arange(100, 101 + PADDING, **whole),
        torch.tensor([0, 7, 12, 3, 4 * blocks - 1, 0], **whole),
        tables.view(PADDING + 1, blocks),
        torch.tensor([-1, 0, 2, -1, 1, -1], **whole),
    )


def step(rows: int, blocks: int, full: bool) -> ForwardBatch:
    whole: dict[str, Any] = {"dtype": torch.int64, "device": DEVICE}
    short: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
    return ForwardBatch(
        tokens_N=torch.full((rows,), -7, **whole),
        positions_N=torch.full((rows,), -7, **whole),
        slot_mapping_N=torch.full((rows,), -7, **whole),
        block_tables_RB=torch.full((rows, blocks), -7, **short),
        seq_lens_R=torch.full((rows,), -7, **short),
        query_start_loc_R1=torch.arange(rows + 1, **short),
        max_query_len=1,
        state_rows_R=torch.full((rows,), -7, **whole) if full else None,
        lora_slots_N=torch.full((rows,), -7, **whole) if full else None,
    )


@pytest.mark.parametrize("blocks", [4, 300])
@pytest.mark.parametrize("full", [True, False])
def test_both_read_the_same(blocks: int, full: bool) -> None:
    rows = torch.tensor([4, 1, 3, PADDING, PADDING], device=DEVICE)
    found = []
    for backend in ("torch", "triton"):
        known, into = held(blocks), step(5, blocks, full)
        gather_decode_inputs(rows, known, into, 4, backend=backend)
        read = (
            into.tokens_N,
            into.positions_N,
            into.slot_mapping_N,
            into.block_tables_RB,
            into.seq_lens_R,
        )
        extra = (into.state_rows_R, into.lora_slots_N) if full else ()
        found.append([each.tolist() for each in (*read, *extra, known.positions)])
    assert found[0] == found[1]
    tokens, positions, slots, tables, lengths = found[1][:5]
    assert tokens[:3] == [104, 101, 103]
    assert positions[:3] == [4 * blocks - 1, 7, 3]
    # The block at the position's place in the row's table, and the rest within it.
    assert slots == [4 * (5 * blocks - 1) + 3, 4 * (blocks + 1) + 3, 4 * (3 * blocks) + 3, -1, -1]
    assert lengths == [4 * blocks, 8, 4, 0, 0]
    assert tables[1] == list(range(blocks, 2 * blocks))
    assert found[1][-1] == [0, 8, 12, 4, 4 * blocks, 0]
