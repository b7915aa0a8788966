"""`RolloutPolicy`: where generating and training happen, and how far they may drift apart."""

from typing import Literal, get_args

import msgspec

from meshwright.spec.field_checks import FieldChecker

ConsumeOrder = Literal["submitted", "completed"]
StalePolicy = Literal["wait", "regenerate", "drop"]
STALE_POLICIES: tuple[StalePolicy, ...] = get_args(StalePolicy)
Placement = Literal["colocated", "disaggregated", "one_step_off", "async"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


class RolloutPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller goes by."""

    groups_per_step: int
    """Groups of one training step."""
    total_steps: int
    """Training steps in all."""
    colocated: bool = False
    """Both sides take turns on the same GPUs."""
    max_staleness: int = 0
    """How many steps behind the trainer the weights of a group may be when it is trained on."""
    in_flight_weight_updates: bool = False
    """Weights come in while groups run, which go on with them; otherwise all that runs ends first
    and nothing new begins."""
    consume_order: ConsumeOrder = "submitted"
    """Whether steps take groups as they were begun, so that none gets too old, or as they end, so
    that long ones hold nobody up."""
    on_stale: StalePolicy = "wait"
    """Where steps take groups as they end: whether a step waits for those that would be too old for
    the next, or lets them go, and then answers their prompts anew or gives them up. Only who waits
    trains on long answers as often as they come."""
    sync_interval_steps: int = 1
    """Steps between two syncs."""
    max_concurrent_groups: int | None = None
    """Groups under way at most; None leaves it to the engines."""
    extra_groups: int | None = None
    """Groups of no use that further prompts may take the place of, for each step; once there are
    more, steps take them as they are. None sets no bound."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(
            groups_per_step=self.groups_per_step,
            total_steps=self.total_steps,
            sync_interval_steps=self.sync_interval_steps,
            max_concurrent_groups=self.max_concurrent_groups,
        )
        bounds.count(0, max_staleness=self.max_staleness, extra_groups=self.extra_groups)
        bounds.one_of("consume_order", self.consume_order, get_args(ConsumeOrder))
        bounds.one_of("on_stale", self.on_stale, STALE_POLICIES)
        if bounds.is_valid("max_staleness") and self.colocated and self.max_staleness:
            what = "engines that take turns with the trainer generate nothing ahead"
            bounds.add("max_staleness", what, "use 0, or place them on GPUs of their own")
        if (
            bounds.is_valid("max_staleness", "sync_interval_steps")
            and self.sync_interval_steps > self.max_staleness + 1
        ):
            what = (
                f"{self.sync_interval_steps} steps between syncs need groups "
                f"{self.sync_interval_steps - 1} old"
            )
            bounds.add("sync_interval_steps", what, f"use at most {self.max_staleness + 1}")
        bounds.raise_problems()


def build_rollout_policy(
    placement: Placement,
    *,
    groups: int,
    steps: int,
    max_staleness: int | None = None,
    on_stale: StalePolicy = "wait",
    max_concurrent_groups: int | None = None,
    extra_groups: int | None = None,
) -> RolloutPolicy:
    """Return what a placement's name stands for.

    `colocated` and `disaggregated` are synchronous. `one_step_off` generates the next step's groups
    with the weights before this one. `async` never lets engines stand still for the trainer,
    as far as `max_staleness` (default: 1) goes.
    """
    bounds = FieldChecker()
    bounds.one_of("placement", placement, PLACEMENTS)
    bounds.raise_problems()
    fixed = {"colocated": 0, "disaggregated": 0, "one_step_off": 1}.get(placement)
    staleness = (1 if fixed is None else fixed) if max_staleness is None else max_staleness
    if fixed is not None and staleness != fixed:
        fix = "leave it out, or use async"
        bounds.add("max_staleness", f"{placement} means {fixed}, not {staleness}", fix)
        bounds.raise_problems()
    streams = placement == "async"
    return RolloutPolicy(
        groups_per_step=groups,
        total_steps=steps,
        colocated=placement == "colocated",
        max_staleness=staleness,
        in_flight_weight_updates=streams,
        consume_order="completed" if streams else "submitted",
        on_stale=on_stale,
        max_concurrent_groups=max_concurrent_groups,
        extra_groups=extra_groups,
    )
