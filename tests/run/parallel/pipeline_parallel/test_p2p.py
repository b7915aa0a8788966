"""What leaves a stage is kept until it has left, and what goes wrong on the way is not lost."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="sends tensors")

import torch

from meshwright.policy.pipeline import add_transfers, build_schedule
from meshwright.policy.pipeline.schedule import PipelineAction
from meshwright.run.parallel.group_coordinator import AsyncWork, P2PMessage
from meshwright.run.parallel.pipeline_parallel.p2p import P2PCommunicator


class Sent:
    """A send as torch hands it out."""

    def __init__(self, *, over: bool, fails: bool = False) -> None:
        self.over, self.fails, self.waited = over, fails, False

    def is_completed(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.waited = True
        if self.fails:
            raise RuntimeError("connection closed by peer")


class Way:
    """The group of two stages, which hands out prepared sends."""

    def __init__(self, *sends: Sent) -> None:
        self.sends = list(sends)

    def batch_send_recv(self, messages: list[P2PMessage]) -> list[AsyncWork]:
        works: list[Any] = [self.sends.pop(0) for _ in messages]
        return [AsyncWork(one.tensor, [work]) for one, work in zip(messages, works, strict=True)]


def boundary(*sends: Sent) -> P2PCommunicator:
    group: Any = Way(*sends)
    schedule = add_transfers(build_schedule("1f1b", 2, 2))
    shapes = [torch.Size((1,))] * 2
    return P2PCommunicator(group, schedule, shapes, dtype=torch.float32, device=torch.device("cpu"))


def send(between: P2PCommunicator, microbatch: int) -> None:
    between.put("forward", 1, microbatch, torch.zeros(1))
    between.start_transfers([PipelineAction("send_forward", 0, microbatch)])


def test_a_failed_send_is_told_with_the_next() -> None:
    between = boundary(Sent(over=True, fails=True), Sent(over=True))
    send(between, 0)
    with pytest.raises(RuntimeError, match="closed by peer"):
        send(between, 1)


def test_a_send_that_lasts_is_waited_for_at_the_end_alone() -> None:
    lasting, quick = Sent(over=False), Sent(over=True)
    between = boundary(quick, lasting)
    send(between, 0)
    send(between, 1)
    assert quick.waited
    assert not lasting.waited
    between.wait_all()
    assert lasting.waited
