"""Collectives over virtual ranks give what torch gives, on the GPU or through the interpreter."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="virtual ranks are torch tensors")
pytest.importorskip("triton", reason="virtual ranks are moved by Triton kernels")

import torch

from meshwright.errors import InputError, MissingDependency
from meshwright.policy.collective import (
    ALGORITHMS,
    Collective,
    CollectiveBuilder,
    CollectiveOp,
    build_algorithm,
)
from meshwright.run.kernels.collective import VirtualRanks
from meshwright.run.kernels.collective.collective_reference import SUM_TYPES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS = ("run_per_step", "run_persistent", "run_reference")
NEEDS: dict[str, Any] = {
    "per_node": 4,
    "nodes_per_pod": 2,
    "peers": (1, 0, 3, 4, 2, -1, 7, 6),
    "counts": [[(3 * src + dst) % 4 for dst in range(8)] for src in range(8)],
}
EVERY = [(algorithm.name, op) for algorithm in ALGORITHMS for op in algorithm.ops]


def _built(name: str, op: CollectiveOp, ranks: int = 8) -> Collective:
    needs = next(algorithm.needs for algorithm in ALGORITHMS if algorithm.name == name)
    wanted = set(needs) | {"all_to_all_v": {"counts"}, "send_recv": {"peers"}}.get(op, set())
    return build_algorithm(name, op, ranks, pieces=2, **{key: NEEDS[key] for key in sorted(wanted)})


def _drawn(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers so small that every sum of eight is exact in every type.

    The interpreter cuts bits off where a GPU rounds to bfloat16; exact sums are the same in both.
    """
    return torch.randint(-16, 16, (elements,), device=DEVICE).to(dtype)


def _inputs(collective: Collective, share: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What the ranks bring when each has `share` elements for or from each of the others."""
    ranks, op, root = collective.ranks, collective.op, collective.root
    whole = share * ranks
    if op in ("all_gather", "gather"):
        return [_drawn(share, dtype) for _ in range(ranks)]
    if op in ("broadcast", "scatter"):
        return [_drawn(whole if rank == root else 0, dtype) for rank in range(ranks)]
    if op == "all_to_all_v":
        return [_drawn(share * sum(row), dtype) for row in collective.counts]
    return [_drawn(whole, dtype) for _ in range(ranks)]


def _expected(collective: Collective, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the operation promises, said with torch alone."""
    ranks, op, root = collective.ranks, collective.op, collective.root
    nothing = inputs[0].new_empty(0)
    match op:
        case "all_reduce":
            return [torch.stack(list(inputs)).sum(0).to(inputs[0].dtype)] * ranks
        case "reduce":
            total = torch.stack(list(inputs)).sum(0).to(inputs[0].dtype)
            return [total if rank == root else nothing for rank in range(ranks)]
        case "reduce_scatter":
            return list(torch.stack(list(inputs)).sum(0).to(inputs[0].dtype).chunk(ranks))
        case "all_gather":
            return [torch.cat(list(inputs))] * ranks
        case "gather":
            whole = torch.cat(list(inputs))
            return [whole if rank == root else nothing for rank in range(ranks)]
        case "broadcast":
            return [inputs[root]] * ranks
        case "scatter":
            return list(inputs[root].chunk(ranks))
        case "all_to_all":
            return [
                torch.cat([each.chunk(ranks)[rank] for each in inputs]) for rank in range(ranks)
            ]
        case "send_recv":
            sender = {peer: rank for rank, peer in enumerate(collective.peers)}
            return [inputs[sender[rank]] if rank in sender else nothing for rank in range(ranks)]
    return _shared_out(collective.counts, inputs)


def _shared_out(
    counts: Sequence[Sequence[int]], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What an all_to_all_v promises."""
    unit = len(inputs[0]) // max(1, sum(counts[0]))
    parts: list[list[torch.Tensor]] = [[] for _ in counts]
    for each, row in zip(inputs, counts, strict=True):
        for rank, count in enumerate(row):
            start = unit * sum(row[:rank])
            parts[rank].append(each[start : start + unit * count])
    return [torch.cat(part) for part in parts]


def _same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def _ran(run: str, collective: Collective, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    ranks = VirtualRanks.from_inputs(collective, inputs, tile=64)
    getattr(ranks, run)()
    return ranks.outputs()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize(("name", "op"), EVERY)
def test_every_algorithm_of_the_library(name: str, op: CollectiveOp) -> None:
    collective = _built(name, op)
    inputs = _inputs(collective, 30, torch.float32)
    for run in ("run_per_step", "run_reference"):
        assert _same(_ran(run, collective, inputs), _expected(collective, inputs))


@pytest.mark.parametrize(("name", "op"), [each for each in EVERY if each[1] == "all_to_all_v"])
def test_one_launch_takes_steps_of_uneven_size(name: str, op: CollectiveOp) -> None:
    collective = _built(name, op)
    inputs = _inputs(collective, 100, torch.float32)
    assert _same(_ran("run_persistent", collective, inputs), _expected(collective, inputs))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", ["ring", "double_tree"])
def test_any_number_of_ranks(name: str, ranks: int) -> None:
    collective = build_algorithm(name, "all_reduce", ranks, pieces=2)
    inputs = _inputs(collective, 41, torch.int32)
    for run in RUNS:
        assert _same(_ran(run, collective, inputs), _expected(collective, inputs))


@pytest.mark.parametrize("dtype", SUM_TYPES, ids=str)
@pytest.mark.parametrize("elements", [1, 3, 8, 129, 500])
def test_messages_that_chunks_do_not_divide(elements: int, dtype: torch.dtype) -> None:
    collective = build_algorithm("ring", "all_reduce", 4)
    inputs = [_drawn(elements, dtype) for _ in range(4)]
    for run in RUNS:
        assert _same(_ran(run, collective, inputs), _expected(collective, inputs))


def _through_a_switch(ranks: int) -> Collective:
    builder = CollectiveBuilder(
        "switch", "all_reduce", ranks=ranks, chunks=2, switches=("nvswitch0",)
    )
    with builder.step():
        for rank in range(ranks):
            builder.add(rank, ranks, chunk=0, count=2)
    with builder.step():
        for rank in range(ranks):
            builder.copy(ranks, rank, chunk=0, count=2)
    return builder.build()


@pytest.mark.parametrize("run", RUNS)
def test_a_switch_adds_16_bit_numbers_in_float32(run: str) -> None:
    # bfloat16 has 8 significant bits: 256 + 1 is 256 there, but 256 + 1 + 1 is 258.
    collective = _through_a_switch(3)
    inputs = [
        torch.full((64,), value, dtype=torch.bfloat16, device=DEVICE) for value in (256, 1, 1)
    ]
    found = _ran(run, collective, inputs)
    assert [set(each.tolist()) for each in found] == [{258.0}] * 3


@pytest.mark.parametrize("run", RUNS)
def test_a_second_run_forgets_what_a_switch_held(run: str) -> None:
    collective = _through_a_switch(4)
    inputs = _inputs(collective, 20, torch.int32)
    ranks = VirtualRanks.from_inputs(collective, inputs, tile=64)
    getattr(ranks, run)()
    ranks.load(inputs)
    getattr(ranks, run)()
    assert _same(ranks.outputs(), _expected(collective, inputs))


@pytest.mark.parametrize("run", RUNS)
def test_copies_keep_every_bit(run: str) -> None:
    strange = [0x7F81, 0xFFC1, 0x8000, 0x0001]  # two NaNs with a payload, −0, the least number
    bits = torch.tensor(strange * 8, dtype=torch.int32).to(torch.int16).to(DEVICE)
    collective = build_algorithm("ring", "all_gather", 4)
    ranks = VirtualRanks.from_inputs(collective, [bits.view(torch.bfloat16)] * 4, tile=64)
    getattr(ranks, run)()
    for each in ranks.outputs():
        assert torch.equal(each.view(torch.int16), bits.repeat(4))


def test_all_runs_agree_in_every_bit() -> None:
    collective = _built("double_tree", "all_reduce")
    inputs = [torch.randn(999, device=DEVICE) for _ in range(8)]
    first, *others = (_ran(run, collective, inputs) for run in RUNS)
    for other in others:
        assert _same(first, other)
    exact = torch.stack(inputs).double().sum(0)
    assert (first[0].double() - exact).norm() / exact.norm() < 1e-6


def test_a_ready_buffer_is_worked_on_in_place() -> None:
    collective = build_algorithm("ring", "all_reduce", 4)
    buffer = _drawn(4 * 4 * 32, torch.float32).view(4, 4 * 32)
    wanted = buffer.sum(0)
    ranks = VirtualRanks(collective, buffer)
    assert ranks.buffer_layout.elements == 4 * 32
    ranks.run_per_step()
    assert _same(list(buffer), [wanted] * 4)


def test_bytes_moved_count_reads_and_writes() -> None:
    buffer = torch.zeros(2, 2 * 16, dtype=torch.bfloat16, device=DEVICE)
    # Two adds of 16 elements with 3 accesses each, two copies with 2, all of 2 bytes.
    assert (
        VirtualRanks(build_algorithm("ring", "all_reduce", 2), buffer).bytes_moved == 2 * 16 * 5 * 2
    )


def test_unsound_collective_is_refused_with_its_counter_example() -> None:
    builder = CollectiveBuilder("half", "all_reduce", ranks=2, chunks=1)
    with builder.step():
        builder.add(0, 1, chunk=0)
    with pytest.raises(InputError, match="rank 0"):
        VirtualRanks.from_inputs(builder.build(), [_drawn(4, torch.float32)] * 2)


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ((3, 64), torch.float32, "2 ranks of 2 slots"),
        ((2, 63), torch.float32, "2 ranks of 2 slots"),
        ((2, 64), torch.float64, "torch.float64"),
        ((2, 60), torch.float32, "multiple of 16"),
    ],
)
def test_unsuitable_buffer_is_refused(
    shape: tuple[int, int], dtype: torch.dtype, said: str
) -> None:
    buffer = torch.zeros(shape, dtype=dtype, device=DEVICE)
    with pytest.raises(InputError, match=said):
        VirtualRanks(build_algorithm("ring", "all_reduce", 2), buffer)


def test_rows_of_a_larger_tensor_are_refused() -> None:
    wide = torch.zeros(2, 128, device=DEVICE)
    with pytest.raises(InputError, match="follow each other"):
        VirtualRanks(build_algorithm("ring", "all_reduce", 2), wide[:, :64])


def test_wrong_inputs_are_refused_by_rank() -> None:
    ring = build_algorithm("ring", "all_reduce", 2)
    with pytest.raises(InputError, match="1 tensors for 2 ranks"):
        VirtualRanks.from_inputs(ring, [_drawn(4, torch.float32)])
    with pytest.raises(InputError, match=r"inputs\[1\]: 5 elements .*give 4"):
        VirtualRanks.from_inputs(ring, [_drawn(4, torch.float32), _drawn(5, torch.float32)])
    with pytest.raises(InputError, match=r"inputs\[1\].*one type"):
        VirtualRanks.from_inputs(ring, [_drawn(4, torch.float32), _drawn(4, torch.int32)])


def test_without_triton_the_plain_run_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    ranks = VirtualRanks.from_inputs(
        build_algorithm("ring", "all_reduce", 2), [_drawn(4, torch.float32)] * 2
    )
    ranks.run_reference()
    with pytest.raises(MissingDependency, match="Triton is not installed"):
        ranks.run_persistent()


@pytest.mark.skipif(DEVICE == "cuda", reason="says what is lacking where there is no GPU")
def test_recording_needs_a_gpu() -> None:
    ranks = VirtualRanks.from_inputs(
        build_algorithm("ring", "all_reduce", 2), [_drawn(4, torch.float32)] * 2
    )
    with pytest.raises(MissingDependency, match="CUDA"):
        ranks.capture_graph(ranks.run_persistent)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("run", RUNS[:2])
@pytest.mark.parametrize(("name", "op"), EVERY)
def test_messages_of_more_tiles_than_fit_on_the_device(
    name: str, op: CollectiveOp, run: str
) -> None:
    collective = _built(name, op)
    inputs = _inputs(collective, 100_003 if op != "all_to_all_v" else 10_001, torch.float32)
    ranks = VirtualRanks.from_inputs(collective, inputs, tile=1024)
    replay = ranks.capture_graph(getattr(ranks, run))
    replay()
    assert _same(ranks.outputs(), _expected(collective, inputs))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("run", RUNS[:2])
@pytest.mark.parametrize("name", ["ring", "double_tree"])
def test_recorded_launches_agree_with_torch_in_every_bit(
    name: str, run: str, dtype: torch.dtype
) -> None:
    collective = build_algorithm(name, "all_reduce", 8, pieces=8)
    inputs = [torch.randn(1_000_003, device=DEVICE).to(dtype) for _ in range(8)]
    plain = VirtualRanks.from_inputs(collective, inputs)
    ranks = VirtualRanks.from_inputs(collective, inputs)
    replay = ranks.capture_graph(getattr(ranks, run))
    for _ in range(3):
        plain.run_reference()
        replay()
    assert _same(ranks.outputs(), plain.outputs())
