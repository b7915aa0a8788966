"""`RolloutController`: decides what is generated with which weights, when to train, when to sync.

A driver begins every action that `start_actions` returns, and says with `complete_action` that one
is over. At most

    (max_staleness + version of the engines' weights + 1) · groups of a step

groups are begun in all (the admission rule of AReaL, arXiv 2505.24298). Taken in the order they
were begun, none is then too old when its step comes; taken as they end, a step waits for those
that later ones could not take, or they are let go. With `max_staleness` 0 all of these are the
synchronous loop, whatever takes how long: also further prompts, which take the place of groups of
no use (DAPO's dynamic sampling, arXiv 2503.14476), then begin together once nothing else runs.
"""

from collections import Counter, deque
from typing import Literal, NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.rollout.actions import (
    AFTER_SYNC,
    BEFORE_SYNC,
    BEFORE_TRAINING,
    Action,
    DropAction,
    GenerateAction,
    IdleReason,
    MemoryPhaseAction,
    SyncAction,
    TrainAction,
)
from meshwright.policy.rollout.rollout_policy import RolloutPolicy

GroupEnd = Literal["kept", "useless", "lost"]
"""How a group ends: trained on, of no use (all its rewards are equal, say) so that another prompt
takes its place, or lost with the engine that had it, so that its prompt is answered anew."""


class RolloutProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint of the trainer has to hold, to go on with nothing lost or done twice."""

    trained_steps: int
    """Steps that are done."""
    next_group: int
    """The first prompt that was never begun."""
    requeued_groups: tuple[int, ...] = ()
    """Prompts before it that are to be answered, those under way included."""
    ready_groups: tuple[tuple[int, int], ...] = ()
    """Groups that ended and wait for their step, with their versions."""
    replaced_groups: int = 0
    """Groups of no use that were let go since the last step that is done began: also those before a
    step under way, which takes all of them as its own when it is done anew."""


class _Group(NamedTuple):
    """One group since it was begun."""

    asked: GenerateAction
    turn: int
    """How many were begun before it."""


class RolloutController:
    """Decides; it is told what ended, and never what time it is."""

    def __init__(self, policy: RolloutPolicy, progress: RolloutProgress | None = None) -> None:
        """Begin, or go on from where a checkpoint stood."""
        self.policy = policy
        started = progress or RolloutProgress(trained_steps=0, next_group=0)
        self.trained_steps = self.weights_version = started.trained_steps
        """Steps done, and the version of the weights that engines have."""
        self.dropped_groups = 0
        """Groups that were let go as too old."""
        self._unasked, self._again = started.next_group, deque(started.requeued_groups)
        self._attempts: dict[int, int] = {}
        self._turn = 0
        self._running: dict[int, _Group] = {}
        self._ready: dict[int, _Group] = {}
        self._useless: dict[int, _Group] = {}
        """Of which it is not decided yet whether others take their places."""
        self._replaced = started.replaced_groups
        for group, version in started.ready_groups:
            self._ready[group] = self._begun(GenerateAction(group, 0, version))
        self._training: tuple[_Group, ...] = ()
        self._doing: TrainAction | SyncAction | MemoryPhaseAction | None = None
        self._next: deque[SyncAction | MemoryPhaseAction] = deque()
        self._engines_have_gpus = True
        self._drops: list[DropAction] = []
        self._drop_too_old()

    @property
    def is_done(self) -> bool:
        """Whether every step is trained."""
        return self.trained_steps == self.policy.total_steps and self._doing is None

    def start_actions(self) -> list[Action]:
        """Return everything that begins now."""
        if self._useless and not (self._running or self._may_generate()):
            self._replace_useless()
        found: list[Action] = [*self._drops]
        self._drops = []
        if self._doing is None:
            self._doing = self._trainers_next()
            if self._doing is not None:
                found.append(self._doing)
        while self._may_generate():
            group = self._again.popleft() if self._again else self._unasked
            self._unasked = max(self._unasked, group + 1)
            attempt = self._attempts.get(group, 0)
            self._attempts[group] = attempt + 1
            begun = self._begun(GenerateAction(group, attempt, self.weights_version))
            self._running[group] = begun
            found.append(begun.asked)
        return found

    def complete_action(
        self,
        action: GenerateAction | TrainAction | SyncAction | MemoryPhaseAction,
        ending: GroupEnd = "kept",
    ) -> None:
        """Hear that something is over; how a group ended is `ending`."""
        if isinstance(action, GenerateAction):
            self._generated(action, ending)
            return
        if action != self._doing:
            what = f"{action} was not begun, or is over already"
            raise InputError([Problem("action", what, f"end {self._doing} first")])
        self._doing = None
        if isinstance(action, TrainAction):
            self._training = ()
            self.trained_steps += 1
            self._drop_too_old()
            if self.policy.colocated and not self.is_done:
                self._next += [MemoryPhaseAction(name) for name in BEFORE_SYNC]
                self._next += [
                    SyncAction(self.trained_steps),
                    *(MemoryPhaseAction(name) for name in AFTER_SYNC),
                ]
        elif isinstance(action, SyncAction):
            self.weights_version = action.version
        elif action.phase in ("sleep", "wake cache"):
            self._engines_have_gpus = action.phase == "wake cache"

    @property
    def idle_reasons(self) -> tuple[IdleReason, ...]:
        """Return who does nothing once everything has begun, and what for."""
        found = []
        running = tuple(sorted(self._running))
        if self._doing is None:
            if self.trained_steps == self.policy.total_steps:
                found.append(IdleReason("trainer", "end"))
            elif self._sync_is_due():
                found.append(IdleReason("trainer", "drain", running))
            else:
                late = tuple(self._late(self._oldest())) if self._has_enough() else ()
                found.append(IdleReason("trainer", "groups", late or running))
        if not self._running:
            found.append(self._engines_wait())
        return tuple(found)

    def progress(self) -> RolloutProgress:
        """Return what a checkpoint has to hold now, between two actions of the trainer or in one.

        A step under way is not done: its groups are ready again.
        """
        ready = [*self._training, *self._ready.values()]
        again = [*self._running, *self._useless, *self._again]
        replaced = self._replaced
        if isinstance(self._doing, TrainAction):
            replaced += self._doing.replaced_groups
        return RolloutProgress(
            trained_steps=self.trained_steps,
            next_group=self._unasked,
            requeued_groups=tuple(sorted(again)),
            ready_groups=tuple((one.asked.group, one.asked.version) for one in ready),
            replaced_groups=replaced,
        )

    def _begun(self, asked: GenerateAction) -> _Group:
        self._turn += 1
        return _Group(asked, self._turn)

    def _alive(self) -> int:
        """Count the groups that were begun and not let go, those included that are trained on."""
        held = (self._running, self._ready, self._useless, self._training)
        under_way = sum(len(each) for each in held)
        return self.trained_steps * self.policy.groups_per_step + under_way

    def _admitted(self) -> int:
        """Return how many groups may be begun with the weights that engines have."""
        terms = self.policy
        return (
            min(terms.max_staleness + self.weights_version + 1, terms.total_steps)
            * terms.groups_per_step
        )

    def _may_generate(self) -> bool:
        terms = self.policy
        if isinstance(self._doing, SyncAction) or not self._engines_have_gpus:
            return False
        if self._next or (self._sync_is_due() and not terms.in_flight_weight_updates):
            return False
        if (
            terms.max_concurrent_groups is not None
            and len(self._running) >= terms.max_concurrent_groups
        ):
            return False
        return self._alive() < self._admitted()

    def _sync_is_due(self) -> bool:
        behind = self.trained_steps - self.weights_version
        is_last = self.trained_steps == self.policy.total_steps
        return behind >= self.policy.sync_interval_steps and not is_last

    def _trainers_next(self) -> TrainAction | SyncAction | MemoryPhaseAction | None:
        """Return what the trainer does now; None where it has to wait."""
        terms = self.policy
        if self._next:
            return self._next.popleft()
        if self.trained_steps == terms.total_steps:
            return None
        if self._sync_is_due():
            return (
                SyncAction(self.trained_steps)
                if terms.in_flight_weight_updates or not self._running
                else None
            )
        batch = self._batch()
        if batch is None:
            return None
        if terms.colocated and self._engines_have_gpus:
            self._next += [MemoryPhaseAction(name) for name in BEFORE_TRAINING]
            return self._next.popleft()
        for one in batch:
            del self._ready[one.asked.group]
        self._training = tuple(sorted(batch, key=lambda one: one.asked.group))
        asked = [one.asked for one in self._training]
        groups, versions = (tuple(each[at] for each in asked) for at in (0, 2))
        replaced, self._replaced = self._replaced, 0
        return TrainAction(self.trained_steps, groups, versions, replaced)

    def _has_enough(self) -> bool:
        return len(self._ready) >= self.policy.groups_per_step

    def _batch(self) -> list[_Group] | None:
        """Return the groups of the next step; None while some are missing."""
        count = self.policy.groups_per_step
        if not self._has_enough():
            return None
        if self.policy.consume_order == "completed":
            batch = self._oldest()
            return None if self._late(batch) else batch
        first = sorted([*self._ready.values(), *self._running.values()], key=lambda one: one.turn)
        batch = first[:count]
        return batch if all(one.asked.group in self._ready for one in batch) else None

    def _oldest(self) -> list[_Group]:
        """Return as many as a step takes, of those that cannot wait for another as long."""
        waiting = sorted(self._ready.values(), key=lambda one: one.asked.version)
        return waiting[: self.policy.groups_per_step]

    def _late(self, batch: list[_Group]) -> list[int]:
        """Return the groups that run and that a step waits for, lest they get too old.

        Of what is left behind by a step, each version and those before it have to fit into the
        steps that can still take them; admission sees to it that they do if older ones go first.
        """
        terms = self.policy
        if terms.on_stale != "wait" or terms.consume_order != "completed":
            return []
        taken = {one.asked.group for one in batch}
        left = [*self._running.values()]
        left += [one for one in self._ready.values() if one.asked.group not in taken]
        count = 0
        for version, many in sorted(Counter(one.asked.version for one in left).items()):
            count += many
            if count > (version + terms.max_staleness - self.trained_steps) * terms.groups_per_step:
                running = self._running.items()
                late = sorted(at for at, one in running if one.asked.version <= version)
                if late:
                    return late
        return []

    def _generated(self, asked: GenerateAction, ending: GroupEnd) -> None:
        known = self._running.get(asked.group)
        if known is None or known.asked != asked:
            what = f"group {asked.group}, attempt {asked.attempt}, does not run"
            fix = "end what was begun, once, and nothing that was dropped"
            raise InputError([Problem("action", what, fix)])
        del self._running[asked.group]
        if ending == "kept":
            self._ready[asked.group] = known
        elif ending == "lost":
            self._again.append(asked.group)
        else:
            self._useless[asked.group] = known
            if self.policy.max_staleness:
                self._replace_useless()

    def _replace_useless(self) -> None:
        """Let groups of no use go while there are prompts to spare; steps take the others."""
        spare = self.policy.extra_groups
        for group, one in sorted(self._useless.items()):
            if spare is not None and self._replaced >= spare:
                self._ready[group] = one
            else:
                self._replaced += 1
                self._drops.append(
                    DropAction(*one.asked, is_running=False, requeue=False, no_signal=True)
                )
        self._useless = {}

    def _drop_too_old(self) -> None:
        """Let go of groups that no step can take any more."""
        oldest = self.trained_steps - self.policy.max_staleness
        again = self.policy.on_stale == "regenerate"
        for held in (self._running, self._ready):
            for group, one in list(held.items()):
                if one.asked.version < oldest:
                    del held[group]
                    self.dropped_groups += 1
                    self._drops.append(DropAction(*one.asked, held is self._running, again))
                    if again:
                        self._again.append(group)

    def _engines_wait(self) -> IdleReason:
        if isinstance(self._doing, SyncAction):
            return IdleReason("engines", "weights")
        if not self._engines_have_gpus or self._next or isinstance(self._doing, MemoryPhaseAction):
            return IdleReason("engines", "memory")
        if self._alive() >= self.policy.total_steps * self.policy.groups_per_step:
            return IdleReason("engines", "end")
        return IdleReason("engines", "staleness")
