"""`sync_of`: new weights on their way to the engines, by the plan that a run carries out.

Frameworks that gather the whole model first are `gathered_of`'s.

Trainers have the first GPUs and engines those behind them, unless they share them. Engines that
keep weights in a format that no run sends get bf16. Of an adapter nothing else is sent, in fp32.
"""

from functools import lru_cache

from meshwright.errors import InputError, Problem
from meshwright.policy.transfer import ROW_SCALES, plan_transfer
from meshwright.predict.held import Side, held, held_adapter
from meshwright.predict.rl.gathered import gathered_of
from meshwright.predict.rl.setup import Setup
from meshwright.predict.transfer_time import TransferTime, predict_transfer
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.workload import Adapter

_SERVED = {"fp32": ("fp32",), "fp16": ("fp16",), "fp8": ("bf16", ROW_SCALES)}


def sync_of(setup: Setup) -> TransferTime:
    """Return what one version of weights takes to all engines."""
    replica = setup.engines.replica
    if setup.framework.sending == "gathered":
        return gathered_of(
            model=setup.model,
            cluster=setup.cluster,
            training=setup.training,
            serving=replica.layout,
            engines=setup.engines.count,
            shared=setup.shares_gpus,
        )
    return _sync(
        model=setup.model,
        cluster=setup.cluster,
        training=setup.training,
        serving=replica.layout,
        engines=setup.engines.count,
        served=_SERVED.get(replica.formats.weights, ("bf16",)),
        shared=setup.shares_gpus,
        adapter=setup.rounds.adapter,
    )


# A search looks at the same pair of layouts under several placements and lengths.
@lru_cache(maxsize=64)
def _sync(
    *,
    model: Model,
    cluster: Cluster,
    training: Layout,
    serving: Layout,
    engines: int,
    served: tuple[str, ...],
    shared: bool,
    adapter: Adapter | None,
) -> TransferTime:
    sources, targets = training.gpus, engines * serving.gpus
    first = 0 if shared else sources
    seats = max(sources, first + targets)
    if seats > cluster.scale_up.gpus and cluster.nic_bytes_per_s_per_gpu <= 0:
        what = f"{cluster.name} has no network between its nodes"
        raise InputError([Problem("cluster", what, f"use at most {cluster.scale_up.gpus} GPUs")])
    kept = ("fp32",) if training.precision == "fp32" else ("bf16",)
    if adapter is not None:
        trainers, ranks = held_adapter(model, adapter, training, serving)
    else:
        trainers, ranks = held(
            model,
            Side(training, kept, kept),
            Side(serving, served, served[:1]),
            engines=engines,
        )
    plan = plan_transfer(
        trainers,
        engines * ranks,
        source_seats=range(sources),
        target_seats=range(first, first + targets),
        nodes=[seat // cluster.gpus_per_node for seat in range(seats)],
    )
    return predict_transfer(plan, cluster)
