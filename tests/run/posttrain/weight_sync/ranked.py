"""An engine of two ranks takes versions; what happened is written as JSON, line by line."""

import json

import torch

from meshwright.errors import InputError, MeshwrightError
from meshwright.run.posttrain.weight_sync.bucket_packing import compute_bucket_bytes
from meshwright.run.posttrain.weight_sync.engine_weights import (
    EngineWeightUpdater,
    collect_engine_targets,
)
from meshwright.run.posttrain.weight_sync.weight_receiver import (
    RECEIVING_RANKS,
    RankWeightReceiver,
    connect_in_process,
    receive_version,
)
from meshwright.run.posttrain.weight_sync.weight_sender import WeightSender
from meshwright.run.posttrain.weight_sync.weight_tensors import collect_decoder_weights
from meshwright.run.serve.llm import LLM
from tests.run.posttrain.weight_sync.test_engine_weights import drawn, likely
from tests.run.posttrain.weight_sync.virtual_ranks import DENSE


def damage(offered: WeightSender, targets: tuple[int, ...]) -> None:
    """Change a byte of what only some ranks want."""
    assert offered.plan is not None
    at = 0
    for parcel in offered.plan.make_buckets():
        if parcel.targets == targets:
            break
        at += compute_bucket_bytes(parcel)
    with offered.list_files()[0].open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1]))


def main() -> None:
    torch.set_num_threads(1)
    llm = LLM(DENSE, device="cpu", cuda_graphs=False, tensor_parallel_size=2, ranks=RECEIVING_RANKS)
    print(json.dumps(likely(llm)))
    weights = EngineWeightUpdater([collect_decoder_weights(drawn(3))], llm.engine, llm.lifecycle)
    weights.update(1)
    print(json.dumps(likely(llm)))
    offered = WeightSender([collect_decoder_weights(drawn(4))])
    connect_in_process(offered, llm.lifecycle)
    offered.publish(2)
    damage(offered, (1,))
    try:
        receive_version(2, llm.engine, llm.lifecycle)
    except MeshwrightError as error:
        print(json.dumps(str(error)))
    print(json.dumps([llm.engine.weights_version, likely(llm)]))
    offered.publish(2)
    receive_version(2, llm.engine, llm.lifecycle)
    print(json.dumps([llm.engine.weights_version, likely(llm)]))
    offered.close()
    try:
        collect_engine_targets(llm.engine)
    except InputError as error:
        print(json.dumps(str(error)))
    assert isinstance(llm.lifecycle.run_on_first_rank, RankWeightReceiver)
    wanted = [
        each["layers.0.mlp.down.weight"].boxes[0].sizes
        for each in llm.lifecycle.run_on_first_rank.targets
    ]
    print(json.dumps(wanted))


if __name__ == "__main__":
    main()
