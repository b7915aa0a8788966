"""Steps with prompts that numbers on the device describe equal those that the host lays out."""

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")
pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.errors import InputError
from meshwright.policy.captured import captured_sizes
from meshwright.run.kernels import paged_decode, paged_prefill
from meshwright.run.serve.asked import Sampling
from meshwright.run.serve.engine.mixed_steps import MixedSteps
from meshwright.run.serve.engine.orders import Entry, Going, Orders, Part, Written
from meshwright.run.serve.engine.runner import Runner
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.model.cache import PagedCache
from meshwright.run.serve.model.forward import Forward
from meshwright.run.serve.sampling.sampler import Sampler
from meshwright.spec.serving import Limits
from tests.run.serve.model.small import DEVICE, chunked, hybrid, latent, small

ROWS, BLOCK = 6, 4
FIRST = (Part(0, 0, (3, 1, 4, 1, 5), (0,)), Part(1, 0, (9, 2, 6), (1,)))
SECOND = (Part(2, 0, (5, 3, 5, 8, 9, 7), (2,)), Part(3, 0, (9, 3), ()))
THIRD = (Part(3, 2, (2, 3, 8), (3,)),)


def runner_of(make: Any, graph_tokens: int) -> Runner:
    decoder = make()
    forward = Forward(decoder, PagedCache(decoder, 32, BLOCK), max_length=32)
    sampler = Sampler(ROWS + 1, decoder.model.vocab, forward.cache.device)
    runner = Runner(forward, sampler, ROWS, graph_tokens=graph_tokens)
    runner.capture()
    return runner


def steps() -> list[Orders]:
    """Two prompts; both decode beside a third and a part of a fourth; then beside its rest."""
    entries = tuple(Entry(row, Sampling(temperature=0.0), (), (), 0) for row in range(4))
    blocks = tuple(Written(row, 0, tuple(range(5 * row, 5 * row + 5))) for row in range(4))
    return [
        Orders(entries=entries, written=blocks, parts=FIRST),
        Orders(going=(Going(0, 5), Going(1, 3)), rows=(0, 1), parts=SECOND),
        Orders(going=(Going(2, 6),), rows=(0, 1, 2), parts=THIRD),
    ]


def logits_of(runner: Runner, orders: Sequence[Orders]) -> list[torch.Tensor]:
    found = []
    for each in orders:
        computed = runner.compute(each)
        assert computed is not None
        found.append(computed.logits.clone())
        runner.draw(computed)
    return found


@pytest.mark.parametrize("make", [small, chunked, latent])
@pytest.mark.parametrize("graph_tokens", [12, 40])
def test_padded_steps_equal_those_of_the_host(make: Any, graph_tokens: int) -> None:
    told, plain = runner_of(make, graph_tokens), runner_of(make, 0)
    for found, wanted in zip(logits_of(told, steps()), logits_of(plain, steps()), strict=True):
        torch.testing.assert_close(found, wanted)
    assert told.mixed is not None
    assert told.mixed.steps == 3
    assert torch.equal(told.rows.position, plain.rows.position)
    held = (runner.cache.gather(range(20)).view(torch.float32) for runner in (told, plain))
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
    compute = MixedSteps._compute

    def watched(self: MixedSteps, *room: Any) -> torch.Tensor:
        # Attention as a GPU has it, by Triton's interpreter.
        with monkeypatch.context() as patch, _AsksNothing():  # type: ignore[no-untyped-call]
            for module in (paged_decode, paged_prefill):
                patch.setattr(module, "on_triton", lambda *_: True)
            return compute(self, *room)

    monkeypatch.setattr(MixedSteps, "_compute", watched)
    for found, want in zip(logits_of(told, steps()), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_a_graph_is_put_together_by_the_host() -> None:
    runner = runner_of(small, 8)
    assert runner.mixed is not None
    assert runner.mixed.covers(0, FIRST)
    assert not runner.mixed.covers(1, FIRST), "nine tokens"
    assert not runner.mixed.covers(0, (Part(0, 0, (1, 2), (0,), checks=True),))
    assert not runner.mixed.covers(7, (Part(0, 0, (1,), (0, 1)),)), "nine that draw"
    assert runner.mixed.covers(6, (Part(0, 0, (1,), (0, 1)),))


def test_models_whose_states_the_host_follows_are_refused() -> None:
    with pytest.raises(InputError, match="computed row by row"):
        runner_of(hybrid, 8)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"limits": Limits(graph_tokens=64), "graphs": False}, "captured where graphs are"),
        ({"limits": Limits(graph_tokens=64), "invariant": True}, "one kernel reads all rows"),
    ],
)
def test_settings_that_capture_nothing_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        EngineSettings(**given)


def test_no_more_is_captured_than_a_step_has() -> None:
    with pytest.raises(InputError, match="use 512 or fewer"):
        Limits(batch_tokens=512, graph_tokens=513)


def test_a_step_of_nothing_but_padding_changes_nothing() -> None:
    runner = runner_of(small, 40)
    assert runner.mixed is not None
    runner.rows.position[:] = torch.arange(ROWS + 1)
    kept = runner.cache.gather(range(32)).clone()
    for size in captured_sizes(40):  # as they are captured
        room = runner.mixed._room(size)
        assert runner.mixed._tell(room, (), ()) == 0
        assert runner.mixed._compute(room).isfinite().all()
    assert torch.equal(runner.rows.position, torch.arange(ROWS + 1, device=DEVICE))
    assert torch.equal(runner.cache.gather(range(32)), kept)
