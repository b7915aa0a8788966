"""`Controller`: what is generated with which weights, when it is trained on, and when they sync.

A driver begins every action that `begin` returns, and says with `end` that one is over. At most

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
    Drop,
    Generate,
    Phase,
    Sync,
    Train,
    Wait,
)
from meshwright.policy.rollout.arrangement import Arrangement

Ending = Literal["kept", "useless", "lost"]
"""How a group ends: trained on, of no use (all its rewards are equal, say) so that another prompt
takes its place, or lost with the engine that had it, so that its prompt is answered anew."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint of the trainer has to hold, to go on with nothing lost or done twice."""

    trained: int
    """Steps that are done."""
    unasked: int
    """The first prompt that was never begun."""
    again: tuple[int, ...] = ()
    """Prompts before it that are to be answered, those under way included."""
    ready: tuple[tuple[int, int], ...] = ()
    """Groups that ended and wait for their step, with their versions."""
    replaced: int = 0
    """Groups of no use that were let go since the last step that is done began: also those before a
    step under way, which takes all of them as its own when it is done anew."""


class _Group(NamedTuple):
    """One group since it was begun."""

    asked: Generate
    turn: int
    """How many were begun before it."""


class Controller:
    """Decides; it is told what ended, and never what time it is."""

    def __init__(self, arrangement: Arrangement, progress: Progress | None = None) -> None:
        """Begin, or go on from where a checkpoint stood."""
        self.arrangement = arrangement
        started = progress or Progress(trained=0, unasked=0)
        self.trained = self.version = started.trained
        """Steps done, and the version of the weights that engines have."""
        self.dropped = 0
        """Groups that were let go as too old."""
        self._unasked, self._again = started.unasked, deque(started.again)
        self._attempts: dict[int, int] = {}
        self._turn = 0
        self._running: dict[int, _Group] = {}
        self._ready: dict[int, _Group] = {}
        self._useless: dict[int, _Group] = {}
        """Of which it is not decided yet whether others take their places."""
        self._replaced = started.replaced
        for group, version in started.ready:
            self._ready[group] = self._begun(Generate(group, 0, version))
        self._training: tuple[_Group, ...] = ()
        self._doing: Train | Sync | Phase | None = None
        self._next: deque[Sync | Phase] = deque()
        self._engines_have_gpus = True
        self._drops: list[Drop] = []
        self._drop_too_old()

    @property
    def is_done(self) -> bool:
        """Whether every step is trained."""
        return self.trained == self.arrangement.steps and self._doing is None

    def begin(self) -> list[Action]:
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
            begun = self._begun(Generate(group, attempt, self.version))
            self._running[group] = begun
            found.append(begun.asked)
        return found

    def end(self, action: Generate | Train | Sync | Phase, ending: Ending = "kept") -> None:
        """Hear that something is over; how a group ended is `ending`."""
        if isinstance(action, Generate):
            self._generated(action, ending)
            return
        if action != self._doing:
            what = f"{action} was not begun, or is over already"
            raise InputError([Problem("action", what, f"end {self._doing} first")])
        self._doing = None
        if isinstance(action, Train):
            self._training = ()
            self.trained += 1
            self._drop_too_old()
            if self.arrangement.shared and not self.is_done:
                self._next += [Phase(name) for name in BEFORE_SYNC]
                self._next += [Sync(self.trained), *(Phase(name) for name in AFTER_SYNC)]
        elif isinstance(action, Sync):
            self.version = action.version
        elif action.name in ("sleep", "wake cache"):
            self._engines_have_gpus = action.name == "wake cache"

    @property
    def waits(self) -> tuple[Wait, ...]:
        """Return who does nothing once everything has begun, and what for."""
        found = []
        running = tuple(sorted(self._running))
        if self._doing is None:
            if self.trained == self.arrangement.steps:
                found.append(Wait("trainer", "end"))
            elif self._sync_is_due():
                found.append(Wait("trainer", "drain", running))
            else:
                late = tuple(self._late(self._oldest())) if self._has_enough() else ()
                found.append(Wait("trainer", "groups", late or running))
        if not self._running:
            found.append(self._engines_wait())
        return tuple(found)

    def progress(self) -> Progress:
        """Return what a checkpoint has to hold now, between two actions of the trainer or in one.

        A step under way is not done: its groups are ready again.
        """
        ready = [*self._training, *self._ready.values()]
        again = [*self._running, *self._useless, *self._again]
        replaced = self._replaced
        if isinstance(self._doing, Train):
            replaced += self._doing.replaced
        return Progress(
            trained=self.trained,
            unasked=self._unasked,
            again=tuple(sorted(again)),
            ready=tuple((one.asked.group, one.asked.version) for one in ready),
            replaced=replaced,
        )

    def _begun(self, asked: Generate) -> _Group:
        self._turn += 1
        return _Group(asked, self._turn)

    def _alive(self) -> int:
        """Count the groups that were begun and not let go, those included that are trained on."""
        held = (self._running, self._ready, self._useless, self._training)
        under_way = sum(len(each) for each in held)
        return self.trained * self.arrangement.groups + under_way

    def _admitted(self) -> int:
        """Return how many groups may be begun with the weights that engines have."""
        terms = self.arrangement
        return min(terms.max_staleness + self.version + 1, terms.steps) * terms.groups

    def _may_generate(self) -> bool:
        terms = self.arrangement
        if isinstance(self._doing, Sync) or not self._engines_have_gpus:
            return False
        if self._next or (self._sync_is_due() and not terms.interrupt):
            return False
        if terms.running is not None and len(self._running) >= terms.running:
            return False
        return self._alive() < self._admitted()

    def _sync_is_due(self) -> bool:
        behind = self.trained - self.version
        is_last = self.trained == self.arrangement.steps
        return behind >= self.arrangement.sync_every and not is_last

    def _trainers_next(self) -> Train | Sync | Phase | None:
        """Return what the trainer does now; None where it has to wait."""
        terms = self.arrangement
        if self._next:
            return self._next.popleft()
        if self.trained == terms.steps:
            return None
        if self._sync_is_due():
            return Sync(self.trained) if terms.interrupt or not self._running else None
        batch = self._batch()
        if batch is None:
            return None
        if terms.shared and self._engines_have_gpus:
            self._next += [Phase(name) for name in BEFORE_TRAINING]
            return self._next.popleft()
        for one in batch:
            del self._ready[one.asked.group]
        self._training = tuple(sorted(batch, key=lambda one: one.asked.group))
        asked = [one.asked for one in self._training]
        groups, versions = (tuple(each[at] for each in asked) for at in (0, 2))
        replaced, self._replaced = self._replaced, 0
        return Train(self.trained, groups, versions, replaced)

    def _has_enough(self) -> bool:
        return len(self._ready) >= self.arrangement.groups

    def _batch(self) -> list[_Group] | None:
        """Return the groups of the next step; None while some are missing."""
        count = self.arrangement.groups
        if not self._has_enough():
            return None
        if self.arrangement.order == "ended":
            batch = self._oldest()
            return None if self._late(batch) else batch
        first = sorted([*self._ready.values(), *self._running.values()], key=lambda one: one.turn)
        batch = first[:count]
        return batch if all(one.asked.group in self._ready for one in batch) else None

    def _oldest(self) -> list[_Group]:
        """Return as many as a step takes, of those that cannot wait for another as long."""
        waiting = sorted(self._ready.values(), key=lambda one: one.asked.version)
        return waiting[: self.arrangement.groups]

    def _late(self, batch: list[_Group]) -> list[int]:
        """Return the groups that run and that a step waits for, lest they get too old.

        Of what is left behind by a step, each version and those before it have to fit into the
        steps that can still take them; admission sees to it that they do if older ones go first.
        """
        terms = self.arrangement
        if terms.too_old != "wait" or terms.order != "ended":
            return []
        taken = {one.asked.group for one in batch}
        left = [*self._running.values()]
        left += [one for one in self._ready.values() if one.asked.group not in taken]
        count = 0
        for version, many in sorted(Counter(one.asked.version for one in left).items()):
            count += many
            if count > (version + terms.max_staleness - self.trained) * terms.groups:
                running = self._running.items()
                late = sorted(at for at, one in running if one.asked.version <= version)
                if late:
                    return late
        return []

    def _generated(self, asked: Generate, ending: Ending) -> None:
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
            if self.arrangement.max_staleness:
                self._replace_useless()

    def _replace_useless(self) -> None:
        """Let groups of no use go while there are prompts to spare; steps take the others."""
        spare = self.arrangement.spare
        for group, one in sorted(self._useless.items()):
            if spare is not None and self._replaced >= spare:
                self._ready[group] = one
            else:
                self._replaced += 1
                self._drops.append(Drop(*one.asked, running=False, again=False, useless=True))
        self._useless = {}

    def _drop_too_old(self) -> None:
        """Let go of groups that no step can take any more."""
        oldest = self.trained - self.arrangement.max_staleness
        again = self.arrangement.too_old == "again"
        for held in (self._running, self._ready):
            for group, one in list(held.items()):
                if one.asked.version < oldest:
                    del held[group]
                    self.dropped += 1
                    self._drops.append(Drop(*one.asked, held is self._running, again))
                    if again:
                        self._again.append(group)

    def _engines_wait(self) -> Wait:
        if isinstance(self._doing, Sync):
            return Wait("engines", "weights")
        if not self._engines_have_gpus or self._next or isinstance(self._doing, Phase):
            return Wait("engines", "memory")
        if self._alive() >= self.arrangement.steps * self.arrangement.groups:
            return Wait("engines", "end")
        return Wait("engines", "staleness")
