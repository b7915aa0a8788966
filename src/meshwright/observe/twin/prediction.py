"""The step of a layout as the simulator predicts it from the measured parts of this machine."""

from msgspec.structs import replace

from meshwright.predict.constants import CONSTANTS, StepConstants
from meshwright.predict.measured import Measured
from meshwright.predict.run import Run
from meshwright.predict.simulate import simulate_step
from meshwright.predict.software import MESHWRIGHT
from meshwright.spec import catalog
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.work import Work
from meshwright.spec.workload import Training
from meshwright.timeline import Timeline


def on_cores(ranks: int, cores: int) -> StepConstants:
    """Return what hides behind compute where ranks are processes of one machine.

    Whoever exchanges needs a core: where ranks leave none over, what runs beside compute takes as
    much from it as it would have taken alone. No bucket is held back beyond its own size.
    """
    spare = cores - ranks
    taken = 0.0 if spare >= ranks else 1.0
    return replace(CONSTANTS, sm_share=taken, bucket_exposed=0.0)


def predict(
    model: Model, layout: Layout, measured: Measured, *, length: int, sequences: int, cores: int
) -> Timeline:
    """Return the simulated step as a timeline, a rank for each stage."""
    step = Training(sequence_length=length, global_batch=sequences, tokens=length * sequences)
    work = Work(model=model, cluster=_machine(layout.gpus), layout=layout, workload=step)
    run = Run(work, software=MESHWRIGHT, constants=on_cores(layout.gpus, cores), measured=measured)
    return simulate_step(run).timeline()


def _machine(ranks: int) -> Cluster:
    """Return a host with a core for each rank; none of its speeds is used."""
    host = catalog.cluster("cpu-host")
    if ranks <= host.gpus_per_node:
        return host
    return replace(host, gpus_per_node=ranks, scale_up=replace(host.scale_up, gpus=ranks))
