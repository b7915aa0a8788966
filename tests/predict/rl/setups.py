"""Small setups for tests."""

from typing import Any

from meshwright.policy.rollout import Placement
from meshwright.predict.rl import RLSetup, RolloutBatch
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.sim.serving_fleet import ReplicaPool, default_scheduler_config
from meshwright.spec.job_spec import read_cluster, read_model
from meshwright.spec.layout import Layout
from meshwright.spec.workload import FixedLength, LogNormalLength

MODEL = read_model("llama3.1-8b", "model")
CLUSTER = read_cluster("h100-superpod", "cluster").with_gpus(16)
EVEN = FixedLength(tokens=600)
SKEWED = LogNormalLength(median=500, sigma=0.8)


def rounds(**given: Any) -> RolloutBatch:
    fields: dict[str, Any] = {
        "prompts_per_step": 8,
        "group_size": 4,
        "prompt_lengths": FixedLength(tokens=100),
        "response_lengths": SKEWED,
        "max_response_tokens": 4000,
    }
    return RolloutBatch(**{**fields, **given})


def setup(placement: Placement, rollout: int = 8, training: int = 8, **given: Any) -> RLSetup:
    replica = Replica(model=MODEL, cluster=CLUSTER, layout=Layout(tp=2))
    fields: dict[str, Any] = {"rollout_batch": rounds(), "measured_steps": 3, **given}
    return RLSetup(
        model=MODEL,
        cluster=CLUSTER,
        placement=placement,
        rollout_pool=ReplicaPool(
            replica=replica, scheduler_config=default_scheduler_config(replica), count=rollout // 2
        ),
        trainer_layout=Layout(tp=2, dp=training // 2, zero=1, recompute="full"),
        **fields,
    )
