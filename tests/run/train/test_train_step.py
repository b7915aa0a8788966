"""A step trains on its batch as a whole, however it is cut, and leaves weights alone if it must."""

import msgspec
import pytest

pytest.importorskip("torch", reason="steps work on torch tensors")

import torch

from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.nn.moe.moe_layer import MoELayer
from meshwright.run.train.data.batch import SequenceInfo, TrainBatch
from meshwright.run.train.decoder_factory import make_decoder
from meshwright.run.train.optimizer import OptimizerConfig, make_optimizer
from meshwright.run.train.train_step import TrainStep, get_weight_dtype
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, build_decoder_model, feedforward

LENGTH = 12
MODEL = build_decoder_model(
    "small", layers=1, hidden=32, heads=2, kv_heads=1, ffn=48, vocab=64, max_positions=32
)


def batch(*targets: int, seed: int = 0) -> TrainBatch:
    """Make a sequence for each number of trained positions; the rest of it is padding."""
    rows = torch.randint(
        0, 64, (len(targets), LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    )
    labels = rows[:, 1:].clone()
    for row, count in enumerate(targets):
        labels[row, count:] = IGNORE_INDEX
    notes = tuple(SequenceInfo(1, LENGTH, count, LENGTH) for count in targets)
    return TrainBatch(0, rows[:, :-1].contiguous(), labels, None, None, notes)


def train_step(
    microbatch: int,
    *,
    model: Model = MODEL,
    expert_bias_update_rate: float = 0.0,
    precision: str = "fp32",
) -> TrainStep:
    layout = Layout(precision=precision, microbatch=microbatch)  # type: ignore[arg-type]
    module = make_decoder(model, layout, device=torch.device("cpu"))
    settings = OptimizerConfig(lr=1e-2, warmup_steps=0, schedule="constant")
    optimizer = make_optimizer(module.named_parameters(), layout, settings, total_steps=50)
    return TrainStep(
        module, optimizer, microbatch=microbatch, expert_bias_update_rate=expert_bias_update_rate
    )


def test_unequally_padded_microbatches_weigh_as_one_batch() -> None:
    given = batch(12, 3, 7, 1)
    whole, cut = train_step(4), train_step(1)
    expected, found = whole.forward_backward(given), cut.forward_backward(given)
    assert found.tokens == expected.tokens == 23
    torch.testing.assert_close(found.loss_sum, expected.loss_sum)
    for mine, theirs in zip(cut.decoder.parameters(), whole.decoder.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_weights_are_kept_in_fp8_only_for_a_step_of_several_microbatches() -> None:
    wide = build_decoder_model("w", layers=1, hidden=640, heads=2, kv_heads=1, ffn=640, vocab=64)
    step = train_step(2, model=wide, precision="fp8-tensorwise")
    layer = step.decoder.layers[0].mlp.gate_up  # type: ignore[union-attr]
    for sequences, kept in ((2, False), (4, True), (1, False)):
        step.forward_backward(batch(*(3,) * sequences))
        assert layer.linear_method.caches_weights == kept  # type: ignore[union-attr]


def test_the_mean_loss_is_that_of_a_trained_token() -> None:
    step, given = train_step(2), batch(12, 5)
    logits = step.decoder(given.tokens_BT).detach()
    nats = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), given.labels_BT.flatten(), ignore_index=IGNORE_INDEX
    )
    torch.testing.assert_close(step.forward_backward(given).mean_loss, nats)


def test_steps_on_one_batch_learn_it() -> None:
    step, given = train_step(2), batch(12, 12)
    losses = [float(step(given, number).losses.mean_loss) for number in range(25)]
    assert losses[-1] < losses[0] / 4


def test_an_update_drops_the_gradients_it_used() -> None:
    step = train_step(2)
    figures = step(batch(12, 12), 0)
    assert float(figures.optimizer_report.grad_norm) > 0
    assert all(parameter.grad is None for parameter in step.decoder.parameters())


def test_a_dropped_step_leaves_weights_alone() -> None:
    step = train_step(2)
    before = [parameter.detach().clone() for parameter in step.decoder.parameters()]
    step.forward_backward(batch(12, 12))
    step.discard()
    assert all(parameter.grad is None for parameter in step.decoder.parameters())
    for parameter, held in zip(step.decoder.parameters(), before, strict=True):
        assert torch.equal(parameter, held)


def test_a_batch_without_a_trained_token_leaves_weights_finite() -> None:
    step = train_step(2)
    figures = step(batch(0, 0), 0)
    assert float(figures.losses.loss_sum) == 0
    assert all(parameter.isfinite().all() for parameter in step.decoder.parameters())


def routed_step() -> tuple[TrainStep, MoELayer]:
    experts = feedforward.MoESpec(count=4, top_k=1, width=16, router_bias="balance")
    blocks = tuple(msgspec.structs.replace(each, mlp=experts) for each in MODEL.blocks)
    step = train_step(
        2, model=msgspec.structs.replace(MODEL, blocks=blocks), expert_bias_update_rate=0.01
    )
    (part,) = step.decoder.iter_moe_layers()
    return step, part


def test_experts_with_more_than_their_share_become_harder_to_choose() -> None:
    step, part = routed_step()
    step.forward_backward(batch(12, 12))
    assert part.tokens_per_expert is not None
    load = part.tokens_per_expert.clone()
    step.update(step.forward_backward(batch(12, 12)), 0)
    assert part.balance is not None
    wanted = 0.01 * torch.sign(load.float().mean() - load)
    torch.testing.assert_close(part.balance.detach(), wanted)
    assert part.tokens_per_expert.count_nonzero() == 0


def test_a_step_whose_gradient_is_no_number_balances_no_expert() -> None:
    step, part = routed_step()
    losses = step.forward_backward(batch(12, 12))
    weight = step.decoder.embedding.weight
    assert weight.grad is not None
    weight.grad[0, 0] = float("nan")
    assert step.update(losses, 0).optimizer_report.is_skipped
    assert part.balance is not None
    assert part.tokens_per_expert is not None
    assert part.balance.count_nonzero() == part.tokens_per_expert.count_nonzero() == 0


def test_what_a_dropped_step_counted_is_forgotten() -> None:
    step, part = routed_step()
    step.forward_backward(batch(12, 12))
    step.discard()
    assert part.balance is not None
    assert part.tokens_per_expert is not None
    assert part.balance.count_nonzero() == part.tokens_per_expert.count_nonzero() == 0


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("fp16", torch.float16), ("fp8-rowwise", torch.bfloat16)],
)
def test_weights_have_the_format_that_products_read(precision: str, dtype: torch.dtype) -> None:
    assert get_weight_dtype(Layout(precision=precision)) == dtype  # type: ignore[arg-type]
