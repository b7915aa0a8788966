"""Engines whose ranks take versions of weights, each its own slices of what a trainer offers.

    llm = LLM(folder, tp=2, ranks=TAKING)
    offered = Offered([of_decoder(decoder)])      on the side that trains
    meet(offered, llm.upkeep)                     both make the plan
    offered.post(1)
    take_version(1, llm.engine, llm.upkeep)       every rank has it aside, then all write it

`EngineWeights` does this where both sides are one process, `run.posttrain.workers` where they are
not. A version that one rank did not get whole is taken by none.
"""

import msgspec
import torch
import torch.distributed as dist

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.policy.transfer import Held
from meshwright.run.posttrain.weights.messages import VersionRefused, all_told, flags
from meshwright.run.posttrain.weights.offered import Offered, plan_of
from meshwright.run.posttrain.weights.shared_memory import Fetched
from meshwright.run.posttrain.weights.tensors import Place, format_of, held, places
from meshwright.run.serve.engine.doing import Do, Does
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.ranks import Ranks, doer_of
from meshwright.run.serve.engine.runner import Runner
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.engine.upkeep import Upkeep

PATIENCE_S = 30.0
"""How long a rank waits for what was posted before it was told of it."""
Targets = list[dict[str, Held]]


class Sources(msgspec.Struct, frozen=True, tag="sources"):
    """What the other side offers, and where versions will lie."""

    holds: list[dict[str, Held]]
    folder: str


class Gather(msgspec.Struct, frozen=True, tag="gather"):
    """Have a version aside."""

    version: int


class Write(msgspec.Struct, frozen=True, tag="write"):
    """Write what lies aside where the weights are."""


_decoder = msgspec.msgpack.Decoder(Sources | Gather | Write)
_encode = msgspec.msgpack.encode


class Taking:
    """What one rank does between the steps of an engine that takes versions."""

    def __init__(self, runner: Runner, doer: Does) -> None:
        self._runner, self._doer = runner, doer
        self._fetched: Fetched | None = None
        self.targets: Targets = []
        """What every rank of this engine wants."""

    def __call__(self, do: Do) -> list[float]:
        """Do one thing."""
        if do.what != "versions":
            return self._doer(do)
        match _decoder.decode(do.told):
            case Sources(holds, folder):
                try:
                    self._plan(holds, folder)
                except InputError:
                    if not self._follows:  # the first rank says so, and the others live on
                        raise
            case Gather(version):
                self._gather(version)
            case Write():
                self._write()
        return []

    @property
    def folder(self) -> str:
        """Where versions lie; empty before it is known."""
        return "" if self._fetched is None else str(self._fetched.folder)

    def _plan(self, sources: list[dict[str, Held]], folder: str) -> None:
        mine = self._places()
        self.targets = [held(mine)]
        if self._shared:
            every = all_told(_encode(self.targets[0]))
            self.targets = [msgspec.msgpack.decode(each, type=dict[str, Held]) for each in every]
        plan = plan_of(sources, self.targets)
        rank = dist.get_rank() if self._shared else 0
        self._fetched = Fetched(plan, rank, mine, folder)
        self._fetched.arrivals.places = {}

    def _write(self) -> None:
        arrivals = self._told.arrivals
        arrivals.places = self._places()
        try:
            arrivals.commit()
        finally:
            arrivals.places = {}

    def _gather(self, version: int) -> None:
        """Gather on all ranks, or on none: what fails on one is dropped by the others."""
        fetched, wrong = self._told, None
        try:
            fetched.gather(version, patience_s=PATIENCE_S)
        except MeshwrightError as error:
            wrong = error
        failed = flags(wrong is not None) if self._shared else [wrong is not None]
        if not any(failed):
            return
        fetched.arrivals.drop()
        if self._follows:
            return
        if wrong is not None:
            raise wrong
        ranks = [rank for rank, bad in enumerate(failed) if bad]
        raise VersionRefused(
            f"version {version} was taken by nobody: ranks {ranks} lack some of it"
        )

    def _places(self) -> dict[str, Place]:
        decoder = self._runner.forward.decoder
        base = format_of("embedding.weight", decoder.embedding.weight)
        return places(decoder, self._runner.holdings, base=base)

    @property
    def _told(self) -> Fetched:
        if self._fetched is None:
            what = "it does not know what is offered"
            raise InputError([Problem("engine", what, "tell it the sources first")])
        return self._fetched

    @property
    def _shared(self) -> bool:
        return self._runner.holdings is not None

    @property
    def _follows(self) -> bool:
        return self._shared and dist.get_rank() > 0


def _doer(runner: Runner, settings: EngineSettings) -> Taking:
    return Taking(runner, doer_of(runner, settings))


TAKING = Ranks("meshwright.run.posttrain.weights.rank", _doer)
"""Ranks that take versions."""


def sources_of(offered: Offered, folder: str) -> bytes:
    """Return what an engine has to know of what is offered, and where it finds versions."""
    return _encode(Sources(offered.holds, folder))


def learn(told: bytes, upkeep: Upkeep) -> Targets:
    """Let all ranks make the plan; return what they want, for the other side to make it as well."""
    if not isinstance(upkeep.first, Taking):
        what = "its ranks take no versions"
        raise InputError([Problem("engine", what, "start it with ranks=TAKING")])
    upkeep.do(Do(what="versions", told=told))
    return upkeep.first.targets


def meet(offered: Offered, upkeep: Upkeep) -> None:
    """Let both sides make the plan, in one process."""
    offered.agree(learn(sources_of(offered, str(offered.folder)), upkeep))


@torch.no_grad()
def take_version(version: int, engine: Engine, upkeep: Upkeep) -> None:
    """Let an engine take a version that was posted; what was cancelled ends first.

    Raises:
        MeshwrightError: where some rank did not get it whole; the engine has what it had.
        HalfRenewed: where writing broke off; the engine refuses asks until it has a whole version.
    """
    while not engine.is_idle:
        engine.turn()
    upkeep.do(Do(what="versions", told=_encode(Gather(version))))
    upkeep.renew(version, lambda: upkeep.do(Do(what="versions", told=_encode(Write()))))
