"""`EngineWeights`: an engine of this process that takes versions of a trainer's weights.

    weights = EngineWeights([of_decoder(decoder)], engine, upkeep)
    weights.update(1)     between turns; what the engine has cached is of version 0, and not found

Where several ranks share the engine's weights it has to be one whose ranks take versions
(`taking.TAKING`). Engines of other processes are those of `run.posttrain.workers`.

Where an adapter is trained, versions are the adapter's alone, for an engine that has room for one
(`own_adapter`) and the weights beside it.
"""

import weakref
from collections.abc import Mapping, Sequence

from meshwright.errors import InputError, Problem
from meshwright.policy.transfer import PARCEL_BYTES, Transfer, plan_transfer
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.placed import Placed
from meshwright.run.posttrain.adapters.settings import Lora
from meshwright.run.posttrain.weights.adapter_slot import AdapterSlot
from meshwright.run.posttrain.weights.arrivals import Arrivals
from meshwright.run.posttrain.weights.in_process import InProcess
from meshwright.run.posttrain.weights.offered import Offered
from meshwright.run.posttrain.weights.taking import meet, take_version
from meshwright.run.posttrain.weights.tensors import Place, format_of, held, places
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.upkeep import Upkeep


def engine_places(engine: Engine) -> dict[str, Place]:
    """Return where the weights of an engine of one device lie at this moment."""
    if engine.runner.ranks > 1:
        what = "its ranks share its weights, and each takes its own"
        raise InputError([Problem("engine", what, "use EngineWeights")])
    decoder: Decoder = engine.runner.forward.decoder
    base = format_of("embedding.weight", decoder.embedding.weight)
    return places(decoder, base=base)


def take(arrivals: Arrivals, engine: Engine, upkeep: Upkeep) -> None:
    """Let an idle engine take a version that has come whole.

    Raises:
        IncompleteVersion: where it has not; the engine answers with what it has.
        HalfRenewed: where writing broke off; the engine refuses asks until it has a whole version.
    """
    version = arrivals.require_all()
    arrivals.places = engine_places(engine)
    try:
        upkeep.renew(version, arrivals.commit)
    finally:
        arrivals.places = {}


class EngineWeights:
    """Carries versions from ranks that train to an engine, all in this process."""

    def __init__(
        self,
        sources: Sequence[Mapping[str, Placed]],
        engine: Engine,
        upkeep: Upkeep,
        *,
        most_bytes: int = PARCEL_BYTES,
        adapter: Lora | None = None,
    ) -> None:
        """Carry weights, or an `adapter` of these settings, whose parameters the sources have."""
        self._engine, self._upkeep = engine, upkeep
        self._slot = None if adapter is None else AdapterSlot(engine.runner, adapter)
        self._carrier: InProcess | Offered
        if engine.runner.ranks > 1:
            self._carrier = Offered(sources)
            weakref.finalize(self, self._carrier.close)
            meet(self._carrier, upkeep)
            assert self._carrier.plan is not None, "both sides have met"
            self.plan: Transfer = self._carrier.plan
            return
        target = engine_places(engine) if self._slot is None else self._slot.places()
        seats = tuple(range(len(sources)))
        self.plan = plan_transfer(
            [held(each) for each in sources], [held(target)], source_seats=seats, target_seats=(0,)
        )
        self._carrier = InProcess(self.plan, sources, [target], most_bytes=most_bytes)
        if self._slot is None:
            self._carrier.arrivals[0].places = {}

    def update(self, version: int) -> None:
        """Bring a version and let the engine take it."""
        if isinstance(self._carrier, Offered):
            self._carrier.post(version)
            take_version(version, self._engine, self._upkeep)
            self._carrier.settle(keep=False)
            return
        self._carrier.bring(version)
        arrivals = self._carrier.arrivals[0]
        if self._slot is None:
            take(arrivals, self._engine, self._upkeep)
            return

        def write(slot: AdapterSlot = self._slot) -> None:
            arrivals.commit()
            slot.fill()

        self._upkeep.renew(arrivals.require_all(), write)
