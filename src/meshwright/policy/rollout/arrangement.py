"""`Arrangement`: where generating and training happen, and how far they may drift apart."""

from typing import Literal, get_args

import msgspec

from meshwright.spec.bounds import Bounds

Order = Literal["asked", "ended"]
TooOld = Literal["wait", "again", "drop"]
TOO_OLD: tuple[TooOld, ...] = get_args(TooOld)
Placement = Literal["colocated", "disaggregated", "one-step-off", "asynchronous"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


class Arrangement(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller goes by."""

    groups: int
    """Groups of one training step."""
    steps: int
    """Training steps in all."""
    shared: bool = False
    """Both sides take turns on the same GPUs."""
    max_staleness: int = 0
    """How many steps behind the trainer the weights of a group may be when it is trained on."""
    interrupt: bool = False
    """Weights come in while groups run, which go on with them; otherwise all that runs ends first
    and nothing new begins."""
    order: Order = "asked"
    """Whether steps take groups as they were begun, so that none gets too old, or as they end, so
    that long ones hold nobody up."""
    too_old: TooOld = "wait"
    """Where steps take groups as they end: whether a step waits for those that would be too old for
    the next, or lets them go, and then answers their prompts anew or gives them up. Only who waits
    trains on long answers as often as they come."""
    sync_every: int = 1
    """Steps between two syncs."""
    running: int | None = None
    """Groups under way at most; None leaves it to the engines."""
    spare: int | None = None
    """Groups of no use that further prompts may take the place of, for each step; once there are
    more, steps take them as they are. None sets no bound."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.count(
            groups=self.groups, steps=self.steps, sync_every=self.sync_every, running=self.running
        )
        bounds.count(0, max_staleness=self.max_staleness, spare=self.spare)
        bounds.one_of("order", self.order, get_args(Order))
        bounds.one_of("too_old", self.too_old, TOO_OLD)
        if bounds.sound("max_staleness") and self.shared and self.max_staleness:
            what = "engines that take turns with the trainer generate nothing ahead"
            bounds.add("max_staleness", what, "use 0, or place them on GPUs of their own")
        if bounds.sound("max_staleness", "sync_every") and self.sync_every > self.max_staleness + 1:
            what = f"{self.sync_every} steps between syncs need groups {self.sync_every - 1} old"
            bounds.add("sync_every", what, f"use at most {self.max_staleness + 1}")
        bounds.require()


def arranged(
    placement: Placement,
    *,
    groups: int,
    steps: int,
    max_staleness: int | None = None,
    too_old: TooOld = "wait",
    running: int | None = None,
    spare: int | None = None,
) -> Arrangement:
    """Return what a placement's name stands for.

    `colocated` and `disaggregated` are synchronous. `one-step-off` generates the next step's groups
    with the weights before this one. `asynchronous` never lets engines stand still for the trainer,
    as far as `max_staleness` (default: 1) goes.
    """
    bounds = Bounds()
    bounds.one_of("placement", placement, PLACEMENTS)
    bounds.require()
    fixed = {"colocated": 0, "disaggregated": 0, "one-step-off": 1}.get(placement)
    staleness = (1 if fixed is None else fixed) if max_staleness is None else max_staleness
    if fixed is not None and staleness != fixed:
        fix = "leave it out, or use asynchronous"
        bounds.add("max_staleness", f"{placement} means {fixed}, not {staleness}", fix)
        bounds.require()
    streams = placement == "asynchronous"
    return Arrangement(
        groups=groups,
        steps=steps,
        shared=placement == "colocated",
        max_staleness=staleness,
        interrupt=streams,
        order="ended" if streams else "asked",
        too_old=too_old,
        running=running,
        spare=spare,
    )
