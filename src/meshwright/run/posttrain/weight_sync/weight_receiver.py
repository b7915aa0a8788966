"""Engines whose ranks take versions of weights, each its own slices of what a trainer offers.

    sender = WeightSender([collect_decoder_weights(decoder)])   on the side that trains
    connect_in_process(sender, lifecycle)                       both make the plan
    sender.publish(1)
    receive_version(1, engine, lifecycle)       every rank has it aside, then all write it

The ranks of the engine are those of `RECEIVING_RANKS`. `EngineWeightUpdater` does this where both
sides are one process, `run.posttrain.workers` where they are not. A version that one rank did not
get whole is taken by none.

Of an adapter in training an engine of one rank takes its versions, and the weights beside it when
it has none: before its first version, and after a sleep that gave them up.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.policy.resharding.weight_transfer import RankShards
from meshwright.run.posttrain.lora.lora_config import LoRAConfig
from meshwright.run.posttrain.weight_sync.adapter_slot import AdapterSlot
from meshwright.run.posttrain.weight_sync.process_group_transfer import (
    VersionRejectedError,
    gather_bytes,
    gather_flags,
)
from meshwright.run.posttrain.weight_sync.shared_memory_transfer import SharedMemoryReader
from meshwright.run.posttrain.weight_sync.weight_sender import (
    FROZEN,
    FROZEN_VERSION,
    WeightSender,
    plan_sender_transfer,
)
from meshwright.run.posttrain.weight_sync.weight_tensors import (
    WeightTarget,
    collect_weight_targets,
    describe_shards,
    get_format_name,
)
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.engine.executor.multiproc_executor import (
    RankEntryPoint,
    create_command_handler,
)
from meshwright.run.serve.engine.executor.rank_commands import RankCommand, RankCommandHandler
from meshwright.run.serve.engine.lifecycle import EngineLifecycle
from meshwright.run.serve.engine.model_runner.model_runner import ModelRunner

VERSION_TIMEOUT_S = 30.0
"""How long a rank waits for what was posted before it was told of it."""
ShardsByRank = list[dict[str, RankShards]]


class SenderDescription(msgspec.Struct, frozen=True, tag="sources"):
    """What the other side offers, and where versions will lie."""

    shards: list[dict[str, RankShards]]
    folder: str
    lora_config: LoRAConfig | None = None
    """Of which versions are, where one is trained."""
    frozen_shards: dict[str, RankShards] = {}
    """What lies there once then: the weights beside it."""


class PrepareVersion(msgspec.Struct, frozen=True, tag="gather"):
    """Have a version aside."""

    version: int


class CommitVersion(msgspec.Struct, frozen=True, tag="write"):
    """Write what lies aside where the weights are."""


_decoder = msgspec.msgpack.Decoder(SenderDescription | PrepareVersion | CommitVersion)
_encode = msgspec.msgpack.encode


class RankWeightReceiver:
    """What one rank does between the steps of an engine that takes versions."""

    def __init__(self, runner: ModelRunner, doer: RankCommandHandler) -> None:
        self._runner, self._doer = runner, doer
        self._fetched: SharedMemoryReader | None = None
        self._slot: AdapterSlot | None = None
        self._beside: Callable[[], SharedMemoryReader] | None = None
        """Makes what fetches the weights beside an adapter."""
        self._frozen: SharedMemoryReader | None = None
        """Has them aside until they are written."""
        self._bare = True
        """Whether they are still to come."""
        self.targets: ShardsByRank = []
        """What every rank of this engine wants."""

    def __call__(self, do: RankCommand) -> list[float]:
        """Do one thing."""
        if do.name != "versions":
            self._bare = self._bare or (do.name == "sleep" and do.level > 1)
            return self._doer(do)
        match _decoder.decode(do.payload):
            case SenderDescription() as sources:
                try:
                    self._plan(sources)
                except InputError:
                    if not self._follows:  # the first rank says so, and the others live on
                        raise
            case PrepareVersion(version):
                self._gather(version)
            case CommitVersion():
                self._write()
        return []

    @property
    def folder(self) -> str:
        """Where versions lie; empty before it is known."""
        return "" if self._fetched is None else str(self._fetched.folder)

    def _plan(self, sources: SenderDescription) -> None:
        if sources.lora_config is not None:
            self._plan_adapter(sources, sources.lora_config)
            return
        mine = self._places()
        self.targets = [describe_shards(mine)]
        if self._shared:
            every = gather_bytes(_encode(self.targets[0]))
            self.targets = [
                msgspec.msgpack.decode(each, type=dict[str, RankShards]) for each in every
            ]
        plan = plan_sender_transfer(sources.shards, self.targets)
        rank = dist.get_rank() if self._shared else 0
        self._fetched = SharedMemoryReader(plan, rank, mine, sources.folder)
        self._fetched.buffer.targets = {}

    def _plan_adapter(self, sources: SenderDescription, adapter: LoRAConfig) -> None:
        self._slot = AdapterSlot(self._runner, adapter)
        mine, beside = self._slot.collect_weight_targets(), describe_shards(self._places())
        plan, once = (
            plan_sender_transfer(sources.shards, [describe_shards(mine)]),
            plan_sender_transfer([sources.frozen_shards], [beside]),
        )
        folder = Path(sources.folder)
        self._fetched = SharedMemoryReader(plan, 0, mine, folder)
        self._beside = lambda: SharedMemoryReader(once, 0, self._places(), folder / FROZEN)
        self.targets = [describe_shards(mine) | beside]

    def _write(self) -> None:
        arrivals = self._told.buffer
        if self._slot is not None:
            frozen, self._frozen = self._frozen, None
            if frozen is not None:
                frozen.buffer.commit()
                self._bare = False
            arrivals.commit()
            self._slot.activate()
            return
        arrivals.targets = self._places()
        try:
            arrivals.commit()
        finally:
            arrivals.targets = {}

    def _gather(self, version: int) -> None:
        """Gather on all ranks, or on none: what fails on one is dropped by the others."""
        fetched, wrong = self._told, None
        try:
            fetched.verify(version, patience_s=VERSION_TIMEOUT_S)
            if self._beside is not None and self._bare:
                self._frozen = self._beside()
                self._frozen.verify(FROZEN_VERSION, patience_s=VERSION_TIMEOUT_S)
        except MeshwrightError as error:
            wrong = error
        failed = gather_flags(wrong is not None) if self._shared else [wrong is not None]
        if not any(failed):
            return
        fetched.buffer.discard()
        self._frozen = None
        if self._follows:
            return
        if wrong is not None:
            raise wrong
        ranks = [rank for rank, bad in enumerate(failed) if bad]
        raise VersionRejectedError(
            f"version {version} was received by nobody: ranks {ranks} lack some of it"
        )

    def _places(self) -> dict[str, WeightTarget]:
        decoder = self._runner.model.decoder
        base = get_format_name("embedding.weight", decoder.embedding.weight)
        return collect_weight_targets(decoder, self._runner.weight_shards, base=base)

    @property
    def _told(self) -> SharedMemoryReader:
        if self._fetched is None:
            what = "it does not know what is available"
            raise InputError([Problem("engine", what, "tell it the sources first")])
        return self._fetched

    @property
    def _shared(self) -> bool:
        return self._runner.weight_shards is not None

    @property
    def _follows(self) -> bool:
        return self._shared and dist.get_rank() > 0


def _doer(runner: ModelRunner, settings: EngineConfig) -> RankWeightReceiver:
    return RankWeightReceiver(runner, create_command_handler(runner, settings))


RECEIVING_RANKS = RankEntryPoint("meshwright.run.posttrain.weight_sync.__main__", _doer)
"""Ranks that take versions."""


def describe_sender(sender: WeightSender, folder: str) -> bytes:
    """Return what an engine has to know of what is offered, and where it finds versions."""
    return _encode(
        SenderDescription(sender.shards, folder, sender.lora_config, sender.frozen_shards)
    )


def plan_on_all_ranks(told: bytes, lifecycle: EngineLifecycle) -> ShardsByRank:
    """Let all ranks make the plan; return what they want, for the other side to make it as well."""
    if not isinstance(lifecycle.run_on_first_rank, RankWeightReceiver):
        what = "its ranks take no versions"
        raise InputError([Problem("engine", what, "start it with ranks=RECEIVING_RANKS")])
    lifecycle.run_on_all_ranks(RankCommand(name="versions", payload=told))
    return lifecycle.run_on_first_rank.targets


def connect_in_process(sender: WeightSender, lifecycle: EngineLifecycle) -> None:
    """Let both sides make the plan, in one process."""
    sender.plan_transfer(plan_on_all_ranks(describe_sender(sender, str(sender.folder)), lifecycle))


@torch.no_grad()
def receive_version(version: int, engine: Engine, lifecycle: EngineLifecycle) -> None:
    """Let an engine take a version that was posted; what was cancelled ends first.

    Raises:
        MeshwrightError: where some rank did not get it whole; the engine has what it had.
        PartialUpdateError: where writing broke off; the engine refuses asks until it has a whole
            version.
    """
    while not engine.is_idle:
        engine.step()
    lifecycle.run_on_all_ranks(
        RankCommand(name="versions", payload=_encode(PrepareVersion(version)))
    )
    lifecycle.update_weights_with(
        version,
        lambda: lifecycle.run_on_all_ranks(
            RankCommand(name="versions", payload=_encode(CommitVersion()))
        ),
    )
