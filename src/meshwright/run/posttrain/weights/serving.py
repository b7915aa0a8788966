"""`EngineWeights`: an engine of this process that takes versions of a trainer's weights.

    weights = EngineWeights([of_decoder(decoder)], engine, upkeep)
    weights.update(1)     between turns; what the engine has cached is of version 0, and not found

Engines of other processes gather with `Messages` or `Fetched`; `take` is what they do with it.
"""

from collections.abc import Mapping, Sequence

from meshwright.policy.transfer import PARCEL_BYTES, Transfer, plan_transfer
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.placed import Placed
from meshwright.run.posttrain.weights.arrivals import Arrivals
from meshwright.run.posttrain.weights.in_process import InProcess
from meshwright.run.posttrain.weights.tensors import Place, format_of, held, places
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.upkeep import Upkeep


def engine_places(engine: Engine) -> dict[str, Place]:
    """Return where the weights of an engine of one device lie at this moment."""
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
    upkeep.renew(version, arrivals.commit)


class EngineWeights:
    """Carries versions from ranks that train to an engine, all in this process."""

    def __init__(
        self,
        sources: Sequence[Mapping[str, Placed]],
        engine: Engine,
        upkeep: Upkeep,
        *,
        most_bytes: int = PARCEL_BYTES,
    ) -> None:
        self._engine, self._upkeep = engine, upkeep
        target = engine_places(engine)
        seats = tuple(range(len(sources)))
        self.plan: Transfer = plan_transfer(
            [held(each) for each in sources], [held(target)], source_seats=seats, target_seats=(0,)
        )
        self._carrier = InProcess(self.plan, sources, [target], most_bytes=most_bytes)

    def update(self, version: int) -> None:
        """Bring a version and let the engine take it."""
        self._carrier.bring(version)
        take(self._carrier.arrivals[0], self._engine, self._upkeep)
