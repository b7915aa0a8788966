"""Supervised steps on right answers, before the first rollout, by ranks that share a model."""

import torch
from torch.nn.functional import pad

from meshwright.run.kernels.labels import IGNORED
from meshwright.run.parallel.sync import Sync
from meshwright.run.posttrain.loop.ranks.dealing import parts_of_sequence
from meshwright.run.posttrain.loop.ranks.passes import RankModel
from meshwright.run.posttrain.loop.settings import WarmUpSettings
from meshwright.run.posttrain.loop.warm_up import padded_rows, pairs_of, rule_of, shows
from meshwright.run.posttrain.rollouts.environment import Environment
from meshwright.run.train.optimizer.optimizer import make_optimizer


def warm_up(
    model: RankModel, sync: Sync, environment: Environment, settings: WarmUpSettings
) -> list[float]:
    """Train on right answers; return the mean loss of each step, in nats for a token."""
    task, mesh = shows(environment), model.mesh
    layout, device, rule = mesh.layout, mesh.device, rule_of(settings)
    named = sync.named_parameters()
    optimizer = make_optimizer(named, layout, rule, total_steps=settings.steps)
    losses = []
    for step in range(settings.steps):
        pairs = pairs_of(task, step, settings)
        # Every replica has some; where there are too few, one shows what counts nowhere.
        mine = pairs[mesh.place.dp :: layout.dp]
        tokens, labels = padded_rows(mine or pairs[:1], device)
        if not mine:
            labels = torch.full_like(labels, IGNORED)
        more = -tokens.shape[1] % parts_of_sequence(layout)
        tokens, labels = pad(tokens, (0, more)), pad(labels, (0, more), value=IGNORED)
        count = sum(len(answer) for _, answer in pairs)
        sync.begin()
        sums = model.runner([model.microbatch(tokens, labels)], 1 / count, sync.last)
        gradients = sync.gradients()
        optimizer.step(settings.lr, norm=sync.norm(), gradients=gradients)
        sync.finish()
        # Ranks that share the work on the same tokens have the same loss.
        total = (sums.nats + sums.auxiliary).double() / (layout.tp * count)
        losses.append(mesh.world.all_reduce(total))
    return torch.stack(losses).tolist() if losses else []
