"""`GradientReducer`: starts the reduction of each bucket once its gradients are complete.

Buckets that complete in the same passes leave strictly in their order, so that every rank issues
the same collectives in the same order. A parameter that brought no gradient in the passes that
complete it (it is unused, or a split backward has done it before) is known from the first step on,
in which its bucket leaves only at the end.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from meshwright.run.parallel.zero.bucket_reduction import BucketReduction
from meshwright.run.parallel.zero.buckets import GradientBucket


@dataclass(eq=False)
class _Course:
    """One bucket's course through a step."""

    reduction: BucketReduction
    members: frozenset[str]
    early: frozenset[str] = frozenset()
    """Members that bring nothing in the passes that complete the bucket."""
    arrived: set[str] = field(default_factory=set)
    """Members that did since the bucket left last."""
    seen: set[str] = field(default_factory=set)
    """Members that did in this step."""
    left: int = 0
    """How often the bucket left in this step."""

    @property
    def complete(self) -> bool:
        return self.arrived | self.early >= self.members

    @property
    def unused(self) -> bool:
        return self.early >= self.members


@dataclass(eq=False)
class _Lane:
    """Buckets that complete in the same passes, in their order."""

    courses: list[_Course] = field(default_factory=list)
    next: int = 0


class GradientReducer:
    """Watches gradients arrive and sends buckets on their way."""

    def __init__(
        self,
        reductions: Sequence[BucketReduction],
        *,
        overlaps: bool,
        on_leaving: Callable[[GradientBucket], None] | None = None,
    ) -> None:
        """`reductions` are in the order their buckets complete; `on_leaving` is told of each."""
        self._overlaps, self._on_leaving = overlaps, on_leaving
        self._courses = [
            _Course(each, frozenset(member.name for member in each.bucket.members))
            for each in reductions
        ]
        self._lanes: dict[tuple[frozenset[int], bool], _Lane] = {}
        self._of: dict[str, tuple[_Course, _Lane]] = {}
        for course in self._courses:
            bucket = course.reduction.bucket
            if bucket.shared_stage_group:
                continue
            lane = self._lanes.setdefault((bucket.chunks, course.reduction.accumulates), _Lane())
            lane.courses.append(course)
            for name in course.members:
                self._of[name] = (course, lane)
                parameter = course.reduction.parameters[name]
                if overlaps or course.reduction.accumulates:
                    hook = self._hook(name)
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._ending: set[int] = set()
        self._flights: list[_Flight] = []

    def start_backward(self) -> None:
        """Get ready for the passes of a step."""
        self._ending.clear()
        for course in self._courses:
            course.arrived.clear()
            course.seen.clear()
            course.left, course.reduction.reduced_shard = 0, None
        for lane in self._lanes.values():
            lane.next = 0

    def mark_last_backward(self, chunk: int) -> None:
        """Note that the pass that follows completes a chunk."""
        self._ending.add(chunk)
        for (chunks, adds_up), lane in self._lanes.items():
            if self._overlaps and not adds_up and chunk in chunks and chunks <= self._ending:
                self._advance(lane)

    def mark_ready(self, name: str) -> None:
        """Note that a pass has added its part to a parameter's gradient."""
        if name not in self._of:
            return
        course, lane = self._of[name]
        bucket, adds_up = course.reduction.bucket, course.reduction.accumulates
        if not adds_up and not (self._overlaps and bucket.chunks <= self._ending):
            return
        if course.left and not adds_up:
            raise RuntimeError(
                f"the gradient of {name} came after those of its bucket had been reduced: it "
                "brought none in the first step; let all steps run the same operations, or set "
                "layout.overlap_gradients = false"
            )
        course.arrived.add(name)
        course.seen.add(name)
        self._advance(lane)

    @torch.no_grad()
    def flush(self) -> None:
        """Send what has not left, and wait for everything."""
        for course in self._courses:
            if course.left and not course.arrived:
                continue
            if not course.left and course.seen:
                course.early |= course.members - course.seen
            self._leave(course)
        self._land()
        self._ending.clear()

    def _advance(self, lane: _Lane) -> None:
        while lane.next < len(lane.courses):
            course = lane.courses[lane.next]
            if not course.complete:
                return
            # What is never used has nothing to bring in each pass: once, at the end.
            if not (course.reduction.accumulates and course.unused):
                self._leave(course)
            lane.next += 1
            if course.reduction.accumulates and lane.next == len(lane.courses):
                lane.next = 0
                return

    def _leave(self, course: _Course) -> None:
        course.left += 1
        course.arrived.clear()
        flight = _Flight(course.reduction.reduce())
        flight.step()
        if self._on_leaving is not None:
            self._on_leaving(course.reduction.bucket)
        # The one before had its time; what it waits for is over, or nearly.
        for earlier in self._flights:
            if earlier.goes_on:
                earlier.step()
        self._flights = [each for each in (*self._flights, flight) if not each.landed]
        if not self._overlaps:
            self._land()

    def _land(self) -> None:
        while self._flights:
            for flight in self._flights:
                flight.step()
            self._flights = [each for each in self._flights if not each.landed]

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        # Autograd also calls hooks of what a split backward puts off, with nothing yet.
        return lambda each: None if each.grad is None else self.mark_ready(name)


class _Flight:
    """A reduction under way."""

    def __init__(self, steps: Iterator[bool]) -> None:
        self._steps = steps
        self.landed = False
        self.goes_on = True
        """More than waiting follows."""

    def step(self) -> None:
        """Wait for what is under way and begin what follows."""
        found = next(self._steps, None)
        self.landed, self.goes_on = found is None, bool(found)
