"""`predict_weight_sync`: time of a weight sync by the transfer plan that a run executes.

Frameworks that gather the whole model first are `predict_all_gather_sync`'s.

Trainers have the first GPUs and engines those behind them, unless they share them. Engines that
keep weights in a format that no run sends get bf16. Of an adapter nothing else is sent, in fp32.
"""

from functools import lru_cache

from meshwright.errors import InputError, Problem
from meshwright.policy.resharding.weight_transfer import FP8_ROWWISE, plan_weight_transfer
from meshwright.predict.rl.all_gather_sync import predict_all_gather_sync
from meshwright.predict.rl.rl_setup import RLSetup
from meshwright.predict.rl.weight_ownership import (
    WeightHolders,
    list_adapter_boxes,
    list_weight_boxes,
)
from meshwright.predict.rl.weight_transfer_time import WeightTransferTime, predict_weight_transfer
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.workload import LoRASpec

_SERVED = {"fp32": ("fp32",), "fp16": ("fp16",), "fp8": ("bf16", FP8_ROWWISE)}


def predict_weight_sync(setup: RLSetup) -> WeightTransferTime:
    """Return what one version of weights takes to all engines."""
    replica = setup.rollout_pool.replica
    if setup.framework.sync_method == "gathered":
        return predict_all_gather_sync(
            model=setup.model,
            cluster=setup.cluster,
            training=setup.trainer_layout,
            serving=replica.layout,
            engines=setup.rollout_pool.count,
            shared=setup.shares_gpus,
        )
    return _sync(
        model=setup.model,
        cluster=setup.cluster,
        training=setup.trainer_layout,
        serving=replica.layout,
        engines=setup.rollout_pool.count,
        served=_SERVED.get(replica.quantization.weights, ("bf16",)),
        shared=setup.shares_gpus,
        adapter=setup.rollout_batch.adapter,
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
    adapter: LoRASpec | None,
) -> WeightTransferTime:
    sources, targets = training.gpus, engines * serving.gpus
    first = 0 if shared else sources
    seats = max(sources, first + targets)
    if seats > cluster.scale_up.gpus and cluster.nic_bytes_per_s_per_gpu <= 0:
        what = f"{cluster.name} has no network between its nodes"
        raise InputError([Problem("cluster", what, f"use at most {cluster.scale_up.gpus} GPUs")])
    kept = ("fp32",) if training.precision == "fp32" else ("bf16",)
    if adapter is not None:
        trainers, ranks = list_adapter_boxes(model, adapter, training, serving)
    else:
        trainers, ranks = list_weight_boxes(
            model,
            WeightHolders(training, kept, kept),
            WeightHolders(serving, served, served[:1]),
            engines=engines,
        )
    plan = plan_weight_transfer(
        trainers,
        engines * ranks,
        source_seats=range(sources),
        target_seats=range(first, first + targets),
        nodes=[seat // cluster.gpus_per_node for seat in range(seats)],
    )
    return predict_weight_transfer(plan, cluster)
