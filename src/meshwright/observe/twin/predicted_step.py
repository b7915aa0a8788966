"""The step of a layout as the simulator predicts it from the measured parts of this machine."""

from msgspec.structs import replace

from meshwright.predict.event_sim.step_simulation import simulate_step
from meshwright.predict.step.measured_costs import MeasuredCosts
from meshwright.predict.training_run.step_constants import STEP_CONSTANTS, StepConstants
from meshwright.predict.training_run.training_framework import MESHWRIGHT
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec import catalog
from meshwright.spec.cluster import Cluster
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.workload import TrainingWorkload
from meshwright.timeline import Timeline


def estimate_core_overlap(ranks: int, cores: int) -> StepConstants:
    """Return what hides behind compute where ranks are processes of one machine.

    Whoever exchanges needs a core: where ranks leave none over, what runs beside compute takes as
    much from it as it would have taken alone. No bucket is held back beyond its own size.
    """
    spare = cores - ranks
    taken = 0.0 if spare >= ranks else 1.0
    return replace(STEP_CONSTANTS, comm_sm_share=taken, exposed_bucket_share=0.0)


def predict_layout_step(
    model: Model,
    layout: Layout,
    measured: MeasuredCosts,
    *,
    length: int,
    sequences: int,
    cores: int,
) -> Timeline:
    """Return the simulated step as a timeline, a rank for each stage."""
    step = TrainingWorkload(
        sequence_length=length, global_batch=sequences, tokens=length * sequences
    )
    work = JobSpec(model=model, cluster=_machine(layout.gpus), layout=layout, workload=step)
    run = TrainingRun(
        work,
        framework=MESHWRIGHT,
        constants=estimate_core_overlap(layout.gpus, cores),
        measured=measured,
    )
    return simulate_step(run).build_timeline()


def _machine(ranks: int) -> Cluster:
    """Return a host with a core for each rank; none of its speeds is used."""
    host = catalog.get_cluster("cpu-host")
    if ranks <= host.gpus_per_node:
        return host
    return replace(host, gpus_per_node=ranks, scale_up=replace(host.scale_up, gpus=ranks))
