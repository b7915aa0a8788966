"""`Setup`: a model that learns from what it generates, and the GPUs of both sides."""

from random import Random
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.rollout import Arrangement, Placement, TooOld, arranged
from meshwright.predict.rl.framework import MESHWRIGHT, Framework
from meshwright.predict.serving.fleet import Copies
from meshwright.predict.software import MEGATRON, Software
from meshwright.spec.bounds import Bounds
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.units import format_some
from meshwright.spec.workload import Adapter, Fixed, Lengths

MEASURED = 16
"""Steps that are measured, where nobody says: asynchronous ones are long and short by turns, and
the longest answer of each decides many."""


class Drawn(NamedTuple):
    """Lengths of one group."""

    prompt: int
    answers: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens that are trained on, prompts included."""
        return len(self.answers) * self.prompt + sum(self.answers)

    @property
    def squares(self) -> int:
        """Sum of the squared lengths, which attention grows with."""
        return sum((self.prompt + answer) ** 2 for answer in self.answers)


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """What every step asks for."""

    prompts: int = 128
    """Groups of a step."""
    samples: int = 16
    """Answers to each prompt."""
    prompt: Lengths = Fixed(tokens=256)
    output: Lengths = Fixed(tokens=1024)
    longest: int = 32768
    """Answers are cut there."""
    packed: int | None = None
    """Tokens of a training microbatch, which samples are packed into; None takes the longest
    sample of a step."""
    forward_packed: int | None = None
    """The same of passes without gradients; None takes as many."""
    updates: int = 1
    """Updates of the weights in one step: minibatches."""
    forwards: int = 1
    """Passes without gradients over what is trained on: 1 for log-probabilities of the policy, 2
    with those of a reference model."""
    reference: bool | None = None
    """Whether there is such a model; None takes it that there is where `forwards` is 2 or more."""
    adapter: Adapter | None = None
    """What is trained beside frozen weights; None trains every weight. The reference model is the
    policy without it then."""
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.count(
            prompts=self.prompts, samples=self.samples, longest=self.longest, updates=self.updates,
            packed=self.packed, forward_packed=self.forward_packed,
        )  # fmt: skip
        bounds.count(0, forwards=self.forwards, seed=self.seed)
        bounds.require()

    @property
    def has_reference(self) -> bool:
        """Whether a reference model lies somewhere."""
        if self.adapter is not None:
            return False
        return self.forwards > 1 if self.reference is None else self.reference

    def drawn(self, group: int) -> Drawn:
        """Return the lengths of a group, the same ones whoever asks and whenever."""
        rng = Random(self.seed * 1_000_003 + group)
        (prompt,) = self.prompt.sample(rng, 1)
        answers = self.output.sample(rng, self.samples)
        return Drawn(max(1, prompt), tuple(min(max(1, one), self.longest) for one in answers))

    def even(self) -> "Rounds":
        """Return the same with answers that are all as long as the mean one."""
        drawn = [one for group in range(self.prompts) for one in self.drawn(group).answers]
        mean = max(1, round(sum(drawn) / len(drawn)))
        return msgspec.structs.replace(self, output=Fixed(tokens=mean))


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Both sides, and how they go together."""

    model: Model
    cluster: Cluster
    placement: Placement
    engines: Copies
    training: Layout
    rounds: Rounds = Rounds()
    max_staleness: int | None = None
    """Of `asynchronous`; the others have their own."""
    too_old: TooOld = "wait"
    """What becomes of groups that fall behind, where steps take what has ended."""
    running: int | None = None
    """Groups under way at most; None leaves it to the engines, where those that wait grow old."""
    beside: bool = False
    """Of `disaggregated`: both sides lie on the same GPUs, with memory of their own, and work one
    after the other."""
    lent: bool = False
    """Engines on the trainer's GPUs use its weights where they lie, beside an adapter."""
    software: Software = MEGATRON
    """What trains."""
    framework: Framework = MESHWRIGHT
    """What puts both sides together."""
    measured: int = MEASURED
    """Steps that are measured, after those in which the pipeline fills and settles, and before
    those that drain it."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.count(measured=self.measured)
        bounds.require()
        if self.beside and self.placement != "disaggregated":
            what = f"{self.placement} with both sides beside each other is not simulated"
            raise InputError([Problem("beside", what, "give both sides GPUs of their own")])
        if self.rounds.adapter is not None and self.framework.sending == "gathered":
            what = f"how {self.framework.name} sends adapters is not known"
            raise InputError([Problem("adapter", what, "leave it out")])
        terms = self.arrangement
        if self.too_old != "wait" and (terms.order == "asked" or not terms.max_staleness):
            what = f"with {self.placement} no group gets too old: steps take them in their order"
            fix = "leave out `too_old`, or use placement=asynchronous"
            if terms.order == "ended":
                what = "with a staleness of 0 every step waits for its own groups"
                fix = "leave out `too_old`, or use max_staleness=1"
            raise InputError([Problem("too_old", what, fix)])
        taken = self.engines.gpus, self.training.gpus
        if self.shares_gpus and taken[0] != taken[1]:
            what = f"engines have {taken[0]} GPUs and the trainer {taken[1]}, which are the same"
            raise InputError([Problem("placement", what, "let both have as many")])
        if self.gpus > self.cluster.gpus:
            needed = format_some(self.gpus, "GPU is needed", "GPUs are needed")
            what = f"{needed}, {self.cluster.name} has {self.cluster.gpus}"
            raise InputError([Problem("cluster", what, "use fewer, or a larger one")])

    @property
    def arrangement(self) -> Arrangement:
        """What the controller goes by: enough steps to fill, settle, measure and drain."""
        found = arranged(
            self.placement,
            groups=self.rounds.prompts,
            steps=1,
            max_staleness=self.max_staleness,
            too_old=self.too_old,
            running=self.running,
        )
        ahead = found.max_staleness + 1
        # What was begun at once in the beginning goes on ending at once for another round.
        settles = ahead if found.max_staleness else 0
        return msgspec.structs.replace(found, steps=self.measured + 2 * ahead + settles)

    @property
    def shares_gpus(self) -> bool:
        """Whether both sides have the same GPUs."""
        return self.arrangement.shared or self.beside

    @property
    def gpus(self) -> int:
        """GPUs of both sides; those that they share count once."""
        return self.training.gpus + (0 if self.shares_gpus else self.engines.gpus)


def share_of(cluster: Cluster, gpus: int) -> Cluster:
    """Return so many GPUs of a cluster as one of their own: whole nodes, or a part of one."""
    node = cluster.gpus_per_node
    if gpus % node == 0:
        return cluster.with_gpus(gpus)
    if gpus > node:
        what, fix = f"{gpus} GPUs are no whole nodes of {node}", f"use a multiple of {node}"
        raise InputError([Problem("gpus", what, fix)])
    replace = msgspec.structs.replace
    linked = replace(cluster.scale_up, gpus=min(cluster.scale_up.gpus, gpus))
    return replace(cluster, nodes=1, gpus_per_node=gpus, scale_up=linked)
