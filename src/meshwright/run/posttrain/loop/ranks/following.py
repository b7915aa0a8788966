"""`follow`: the life of every rank but the first, which does what that one says."""

from pathlib import Path

from meshwright.run.nn.decoder import Decoder
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.posttrain.loop.keeping import checkpoints_of
from meshwright.run.posttrain.loop.ranks.offering import Posting
from meshwright.run.posttrain.loop.ranks.orders import (
    Agree,
    Begin,
    End,
    Learn,
    Offer,
    Orders,
    Post,
    Save,
)
from meshwright.run.posttrain.loop.ranks.state import RankState
from meshwright.run.posttrain.loop.settings import LoopSettings
from meshwright.run.posttrain.loop.tasks import Tasks
from meshwright.spec.model import Model


def follow(settings: LoopSettings, tasks: Tasks, model: Model, mesh: Mesh) -> Decoder:
    """Carry out orders until the run is over; return this rank's part of the model."""
    orders, posting = Orders(mesh), None
    checkpoints = checkpoints_of(settings, mesh)
    state = RankState(settings, tasks, model, mesh)
    try:
        while True:
            match orders.next():
                case Begin(goes_on):
                    state.first_weights(goes_on=goes_on)
                    if goes_on and checkpoints is not None:
                        checkpoints.load(state.tensors())
                        state.loaded()
                case Learn(step, groups):
                    state.step(step, groups)
                case Save(trained):
                    assert checkpoints is not None, "only a run with a folder is saved"
                    checkpoints.save(trained, state.tensors(), {})
                case Offer(folder):
                    posting = Posting(state.sync, mesh, Path(folder))
                case Agree(targets):
                    assert posting is not None, "ranks offer before they agree"
                    posting.agree(targets)
                case Post(version):
                    assert posting is not None, "ranks offer before they post"
                    posting.post(version)
                case End():
                    return state.model.spread.decoder
    finally:
        if checkpoints is not None:
            checkpoints.close()
