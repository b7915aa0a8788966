import argparse
import shlex

import pytest

from meshwright.cli.serve import command
from meshwright.predict.serving.cost.quantization import Quantization
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.cost.serving_engine import MESHWRIGHT
from meshwright.predict.serving.plan.engine_command import EngineTarget, build_command_lines
from meshwright.predict.serving.sim.serving_fleet import (
    ReplicaPool,
    ServingFleet,
    default_scheduler_config,
)
from meshwright.spec import catalog
from meshwright.spec.layout import Layout


def copies(count: int, tp: int = 2, pp: int = 1, dp: int = 1) -> ReplicaPool:
    replica = Replica(
        model=catalog.get_model("llama3.1-8b"),
        cluster=catalog.get_cluster("h200-superpod"),
        layout=Layout(tp=tp, pp=pp, dp=dp),
        quantization=Quantization(weights="fp8", kv="fp8"),
        engine=MESHWRIGHT,
    )
    limits = default_scheduler_config(replica, max_num_seqs=128, enable_prefix_caching=False)
    return ReplicaPool(replica=replica, scheduler_config=limits, count=count)


@pytest.mark.parametrize("apart", [False, True])
def test_our_own_command_is_one_that_we_understand(apart: bool) -> None:
    tp = 1 if apart else 2
    fleet = ServingFleet(
        serving_pool=copies(3, tp), prefill_pool=copies(1, tp) if apart else None, routing="prefix"
    )
    (line,), starts, _ = build_command_lines(fleet, "meshwright", "path/of/model")
    assert starts == (1,)
    parser = argparse.ArgumentParser()
    command.configure(parser)
    asked = parser.parse_args(shlex.split(line)[2:])
    assert (asked.quantization, asked.kv_cache_dtype) == ("fp8", "fp8")
    assert asked.max_num_seqs == "128"
    if apart:
        assert (asked.prefill_replicas, asked.decode_replicas) == ("1", "3")
    else:
        assert (asked.tensor_parallel_size, asked.replicas, asked.routing) == ("2", "3", "prefix")


@pytest.mark.parametrize(
    ("fleet", "target", "said"),
    [
        (
            ServingFleet(serving_pool=copies(1, 1), prefill_pool=copies(1, 4)),
            "meshwright",
            "one GPU each",
        ),
        (ServingFleet(serving_pool=copies(5)), "meshwright", "one machine, of 8 GPUs"),
        (ServingFleet(serving_pool=copies(1, pp=2)), "meshwright", "tp alone"),
        (ServingFleet(serving_pool=copies(1, dp=2)), "meshwright", "tp alone"),
        (ServingFleet(serving_pool=copies(1), prefill_pool=copies(1, pp=2)), "vllm", "40674"),
        (ServingFleet(serving_pool=copies(1, dp=2)), "tensorrt-llm", "tp has to be 1"),
    ],
)
def test_no_line_is_written_for_what_an_engine_cannot_run(
    fleet: ServingFleet, target: EngineTarget, said: str
) -> None:
    lines, starts, (note,) = build_command_lines(fleet, target, "m")
    assert (lines, starts) == ((), ())
    assert said in note


def test_stages_are_no_fault_where_nothing_is_handed_over() -> None:
    assert build_command_lines(ServingFleet(serving_pool=copies(1, pp=2)), "vllm", "m").lines


@pytest.mark.parametrize("target", ["vllm", "sglang", "tensorrt-llm"])
def test_it_is_said_how_often_each_line_is_started_and_where_it_listens(
    target: EngineTarget,
) -> None:
    lines, starts, notes = build_command_lines(
        ServingFleet(serving_pool=copies(3), prefill_pool=copies(2)), target, "m"
    )
    assert starts == (2, 3)
    assert all(line.endswith("--port PORT") for line in lines)
    assert "line 1 is for 2 engines of 2 GPUs each" in notes
    assert "line 2 is for 3 engines of 2 GPUs each" in notes
    assert any("8000, 8001" in note for note in notes)
    assert any("CUDA_VISIBLE_DEVICES" in note for note in notes)
    (line,), starts, notes = build_command_lines(ServingFleet(serving_pool=copies(1)), target, "m")
    assert starts == (1,)
    assert line.endswith("--port 8000")
    assert not any("PORT" in note for note in notes)


@pytest.mark.parametrize(
    ("target", "flags", "said"),
    [
        ("vllm", "--nnodes 2 --node-rank RANK --master-addr HEAD", "--headless"),
        ("sglang", "--nnodes 2 --node-rank RANK --dist-init-addr HEAD:5000", "RANK from 0 to 1"),
        ("tensorrt-llm", "", "16 ranks"),
    ],
)
def test_an_engine_larger_than_a_node_is_told_how_its_nodes_meet(
    target: EngineTarget, flags: str, said: str
) -> None:
    (line,), _, notes = build_command_lines(
        ServingFleet(serving_pool=copies(1, tp=8, pp=2)), target, "m"
    )
    assert flags in line
    assert any("2 nodes" in note and said in note for note in notes)
    (line,), _, notes = build_command_lines(ServingFleet(serving_pool=copies(1, tp=8)), target, "m")
    assert "nnodes" not in line
    assert not any("nodes" in note for note in notes)
