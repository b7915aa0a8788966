"""Small setups for tests."""

from typing import Any

from meshwright.policy.rollout import Placement
from meshwright.predict.rl import Rounds, Setup
from meshwright.predict.serving.fleet import Copies, default_limits
from meshwright.predict.serving.replica import Replica
from meshwright.spec.layout import Layout
from meshwright.spec.work import read_cluster, read_model
from meshwright.spec.workload import Fixed, LogNormal

MODEL = read_model("llama3.1-8b", "model")
CLUSTER = read_cluster("h100-superpod", "cluster").with_gpus(16)
EVEN = Fixed(tokens=600)
SKEWED = LogNormal(median=500, sigma=0.8)


def rounds(**given: Any) -> Rounds:
    fields: dict[str, Any] = {
        "prompts": 8, "samples": 4, "prompt": Fixed(tokens=100), "output": SKEWED, "longest": 4000,
    }  # fmt: skip
    return Rounds(**{**fields, **given})


def setup(placement: Placement, rollout: int = 8, training: int = 8, **given: Any) -> Setup:
    replica = Replica(model=MODEL, cluster=CLUSTER, layout=Layout(tp=2))
    fields: dict[str, Any] = {"rounds": rounds(), "measured": 3, **given}
    return Setup(
        model=MODEL,
        cluster=CLUSTER,
        placement=placement,
        engines=Copies(replica=replica, limits=default_limits(replica), count=rollout // 2),
        training=Layout(tp=2, dp=training // 2, zero=1, recompute="full"),
        **fields,
    )
