"""What has been measured: the setups of published runs, and how well their order was foreseen.

The rows themselves are not part of the package. `load_measured_setups.json` holds what a plan needs
of them; it is written by `scripts/measured_setups.py`, which reads rows with the same
`describe_setup` as plans.
"""

from functools import cache
from importlib.resources import files

import msgspec

from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.model import GatedDeltaNetSpec, Mamba2Spec, Model, MoESpec, count_parameters
from meshwright.spec.workload import TrainingWorkload


class MeasuredSetup(msgspec.Struct, frozen=True, order=True, array_like=True, kw_only=True):
    """What of a run decides how far another run lies from it."""

    gpu: str
    """The device's name in the catalog."""
    arch: str
    """Its architecture."""
    precision: str
    """Format of the matrix products."""
    kind: str
    """dense, experts, or scans where layers have any."""
    adapter: bool
    """Whether weights were frozen."""
    zero: int
    """What is sharded; -1 where nobody says, or there is nothing to shard over."""
    schedule: str
    """Empty where there is no pipeline."""
    offload: str
    """What lies in host memory, joined by +; empty where nothing does."""
    hybrid: bool
    """Whether states are sharded within groups of replicas."""
    gpus: int
    length: int
    """Positions of a sequence."""
    tp: int
    cp: int
    pp: int
    ep: int
    chunks: int
    """Model chunks per pipeline rank."""
    microbatch: int
    parameters: int
    """Of the model, to two digits."""


class PairOrderRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How often pairs of layouts, predicted so far apart, were measured in the predicted order.

    Both layouts of a pair ran the same model, batch, GPUs and software.
    """

    up_to: float
    """The pairs' predicted steps differ by less than this share."""
    pairs: int
    right: int
    """Pairs that were measured in the predicted order."""
    sources: int
    """Publications that they come from."""


class MeasuredSetups(msgspec.Struct, frozen=True, kw_only=True):
    """All that is kept of published runs."""

    order: tuple[PairOrderRecord, ...]
    """By how far apart, rising; the last has no end."""
    setups: tuple[MeasuredSetup, ...]
    """Each once, sorted."""


@cache
def load_measured_setups() -> MeasuredSetups:
    """Return what the package ships."""
    path = files("meshwright.predict.plan") / "measured.json"
    return msgspec.json.decode(path.read_bytes(), type=MeasuredSetups)


def get_order_record(
    difference: float, record: tuple[PairOrderRecord, ...] | None = None
) -> PairOrderRecord:
    """Return how often order was right for steps that differ by a share."""
    record = load_measured_setups().order if record is None else record
    return next((one for one in record if difference < one.up_to), record[-1])


def describe_setup(work: JobSpec) -> MeasuredSetup:
    """Return the setup of a training run."""
    layout, model, training = work.layout, work.model, work.workload
    assert isinstance(training, TrainingWorkload)
    return MeasuredSetup(
        gpu=work.cluster.gpu.name,
        arch=work.cluster.gpu.arch,
        precision=layout.precision,
        kind=get_model_kind(model),
        adapter=training.adapter is not None,
        zero=layout.zero if layout.dp * layout.cp > 1 else -1,
        schedule=layout.schedule if layout.pp > 1 else "",
        offload="+".join(sorted(layout.offload)),
        hybrid=_hybrid(layout),
        gpus=layout.gpus,
        length=training.sequence_length,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        ep=layout.ep,
        chunks=layout.virtual_stages,
        microbatch=layout.microbatch,
        parameters=_two_digits(count_parameters(model).total),
    )


def _hybrid(layout: Layout) -> bool:
    return layout.zero > 0 and layout.shard_degree < layout.dp * layout.cp


def get_model_kind(model: Model) -> str:
    """Say what makes a model's layers hard to predict."""
    if any(isinstance(block.mixer, Mamba2Spec | GatedDeltaNetSpec) for block in model.blocks):
        return "scans"
    return "experts" if any(isinstance(block.mlp, MoESpec) for block in model.blocks) else "dense"


def _two_digits(number: int) -> int:
    return int(float(f"{number:.1e}"))
