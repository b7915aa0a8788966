"""`run_worker_rank`: the life of every rank but the first, which does what that one says."""

from pathlib import Path

from meshwright.run.nn.decoder import Decoder
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.posttrain.rl.config.rl_config import RLConfig
from meshwright.run.posttrain.rl.distributed.commands import (
    BeginCommand,
    CommandChannel,
    EndCommand,
    OfferWeightsCommand,
    PlanTransferCommand,
    PublishWeightsCommand,
    SaveCommand,
    TrainCommand,
)
from meshwright.run.posttrain.rl.distributed.rank_state import RankState
from meshwright.run.posttrain.rl.distributed.weight_sender import RankWeightSender
from meshwright.run.posttrain.rl.run_state import open_checkpoints
from meshwright.run.posttrain.rl.task_loader import TaskEnvironments
from meshwright.spec.model import Model


def run_worker_rank(
    settings: RLConfig, tasks: TaskEnvironments, model: Model, mesh: Mesh
) -> Decoder:
    """Carry out orders until the run is over; return this rank's part of the model."""
    orders, posting = CommandChannel(mesh), None
    checkpoints = open_checkpoints(settings, mesh)
    state = RankState(settings, tasks, model, mesh)
    try:
        while True:
            match orders.receive():
                case BeginCommand(goes_on):
                    state.initialize_weights(goes_on=goes_on)
                    if goes_on and checkpoints is not None:
                        checkpoints.load(state.tensors())
                        state.broadcast_loaded()
                case TrainCommand(step, groups):
                    state.step(step, groups)
                case SaveCommand(trained):
                    assert checkpoints is not None, "only a run with a folder is saved"
                    checkpoints.save(trained, state.tensors(), {})
                case OfferWeightsCommand(folder):
                    posting = RankWeightSender(state.sync, mesh, Path(folder))
                case PlanTransferCommand(targets):
                    assert posting is not None, "ranks offer before they agree"
                    posting.plan_transfer(targets)
                case PublishWeightsCommand(version):
                    assert posting is not None, "ranks offer before they post"
                    posting.publish(version)
                case EndCommand():
                    return state.model.spread.decoder
    finally:
        if checkpoints is not None:
            checkpoints.close()
