"""The loader: batches in order, faults told, nothing left running."""

import gc
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from meshwright.errors import InputError, Problem
from meshwright.run.train.data import prefetch
from meshwright.run.train.data.batch import BatchBuffers, SequenceInfo, TrainBatch
from meshwright.run.train.data.prefetch import PrefetchLoader


def memory(*, pinned: bool = False) -> BatchBuffers:
    return BatchBuffers(1, 4, packed=False, pinned=pinned)


def made(step: int) -> TrainBatch:
    tokens = torch.full((1, 4), step)
    return TrainBatch(step, tokens, tokens, None, None, (SequenceInfo(1, 4, 4, 4),))


def make(step: int, into: BatchBuffers | None = None) -> TrainBatch:
    return made(step)


def threads() -> int:
    return sum(thread.name.startswith("data-") for thread in threading.enumerate())


@pytest.mark.parametrize("workers", [1, 4])
def test_batches_come_in_order_from_any_step(workers: int) -> None:
    def uneven(step: int, into: BatchBuffers | None = None) -> TrainBatch:
        time.sleep(0.003 * (step % 3 == 0))
        return made(step)

    with PrefetchLoader(uneven, memory, first=7, until=40, ahead=6, workers=workers) as loader:
        assert [batch.step for batch in loader] == list(range(7, 40))


def test_no_more_is_made_than_was_asked_ahead() -> None:
    begun: list[int] = []

    def noted(step: int, into: BatchBuffers | None = None) -> TrainBatch:
        begun.append(step)
        return made(step)

    with PrefetchLoader(noted, memory, ahead=3, workers=3) as loader:
        next(loader)
        time.sleep(0.05)
        assert sorted(begun) == [0, 1, 2, 3]


def test_a_fault_reaches_the_consumer_at_its_step_and_says_which() -> None:
    def faulty(step: int, into: BatchBuffers | None = None) -> TrainBatch:
        if step == 3:
            raise InputError([Problem("shard", "is damaged")])
        return made(step)

    loader = PrefetchLoader(faulty, memory, ahead=8)
    assert [next(loader).step for _ in range(3)] == [0, 1, 2]
    with pytest.raises(InputError, match="is damaged") as raised:
        next(loader)
    assert raised.value.__notes__ == ["while making the batch of step 3"]
    with pytest.raises(RuntimeError, match="closed before step 4"):
        next(loader)


def test_waiting_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, asked = [0.0], threading.Event()

    def clock() -> float:
        read_s = now_s[0]
        asked.set()
        return read_s

    def slow_at_first(step: int, into: BatchBuffers | None = None) -> TrainBatch:
        assert asked.wait(60)
        now_s[0] += 5.0 if step == 0 else 0.0
        return made(step)

    monkeypatch.setattr(prefetch, "time", SimpleNamespace(perf_counter=clock))
    with PrefetchLoader(slow_at_first, memory, ahead=1) as loader:
        next(loader)
        assert loader.wait_s == 5.0
        next(loader)
        assert loader.wait_s == 0.0
        assert loader.total_wait_s == 5.0


def test_closing_ends_the_threads_whatever_they_wait_for() -> None:
    before = threads()
    loaders = [PrefetchLoader(make, memory, ahead=2, workers=2) for _ in range(3)]
    next(loaders[0])
    assert threads() == before + 6
    for loader in loaders:
        loader.close()
        loader.close()
    assert threads() == before


def test_a_forgotten_loader_ends_its_threads() -> None:
    before = threads()
    loader = PrefetchLoader(make, memory)
    next(loader)
    del loader
    gc.collect()
    deadline = time.monotonic() + 5
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == before


def test_batches_in_main_memory_are_never_written_over() -> None:
    with PrefetchLoader(make, memory, until=20, ahead=2) as loader:
        kept = list(loader)
    assert [int(batch.tokens_BT[0, 0]) for batch in kept] == list(range(20))


class Late:
    """Copies to a device that takes its time: nothing is copied until it is waited for."""

    pinned = False

    def __init__(self) -> None:
        self.sent: list[LateCopy] = []

    def send(self, batch: TrainBatch) -> tuple[TrainBatch, "LateCopy"]:
        there = torch.full_like(batch.tokens_BT, -1)
        copy = LateCopy(batch.tokens_BT, there)
        self.sent.append(copy)
        return TrainBatch(batch.step, there, there, None, None, batch.sequences), copy


class LateCopy:
    def __init__(self, here: torch.Tensor, there: torch.Tensor) -> None:
        self.here, self.there, self.done = here, there, False

    def synchronize(self) -> None:
        if not self.done:
            self.there.copy_(self.here)
            self.done = True


@pytest.mark.parametrize("workers", [1, 3])
def test_memory_is_used_again_only_after_its_copy_has_ended(workers: int) -> None:
    used: list[int] = []

    def into_memory(step: int, into: BatchBuffers | None = None) -> TrainBatch:
        assert into is not None
        used.append(id(into))
        into.tokens_BT.fill_(step)
        return TrainBatch(
            step, into.tokens_BT, into.tokens_BT, None, None, (SequenceInfo(1, 4, 4, 4),)
        )

    sender = Late()
    with PrefetchLoader(
        into_memory, memory, until=40, sender=sender, ahead=3, workers=workers
    ) as loader:
        batches = list(loader)
    for copy in sender.sent:
        copy.synchronize()
    assert [int(batch.tokens_BT[0, 0]) for batch in batches] == list(range(40))
    assert len(set(used)) == 4
