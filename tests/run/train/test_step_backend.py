"""A run of several ranks trains as one device does, and comes to the same figures."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.predict.training_run.training_framework import MESHWRIGHT
from meshwright.run.parallel.flight_recorder import FlightRecord, FlightRecorder
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.train.evaluation import compute_eval_loss
from meshwright.run.train.job.job_file import read_job
from meshwright.run.train.trainer import Trainer
from meshwright.spec.layout import Layout
from meshwright.spec.model import MoESpec, build_decoder_model
from tests.run.parallel.played_step import played_step
from tests.run.train.tiny import job_data

STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "two replicas": {"dp": 2, "microbatch": 1},
    "two replicas of packed sequences": {"dp": 2, "packing": "pack"},
    "shared tensors": {"tp": 2, "sequence_parallel": True},
    "two stages": {"pp": 2, "microbatch": 1},
    "shards of Muon's matrices": {"dp": 2, "zero": 2, "microbatch": 1, "optimizer": "muon"},
}


def figures(trainer: Trainer) -> list[float]:
    """Train some steps and evaluate."""
    found = []
    for step in range(STEPS):
        losses = trainer.train_step.forward_backward(trainer.train_dataset.get_batch(step))
        report = trainer.train_step.update(losses, step).optimizer_report
        found += [float(losses.mean_loss), float(report.grad_norm), float(losses.tokens)]
    assert trainer.eval_dataset is not None
    held = compute_eval_loss(
        trainer.train_step, trainer.eval_dataset, sequences=5, device=torch.device("cpu")
    )
    return [*found, held]


def on_rank(data: dict[str, Any], folder: Path) -> list[float]:
    job = read_job(data)
    return figures(Trainer(job, folder, Mesh(job.layout)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_come_to_the_figures_of_one_device(name: str, tokens: Path, tmp_path: Path) -> None:
    layout = dict(LAYOUTS[name])
    changes: dict[str, Any] = {"workload": {"packing": layout.pop("packing", "concat")}}
    same = {"layout": {"optimizer": layout.get("optimizer", "adamw")}}
    alone = figures(Trainer(read_job(job_data(tokens, changes | same)), tmp_path / "alone"))
    several = job_data(tokens, changes | {"layout": layout})
    for found in spawn_ranks(2, on_rank, several, tmp_path / "several"):
        assert found == pytest.approx(alone, rel=2e-5)


def go_on(data: dict[str, Any], folder: Path, steps: int) -> list[float]:
    """Go on with the run in a folder for some steps, and save."""
    job = read_job(data)
    trainer = Trainer(job, folder, Mesh(job.layout) if job.layout.gpus > 1 else None)
    trainer.resume()
    found = []
    for _ in range(steps):
        step = trainer.step_number
        losses = trainer.train_step.forward_backward(trainer.train_dataset.get_batch(step))
        trainer.train_step.update(losses, step)
        trainer.step_number += 1
        found.append(float(losses.mean_loss))
    trainer.save()
    trainer.close()
    return found


@pytest.mark.slow
def test_a_run_goes_on_under_other_layouts(tokens: Path, tmp_path: Path) -> None:
    alone = job_data(tokens)
    wanted = go_on(alone, tmp_path / "alone", 8)
    moving, found = tmp_path / "moving", []
    for layout in (
        {"tp": 2, "sequence_parallel": True},
        {"dp": 2, "zero": 3, "microbatch": 1},
        {"pp": 2, "schedule": "zb-h1"},
    ):
        several = job_data(tokens, {"layout": layout})
        ranks = spawn_ranks(2, go_on, several, moving, 2)
        assert ranks[0] == ranks[1]
        found += ranks[0]
    found += go_on(alone, moving, 2)
    assert found == pytest.approx(wanted, rel=2e-5)


EIGHT_BITS = {"precision": "bf16", "master_precision": "none", "moment_precision": "int8"}


Moments = dict[str, torch.Tensor]


def eight_bits(data: dict[str, Any], folder: Path, steps: int) -> tuple[Moments, Moments]:
    """Go on with a run for some steps and save; return its moments as loaded, and at the end."""
    job = read_job(data)
    trainer = Trainer(job, folder, Mesh(job.layout) if job.layout.gpus > 1 else None)
    trainer.resume()
    loaded = moments(trainer)
    for step in range(trainer.step_number, trainer.step_number + steps):
        trainer.train_step.update(
            trainer.train_step.forward_backward(trainer.train_dataset.get_batch(step)), step
        )
        trainer.step_number += 1
    if steps:
        trainer.save()
    trainer.close()
    return loaded, moments(trainer)


def moments(trainer: Trainer) -> Moments:
    kept = trainer.optimizer.state_dict().items()
    return {name: each.clone() for name, each in kept if name.startswith(("first", "second"))}


@pytest.mark.slow
def test_moments_of_eight_bits_go_from_shards_to_one_device_and_back(
    tokens: Path, tmp_path: Path
) -> None:
    alone = job_data(tokens, {"layout": EIGHT_BITS})
    sharded = job_data(tokens, {"layout": EIGHT_BITS | {"dp": 2, "zero": 2, "microbatch": 1}})
    first = spawn_ranks(2, eight_bits, sharded, tmp_path, 2)
    loaded, left = eight_bits(alone, tmp_path, 1)
    again = spawn_ranks(2, eight_bits, sharded, tmp_path, 0)
    # Shards begin at blocks of the whole, so nothing has to be rounded.
    for whole, ranks in (
        (loaded, [end for _, end in first]),
        (left, [began for began, _ in again]),
    ):
        for name, value in whole.items():
            parts = [rank[name].view(-1) for rank in ranks if name in rank]
            assert torch.equal(torch.cat(parts), value.view(-1)), name


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes copies between the host and a device, and what has to be counted there."""

    def __init__(self, device: str, found: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.found = device, found

    def __torch_dispatch__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, made))
        devices = {each.device.type for each in leaves if isinstance(each, torch.Tensor)}
        name = str(func)
        if ({"cpu", self.device} <= devices and "copy" in name) or "nonzero" in name:
            self.found.append(name)
        return made


class Numbers(TorchFunctionMode):
    """Notes tensors that are made of Python's numbers on a device, which no dispatch shows."""

    def __init__(self, device: str, found: list[str]) -> None:
        super().__init__()
        self.device, self.found = device, found

    def __torch_function__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        makes = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor)
        if makes and made.device.type == self.device:
            self.found.append(func.__name__)
        return made


@contextmanager
def host_waits(device: str) -> Iterator[list[str]]:
    """Collect where the host waits for a device: what it hands over is not pinned."""
    found: list[str] = []
    with Numbers(device, found), Copies(device, found):
        yield found


def test_shared_products_wait_at_once_as_their_prediction_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_way, most = 0, 0
    note, leave = FlightRecorder.record, FlightRecorder.end_wait

    def issued(
        journal: FlightRecorder, group: str, op: str, *args: Any, **kwargs: Any
    ) -> FlightRecord:
        nonlocal under_way, most
        if group == "tp" and op in {"all_gather", "reduce_scatter"}:
            under_way += 1
            most = max(most, under_way)
        return note(journal, group, op, *args, **kwargs)

    def done(journal: FlightRecorder, entry: FlightRecord, since_ns: int) -> None:
        nonlocal under_way
        if entry.group == "tp" and entry.op in {"all_gather", "reduce_scatter"}:
            assert entry is journal.records[-1], "nothing was issued meanwhile"
            under_way -= 1
        leave(journal, entry, since_ns)

    monkeypatch.setattr(FlightRecorder, "record", issued)
    monkeypatch.setattr(FlightRecorder, "end_wait", done)
    model = build_decoder_model("small", layers=2, hidden=32, heads=4, ffn=48, vocab=61)
    with played_step(model, Layout(tp=2, sequence_parallel=True), "meta") as (step, batch):
        step.forward_backward(batch)
    assert (most, under_way) == (1, 0)
    assert not MESHWRIGHT.tp_async


ROUTED = MoESpec(count=4, top_k=2, width=16, shared_width=16)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tp=2, sequence_parallel=True, overlap_tp=True),
        Layout(cp=2),
        Layout(dp=2, zero=3),
        Layout(pp=2),
        Layout(dp=2, ep=2),
    ],
    ids=lambda layout: f"tp{layout.tp} cp{layout.cp} dp{layout.dp} pp{layout.pp} ep{layout.ep}",
)
def test_no_step_hands_the_device_what_it_would_wait_for(layout: Layout) -> None:
    # A tensor without memory has no value to be read: that would fail by itself.
    model = build_decoder_model(
        "small", layers=2, hidden=32, heads=4, ffn=48, vocab=61, experts=ROUTED
    )
    with played_step(model, layout, "meta") as (step, batch):
        for _ in range(2):  # what is made once is made in the first
            with host_waits("meta") as found:
                step.forward_backward(batch)
                step.grad_norm()
                step.discard()
        assert found == []


def test_what_is_handed_over_from_the_host_is_seen() -> None:
    with host_waits("meta") as found:
        torch.tensor([1.0], device="meta")
        torch.ones(1).to("meta")
        torch.full((1,), 2.0, device="meta")
    assert found == ["tensor", "aten._to_copy.default"]
