"""Fused updates give what torch's optimizers give, and the same bits as their plain twin."""

import pytest

pytest.importorskip("torch", reason="kernels work on torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import weakref
from typing import Any, NamedTuple

import torch

from meshwright.run.kernels.optimizer.fused_update import FusedOptimizerUpdate
from meshwright.run.kernels.optimizer.global_index import GlobalIndexMap, IndexGap
from meshwright.run.kernels.optimizer.stochastic_rounding import make_tensor_key
from meshwright.run.kernels.optimizer.update_inputs import (
    MomentDtype,
    OptimizerMoment,
    OptimizerTensors,
    StepScalars,
    UpdateRule,
    allocate_moment,
    make_step_scalars,
)
from meshwright.run.kernels.triton_compat import KernelBackend
from meshwright.run.train.optimizer import OptimizerConfig, make_optimizer
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import Optimizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ADAMW = UpdateRule("adamw", 0.9, 0.95, 1e-8)
# More than a tile with a ragged end, a whole number of blocks, a few elements.
SHAPES = ((40, 67), (2, 256), (7,))


class Formats(NamedTuple):
    weights: torch.dtype
    master: bool
    moments: MomentDtype
    grads: torch.dtype


FP32 = Formats(torch.float32, False, "fp32", torch.float32)
MASTERS = Formats(torch.bfloat16, True, "fp32", torch.bfloat16)
PURE = Formats(torch.bfloat16, False, "bf16", torch.bfloat16)
EIGHT_BITS = Formats(torch.bfloat16, False, "int8", torch.bfloat16)


def _tensors(
    rule: UpdateRule, formats: Formats, shapes: tuple[tuple[int, ...], ...] = SHAPES
) -> OptimizerTensors:
    params = tuple(draw.to(formats.weights) for draw in _draws(0, shapes))
    number = len(params)
    return OptimizerTensors(
        params=params,
        masters=tuple(each.float() for each in params) if formats.master else (),
        moments=tuple(allocate_moment(params, formats.moments, i) for i in range(rule.num_moments)),
        rounding_keys=tuple(make_tensor_key(str(index), 0) for index in range(number)),
        lr_multipliers=(1.0, 0.5, 2.0)[:number],
        weight_decays=(0.1, 0.0, 0.01)[:number],
        global_index_maps=(GlobalIndexMap(),) * number,
    )


def _draws(seed: int, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]


def _pace(
    step: int, rule: UpdateRule, *, lr: float = 1e-2, scale: float = 1.0, go: bool = True
) -> StepScalars:
    return make_step_scalars(
        torch.tensor(step, device=DEVICE),
        lr,
        rule,
        grad_scale=torch.tensor(scale, device=DEVICE),
        apply_update=torch.tensor(go, device=DEVICE),
    )


def _run(
    tensors: OptimizerTensors,
    rule: UpdateRule,
    kind: torch.dtype,
    backend: KernelBackend,
    steps: int = 2,
) -> list[torch.Tensor]:
    """Update a few times and return the gradients of the last step, which a rule may overwrite."""
    update, grads = FusedOptimizerUpdate(tensors, rule, backend=backend), []
    for step in range(1, steps + 1):
        grads = [draw.to(kind) for draw in _draws(step, tuple(p.shape for p in tensors.params))]
        update(grads, _pace(step, rule, scale=0.7))
    return grads


def _moments(tensors: OptimizerTensors) -> list[torch.Tensor]:
    return [each for moment in tensors.moments for each in (*moment.values, *moment.scales)]


def _everything(tensors: OptimizerTensors) -> list[torch.Tensor]:
    return [*tensors.params, *tensors.masters, *_moments(tensors)]


def _assert_same(mine: torch.Tensor, other: torch.Tensor) -> None:
    """Allow for roots that differ in their last place, and for what a rounding makes of that."""
    if mine.dtype in {torch.int8, torch.uint8}:
        apart = (mine.int() - other.int()).abs()
        assert int(apart.max()) <= 2
        assert int(apart.count_nonzero()) <= mine.numel() // 100
    elif mine.dtype == torch.float32:
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
    else:
        # The interpreter cuts float32 off where a GPU rounds it.
        place = 2**-7 if mine.dtype == torch.bfloat16 else 2**-10
        torch.testing.assert_close(mine, other, rtol=place, atol=1e-7)


@pytest.mark.parametrize(
    ("rule", "formats"),
    [
        (ADAMW, FP32),
        (ADAMW, MASTERS),
        (ADAMW, PURE),
        (ADAMW, EIGHT_BITS),
        (ADAMW, Formats(torch.float16, True, "int8", torch.float16)),
        (ADAMW, Formats(torch.bfloat16, False, "bf16", torch.float32)),
        (UpdateRule("lion", 0.9, 0.99), PURE),
        (UpdateRule("sgd", 0.9, nesterov=True), PURE),
        (UpdateRule("direction", 0.95, nesterov=True), FP32),
        (UpdateRule("direction", 0.95), EIGHT_BITS),
        (UpdateRule("average", 0.99), PURE),
        (UpdateRule("apply"), PURE),
    ],
)
def test_kernel_agrees_with_torch_operations(rule: UpdateRule, formats: Formats) -> None:
    fused, plain = _tensors(rule, formats), _tensors(rule, formats)
    fused_grads = _run(fused, rule, formats.grads, "triton")
    plain_grads = _run(plain, rule, formats.grads, "torch")
    pairs = zip(
        [*_everything(fused), *fused_grads], [*_everything(plain), *plain_grads], strict=True
    )
    for mine, other in pairs:
        _assert_same(mine, other)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's own roots differ in the last place")
def test_random_bits_of_kernel_and_torch_are_the_same() -> None:
    fused, plain = _tensors(ADAMW, PURE), _tensors(ADAMW, PURE)
    _run(fused, ADAMW, torch.bfloat16, "triton")
    _run(plain, ADAMW, torch.bfloat16, "torch")
    for mine, other in zip(_everything(fused), _everything(plain), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_float32_follows_torch_adamw(backend: KernelBackend) -> None:
    tensors = _tensors(ADAMW, FP32)._replace(lr_multipliers=(1.0,) * 3, weight_decays=(0.1,) * 3)
    reference = [torch.nn.Parameter(each.clone()) for each in tensors.params]
    optimizer = torch.optim.AdamW(reference, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    update = FusedOptimizerUpdate(tensors, ADAMW, backend=backend)
    for step in range(1, 5):
        for parameter, grad in zip(reference, _draws(step), strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        update(_draws(step), _pace(step, ADAMW))
    for mine, theirs in zip(tensors.params, reference, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_float32_follows_torch_sgd(nesterov: bool) -> None:
    rule = UpdateRule("sgd", 0.9, nesterov=nesterov)
    tensors = _tensors(rule, FP32)._replace(lr_multipliers=(1.0,) * 3, weight_decays=(0.0,) * 3)
    reference = [torch.nn.Parameter(each.clone()) for each in tensors.params]
    optimizer = torch.optim.SGD(reference, lr=1e-2, momentum=0.9, nesterov=nesterov)
    update = FusedOptimizerUpdate(tensors, rule, backend="torch")
    for step in range(1, 4):
        for parameter, grad in zip(reference, _draws(step), strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        update(_draws(step), _pace(step, rule))
    for mine, theirs in zip(tensors.params, reference, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_lion_steps_by_the_sign_and_then_moves_its_moment() -> None:
    rule = UpdateRule("lion", 0.9, 0.99)
    tensors = _tensors(rule, FP32, ((50,),))
    moment = tensors.moments[0].values[0].normal_(generator=None)
    weight, before, (grad,) = tensors.params[0].clone(), moment.clone(), _draws(3, ((50,),))
    FusedOptimizerUpdate(tensors, rule, backend="torch")([grad], _pace(1, rule))
    # Algorithm 2 of arXiv 2302.06675, with its decoupled decay.
    expected = weight - 1e-2 * ((0.9 * before + 0.1 * grad).sign() + 0.1 * weight)
    torch.testing.assert_close(tensors.params[0], expected)
    torch.testing.assert_close(moment, 0.99 * before + 0.01 * grad)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("formats", [FP32, MASTERS, EIGHT_BITS])
def test_nothing_changes_in_a_step_that_is_called_off(
    formats: Formats, backend: KernelBackend
) -> None:
    tensors = _tensors(ADAMW, formats)
    before = [each.clone() for each in _everything(tensors)]
    grads = [torch.full_like(each, torch.nan).to(formats.grads) for each in tensors.params]
    FusedOptimizerUpdate(tensors, ADAMW, backend=backend)(grads, _pace(1, ADAMW, go=False))
    for mine, old in zip(_everything(tensors), before, strict=True):
        assert torch.equal(mine, old)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_grouping_and_cutting_of_tensors_do_not_change_a_bit(backend: KernelBackend) -> None:
    whole = _tensors(ADAMW, PURE, ((4, 512), (7,)))
    _run(whole, ADAMW, torch.bfloat16, backend, steps=1)
    grads = [draw.to(torch.bfloat16) for draw in _draws(1, ((4, 512), (7,)))]
    alone = _tensors(ADAMW, PURE, ((4, 512), (7,)))
    for rows in (slice(0, 1), slice(1, 4)):
        shard = OptimizerTensors(
            params=(alone.params[0][rows],),
            masters=(),
            moments=tuple(OptimizerMoment((moment.values[0][rows],)) for moment in alone.moments),
            rounding_keys=whole.rounding_keys[:1],
            lr_multipliers=whole.lr_multipliers[:1],
            weight_decays=whole.weight_decays[:1],
            global_index_maps=(GlobalIndexMap(rows.start * 512),),
        )
        FusedOptimizerUpdate(shard, ADAMW, backend=backend)(
            [grads[0][rows]], _pace(1, ADAMW, scale=0.7)
        )
    assert torch.equal(alone.params[0], whole.params[0])
    for mine, other in zip(alone.moments, whole.moments, strict=True):
        assert torch.equal(mine.values[0], other.values[0])


SHARDS: dict[str, tuple[Any, Any, GlobalIndexMap]] = {
    "columns": (slice(None), [*range(16, 48)], GlobalIndexMap(16, 0, 32, 64)),
    "columns from the second row on": (
        slice(1, None),
        [*range(16, 48)],
        GlobalIndexMap(16, 32, 32, 64),
    ),
    "rows of two matrices": (
        [*range(10, 20), *range(50, 60)],
        slice(None),
        GlobalIndexMap(640, 0, 1280, 5120, (IndexGap(640, 30 * 64),)),
    ),
    "a column": (slice(None), [5], GlobalIndexMap(5, 0, 1, 64)),
    "rows": (slice(7, 60), slice(None), GlobalIndexMap(7 * 64)),
}
"""Parts of a matrix of 80 by 64: its rows, its columns, and where they stand."""


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("formats", [PURE, EIGHT_BITS])
def test_parts_with_gaps_are_rounded_as_the_whole_is(
    formats: Formats, backend: KernelBackend
) -> None:
    whole = _tensors(ADAMW, formats, ((80, 64),))
    grad = _draws(1, ((80, 64),))[0].to(formats.grads)
    parts, grads, places = [], [], []
    for rows, columns, place in SHARDS.values():
        parts.append(whole.params[0].clone()[rows][:, columns].contiguous())
        grads.append(grad[rows][:, columns].contiguous())
        places.append(place)
    number = len(parts)
    shards = OptimizerTensors(  # all in one launch
        params=tuple(parts),
        masters=(),
        moments=tuple(allocate_moment(tuple(parts), formats.moments, index) for index in range(2)),
        rounding_keys=whole.rounding_keys * number,
        lr_multipliers=whole.lr_multipliers * number,
        weight_decays=whole.weight_decays * number,
        global_index_maps=tuple(places),
    )
    FusedOptimizerUpdate(shards, ADAMW, backend=backend)(grads, _pace(1, ADAMW))
    FusedOptimizerUpdate(whole, ADAMW, backend=backend)([grad], _pace(1, ADAMW))
    for index, (name, (rows, columns, _)) in enumerate(SHARDS.items()):
        pairs = [(shards.params[index], whole.params[0])]
        if formats is PURE:  # codes depend on what shares a block with them
            pairs += [
                (mine.values[index], all_.values[0])
                for mine, all_ in zip(shards.moments, whole.moments, strict=True)
            ]
        for mine, all_ in pairs:
            assert torch.equal(mine, all_[rows][:, columns]), name


def test_tensors_that_begin_between_16_bytes_are_updated_right() -> None:
    fused, plain = _tensors(ADAMW, FP32, ((300,),)), _tensors(ADAMW, FP32, ((300,),))
    moved = torch.empty(301, device=DEVICE)[1:].copy_(fused.params[0])
    fused = fused._replace(params=(moved,))
    _run(fused, ADAMW, torch.float32, "triton")
    _run(plain, ADAMW, torch.float32, "torch")
    torch.testing.assert_close(moved, plain.params[0], rtol=1e-6, atol=1e-7)


def test_gradients_that_moved_are_found_again() -> None:
    tensors, plain = _tensors(ADAMW, FP32), _tensors(ADAMW, FP32)
    _run(tensors, ADAMW, torch.float32, "triton", steps=3)  # draws anew in each step
    _run(plain, ADAMW, torch.float32, "torch", steps=3)
    for mine, other in zip(tensors.params, plain.params, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_steps_too_small_for_bfloat16_add_up() -> None:
    rule = UpdateRule("apply")
    weight = torch.ones(2000, dtype=torch.bfloat16, device=DEVICE)
    tensors = OptimizerTensors(
        (weight,), (), (), (make_tensor_key("w", 0),), (1.0,), (0.0,), (GlobalIndexMap(),)
    )
    update = FusedOptimizerUpdate(tensors, rule, backend="torch")
    for step in range(1, 101):
        update([torch.ones_like(weight)], _pace(step, rule, lr=1e-5))
    # A single step is 1/390 of the distance to the next bfloat16 number.
    assert float(weight.double().mean()) == pytest.approx(1 - 100e-5, abs=2e-4)


def test_learning_rate_may_lie_on_the_device() -> None:
    step = torch.tensor(3, device=DEVICE)
    given = make_step_scalars(step, torch.tensor(1e-3, device=DEVICE), ADAMW)
    assert torch.equal(given.scalars, make_step_scalars(step, 1e-3, ADAMW).scalars)


def test_bias_correction_is_exact_in_the_first_step() -> None:
    numbers = make_step_scalars(torch.tensor(1), 1.0, UpdateRule("adamw", 0.9, 0.999, 1e-8)).scalars
    assert float(numbers[3]) == pytest.approx(10, rel=1e-7)
    assert float(numbers[4]) == pytest.approx(1000**0.5, rel=1e-7)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_whole_optimizer_trains_alike_on_kernels_and_on_torch(kind: Optimizer) -> None:
    layout = Layout(optimizer=kind, moment_precision="bf16")
    shapes = {"embedding.weight": (40, 8), "layers.0.w": (16, 8), "layers.0.norm": (8,)}
    backends: tuple[KernelBackend, ...] = ("triton", "torch")
    trained = []
    for backend in backends:
        drawn = _draws(0, tuple(shapes.values()))
        weights = [torch.nn.Parameter(each.to(torch.bfloat16)) for each in drawn]
        settings = OptimizerConfig(ema_decay=0.9)
        optimizer = make_optimizer(
            zip(shapes, weights, strict=True), layout, settings, total_steps=9, backend=backend
        )
        for step in range(3):
            for weight, grad in zip(weights, _draws(step + 1, tuple(shapes.values())), strict=True):
                weight.grad = grad.clone()
            if step == 1:
                weight.grad = torch.full_like(weight, torch.nan, dtype=torch.float32)
            held = [weakref.ref(weight.grad) for weight in weights]
            report = optimizer.step(1e-2)
            optimizer.zero_grad()
            del grad
            assert not any(each() is not None for each in held)  # nobody keeps gradients alive
            assert bool(report.is_skipped) == (step == 1)
        trained.append(optimizer.state_dict())
    assert int(trained[0]["steps"]) == 2
    for name, mine in trained[0].items():
        tolerance = 2**-6 if mine.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(mine, trained[1][name], rtol=tolerance, atol=1e-4)
