"""Memory that trainer and engine share by turns: what lies on the device when, and every bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("torch", reason="runs a model")

import msgspec
import torch
from torch import Tensor, nn

from meshwright.policy.rollout import ColocatedPhase, MemoryPhaseAction, list_resident_regions
from meshwright.policy.rollout.actions import MemoryPhase
from meshwright.predict.rl import RLSetup, RolloutBatch
from meshwright.predict.rl.rl_framework import get_host_rates
from meshwright.predict.rl.trainer_costs import build_trainer_costs
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.cost.serving_engine import MESHWRIGHT
from meshwright.predict.serving.sim.serving_fleet import ReplicaPool, default_scheduler_config
from meshwright.predict.training_run.training_framework import FRAMEWORKS
from meshwright.run.kernels.triton_compat import KernelBackend
from meshwright.run.posttrain.rl import run_rl
from meshwright.run.posttrain.rl.config.rl_config import (
    AdapterConfig,
    ObjectiveConfig,
    RLEvaluationConfig,
)
from meshwright.run.posttrain.rl.driver import RLDriver
from meshwright.run.posttrain.rl.generation.rollout_backend import RolloutBackend
from meshwright.run.posttrain.rl.generation.rollout_engine import InlineRolloutEngine
from meshwright.run.posttrain.rl.trainer import offload
from meshwright.run.posttrain.rl.trainer.offload import HostOffload
from meshwright.run.posttrain.rl.trainer.rl_trainer import RLTrainer
from meshwright.run.posttrain.weight_sync.in_process_transfer import InProcessTransfer
from meshwright.run.train.optimizer.optimizer import Optimizer, make_optimizer
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.spec.job_spec import read_cluster
from meshwright.spec.layout import Layout
from meshwright.spec.workload import FixedLength
from tests.run.freed import Memory
from tests.run.posttrain.rl.small import settings
from tests.run.posttrain.rl.test_run import figures, same

CPU = torch.device("cpu")
ALL = ObjectiveConfig(adv_estimator="gae", kl_coef=0.1, kl_in="loss", minibatches=2)
"""A critic and a reference model beside the optimizer."""
AVERAGED = OptimizerConfig(
    lr=1e-2, schedule="constant", warmup_steps=0, weight_decay=0.0, ema_decay=0.9
)  # fmt: skip


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def several() -> list[Tensor]:
    """Tensors of many kinds, one as large as several pieces of host memory."""
    torch.manual_seed(0)
    return [
        torch.randn(5, 7),
        nn.Parameter(torch.randn(300)),
        torch.randn(4, 6).t().clone(),  # as it lies, column by column
        torch.randint(-128, 127, (33,), dtype=torch.int8),
        torch.randn(3, dtype=torch.bfloat16) / 0,
        torch.tensor(2.5),
        torch.empty(0),
        torch.arange(40).double(),
    ]


def test_what_leaves_frees_the_device_and_comes_back_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "_SLAB_BYTES", 256)
    tensors = several()
    before = [(bits(each), each.dtype, each.shape, each.stride()) for each in tensors]
    whole = sum(each.nbytes for each in tensors)
    states = HostOffload(CPU, lambda: tensors)
    for _ in range(2):
        memory = [Memory(each) for each in tensors]
        assert states.device_bytes == whole
        states.offload()
        states.offload()
        assert states.device_bytes == 0
        assert all(each.is_free for each in memory), "nobody holds what lay on the device"
        assert [(bits(each), each.dtype, each.shape, each.stride()) for each in tensors] == before
        aside = [Memory(each) for each in tensors]
        states.reload()
        states.reload()
        assert states.device_bytes == whole
        assert all(each.is_free for each in aside), "nor what lay beside it"
        assert [(bits(each), each.dtype, each.shape, each.stride()) for each in tensors] == before


def test_what_is_written_to_tensors_that_are_away_comes_with_them() -> None:
    tensors = [torch.zeros(3), torch.zeros(2, 2)]
    states = HostOffload(CPU, lambda: tensors)
    states.offload()
    for each in tensors:
        each.fill_(7.0)
    states.reload()
    assert all(bool((each == 7).all()) for each in tensors)


def optimizer_of(weights: list[nn.Parameter], backend: KernelBackend, **layout: Any) -> Optimizer:
    named = [(f"w{at}", weight) for at, weight in enumerate(weights)]
    return make_optimizer(named, Layout(**layout), AVERAGED, total_steps=10, backend=backend)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    "layout",
    [
        {"precision": "fp32"},
        {"precision": "bf16"},
        {"precision": "bf16", "moment_precision": "int8"},
        {"precision": "fp32", "optimizer": "muon"},
    ],
)
def test_steps_between_which_all_has_left_are_the_same(
    layout: dict[str, Any], backend: KernelBackend
) -> None:
    """Kernels look tensors up by addresses, of which others may have some by then."""
    dtype = torch.float32 if layout["precision"] == "fp32" else torch.bfloat16

    def trained(leaves: bool) -> list[bytes]:
        torch.manual_seed(1)
        weights = [nn.Parameter(torch.randn(16, 8).to(dtype)) for _ in range(2)]
        optimizer = optimizer_of(weights, backend, **layout)
        # As a critic's, whose weights leave with its states.
        states = HostOffload(CPU, lambda: [*optimizer.iter_state_tensors(), *weights])
        for _ in range(3):
            for each in weights:
                each.grad = torch.randn(16, 8).to(each.grad_dtype)
            optimizer.step(1e-2)
            optimizer.zero_grad()
            if leaves:
                optimizer.release_tensors()
                memory = [Memory(each) for each in weights]
                states.offload()
                assert all(each.is_free for each in memory), "no view keeps it"
                others = [torch.full_like(each, 1e30) for each in weights * 20]
                states.reload()
                del others
        return [bits(each) for each in (*weights, *optimizer.state_dict().values())]

    assert trained(leaves=True) == trained(leaves=False)


class Watched:
    """What lies on the device, as a run sees it that looks at each of its doings."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.lies: dict[ColocatedPhase, list[set[str]]] = {
            "generating": [],
            "syncing": [],
            "training": [],
        }
        self.order: list[str] = []
        self.trainer: RLTrainer | None = None
        self.sampling: RolloutBackend | None = None
        self.most = 0
        begun, started = RLTrainer.resume_or_initialize, RolloutBackend.__init__

        def begin(trainer: RLTrainer) -> Any:
            self.trainer, progress = trainer, begun(trainer)
            self.most = trainer.offloadable_bytes
            return progress

        def start(sampling: RolloutBackend, *given: Any, **named: Any) -> None:
            self.sampling = sampling
            started(sampling, *given, **named)

        patch.setattr(RLTrainer, "resume_or_initialize", begin)
        patch.setattr(RolloutBackend, "__init__", start)
        for home, name, doing in (
            (InlineRolloutEngine, "submit", "generating"),
            (RolloutBackend, "evaluate_held_out", "generating"),
            (InProcessTransfer, "transfer", "syncing"), (RLTrainer, "step", "training"),
        ):  # fmt: skip
            patch.setattr(home, name, self._looking(getattr(home, name), doing))
        self._freeing(patch, RLTrainer, "offload", self._kept)
        self._freeing(patch, RolloutBackend, "sleep", self._served)
        carried = RLDriver._phase

        def phase(driver: RLDriver, doing: Any) -> None:
            self.order.append(doing.phase)
            carried(driver, doing)

        patch.setattr(RLDriver, "_phase", phase)

    def _freeing(
        self, patch: pytest.MonkeyPatch, home: Any, name: str, held: Callable[[], list[Tensor]]
    ) -> None:
        real = getattr(home, name)

        def call(who: Any) -> None:
            memory = [Memory(each) for each in held()]
            real(who)
            assert all(each.is_free for each in memory), f"{name}: somebody holds it yet"

        patch.setattr(home, name, call)

    def _kept(self) -> list[Tensor]:
        assert self.trainer is not None
        return list(self.trainer._kept()) if self.trainer.offloadable_bytes else []

    def _served(self) -> list[Tensor]:
        runner, trainer = self._runner, self.trainer
        assert trainer is not None
        # An engine beside an adapter uses the trainer's weights, and has none to give up.
        lent = trainer.adapter is not None
        own = () if lent else runner.model.decoder.parameters()
        return [*own, *runner.kv_cache._pools]

    @property
    def _runner(self) -> Any:
        assert self.sampling is not None
        return self.sampling._side.engine.runner  # type: ignore[union-attr]

    def _looking(self, real: Callable[..., Any], doing: Any) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.order.append(doing)
            self.lies[doing].append(self._now())
            return real(*given, **named)

        return call

    def _now(self) -> set[str]:
        assert self.trainer is not None
        runner = self._runner
        sizes = {
            "policy": sum(each.numel() for each in self.trainer.decoder.parameters()),
            "training": self.trainer.offloadable_bytes,
            "served": sum(each.numel() for each in runner.model.decoder.parameters()),
            "cache": sum(pool.numel() for pool in runner.kv_cache._pools),
        }
        assert sizes["training"] in (0, self.most), "all of it, or nothing"
        return {name for name, size in sizes.items() if size}


@pytest.mark.parametrize("adapter", [None, AdapterConfig(rank=4)], ids=["", "adapter"])
@pytest.mark.parametrize("objective", [ObjectiveConfig(), ALL], ids=["plain", "all"])
def test_what_lies_on_the_device_is_what_phases_promise(
    objective: ObjectiveConfig,
    adapter: AdapterConfig | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    given: dict[str, Any] = {
        "objective": objective, "optimizer": AVERAGED, "folder": str(tmp_path),
        "checkpoint_every_steps": 1, "evaluate": RLEvaluationConfig(num_prompts=4, every_steps=1),
        "adapter": adapter,
    }  # fmt: skip
    outcome = run_rl(settings(steps=2, placement="colocated", **given))
    for doing, seen in watched.lies.items():
        # Gradients and activations of a step, and weights aside, are there for a moment.
        promised = list_resident_regions(doing, by_turns=True, lent=adapter is not None) - {
            "step",
            "aside",
        }
        assert len(seen) > 1
        assert all(each == promised for each in seen), doing
    turn = ["sleep", "load", "training", "offload", "wake weights", "syncing", "wake cache"]
    evaluates = ["generating"]
    assert watched.order == [
        "syncing", *evaluates * 2, "generating", *turn, *evaluates,
        "generating", *turn[:3], "syncing", *evaluates, *evaluates * 2,
    ]  # fmt: skip
    assert {f"trainer: {name}" for name in turn if name not in ("training", "syncing")} <= set(
        outcome.duration_by_activity_s
    )


@pytest.mark.parametrize("objective", [ObjectiveConfig(), ALL], ids=["plain", "all"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_simulation_moves_as_many_bytes(
    objective: ObjectiveConfig, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    pulled = msgspec.structs.replace(objective, adv_estimator="z-scored")  # no critic is simulated
    given = settings(steps=1, placement="colocated", precision=precision, objective=pulled)
    decoder = run_rl(given).decoder
    cluster = read_cluster("cpu-host", "cluster")
    replica = Replica(model=decoder.model, cluster=cluster, engine=MESHWRIGHT)
    prices = build_trainer_costs(
        RLSetup(
            model=decoder.model, cluster=cluster, placement=given.placement,
            rollout_pool=ReplicaPool(replica=replica,
            scheduler_config=default_scheduler_config(replica)),
            trainer_layout=Layout(precision=precision), trainer_framework=FRAMEWORKS["meshwright"],
            rollout_batch=RolloutBatch(
                prompts_per_step=4, group_size=4, prompt_lengths=FixedLength(tokens=4),
                max_response_tokens=8, reference=bool(pulled.kl_coef)
            ),
        )
    )  # fmt: skip
    assert watched.most > 0
    names: tuple[MemoryPhase, ...] = get_args(MemoryPhase)
    moved = {
        name: prices.get_phase_s(MemoryPhaseAction(name))
        * get_host_rates(cluster).pinned_bytes_per_s
        for name in names
    }
    assert moved.pop("load") == moved.pop("offload") == pytest.approx(watched.most)
    assert set(moved.values()) == {0.0}, "what is let go of is not moved"


@pytest.mark.parametrize("placement", ["disaggregated", "async"])
def test_who_takes_no_turns_keeps_its_memory(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(_: HostOffload) -> None:
        raise AssertionError("nobody needs it")

    monkeypatch.setattr(HostOffload, "offload", moved)
    run_rl(settings(steps=1, placement=placement))


@pytest.mark.parametrize("objective", [ObjectiveConfig(minibatches=2), ALL], ids=["plain", "all"])
def test_a_colocated_run_with_everything_is_the_same_bit_by_bit(
    objective: ObjectiveConfig,
) -> None:
    given: dict[str, Any] = {
        "objective": objective, "optimizer": AVERAGED,
        "evaluate": RLEvaluationConfig(num_prompts=4, every_steps=1),
    }  # fmt: skip
    plain, turns = (
        run_rl(settings(placement=placement, **given))
        for placement in ("disaggregated", "colocated")
    )
    assert same(plain.decoder, turns.decoder)
    assert plain.held_out_metrics == turns.held_out_metrics
    for one, its in zip(figures(plain.step_metrics), figures(turns.step_metrics), strict=True):
        assert one == {name: its[name] for name in one}


class Enough(Exception):
    """Ends a run."""


@pytest.mark.parametrize("phase", ["sleep", "load", "offload", "wake weights", "wake cache"])
def test_a_run_that_ends_in_any_phase_goes_on_to_the_same_bits(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"objective": ALL, "placement": "colocated", "steps": 3}
    whole = run_rl(settings(**given))
    left = [1]
    carried = RLDriver._phase

    def ends(driver: RLDriver, doing: Any) -> None:
        carried(driver, doing)
        if doing.phase == phase:
            left[0] -= 1
            if left[0] < 0:
                raise Enough

    given |= {"folder": str(tmp_path), "checkpoint_every_steps": 1}
    monkeypatch.setattr(RLDriver, "_phase", ends)
    with pytest.raises(Enough):
        run_rl(settings(**given))
    monkeypatch.undo()
    rest = run_rl(settings(**given))
    assert [row["step"] for row in rest.step_metrics][-1] == 3
    assert same(whole.decoder, rest.decoder)


@pytest.mark.parametrize("away", [False, True])
def test_a_checkpoint_holds_and_fills_what_is_away(
    away: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed trainer may be away when it is filled, and is the one that was saved."""
    found: list[RLTrainer] = []
    begun = RLTrainer.resume_or_initialize

    def begin(trainer: RLTrainer) -> Any:
        if found and away:
            resumed = trainer.run_state.resume

            def resume(tensors: Any) -> Any:
                trainer.offload()
                return resumed(trainer.tensors())

            monkeypatch.setattr(trainer.run_state, "resume", resume)
        found.append(trainer)
        return begun(trainer)

    monkeypatch.setattr(RLTrainer, "resume_or_initialize", begin)
    given = settings(objective=ALL, placement="colocated", steps=2, folder=str(tmp_path))
    for _ in range(2):
        run_rl(given)
    states = [
        {name: bits(each) for name, each in trainer.tensors().items() if isinstance(each, Tensor)}
        for trainer in found
    ]
    assert states[0] == states[1]
    assert any(name.startswith("critic.optimizer.") for name in states[0])
