"""An engine of two ranks takes versions; what happened is written as JSON, line by line."""

import json

import torch

from meshwright.errors import InputError, MeshwrightError
from meshwright.run.posttrain.weights.offered import Offered
from meshwright.run.posttrain.weights.packing import parcel_bytes
from meshwright.run.posttrain.weights.serving import EngineWeights, engine_places
from meshwright.run.posttrain.weights.taking import TAKING, Taking, meet, take_version
from meshwright.run.posttrain.weights.tensors import of_decoder
from meshwright.run.serve.llm import LLM
from tests.run.posttrain.weights.test_serving import drawn, likely
from tests.run.posttrain.weights.virtual_ranks import DENSE


def damage(offered: Offered, targets: tuple[int, ...]) -> None:
    """Change a byte of what only some ranks want."""
    assert offered.plan is not None
    at = 0
    for parcel in offered.plan.parcels():
        if parcel.targets == targets:
            break
        at += parcel_bytes(parcel)
    with offered.files()[0].open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1]))


def main() -> None:
    torch.set_num_threads(1)
    llm = LLM(DENSE, device="cpu", graphs=False, tp=2, ranks=TAKING)
    print(json.dumps(likely(llm)))
    weights = EngineWeights([of_decoder(drawn(3))], llm.engine, llm.upkeep)
    weights.update(1)
    print(json.dumps(likely(llm)))
    offered = Offered([of_decoder(drawn(4))])
    meet(offered, llm.upkeep)
    offered.post(2)
    damage(offered, (1,))
    try:
        take_version(2, llm.engine, llm.upkeep)
    except MeshwrightError as error:
        print(json.dumps(str(error)))
    print(json.dumps([llm.engine.version, likely(llm)]))
    offered.post(2)
    take_version(2, llm.engine, llm.upkeep)
    print(json.dumps([llm.engine.version, likely(llm)]))
    offered.close()
    try:
        engine_places(llm.engine)
    except InputError as error:
        print(json.dumps(str(error)))
    assert isinstance(llm.upkeep.first, Taking)
    wanted = [each["layers.0.mlp.down.weight"].boxes[0].sizes for each in llm.upkeep.first.targets]
    print(json.dumps(wanted))


if __name__ == "__main__":
    main()
