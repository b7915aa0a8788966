"""Steps with prompts that numbers on the device describe equal those that the host lays out."""

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.errors import InputError
from meshwright.policy.serving.graph_sizes import list_mixed_graph_sizes
from meshwright.run.kernels.paged_attention import paged_decode, paged_prefill
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.engine.model_input import (
    BlockTableUpdate,
    DecodeStart,
    ModelInput,
    NewRow,
    RowChunk,
)
from meshwright.run.serve.engine.model_runner.mixed_graphs import MixedStepGraphs
from meshwright.run.serve.engine.model_runner.model_runner import ModelRunner
from meshwright.run.serve.model.kv_cache import PagedKVCache
from meshwright.run.serve.model.served_model import ServedModel
from meshwright.run.serve.sampling.sampler import TokenSampler
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.spec.scheduler_config import SchedulerConfig
from tests.run.serve.model.small import DEVICE, chunked, hybrid, latent, small

ROWS, BLOCK = 6, 4
FIRST = (RowChunk(0, 0, (3, 1, 4, 1, 5), (0,)), RowChunk(1, 0, (9, 2, 6), (1,)))
SECOND = (RowChunk(2, 0, (5, 3, 5, 8, 9, 7), (2,)), RowChunk(3, 0, (9, 3), ()))
THIRD = (RowChunk(3, 2, (2, 3, 8), (3,)),)


def runner_of(make: Any, graph_tokens: int) -> ModelRunner:
    decoder = make()
    forward = ServedModel(decoder, PagedKVCache(decoder, 32, BLOCK), max_model_len=32)
    sampler = TokenSampler(ROWS + 1, decoder.model.vocab, forward.kv_cache.device)
    runner = ModelRunner(forward, sampler, ROWS, graph_tokens=graph_tokens)
    runner.capture()
    return runner


def steps() -> list[ModelInput]:
    """Two prompts; both decode beside a third and a part of a fourth; then beside its rest."""
    entries = tuple(NewRow(row, SamplingParams(temperature=0.0), (), (), 0) for row in range(4))
    blocks = tuple(BlockTableUpdate(row, 0, tuple(range(5 * row, 5 * row + 5))) for row in range(4))
    return [
        ModelInput(new_rows=entries, block_table_updates=blocks, chunks=FIRST),
        ModelInput(
            decode_starts=(DecodeStart(0, 5), DecodeStart(1, 3)), decode_rows=(0, 1), chunks=SECOND
        ),
        ModelInput(decode_starts=(DecodeStart(2, 6),), decode_rows=(0, 1, 2), chunks=THIRD),
    ]


def logits_of(runner: ModelRunner, orders: Sequence[ModelInput]) -> list[torch.Tensor]:
    found = []
    for each in orders:
        computed = runner.execute_model(each)
        assert computed is not None
        found.append(computed.logits.clone())
        runner.sample_tokens(computed)
    return found


@pytest.mark.parametrize("make", [small, chunked, latent])
@pytest.mark.parametrize("graph_tokens", [12, 40])
def test_padded_steps_equal_those_of_the_host(make: Any, graph_tokens: int) -> None:
    told, plain = runner_of(make, graph_tokens), runner_of(make, 0)
    for found, wanted in zip(logits_of(told, steps()), logits_of(plain, steps()), strict=True):
        torch.testing.assert_close(found, wanted)
    assert told.mixed_graphs is not None
    assert told.mixed_graphs.steps == 3
    assert torch.equal(told.device_rows.positions, plain.device_rows.positions)
    held = (runner.kv_cache.gather(range(20)).view(torch.float32) for runner in (told, plain))
    torch.testing.assert_close(*held, rtol=1e-4, atol=1e-4)


class _AsksNothing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to bring a number to the host, which would end a capture."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "asked the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles what is interpreted here")
def test_what_is_captured_asks_the_device_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told, plain = runner_of(small, 24), runner_of(small, 0)
    wanted = logits_of(plain, steps())
    compute = MixedStepGraphs._compute

    def watched(self: MixedStepGraphs, *room: Any) -> torch.Tensor:
        # Attention as a GPU has it, by Triton's interpreter.
        with monkeypatch.context() as patch, _AsksNothing():  # type: ignore[no-untyped-call]
            for module in (paged_decode, paged_prefill):
                patch.setattr(module, "should_use_triton", lambda *_: True)
            return compute(self, *room)

    monkeypatch.setattr(MixedStepGraphs, "_compute", watched)
    for found, want in zip(logits_of(told, steps()), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_a_graph_is_put_together_by_the_host() -> None:
    runner = runner_of(small, 8)
    assert runner.mixed_graphs is not None
    assert runner.mixed_graphs.can_replay(0, FIRST)
    assert not runner.mixed_graphs.can_replay(1, FIRST), "nine tokens"
    assert not runner.mixed_graphs.can_replay(
        0, (RowChunk(0, 0, (1, 2), (0,), verifies_drafts=True),)
    )
    assert not runner.mixed_graphs.can_replay(7, (RowChunk(0, 0, (1,), (0, 1)),)), "nine that draw"
    assert runner.mixed_graphs.can_replay(6, (RowChunk(0, 0, (1,), (0, 1)),))


def test_models_whose_states_the_host_follows_are_refused() -> None:
    with pytest.raises(InputError, match="computed row by row"):
        runner_of(hybrid, 8)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {
                "scheduler_config": SchedulerConfig(max_cudagraph_capture_size=64),
                "cuda_graphs": False,
            },
            "captured where graphs are",
        ),
        (
            {
                "scheduler_config": SchedulerConfig(max_cudagraph_capture_size=64),
                "batch_invariant": True,
            },
            "one kernel reads all rows",
        ),
    ],
)
def test_settings_that_capture_nothing_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        EngineConfig(**given)


def test_no_more_is_captured_than_a_step_has() -> None:
    with pytest.raises(InputError, match="use 512 or fewer"):
        SchedulerConfig(max_num_batched_tokens=512, max_cudagraph_capture_size=513)


def test_a_step_of_nothing_but_padding_changes_nothing() -> None:
    runner = runner_of(small, 40)
    assert runner.mixed_graphs is not None
    runner.device_rows.positions[:] = torch.arange(ROWS + 1)
    kept = runner.kv_cache.gather(range(32)).clone()
    for size in list_mixed_graph_sizes(40):  # as they are captured
        room = runner.mixed_graphs._room(size)
        assert runner.mixed_graphs._tell(room, (), ()) == 0
        assert runner.mixed_graphs._compute(room).isfinite().all()
    assert torch.equal(runner.device_rows.positions, torch.arange(ROWS + 1, device=DEVICE))
    assert torch.equal(runner.kv_cache.gather(range(32)), kept)
