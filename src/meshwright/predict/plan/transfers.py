"""How long passes wait for host memory at the least, where states or activations are kept there."""

from meshwright.predict.offload import Moved, pass_traffic, transfer_s
from meshwright.predict.plan.pipes import Chunks
from meshwright.predict.run import Run
from meshwright.spec.layout import chunks


class Transfers:
    """What crosses the links to the host with every pass of a run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._states = pass_traffic(run, (0.0,) * run.layout.pp)
        every = chunks(run.layout, run.model.layers)
        self._ranks = {chunk.position: chunk.rank for chunk in every}

    def delayed(
        self, own: Chunks, more: list[float] | None, activations: tuple[float, ...] | None
    ) -> Chunks:
        """Return chunks whose passes take no less than their transfers.

        `more` is what every chunk's backward takes longer, `activations` the bytes that one chunk
        of every rank moves of them. Waiting for other ranks makes up for some of the wait for the
        host, so that no more than the longer of both is sure.
        """
        forward, backward = list(own.forward), list(own.backward)
        for place, traffic in enumerate(self._states):
            kept = activations[self._ranks[place]] if activations else 0.0
            there = Moved(traffic.forward.down + kept, traffic.forward.up)
            back = Moved(traffic.backward.down, traffic.backward.up + kept)
            again = more[place] if more else 0.0
            forward[place] = max(forward[place], transfer_s(self.run, there))
            backward[place] = max(backward[place], transfer_s(self.run, back) - again)
        return own._replace(forward=forward, backward=backward)
