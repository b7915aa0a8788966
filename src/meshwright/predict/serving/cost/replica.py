"""`Replica`: one copy of a model that serves requests, on the GPUs of its layout.

Degrees are a `Layout`'s: `tp` shares every product, `pp` the layers, `dp` gives each group of `tp`
GPUs requests of its own while the experts are shared by all (attention data parallel), and
`expert_tp` × `ep` says how the experts lie on the GPUs of a stage.
"""

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.cost import Calibration
from meshwright.predict.serving.cost.quantization import Quantization
from meshwright.predict.serving.cost.serving_engine import VLLM, ServingEngine
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.layout.constraints import check_tensor_parallel
from meshwright.spec.model import Model


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A model, where it lies, how it is stored and which engine runs it."""

    model: Model
    cluster: Cluster
    layout: Layout = Layout()
    quantization: Quantization = Quantization()
    engine: ServingEngine = VLLM
    calibration: Calibration | None = None
    """What was measured on the device, in place of its default constants."""
    other_process_bytes: float = 0.0
    """Of each GPU's memory, by others that share it."""

    def __post_init__(self) -> None:
        problems = []
        if self.gpus > self.cluster.gpus:
            what = (
                f"the replica takes {self.gpus} GPUs, {self.cluster.name} has {self.cluster.gpus}"
            )
            problems.append(Problem("layout", what, "use smaller degrees or a larger cluster"))
        problems += dict.fromkeys(check_tensor_parallel(self.layout.tp, self.model))
        if self.layout.cp > 1:
            what = "context parallel is not known to serving"
            problems.append(Problem("layout.cp", what, "use cp=1"))
        if self.layout.pp > self.model.layers:
            what = f"{self.model.layers} layers do not fill {self.layout.pp} stages"
            problems.append(Problem("layout.pp", what, f"use at most {self.model.layers}"))
        if problems:
            raise InputError(problems)

    @property
    def gpus(self) -> int:
        """GPUs of one copy."""
        return self.layout.tp * self.layout.pp * self.layout.dp

    @property
    def async_scheduling(self) -> bool:
        """Whether the host prepares a step while the device computes the one before."""
        # A processor that computes is its own host.
        return self.engine.overlaps_host and self.cluster.gpu.kind != "cpu"
