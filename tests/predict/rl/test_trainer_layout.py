"""The trainer's layout: what is found fits where steps are priced, and refusals say what would."""

import pytest

from meshwright.errors import InputError
from meshwright.predict.rl import RLSetup, RolloutBatch
from meshwright.predict.rl.rl_memory import TRAINING
from meshwright.predict.rl.rl_setup import take_gpu_share
from meshwright.predict.rl.trainer_costs import build_trainer_costs
from meshwright.predict.rl.trainer_layout import find_trainer_layout
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.sim.serving_fleet import ReplicaPool, default_scheduler_config
from meshwright.spec.job_spec import read_cluster, read_model
from meshwright.spec.layout import Layout
from meshwright.spec.workload import FixedLength, LogNormalLength

H100 = read_cluster("h100-superpod", "cluster")
LONG = LogNormalLength(median=1024, sigma=0.6)


def asked(**given: object) -> RolloutBatch:
    return RolloutBatch(**{"response_lengths": LONG, "max_response_tokens": 8192, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "gpus", "prompt"),
    [
        ("llama3.1-70b", 32, 256),
        ("llama3.1-70b", 64, 256),
        ("llama3.1-70b", 128, 256),
        ("qwen3-30b-a3b", 32, 256),
        ("qwen3-8b", 32, 1024),
        ("qwen3-8b", 32, 4096),
    ],
)
def test_what_is_chosen_has_room_where_it_is_priced(name: str, gpus: int, prompt: int) -> None:
    model, cluster = read_model(name, "model"), H100.with_gpus(gpus)
    rounds = asked(prompt_lengths=FixedLength(tokens=prompt))
    layout = find_trainer_layout(model, cluster, rounds, {})
    replica = Replica(model=model, cluster=cluster, layout=Layout(tp=8))
    setup = RLSetup(
        model=model, cluster=cluster, placement="colocated", trainer_layout=layout,
        rollout_batch=rounds,
        rollout_pool=ReplicaPool(replica=replica,
        scheduler_config=default_scheduler_config(replica), count=gpus // 8),
    )  # fmt: skip
    peak = build_trainer_costs(setup).peak_bytes[TRAINING]
    assert peak <= cluster.gpu.memory_bytes


def test_a_degree_that_is_given_costs_time_and_is_never_faster_than_none() -> None:
    model, cluster, rounds = read_model("llama3.1-8b", "model"), H100.with_gpus(16), asked()
    replica = Replica(model=model, cluster=cluster, layout=Layout())
    engines = ReplicaPool(
        replica=replica, scheduler_config=default_scheduler_config(replica), count=16
    )

    def update_s(**fixed: tuple[object, ...]) -> float:
        layout = find_trainer_layout(model, cluster, rounds, fixed)
        setup = RLSetup(
            model=model,
            cluster=cluster,
            placement="colocated",
            trainer_layout=layout,
            rollout_batch=rounds,
            rollout_pool=engines,
        )
        return build_trainer_costs(setup).step.step_s

    free = update_s()
    assert free <= min(update_s(tp=(2,)), update_s(pp=(2,)), update_s(pp=(4,)), update_s(tp=(8,)))


@pytest.mark.parametrize(
    ("name", "gpus", "fixed", "said"),
    [
        ("llama3.1-70b", 16, {}, ("trainer_layout", "tp 16, needs 8", "let 32 GPUs train")),
        ("llama3.1-8b", 1, {},
         ("trainer_layout", "trains on 1 GPU: it needs ", "let 2 GPUs train")),
        ("llama3.1-70b", 32, {"tp": (2,), "pp": (2,)},
         ("trainer_layout", "the nearest, tp 2 pp 2 dp 8",
          "leave out `trainer_layout.tp` and `trainer_layout.pp`")),
        ("llama3.1-8b", 8, {"tp": (3,)},
         ("trainer_layout.tp", "3 does not divide the 8 GPUs", "use tp=2")),
        ("llama3.1-8b", 8, {"ep": (2,)}, ("trainer_layout.ep", "has no experts", "leave it out")),
    ],
)  # fmt: skip
def test_where_none_fits_the_fields_that_would_help_are_named(
    name: str, gpus: int, fixed: dict[str, tuple[object, ...]], said: tuple[str, str, str]
) -> None:
    with pytest.raises(InputError) as caught:
        find_trainer_layout(read_model(name, "model"), take_gpu_share(H100, gpus), asked(), fixed)
    (problem,) = caught.value.problems
    where, what, fix = said
    assert problem.where == where
    assert what in problem.what
    assert fix in problem.fix
    for word in ("zero=", "offload=", "gpus="):
        assert word not in problem.what + problem.fix
