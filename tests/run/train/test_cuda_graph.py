"""Microbatches replayed from a recording leave what they leave without one."""

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="steps work on torch tensors")

import msgspec
import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.nn.decoder import BatchLoss
from meshwright.run.train.cuda_graph import (
    WARMUP_STEPS,
    BackwardFn,
    GraphedForwardBackward,
    select_cuda_graph,
)
from meshwright.run.train.data.batch import SequenceInfo, TrainBatch
from meshwright.run.train.decoder_factory import make_decoder
from meshwright.run.train.optimizer import OptimizerConfig, make_optimizer
from meshwright.run.train.train_step import TrainStep
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, build_decoder_model, feedforward

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LENGTH = 16


def small(**changes: Any) -> Model:
    words: dict[str, Any] = {
        "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 256, "vocab": 512,
        "max_positions": 128,
    }  # fmt: skip
    return build_decoder_model("small", **words | changes)


def with_experts() -> Model:
    experts = feedforward.MoESpec(count=8, top_k=2, width=128, router_bias="balance")
    dense = small()
    blocks = tuple(msgspec.structs.replace(block, mlp=experts) for block in dense.blocks)
    return msgspec.structs.replace(dense, blocks=blocks)


def batch(
    sequences: int, *, seed: int = 0, device: str = "cpu", length: int = LENGTH
) -> TrainBatch:
    rows = torch.randint(
        0, 512, (sequences, length + 1), generator=torch.Generator().manual_seed(seed)
    ).to(device)
    notes = (SequenceInfo(1, length, length, length),) * sequences
    return TrainBatch(seed, rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), None, None, notes)


class TestChoice:
    def choose(self, asked: Any = "auto", device: str = "cuda", **words: Any) -> tuple[bool, str]:
        model = words.pop("model", small())
        layout = Layout(**{"microbatch": 8, **words})
        return select_cuda_graph(asked, model, layout, length=2048, device=torch.device(device))

    def test_a_model_the_host_cannot_keep_up_with_is_recorded(self) -> None:
        record, why = self.choose()
        assert record
        assert why.endswith("starting it 6 ms")

    def test_a_model_that_keeps_the_device_busy_is_not(self) -> None:
        large = small(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256)
        assert not self.choose(model=large)[0]
        assert self.choose(True, model=large)[0]

    def test_a_processor_has_no_graphs(self) -> None:
        assert self.choose(True, device="cpu") == (False, "no CUDA graph on cpu")

    def test_fp8_is_not_recorded_and_says_so_where_it_is_asked_for(self) -> None:
        assert not self.choose(precision="fp8-rowwise")[0]
        with pytest.raises(InputError, match=r"device.cuda_graph.*fp8-rowwise keeps weights"):
            self.choose(True, precision="fp8-rowwise")


class Parrot:
    """What a recording does, without a GPU: the same again, gradients always in one memory."""

    made = 0

    def __init__(
        self, backward: BackwardFn, parameters: Sequence[nn.Parameter], example: TrainBatch
    ) -> None:
        type(self).made += 1
        self.backward, self.parameters = backward, parameters
        backward(example, 1.0)
        self.gradients: list[Tensor | None] = [each.grad for each in parameters]
        for each in parameters:
            each.grad = None

    def __call__(self, part: TrainBatch, share: float) -> BatchLoss:
        loss = self.backward(part, share)
        for parameter, fixed in zip(self.parameters, self.gradients, strict=True):
            if fixed is not None and parameter.grad is not None:
                fixed.copy_(parameter.grad)
            parameter.grad = None
        return loss


class TestRunning:
    """On a processor, with a recording that is none."""

    def steps(self, layout: Layout) -> tuple[TrainStep, TrainStep, GraphedForwardBackward]:
        made = []
        for _ in range(2):
            module = make_decoder(
                small(layers=1, hidden=32, ffn=64), layout, device=torch.device("cpu")
            )
            settings = OptimizerConfig(lr=1e-2)
            optimizer = make_optimizer(module.named_parameters(), layout, settings, total_steps=100)
            made.append(TrainStep(module, optimizer, microbatch=layout.microbatch))
        plain, other = made
        Parrot.made = 0
        graphed = GraphedForwardBackward(
            other._backward, list(other.decoder.parameters()), record=Parrot
        )
        other._graphed = graphed
        return plain, other, graphed

    @pytest.mark.parametrize("microbatch", [4, 2])
    def test_steps_are_those_without_a_recording(self, microbatch: int) -> None:
        plain, other, _ = self.steps(Layout(precision="fp32", microbatch=microbatch))
        for step in range(5):
            given = batch(4, seed=step)
            expected, found = plain(given, step), other(given, step)
            assert torch.equal(found.losses.loss_sum, expected.losses.loss_sum)
            assert torch.equal(
                found.optimizer_report.grad_norm, expected.optimizer_report.grad_norm
            )
        assert Parrot.made == 1
        for mine, theirs in zip(
            plain.decoder.parameters(), other.decoder.parameters(), strict=True
        ):
            assert torch.equal(mine, theirs)

    def test_nothing_is_recorded_before_kernels_are_warm(self) -> None:
        _, other, _ = self.steps(Layout(precision="fp32", microbatch=4))
        for step in range(WARMUP_STEPS):
            other(batch(4), step)
        assert Parrot.made == 0
        other(batch(4), WARMUP_STEPS)
        assert Parrot.made == 1

    def test_documents_and_other_shapes_run_without_it(self) -> None:
        plain, other, _ = self.steps(Layout(precision="fp32", microbatch=4))
        packed = batch(4)
        documents = PackedSequences.from_lengths([[10, 6]] * 4)
        positions = documents.positions(4, LENGTH)
        notes = (SequenceInfo(2, 10, LENGTH, LENGTH),) * 4
        packed = TrainBatch(0, packed.tokens_BT, packed.labels_BT, positions, documents, notes)
        for step, given in enumerate([*[batch(4)] * 5, packed, batch(3), batch(4, length=8)]):
            expected, found = plain(given, step), other(given, step)
            assert torch.equal(found.losses.loss_sum, expected.losses.loss_sum)
        assert Parrot.made == 1


@GPU
class TestOnGpu:
    def step(self, model: Model, layout: Layout, *, graph: bool) -> TrainStep:
        module = make_decoder(model, layout, device=torch.device("cuda"))
        optimizer = make_optimizer(
            module.named_parameters(), layout, OptimizerConfig(lr=1e-3), total_steps=100
        )
        rate = 0.001 if list(module.iter_moe_layers()) else 0.0
        return TrainStep(
            module,
            optimizer,
            microbatch=layout.microbatch,
            expert_bias_update_rate=rate,
            graph=graph,
        )

    @pytest.mark.parametrize("microbatch", [4, 2])
    @pytest.mark.parametrize("precision", ["bf16", "fp32"])
    def test_losses_and_gradients_are_those_of_eager_steps(
        self, microbatch: int, precision: str
    ) -> None:
        layout = Layout(precision=precision, microbatch=microbatch)  # type: ignore[arg-type]
        self._compare(small(), layout)

    def test_experts_are_replayed_without_asking_the_host(self) -> None:
        self._compare(with_experts(), Layout(precision="bf16", microbatch=2))

    def _compare(self, model: Model, layout: Layout) -> None:
        plain, graphed = (self.step(model, layout, graph=each) for each in (False, True))
        for step in range(WARMUP_STEPS + 4):
            given = batch(4, seed=step, device="cuda")
            expected, found = plain(given, step), graphed(given, step)
            torch.testing.assert_close(
                found.losses.loss_sum, expected.losses.loss_sum, rtol=1e-3, atol=1e-3
            )
            torch.testing.assert_close(
                found.optimizer_report.grad_norm,
                expected.optimizer_report.grad_norm,
                rtol=0.02,
                atol=0,
            )
        assert graphed._graphed is not None
        assert graphed._graphed._recorded is not None
        # From equal weights one microbatch, recorded and not, leaves gradients of equal bits,
        # but for sums that are not always made in one order.
        graphed.decoder.load_state_dict(plain.decoder.state_dict())
        given = batch(4, seed=99, device="cuda")
        plain.forward_backward(given)
        graphed.forward_backward(given)
        for (name, mine), theirs in zip(
            plain.decoder.named_parameters(), graphed.decoder.parameters(), strict=True
        ):
            if mine.grad is None:
                assert theirs.grad is None, name
                continue
            assert theirs.grad is not None, name
            off = (mine.grad.double() - theirs.grad.double()).norm()
            assert off <= 0.01 * mine.grad.double().norm() + 1e-12, name
