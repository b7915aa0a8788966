"""`Ask`: what a job asks of a cluster; `Standing`: how it stands in the queue.

An ask is all that a scheduler may know. How long a job really runs is known to whoever drives the
queue; `estimate_s` is what a user, a limit or a predictor says beforehand.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.errors import InputError, Problem


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it is handed in."""

    job: str
    """Its name among all jobs."""
    submit_s: float
    """When it is handed in."""
    gpus: float
    """GPUs it runs on, all of them at once; a part of one is allowed where GPUs are shared."""
    estimate_s: float = math.inf
    """How long it is expected to run: a limit, a prediction, or the truth for an oracle."""
    user: str = ""
    """Who handed it in."""
    team: str = ""
    """Whose quota and whose share it counts to."""
    name: str = ""
    """What it is called by its user; runs of the same name are alike."""
    priority: float = 0.0
    """The higher goes first, where priorities count."""
    kinds: tuple[str, ...] = ()
    """Kinds of GPU that will do; empty: any."""
    cpus: float = 0.0
    """Cores it needs."""
    memory: float = 0.0
    """Bytes of host memory it needs."""
    least_gpus: float | None = None
    """The fewest it runs on, where it can shrink; None: as many as it asks for."""
    most_gpus: float | None = None
    """The most it can use, where it can grow; None: as many as it asks for."""
    serial_share: float = 0.0
    """Share of a step that more GPUs do not shorten (Amdahl), for jobs that change their size."""
    speeds: dict[str, float] = {}
    """How fast it is on a kind of GPU, 1 being the speed that its duration was measured at."""
    restart_s: float = 0.0
    """Seconds without progress whenever it starts or goes on."""
    deadline_s: float | None = None
    """When it should be done."""


class Standing:
    """A job in the queue: what it asks, holds and has done so far.

    Whoever drives the queue keeps `progress_s`, `attained_s` and `served_gpu_s` up to date;
    policies read them and change only `place`, `held` and `ends_s`, through a pool.
    """

    __slots__ = (
        "ask", "attained_s", "began_s", "ends_s", "estimate_s", "gpus", "held", "index", "kept_s",
        "pause_s", "place", "progress_s", "rank", "rate", "served_gpu_s", "settled_s", "shape",
        "tries",
    )  # fmt: skip

    def __init__(self, index: int, ask: Ask) -> None:
        """Stand at the end of the queue; `index` is the order in which jobs came."""
        self.index, self.ask = index, ask
        self.gpus, self.estimate_s = ask.gpus, ask.estimate_s
        self.shape = (ask.gpus, ask.kinds, ask.cpus, ask.memory)
        """What decides whether it fits; jobs of one shape fit alike."""
        self.place: Any = None
        """Where it runs, in the words of the pool; None while it waits."""
        self.held = 0.0
        """GPUs it has now."""
        self.began_s = self.settled_s = self.ends_s = 0.0
        self.progress_s = self.kept_s = 0.0
        """Seconds of work that are done, at the size it asked for; and that a checkpoint has."""
        self.attained_s = self.served_gpu_s = 0.0
        """Time it has run, and GPU-seconds it has had."""
        self.pause_s, self.rate = 0.0, 1.0
        """What is left of its start-up, and its progress per second after it."""
        self.rank: Any = 0
        """Room for a policy to keep a place in its order."""
        self.tries = 0
        """How often it started."""

    @property
    def left_s(self) -> float:
        """Seconds it is still expected to take at the size it asked for, never less than none."""
        return max(0.0, self.estimate_s - self.progress_s)


def speedup(ask: Ask, gpus: float) -> float:
    """Return the speed on `gpus` over that on as many as it asked for, by Amdahl's law."""
    share = ask.serial_share
    return (share + (1 - share) / ask.gpus) / (share + (1 - share) / gpus)


def check_asks(asks: Sequence[Ask], gpus: float) -> None:
    """Refuse jobs that no scheduler could ever start on `gpus`, all of them at once."""
    problems = []
    most = max((ask.least_gpus or ask.gpus for ask in asks), default=0.0)
    for ask in asks:
        if not (math.isfinite(ask.submit_s) and 0 < ask.gpus < math.inf):
            what = f"it asks for {ask.gpus:g} GPUs at {ask.submit_s:g} s"
            problems.append(Problem(f"job {ask.job}", what, "leave it out"))
        elif (ask.least_gpus or ask.gpus) > gpus:
            what = f"it asks for {ask.gpus:g} GPUs and there are {gpus:g}"
            fix = f"leave it out, or add GPUs: the largest job needs {most:g}"
            problems.append(Problem(f"job {ask.job}", what, fix))
        if len(problems) == 5:
            break
    if problems:
        raise InputError(problems)
