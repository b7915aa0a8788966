"""Products are streamed where that was measured to be faster, and nowhere else."""

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="the products are written in Triton")

import torch

from meshwright.run.kernels.gemm.gemm import TORCH_GEMM
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.linear.linear import Linear
from meshwright.run.nn.mlp import MLPLayer
from meshwright.run.serve.engine.model_runner import persistent_gemm
from meshwright.run.serve.engine.model_runner.persistent_gemm import (
    TIMED_ROWS,
    GemmCase,
    GemmKind,
    GemmTimes,
    PersistentGemmSelection,
    enable_persistent_gemm,
)
from meshwright.run.serve.model.forward_batch import BatchRow, build_forward_batch
from meshwright.run.serve.model.kv_cache import PagedKVCache
from meshwright.run.serve.model.quantization import quantize_model
from meshwright.run.serve.model.served_model import ServedModel
from meshwright.spec.model import AttentionSpec, BlockSpec, MLPSpec, Model, Rotary
from tests.run.serve.model.small import DEVICE, made, small

FASTER, SLOWER = GemmTimes(2.0, 1.0), GemmTimes(1.0, 0.99)


def wide(*, bias: bool = False) -> Decoder:
    mixer = AttentionSpec(heads=4, kv_heads=2, head_dim=64, rotary=Rotary(), qkv_bias=bias)
    block = BlockSpec(name="plain", mixer=mixer, mlp=MLPSpec(width=256))
    model = Model(
        name="wide", hidden=256, vocab=61, blocks=(block,), pattern="2*plain", max_positions=64
    )
    return made(model, torch.bfloat16)


def clock(*faster: tuple[GemmKind, int]) -> Callable[[GemmCase, int], GemmTimes]:
    """Return a clock by which some kinds are faster at some points."""
    return lambda case, rows: FASTER if (case.kind, rows) in faster else SLOWER


def every_point(*kinds: GemmKind) -> list[tuple[GemmKind, int]]:
    return [(kind, point) for kind in kinds for point in TIMED_ROWS]


def calls(monkeypatch: pytest.MonkeyPatch, decoder: Decoder, tokens: int) -> list[str]:
    """Return which kernels a step of so many tokens calls."""
    seen: list[str] = []
    for name in ("skinny_linear", "skinny_glu"):
        real = getattr(persistent_gemm, name)

        def note(*given: object, _name: str = name, _real: Callable[..., object] = real) -> object:
            seen.append(_name)
            return _real(*given)

        monkeypatch.setattr(persistent_gemm, name, note)
    forward = ServedModel(decoder, PagedKVCache(decoder, 16, 4))
    forward.forward(
        build_forward_batch(
            [BatchRow(list(range(tokens)), 0, range(16))], 4, DEVICE, all_wanted=True
        )
    )
    return seen


def test_a_step_streams_what_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = wide()
    enable_persistent_gemm(decoder, 64, clock(*every_point("gate_up", "o")))
    assert calls(monkeypatch, decoder, 20) == ["skinny_linear", "skinny_glu"] * 2


def test_nothing_is_streamed_where_it_gains_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = wide()
    enable_persistent_gemm(decoder, 64, clock())
    assert calls(monkeypatch, decoder, 20) == []


def test_answers_are_the_same_to_rounding() -> None:
    step = build_forward_batch(
        [BatchRow(list(range(20)), 0, range(16))], 4, DEVICE, all_wanted=True
    )
    found = []
    for kinds in ((), ("qkv", "o", "gate_up", "down")):
        decoder = wide()
        enable_persistent_gemm(decoder, 64, clock(*every_point(*kinds)))
        found.append(ServedModel(decoder, PagedKVCache(decoder, 16, 4)).forward(step).float())
    assert (found[0] - found[1]).norm() < 0.03 * found[0].norm()


def test_rows_between_two_points_are_treated_as_the_next() -> None:
    found = PersistentGemmSelection()
    found.select([GemmCase("o", ())], 64, clock(("o", 32)))
    x, weight = torch.zeros(256, 256, dtype=torch.bfloat16), torch.zeros(8, 256).bfloat16()
    used = {rows for rows in range(1, 257) if found.is_selected("o", x[:rows], weight)}
    assert used == set(range(17, 33))
    assert not found.is_selected("qkv", x[:20], weight)


def test_points_are_timed_up_to_the_rows_that_are_served() -> None:
    seen: list[int] = []

    def timed(_: GemmCase, rows: int) -> GemmTimes:
        seen.append(rows)
        return FASTER

    PersistentGemmSelection().select([GemmCase("o", ())], 40, timed)
    assert seen == [1, 16, 32, 64]


def test_a_kernel_that_does_not_run_is_not_chosen() -> None:
    found = PersistentGemmSelection()
    found.select([GemmCase("o", ())], 256, lambda _, rows: FASTER if rows < 32 else None)
    assert found.selected_rows["o"] == {1, 16}


def test_layers_that_are_more_than_a_plain_product_stay_as_they_are() -> None:
    biased, single, eight = wide(bias=True), small(), wide()
    quantize_model(eight, "fp8")
    for decoder, streamed in ((biased, {"o", "gate_up", "down"}), (single, set()), (eight, set())):
        assert set(enable_persistent_gemm(decoder, 64, clock()).selected_rows) == streamed
    layer = biased.get_submodule("layers.0.mixer.qkv")
    assert isinstance(layer, Linear)
    assert layer.gemm is TORCH_GEMM


def test_gates_with_gradients_or_adapters_are_made_by_two_kernels() -> None:
    decoder = wide()
    enable_persistent_gemm(decoder, 64, clock(*every_point("gate_up")))
    mlp = decoder.get_submodule("layers.0.mlp")
    assert isinstance(mlp, MLPLayer)
    assert mlp.fused_gate_up is not None
    x = torch.ones(1, 3, 256, dtype=torch.bfloat16, device=DEVICE)
    assert mlp.fused_gate_up(x) is None
    with torch.no_grad():
        gated = mlp.fused_gate_up(x)
        assert gated is not None
        torch.testing.assert_close(gated, mlp.activate(mlp.project_up(x)), atol=0.1, rtol=0.05)
        mlp.gate_up.tp_overlap = lambda x, weight, *_: x @ weight.t()
        assert mlp.fused_gate_up(x) is None


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: nothing is timed without one")
def test_both_ways_are_timed_on_a_gpu() -> None:
    weights = tuple(torch.randn(512, 256, device="cuda").bfloat16() for _ in range(2))
    for case in (GemmCase("o", weights), GemmCase("gate_up", weights, "silu")):
        times = persistent_gemm.time_gemm(case, 16)
        assert times is not None
        assert min(times) > 0


def test_without_a_gpu_nothing_is_chosen() -> None:
    if DEVICE == "cpu":
        assert enable_persistent_gemm(wide(), 64).selected_rows == {}
