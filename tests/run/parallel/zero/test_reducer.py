"""Buckets leave in their order, as soon as all that they wait for is there."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="gradients arrive by autograd's hooks")

import torch

from meshwright.run.parallel.zero.buckets import BucketRequest, GradientBucket, lay_out_bucket
from meshwright.run.parallel.zero.reducer import GradientReducer


class Noted:
    """A reduction that only says when it begins and when what it began is over."""

    def __init__(
        self, names: str, log: list[str], *, adds_up: bool = False, chunk: int = 0
    ) -> None:
        chunks = frozenset({chunk})
        wanted = [BucketRequest(name, 1, torch.float32, chunks=chunks) for name in names]
        self.bucket: GradientBucket = lay_out_bucket(wanted, 1)
        self.parameters = {name: torch.nn.Parameter(torch.ones(1)) for name in names}
        self.names, self.log, self.accumulates, self.own = names, log, adds_up, None

    def reduce(self) -> Iterator[bool]:
        self.log.append(f"begin {self.names}")
        yield self.accumulates
        self.log.append(f"end {self.names}")


def reducer(*reductions: Noted, overlaps: bool = True) -> GradientReducer:
    given: Any = reductions
    return GradientReducer(given, overlaps=overlaps)


def step(reduces: GradientReducer, *arriving: str) -> None:
    reduces.start_backward()
    reduces.mark_last_backward(0)
    for name in arriving:
        reduces.mark_ready(name)
    reduces.flush()


def test_a_bucket_waits_for_those_before_it() -> None:
    log: list[str] = []
    reduces = reducer(Noted("ab", log), Noted("c", log))
    reduces.start_backward()
    reduces.mark_last_backward(0)
    for name in "cb":
        reduces.mark_ready(name)
    assert log == []
    reduces.mark_ready("a")
    assert log == ["begin ab", "begin c"]
    reduces.flush()
    assert log[2:] == ["end ab", "end c"]


def test_gradients_of_passes_that_complete_nothing_do_not_count() -> None:
    log: list[str] = []
    reduces = reducer(Noted("a", log))
    reduces.start_backward()
    reduces.mark_ready("a")
    assert log == []
    reduces.mark_last_backward(0)
    reduces.mark_ready("a")
    assert log == ["begin a"]


def test_the_chunks_of_a_rank_do_not_wait_for_each_other() -> None:
    log: list[str] = []
    reduces = reducer(Noted("a", log, chunk=1), Noted("b", log, chunk=0))
    reduces.start_backward()
    reduces.mark_last_backward(0)
    reduces.mark_ready("b")
    assert log == ["begin b"]


def test_hooks_of_autograd_tell_of_arrivals() -> None:
    log: list[str] = []
    reduction = Noted("a", log)
    reduces = reducer(reduction)
    reduces.start_backward()
    reduces.mark_last_backward(0)
    (reduction.parameters["a"] * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert log == ["begin a"]


def test_what_brings_nothing_in_the_completing_pass_is_known_from_the_second_step() -> None:
    log: list[str] = []
    reduces = reducer(Noted("ab", log), Noted("c", log))
    step(reduces, "b", "c")  # `a` was there before, as in a split backward
    log.clear()
    reduces.start_backward()
    reduces.mark_last_backward(0)
    reduces.mark_ready("b")
    assert log == ["begin ab"]


def test_a_gradient_that_comes_after_its_bucket_left_is_an_error() -> None:
    reduces = reducer(Noted("ab", []))
    step(reduces, "b")
    with pytest.raises(RuntimeError, match="gradient of a came after"):
        step(reduces, "b", "a")


def test_where_reductions_add_up_a_bucket_leaves_in_every_pass() -> None:
    log: list[str] = []
    reduces = reducer(Noted("a", log, adds_up=True), Noted("b", log, adds_up=True))
    reduces.start_backward()
    for name in "abab":
        reduces.mark_ready(name)
    # At most two are on their way, so that no more than two buckets' gradients are held.
    assert log == ["begin a", "begin b", "end a", "begin a", "end b", "begin b", "end a"]


def test_without_overlap_all_leave_at_the_end_one_by_one() -> None:
    log: list[str] = []
    reduces = reducer(Noted("a", log), Noted("b", log), overlaps=False)
    reduces.start_backward()
    reduces.mark_last_backward(0)
    reduces.mark_ready("a")
    assert log == []
    reduces.flush()
    assert log == ["begin a", "end a", "begin b", "end b"]
