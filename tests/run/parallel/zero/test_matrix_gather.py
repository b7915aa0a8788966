"""Muon's matrices are whole on one rank each while it works on them, wherever their parts lie."""

import zlib

import pytest

pytest.importorskip("torch", reason="runs gloo ranks")

import torch
from torch import Tensor

from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.sharded_model import shard_model
from meshwright.run.parallel.zero.gradient_sync import make_gradient_sync
from meshwright.run.parallel.zero.matrix_gather import TRANSFER_DTYPE
from meshwright.run.train.optimizer.param_groups import is_matrix
from meshwright.run.train.optimizer.stacked_matrices import make_matrix_gatherer
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, build_decoder_model
from tests.run.parallel.equivalence import Case, check
from tests.run.parallel.expert_parallel.test_token_dispatcher import DEEPSEEK
from tests.run.parallel.nearness import Kind

DENSE = build_decoder_model("dense", layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61)
LAYOUTS: dict[str, tuple[Model, Layout]] = {
    "slices, keys on two ranks each": (DENSE, Layout(tp=4, precision="fp32")),
    "runs": (DENSE, Layout(dp=4, zero=3, precision="fp32")),
    "runs of slices": (
        DENSE,
        Layout(tp=2, dp=2, zero=1, sequence_parallel=True, precision="fp32"),
    ),
    "runs in two copies": (DENSE, Layout(dp=4, zero=2, shard=2, precision="fp32")),
    "runs of experts and of slices": (
        DEEPSEEK,
        Layout(tp=2, dp=2, ep=2, expert_tp=1, zero=1, precision="fp32"),
    ),
    "slices of experts": (DEEPSEEK, Layout(dp=4, ep=2, expert_tp=2, precision="fp32")),
}
MUON: dict[Kind, float] = {"loss": 2e-6, "update": 0.15}
"""Newton–Schulz in bfloat16 multiplies what differs in small singular values by up to 3.4445⁵ =
485: of how far matrices move in three steps, 3.8e-2 was found, and of losses 3e-7."""


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return numbers that bfloat16 has for a whole parameter, the same on every rank."""
    seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=seed).to(TRANSFER_DTYPE).float()


def turned_over(model: Model, layout: Layout) -> tuple[list[str], list[str]]:
    """Let owners turn matrices upside down; return what this rank owned and has wrong parts of."""
    mine = shard_model(model, Mesh(layout), dtype=torch.float32, seed=1)
    sync = make_gradient_sync(mine)
    matrices = make_matrix_gatherer(mine, sync)
    assert matrices is not None
    parts, wanted, owned = {}, {}, []
    for name, parameter in sync.named_parameters():
        if not parameter.requires_grad:
            continue
        holding, start, stop = sync.shard_ranges()[name]
        whole = drawn(name, holding.global_shape)
        after = whole.flip(-2) if is_matrix(name, parameter) else whole
        parts[name] = holding.select_local(whole).reshape(-1)[start:stop].clone()
        wanted[name] = holding.select_local(after).reshape(-1)[start:stop]

    def turn(name: str, whole: Tensor) -> None:
        owned.append(name)
        assert whole.shape[-2:] == mine.shard_specs[name].global_shape[-2:]
        whole.copy_(whole.flip(-2))

    matrices(parts, turn)
    return owned, [name for name in parts if not torch.equal(parts[name], wanted[name])]


def every_layout() -> list[tuple[list[str], list[str]]]:
    return [turned_over(*each) for each in LAYOUTS.values()]


def test_owners_get_whole_matrices_and_all_ranks_their_parts_of_the_result() -> None:
    by_rank = spawn_ranks(4, every_layout)
    for number, name in enumerate(LAYOUTS):
        assert [(name, found[number][1]) for found in by_rank] == [(name, [])] * 4
    # The work is shared: of the 12 matrices in three layers each of four ranks has three.
    for number in (0, 1, 2):
        assert [len(found[number][0]) for found in by_rank] == [3] * 4


@pytest.mark.slow
def test_muon_trains_as_on_one_device() -> None:
    cases = [
        Case(name, model, layout, optimizer="muon", tolerances=MUON)
        for name, (model, layout) in LAYOUTS.items()
    ]
    found = check(cases)
    assert {name: lines for name, lines in found.items() if lines} == {}
