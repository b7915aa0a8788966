"""Engines whose ranks take versions of weights, each its own slices of what a trainer offers.

    llm = LLM(folder, tp=2, ranks=TAKING)
    offered = Offered([of_decoder(decoder)])      on the side that trains
    meet(offered, llm.upkeep)                     both make the plan
    offered.post(1)
    take_version(1, llm.engine, llm.upkeep)       every rank has it aside, then all write it

`EngineWeights` does this where both sides are one process, `run.posttrain.workers` where they are
not. A version that one rank did not get whole is taken by none.

Of an adapter in training an engine of one rank takes its versions, and the weights beside it when
it has none: before its first version, and after a sleep that gave them up.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.policy.transfer import Held
from meshwright.run.posttrain.adapters.settings import Lora
from meshwright.run.posttrain.weights.adapter_slot import AdapterSlot
from meshwright.run.posttrain.weights.messages import VersionRefused, all_told, flags
from meshwright.run.posttrain.weights.offered import FROZEN, FROZEN_VERSION, Offered, plan_of
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
    adapter: Lora | None = None
    """Of which versions are, where one is trained."""
    frozen: dict[str, Held] = {}
    """What lies there once then: the weights beside it."""


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
        self._slot: AdapterSlot | None = None
        self._beside: Callable[[], Fetched] | None = None
        """Makes what fetches the weights beside an adapter."""
        self._frozen: Fetched | None = None
        """Has them aside until they are written."""
        self._bare = True
        """Whether they are still to come."""
        self.targets: Targets = []
        """What every rank of this engine wants."""

    def __call__(self, do: Do) -> list[float]:
        """Do one thing."""
        if do.what != "versions":
            self._bare = self._bare or (do.what == "sleep" and do.level > 1)
            return self._doer(do)
        match _decoder.decode(do.told):
            case Sources() as sources:
                try:
                    self._plan(sources)
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

    def _plan(self, sources: Sources) -> None:
        if sources.adapter is not None:
            self._plan_adapter(sources, sources.adapter)
            return
        mine = self._places()
        self.targets = [held(mine)]
        if self._shared:
            every = all_told(_encode(self.targets[0]))
            self.targets = [msgspec.msgpack.decode(each, type=dict[str, Held]) for each in every]
        plan = plan_of(sources.holds, self.targets)
        rank = dist.get_rank() if self._shared else 0
        self._fetched = Fetched(plan, rank, mine, sources.folder)
        self._fetched.arrivals.places = {}

    def _plan_adapter(self, sources: Sources, adapter: Lora) -> None:
        self._slot = AdapterSlot(self._runner, adapter)
        mine, beside = self._slot.places(), held(self._places())
        plan, once = plan_of(sources.holds, [held(mine)]), plan_of([sources.frozen], [beside])
        folder = Path(sources.folder)
        self._fetched = Fetched(plan, 0, mine, folder)
        self._beside = lambda: Fetched(once, 0, self._places(), folder / FROZEN)
        self.targets = [held(mine) | beside]

    def _write(self) -> None:
        arrivals = self._told.arrivals
        if self._slot is not None:
            frozen, self._frozen = self._frozen, None
            if frozen is not None:
                frozen.arrivals.commit()
                self._bare = False
            arrivals.commit()
            self._slot.fill()
            return
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
            if self._beside is not None and self._bare:
                self._frozen = self._beside()
                self._frozen.gather(FROZEN_VERSION, patience_s=PATIENCE_S)
        except MeshwrightError as error:
            wrong = error
        failed = flags(wrong is not None) if self._shared else [wrong is not None]
        if not any(failed):
            return
        fetched.arrivals.drop()
        self._frozen = None
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
    return _encode(Sources(offered.holds, folder, offered.adapter, offered.frozen))


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
