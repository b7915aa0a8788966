"""An optimizer updates what it should, skips what it must, and resumes to the last bit."""

import pytest

pytest.importorskip("torch", reason="optimizers work on torch tensors")

from typing import Any

import torch
from torch import nn

from meshwright.errors import InputError
from meshwright.run.train.optimizer import Optimizer, OptimizerConfig, make_optimizer
from meshwright.spec.layout import Layout

FP32 = Layout(precision="fp32", master_precision="none")
PURE = Layout(master_precision="none", moment_precision="bf16", gradient_precision="bf16")
MASTERS = Layout(gradient_precision="fp32")
FP16 = Layout(precision="fp16")
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class _Run:
    """A few parameters, their optimizer, and gradients that follow from the step."""

    def __init__(self, layout: Layout = FP32, **settings: Any) -> None:
        shapes = {
            "embedding.weight": (20, 8),
            "layers.0.mlp.gate_up.weight": (24, 8),
            "layers.0.norm_mlp.weight": (8,),
        }
        self.parameters = {
            name: nn.Parameter(_drawn(index, shape).to(_TYPES[layout.precision]))
            for index, (name, shape) in enumerate(shapes.items())
        }
        chosen = OptimizerConfig(**{"lr": 1e-2, "warmup_steps": 0, **settings})
        self.optimizer: Optimizer = make_optimizer(
            self.parameters.items(),
            layout,
            chosen,
            total_steps=100,
            seed=3,
            parts={"layers.0.mlp.gate_up.weight": (12, 12)},
        )

    def step(self, step: int, *, scale: float = 1.0, spoil: float | None = None, **how: Any) -> Any:
        for index, each in enumerate(self.parameters.values()):
            drawn = _drawn(100 * (step + 1) + index, tuple(each.shape)) * scale
            each.grad = drawn.to(each.grad_dtype)
        if spoil is not None:
            assert each.grad is not None
            each.grad[0] = spoil
        report = self.optimizer.step(1e-2, **how)
        self.optimizer.zero_grad()
        return report

    def everything(self) -> dict[str, torch.Tensor]:
        return {**self.parameters, **self.optimizer.state_dict()}


def _drawn(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in tensors.items()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lion", "sgd"])
@pytest.mark.parametrize(
    "formats",
    [
        {"precision": "fp32", "master_precision": "none"},
        {"moment_precision": "int8", "gradient_precision": "bf16"},
        {"master_precision": "none", "moment_precision": "bf16", "gradient_precision": "bf16"},
        {"precision": "fp16"},
    ],
)
def test_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(
    optimizer: Any, formats: dict[str, Any]
) -> None:
    layout = Layout(optimizer=optimizer, **formats)
    whole, first, second = (_Run(layout, ema_decay=0.9, ema_dtype="bf16") for _ in range(3))
    for step in range(4):
        whole.step(step, spoil=torch.inf if step == 1 else None)
    for step in range(2):
        first.step(step, spoil=torch.inf if step == 1 else None)
    with torch.no_grad():
        for name, parameter in second.parameters.items():
            parameter.copy_(first.parameters[name])
    second.optimizer.load_state_dict(_copied(first.optimizer.state_dict()))
    for step in range(2, 4):
        second.step(step)
    for name, expected in whole.everything().items():
        assert torch.equal(second.everything()[name], expected), name


def test_adamw_with_clipping_follows_torch() -> None:
    run = _Run(clip_grad=1.0, weight_decay=0.1)
    theirs = {name: nn.Parameter(each.detach().clone()) for name, each in run.parameters.items()}
    decaying = [each for name, each in theirs.items() if each.ndim == 2]
    groups = [
        {"params": decaying, "weight_decay": 0.1},
        {"params": [theirs["layers.0.norm_mlp.weight"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for step in range(4):
        for index, each in enumerate(theirs.values()):
            each.grad = _drawn(100 * (step + 1) + index, tuple(each.shape))
        norm = nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        reference.step()
        report = run.step(step)
        assert float(report.grad_norm) == pytest.approx(float(norm), rel=1e-6)
    for name, each in theirs.items():
        torch.testing.assert_close(run.parameters[name].data, each.data, rtol=1e-5, atol=1e-6)


def test_muon_follows_torch_for_matrices_and_adamw_for_the_rest() -> None:
    layout = Layout(optimizer="muon", precision="fp32", master_precision="none")
    run = _Run(layout, clip_grad=None, weight_decay=0.1)
    stacked = run.parameters["layers.0.mlp.gate_up.weight"].detach().clone()
    halves = [nn.Parameter(each.clone()) for each in torch.split(stacked, 12)]
    rest = nn.Parameter(run.parameters["embedding.weight"].detach().clone())
    muon = torch.optim.Muon(
        halves, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW([rest], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(3):
        grads = torch.split(_drawn(100 * (step + 1) + 1, (24, 8)), 12)
        for half, grad in zip(halves, grads, strict=True):
            half.grad = grad.clone()
        rest.grad = _drawn(100 * (step + 1), (20, 8))
        muon.step()  # type: ignore[no-untyped-call]
        adamw.step()
        run.step(step)
    mine = run.parameters["layers.0.mlp.gate_up.weight"].detach()
    # Products of bfloat16 in another order: 2 % of a step of 0.2·√12 / √8 an element.
    torch.testing.assert_close(mine, torch.cat([*halves]).detach(), rtol=0, atol=3 * 1e-4)
    torch.testing.assert_close(run.parameters["embedding.weight"].data, rest.data)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(
    optimizer: Any, bad: float
) -> None:
    layout = Layout(optimizer=optimizer, master_precision="none", moment_precision="bf16")
    run = _Run(layout, ema_decay=0.5)
    run.step(0)
    before = _copied(run.everything())
    report = run.step(1, spoil=bad)
    after = run.everything()
    assert bool(report.is_skipped)
    assert int(report.nonfinite_count) == 1
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == set()
    assert bool(run.step(2, spoil=bad).is_skipped)
    assert not bool(run.step(3).is_skipped)
    assert int(run.optimizer.steps) == 2


def test_gradients_are_scaled_before_they_are_clipped() -> None:
    one, other = _Run(clip_grad=0.5), _Run(clip_grad=0.5)
    small = one.step(0)
    large = other.step(0, scale=64.0, grad_scale=torch.tensor(1 / 64))
    assert float(small.grad_norm) == pytest.approx(float(large.grad_norm), rel=1e-6)
    for name, parameter in one.parameters.items():
        torch.testing.assert_close(parameter, other.parameters[name], rtol=1e-6, atol=1e-7)


def test_fp16_takes_the_loss_scale_out_of_gradients_and_lowers_it_when_one_overflows() -> None:
    run, plain = _Run(FP16, clip_grad=None), _Run(MASTERS, clip_grad=None)
    assert run.optimizer.grad_scaler is not None
    before = float(run.optimizer.grad_scaler.scale)
    # Accumulated in float32, so that the scale of 65,536 does not overflow here.
    report = run.step(0, scale=before)
    assert float(report.grad_norm) == pytest.approx(float(plain.step(0).grad_norm), rel=1e-5)
    assert bool(run.step(1, spoil=torch.inf).is_skipped)
    assert float(run.optimizer.grad_scaler.scale) == before / 2


def test_masters_keep_what_bfloat16_weights_cannot() -> None:
    run = _Run(MASTERS)
    for step in range(3):
        run.step(step)
    for name, parameter in run.parameters.items():
        master = run.optimizer.state_dict()[f"master.{name}"]
        assert torch.equal(parameter.detach(), master.to(torch.bfloat16))
        assert not torch.equal(parameter.detach().float(), master)


def test_gradients_accumulate_in_the_layouts_format() -> None:
    run = _Run(MASTERS)
    weight = run.parameters["embedding.weight"]
    for _ in range(2):
        weight.float().sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert float(weight.grad[0, 0]) == 2


def test_parameters_without_a_gradient_stay() -> None:
    run = _Run()
    run.step(0)
    before = _copied(run.everything())
    run.parameters["embedding.weight"].grad = torch.ones(20, 8)
    run.optimizer.step(1e-2)
    changed = {
        name for name, value in before.items() if not torch.equal(value, run.everything()[name])
    }
    kinds = ("", "first.", "second.")
    assert changed == {f"{kind}embedding.weight" for kind in kinds} | {"steps"}


def test_frozen_parameters_have_no_state() -> None:
    frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    trained = nn.Parameter(torch.ones(4))
    optimizer = make_optimizer(
        [("balance", frozen), ("norm", trained)], FP32, OptimizerConfig(), total_steps=1
    )
    assert not any("balance" in name for name in optimizer.state_dict())


def test_average_follows_the_weights_and_can_stand_in_for_them() -> None:
    run = _Run(MASTERS, ema_decay=0.75)
    average = run.optimizer.ema
    assert average is not None
    name = "embedding.weight"
    expected = run.optimizer.state_dict()[f"master.{name}"].clone()
    for step in range(3):
        run.step(step)
        expected.lerp_(run.optimizer.state_dict()[f"master.{name}"], 0.25)
    torch.testing.assert_close(average.ema_tensors[name], expected)
    weight = run.parameters[name].detach().clone()
    with average.swap_into(run.parameters):
        assert torch.equal(run.parameters[name].detach(), expected.to(torch.bfloat16))
    assert torch.equal(run.parameters[name].detach(), weight)


def test_state_of_another_kind_of_run_is_refused_by_name() -> None:
    saved = _Run(MASTERS).optimizer.state_dict()
    with pytest.raises(InputError) as caught:
        _Run(PURE).optimizer.load_state_dict(saved)
    places = [problem.where for problem in caught.value.problems]
    assert "master.embedding.weight" in places
    assert "first.embedding.weight" in places


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lion", "sgd"])
def test_every_optimizer_descends_a_bowl(optimizer: Any) -> None:
    layout = Layout(optimizer=optimizer, master_precision="none", moment_precision="bf16")
    weight = nn.Parameter((_drawn(0, (16, 16)) / 10).to(torch.bfloat16))
    chosen = OptimizerConfig(
        lr=0.03, weight_decay=0.0, warmup_steps=0, schedule="linear", betas=(0.9, 0.95)
    )
    made = make_optimizer([("layers.0.w", weight)], layout, chosen, total_steps=80)
    start = float(weight.detach().float().square().mean())
    for step in range(80):
        (weight.float().square().sum() / 2).backward()  # type: ignore[no-untyped-call]
        made.step(made.learning_rate(step))
        made.zero_grad()
    assert float(weight.detach().float().square().mean()) < start / 20
