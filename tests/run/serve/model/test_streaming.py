"""Products are streamed where that was measured to be faster, and nowhere else."""

from collections.abc import Callable

import pytest

pytest.importorskip("triton", reason="the products are written in Triton")

import torch

from meshwright.run.kernels.products import TORCH
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.linear import Linear
from meshwright.run.nn.mlp import Mlp as MlpLayer
from meshwright.run.serve.model import streaming
from meshwright.run.serve.model.cache import PagedCache
from meshwright.run.serve.model.forward import Forward
from meshwright.run.serve.model.quantise import quantise
from meshwright.run.serve.model.step import Row, step_of
from meshwright.run.serve.model.streaming import POINTS, Case, Kind, Streaming, Times, stream
from meshwright.spec.model import Attention, Mlp, Model, Rotary
from meshwright.spec.model import Block as BlockSpec
from tests.run.serve.model.small import DEVICE, made, small

FASTER, SLOWER = Times(2.0, 1.0), Times(1.0, 0.99)


def wide(*, bias: bool = False) -> Decoder:
    mixer = Attention(heads=4, kv_heads=2, head_dim=64, rotary=Rotary(), qkv_bias=bias)
    block = BlockSpec(name="plain", mixer=mixer, mlp=Mlp(width=256))
    model = Model(
        name="wide", hidden=256, vocab=61, blocks=(block,), pattern="2*plain", max_positions=64
    )
    return made(model, torch.bfloat16)


def clock(*faster: tuple[Kind, int]) -> Callable[[Case, int], Times]:
    """Return a clock by which some kinds are faster at some points."""
    return lambda case, rows: FASTER if (case.kind, rows) in faster else SLOWER


def every_point(*kinds: Kind) -> list[tuple[Kind, int]]:
    return [(kind, point) for kind in kinds for point in POINTS]


def calls(monkeypatch: pytest.MonkeyPatch, decoder: Decoder, tokens: int) -> list[str]:
    """Return which kernels a step of so many tokens calls."""
    seen: list[str] = []
    for name in ("stream_linear", "stream_glu"):
        real = getattr(streaming, name)

        def note(*given: object, _name: str = name, _real: Callable[..., object] = real) -> object:
            seen.append(_name)
            return _real(*given)

        monkeypatch.setattr(streaming, name, note)
    forward = Forward(decoder, PagedCache(decoder, 16, 4))
    forward.run(step_of([Row(list(range(tokens)), 0, range(16))], 4, DEVICE, all_wanted=True))
    return seen


def test_a_step_streams_what_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = wide()
    stream(decoder, 64, clock(*every_point("gate_up", "o")))
    assert calls(monkeypatch, decoder, 20) == ["stream_linear", "stream_glu"] * 2


def test_nothing_is_streamed_where_it_gains_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = wide()
    stream(decoder, 64, clock())
    assert calls(monkeypatch, decoder, 20) == []


def test_answers_are_the_same_to_rounding() -> None:
    step = step_of([Row(list(range(20)), 0, range(16))], 4, DEVICE, all_wanted=True)
    found = []
    for kinds in ((), ("qkv", "o", "gate_up", "down")):
        decoder = wide()
        stream(decoder, 64, clock(*every_point(*kinds)))
        found.append(Forward(decoder, PagedCache(decoder, 16, 4)).run(step).float())
    assert (found[0] - found[1]).norm() < 0.03 * found[0].norm()


def test_rows_between_two_points_are_treated_as_the_next() -> None:
    found = Streaming()
    found.choose([Case("o", ())], 64, clock(("o", 32)))
    x, weight = torch.zeros(256, 256, dtype=torch.bfloat16), torch.zeros(8, 256).bfloat16()
    used = {rows for rows in range(1, 257) if found.uses("o", x[:rows], weight)}
    assert used == set(range(17, 33))
    assert not found.uses("qkv", x[:20], weight)


def test_points_are_timed_up_to_the_rows_that_are_served() -> None:
    seen: list[int] = []

    def timed(_: Case, rows: int) -> Times:
        seen.append(rows)
        return FASTER

    Streaming().choose([Case("o", ())], 40, timed)
    assert seen == [1, 16, 32, 64]


def test_a_kernel_that_does_not_run_is_not_chosen() -> None:
    found = Streaming()
    found.choose([Case("o", ())], 256, lambda _, rows: FASTER if rows < 32 else None)
    assert found.chosen["o"] == {1, 16}


def test_layers_that_are_more_than_a_plain_product_stay_as_they_are() -> None:
    biased, single, eight = wide(bias=True), small(), wide()
    quantise(eight, "fp8")
    for decoder, streamed in ((biased, {"o", "gate_up", "down"}), (single, set()), (eight, set())):
        assert set(stream(decoder, 64, clock()).chosen) == streamed
    layer = biased.get_submodule("layers.0.mixer.qkv")
    assert isinstance(layer, Linear)
    assert layer.products is TORCH


def test_gates_with_gradients_or_adapters_are_made_by_two_kernels() -> None:
    decoder = wide()
    stream(decoder, 64, clock(*every_point("gate_up")))
    mlp = decoder.get_submodule("layers.0.mlp")
    assert isinstance(mlp, MlpLayer)
    assert mlp.in_one is not None
    x = torch.ones(1, 3, 256, dtype=torch.bfloat16, device=DEVICE)
    assert mlp.in_one(x) is None
    with torch.no_grad():
        gated = mlp.in_one(x)
        assert gated is not None
        torch.testing.assert_close(gated, mlp.activate(mlp.raw(x)), atol=0.1, rtol=0.05)
        mlp.gate_up.across = lambda x, weight, *_: x @ weight.t()
        assert mlp.in_one(x) is None


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: nothing is timed without one")
def test_both_ways_are_timed_on_a_gpu() -> None:
    weights = tuple(torch.randn(512, 256, device="cuda").bfloat16() for _ in range(2))
    for case in (Case("o", weights), Case("gate_up", weights, "silu")):
        times = streaming.time_case(case, 16)
        assert times is not None
        assert min(times) > 0


def test_without_a_gpu_nothing_is_chosen() -> None:
    if DEVICE == "cpu":
        assert stream(wide(), 64).chosen == {}
