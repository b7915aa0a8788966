"""A loop that trains an adapter: the weights beside it stay, and both sides answer with it."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import torch
from safetensors.torch import load_file, save_file

from meshwright.cli import main
from meshwright.errors import InputError
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.huggingface import load_hf_checkpoint
from meshwright.run.posttrain.lora import load_adapter
from meshwright.run.posttrain.objectives.masked_tokens import padded_tokens
from meshwright.run.posttrain.rl import RLResult, run_rl, run_state
from meshwright.run.posttrain.rl.config.rl_config import (
    AdapterConfig,
    ObjectiveConfig,
    RLConfig,
    TinyModelConfig,
    WarmupConfig,
)
from meshwright.run.posttrain.rl.run_state import RLRunState
from meshwright.run.posttrain.rl.task_loader import load_task
from meshwright.run.posttrain.rl.trainer.microbatches import RolloutMicrobatch
from meshwright.run.posttrain.rl.trainer.rl_trainer import RLTrainer
from meshwright.run.posttrain.rl.trainer.step_preparation import compute_policy_logprobs
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.run.serve.llm import LLM
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.run.train.checkpoint.checkpoint_folder import read_metadata
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.spec.file_formats import load_data
from meshwright.spec.layout import Layout
from tests.run.posttrain.rl.small import EVALUATED, settings
from tests.run.posttrain.rl.test_run import figures
from tests.run.posttrain.supervised.tiny import model_folder

Captured = pytest.CaptureFixture[str]
RANK = 4
PULLED = ObjectiveConfig(minibatches=2, kl_coef=0.04)


def adapted(**given: Any) -> RLConfig:
    chosen: dict[str, Any] = {"adapter": AdapterConfig(rank=RANK), "objective": PULLED}
    return settings(**chosen | given)


def of_model(folder: Path | None = None, **given: Any) -> RLConfig:
    """Return a run that begins with a model, and moves far from it."""
    chosen: dict[str, Any] = {
        "model": str(model_folder()),
        "warm_up": WarmupConfig(),
        "folder": "" if folder is None else str(folder),
        "optimizer": OptimizerConfig(
            lr=3e-2, schedule="constant", warmup_steps=0, weight_decay=0.0
        ),
    }
    return adapted(**chosen | given)


def learnt(outcome: RLResult) -> list[torch.Tensor]:
    """Return all that a run came to, frozen weights too."""
    assert outcome.adapter is not None
    return [*outcome.adapter.parameters(), *outcome.decoder.parameters()]


def same(one: RLResult, other: RLResult) -> bool:
    pairs = zip(learnt(one), learnt(other), strict=True)
    return all(torch.equal(mine, its) for mine, its in pairs)


@pytest.mark.parametrize(
    "kind", [{}, {"dora": True}, {"rslora": True, "target_modules": ("q_proj", "down_proj")}]
)
def test_both_sides_say_the_same_and_the_weights_beside_it_stay(kind: dict[str, Any]) -> None:
    outcome = run_rl(of_model(adapter=AdapterConfig(rank=RANK, **kind)))
    assert max(row["logprob_gap_max"] for row in outcome.step_metrics) <= 1e-5
    assert outcome.step_metrics[-1]["kl"] > 1e-4, "the policy moved"
    began = load_hf_checkpoint(None, model_folder(), dtype=torch.float32)
    for name, each in began.named_parameters():
        assert torch.equal(each, dict(outcome.decoder.named_parameters())[name])
    assert outcome.adapter is not None
    assert all(
        each.abs().max() > 0
        for name, each in outcome.adapter.named_parameters()
        if "lora_B" in name
    )


@pytest.mark.parametrize(
    "other",
    [
        {"placement": "async", "max_staleness": 0},
        {"placement": "colocated", "evaluate": EVALUATED},
        {"workers": WorkerConfig(num_workers=1)},
    ],
)
def test_ways_without_staleness_come_to_the_same_bits(other: dict[str, Any]) -> None:
    plain, driven = run_rl(adapted()), run_rl(adapted(**other))
    assert same(plain, driven)
    for one, its in zip(figures(plain.step_metrics), figures(driven.step_metrics), strict=True):
        assert one == {name: its[name] for name in one}


def test_workers_by_turns_take_the_frozen_weights_again() -> None:
    workers = WorkerConfig(num_workers=2)
    turns = run_rl(of_model(workers=workers, placement="colocated"))
    assert same(turns, run_rl(of_model(workers=workers)))
    assert max(row["logprob_gap_max"] for row in turns.step_metrics) <= 1e-5


def test_an_engine_in_fp8_has_matrices_of_its_own_and_leaves_the_trainers_alone() -> None:
    wide = TinyModelConfig(layers=1, hidden=64, heads=2, ffn=64)
    given: dict[str, Any] = {"network": wide, "precision": "bf16"}
    exact, rounded = (run_rl(adapted(**given, engine_weights=each)) for each in ("none", "fp8"))
    assert rounded.step_metrics[0]["logprob_gap_max"] > exact.step_metrics[0]["logprob_gap_max"], (
        "it rounds more"
    )
    pairs = zip(exact.decoder.parameters(), rounded.decoder.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("placement", ["one_step_off", "async"])
def test_an_adapter_is_trained_while_the_engine_draws(placement: str) -> None:
    outcome = run_rl(adapted(placement=placement, steps=4))
    staleness = [row["staleness_max"] for row in outcome.step_metrics]
    if placement == "one_step_off":
        assert staleness == [0, 1, 1, 1]
    else:  # How far the engine is behind depends on which thread is quicker, up to the limit.
        assert staleness[0] == 0
        assert max(staleness) <= 1


def test_a_critic_learns_beside_an_adapter(tmp_path: Path) -> None:
    aim = ObjectiveConfig(adv_estimator="gae", minibatches=2)
    outcome = run_rl(of_model(tmp_path / "run", objective=aim))
    assert all("value_loss" in row for row in outcome.step_metrics)
    assert same(outcome, run_rl(of_model(tmp_path / "run", objective=aim)))


class Stops(Exception):
    """Ends a run."""


@pytest.mark.parametrize("of", [adapted, of_model], ids=["network", "model"])
def test_a_run_that_was_ended_goes_on_to_the_same_bits(
    of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"steps": 4, "checkpoint_every_steps": 1, "placement": "colocated"}
    whole = run_rl(of(**given))
    step = RLTrainer.step

    def stops(self: RLTrainer, number: int, groups: Sequence[Any]) -> dict[str, float]:
        if number == 2:
            raise Stops
        return step(self, number, groups)

    with monkeypatch.context() as patch:
        patch.setattr(RLTrainer, "step", stops)
        with pytest.raises(Stops):
            run_rl(of(**given, folder=str(tmp_path / "run")))
    resumed = run_rl(of(**given, folder=str(tmp_path / "run")))
    assert len(resumed.step_metrics) == 2
    assert same(whole, resumed)


def test_a_checkpoint_has_the_adapter_and_not_the_folders_weights(tmp_path: Path) -> None:
    run_rl(of_model(tmp_path / "run", steps=1))
    (newest,) = (tmp_path / "run" / "checkpoints").glob("*1")
    names = {name.partition(".")[0] for name in read_metadata(newest).tensors}
    assert names == {"adapter", "optimizer"}


@pytest.fixture
def replaceable(tmp_path: Path) -> Path:
    """A model whose weights may be written over."""
    return Path(shutil.copytree(model_folder(), tmp_path / "model"))


def retrain_one_tensor(model: Path) -> None:
    """Change the numbers of one tensor; its file stays as long, with the same header."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layers.1.self_attn.q_proj.weight"))
    tensors[name] = tensors[name] * 1.01
    save_file(tensors, file, metadata={"format": "pt"})


def files_of(folder: Path) -> dict[Path, bytes]:
    return {each: each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_a_run_does_not_go_on_beside_other_weights_and_writes_nothing(
    tmp_path: Path, replaceable: Path
) -> None:
    given: dict[str, Any] = {"model": str(replaceable)}
    run_rl(of_model(tmp_path / "run", steps=1, **given))
    before = files_of(tmp_path / "run")
    retrain_one_tensor(replaceable)
    with pytest.raises(InputError, match=r"model: .* holds other weights .*: put its weights back"):
        run_rl(of_model(tmp_path / "run", steps=2, **given))
    assert files_of(tmp_path / "run") == before


def test_a_run_goes_on_beside_the_same_weights_in_other_files(
    tmp_path: Path, replaceable: Path
) -> None:
    given: dict[str, Any] = {"model": str(replaceable)}
    run_rl(of_model(tmp_path / "run", steps=1, **given))
    file = replaceable / "model.safetensors"
    tensors = load_file(file)
    homes = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for home in set(homes.values()):
        its = {name: one for name, one in tensors.items() if homes[name] == home}
        save_file(its, replaceable / home, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": homes}
    (replaceable / "model.safetensors.index.json").write_text(json.dumps(index))
    file.unlink()
    outcome = run_rl(of_model(tmp_path / "run", steps=2, **given))
    assert [row["step"] for row in outcome.step_metrics] == [2]


def test_a_run_goes_on_that_was_begun_before_its_weights_were_told_apart(
    tmp_path: Path, replaceable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"model": str(replaceable)}
    with monkeypatch.context() as older:
        older.setattr(run_state, "compute_base_fingerprint", lambda _: "")
        run_rl(of_model(tmp_path / "run", steps=1, **given))
    assert len(run_rl(of_model(tmp_path / "run", steps=2, **given)).step_metrics) == 1
    retrain_one_tensor(replaceable)
    with pytest.raises(InputError, match="holds other weights"):  # known from then on
        run_rl(of_model(tmp_path / "run", steps=3, **given))


def test_kl_is_taken_to_the_weights_beside_the_adapter_without_a_copy_of_them() -> None:
    given = of_model()
    keeping = RLRunState(given, lambda _: None)
    trainer = RLTrainer(given, load_task(given), keeping)
    trainer.resume_or_initialize()
    assert trainer.adapter is not None
    for name, each in trainer.adapter.named_parameters():
        if "lora_B" in name:
            each.data.normal_(std=0.1)
    tokens = torch.arange(12).view(2, 6) % 10
    rows = RolloutMicrobatch(
        rollout_indices=torch.arange(2),
        input_ids=tokens,
        targets=tokens.roll(-1, 1),
        sampler_logprobs=torch.zeros(2, 6),
        loss_tokens=padded_tokens(torch.ones(2, 6, dtype=torch.bool)),
    )
    base: Decoder = load_hf_checkpoint(None, model_folder(), dtype=torch.float32)
    referring = trainer._referring()
    assert callable(referring)
    assert torch.equal(referring([rows])[0], compute_policy_logprobs(base, rows))
    assert not torch.equal(
        compute_policy_logprobs(trainer.decoder, rows), compute_policy_logprobs(base, rows)
    )
    moments = 2 * 4 * sum(each.numel() for each in trainer.adapter.parameters())
    assert trainer.offloadable_bytes == moments, "neither a reference nor states of frozen weights"
    keeping.close()


def answers(llm: LLM, adapter: str | None = None) -> list[tuple[int, ...]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [(12, 3, 1, 10), (4, 4, 9), (1, 2, 3, 4, 5)]
    asks = [
        Request(prompt_token_ids=each, sampling_params=greedy, lora_name=adapter)
        for each in prompts
    ]
    return [each.outputs[0].token_ids for each in llm.run_requests(asks)]


@pytest.fixture(scope="module", params=[False, True], ids=["lora", "dora"])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, RLResult]:
    """A run that began with a model, and how it ended."""
    folder = tmp_path_factory.mktemp("loop") / "run"
    own = AdapterConfig(rank=RANK, dora=request.param)
    return folder, run_rl(of_model(folder, adapter=own))


def test_the_adapter_lies_in_the_runs_folder_as_it_is_exported(
    trained: tuple[Path, RLResult], tmp_path: Path, capsys: Captured
) -> None:
    folder, outcome = trained
    assert main(["convert", str(folder), str(tmp_path / "out"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["step"], answer["dtype"]) == (3, "float32")
    assert outcome.adapter is not None
    wanted = dict(outcome.adapter.named_parameters())
    for place in (folder / "adapter", tmp_path / "out"):
        decoder = load_hf_checkpoint(None, model_folder(), dtype=torch.float32)
        found = dict(load_adapter(decoder, place).named_parameters())
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_engine_answers_with_the_exported_adapter_as_with_the_merged_model(
    trained: tuple[Path, RLResult], tmp_path: Path
) -> None:
    folder, outcome = trained
    assert main(["convert", str(folder), str(tmp_path / "merged"), "--merge-adapter", "-q"]) == 0
    given: dict[str, Any] = {"device": "cpu", "dtype": "fp32"}
    served = LLM(model_folder(), lora_modules={"own": str(folder / "adapter")}, **given)
    mine = answers(served, "own")
    assert mine == answers(LLM(tmp_path / "merged", **given))
    assert mine != answers(served), "the adapter does something"
    prompt = (12, 3, 1, 10)
    ids = torch.tensor([[*prompt, *mine[0]]])
    with torch.no_grad():
        picked = outcome.decoder(ids)[0].argmax(-1)[len(prompt) - 1 : -1]
    assert tuple(picked.tolist()) == mine[0], "as the trainer would answer"


def test_peft_opens_it(trained: tuple[Path, RLResult]) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    folder, outcome = trained
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, folder / "adapter")
    tokens = torch.tensor([[12, 3, 1, 10]])
    with torch.no_grad():
        ours = outcome.decoder(tokens)
        torch.testing.assert_close(theirs(tokens).logits, ours, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_average_of_an_adapter_is_exported(precision: Any, tmp_path: Path) -> None:
    averaged = OptimizerConfig(
        lr=3e-2, schedule="constant", warmup_steps=0, weight_decay=0.0, ema_decay=0.5,
        ema_dtype=precision,
    )  # fmt: skip
    outcome = run_rl(of_model(tmp_path / "run", optimizer=averaged))
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--ema", "-q"]) == 0
    decoder = load_hf_checkpoint(None, model_folder(), dtype=torch.float32)
    mean = dict(load_adapter(decoder, tmp_path / "out").named_parameters())
    assert outcome.adapter is not None
    for name, each in outcome.adapter.named_parameters():
        if "lora_B" in name:
            assert 0 < mean[name].norm() < each.norm(), "it lags behind from nought"


def test_what_is_recorded_trains_an_adapter_to_the_same_bits(tmp_path: Path) -> None:
    recorded = run_rl(of_model(tmp_path / "run"))
    replayed = run_rl(of_model(replay=str(tmp_path / "run" / "rollouts.jsonl")))
    assert same(recorded, replayed)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"adapter": AdapterConfig(dropout=0.1)}, "adapter.dropout: the engine drew with all"),
        ({"layout": Layout(dp=2)}, "layout: an adapter is trained on one device"),
        (
            {"workers": WorkerConfig(num_workers=1, tensor_parallel_size=2)},
            "workers.tensor_parallel_size: .* on one device",
        ),
        (
            {"adapter": AdapterConfig(dora=True), "engine_weights": "fp8"},
            "adapter.dora: the lengths of rows in fp8",
        ),
        ({"model": "some/folder"}, "warm_up.steps: it would train the model's own weights"),
    ],
)
def test_what_an_adapter_does_not_go_with_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        adapted(**given)
    # All of them go where every weight is trained, or without an adapter's own settings.
    if "adapter" not in given:
        settings(**given)


def test_each_target_names_a_layer_before_anything_is_kept(tmp_path: Path) -> None:
    wrong = AdapterConfig(target_modules=("q_proj", "v_prj"))
    with pytest.raises(InputError, match=r"adapter.target_modules: 'v_prj' names no linear layer"):
        run_rl(adapted(adapter=wrong, folder=str(tmp_path / "run")))
    assert not list((tmp_path / "run").glob("checkpoints/*step*")), "others may take its place"


def test_the_command_line_trains_an_adapter_and_says_what_to_do_with_it(
    tmp_path: Path, capsys: Captured
) -> None:
    words = [
        "steps=1",
        "prompts_per_step=2",
        "group_size=2",
        "threads=1",
        "task.name=sorting-digits",
    ]
    words += [
        "adapter.rank=2",
        "adapter.target_modules=q_proj,v_proj",
        "--output-dir",
        str(tmp_path / "run"),
    ]
    assert main(["train", "--recipe", "grpo", str(model_folder()), *words]) == 0
    told = capsys.readouterr().err
    assert f"--lora-modules own={tmp_path / 'run' / 'adapter'}" in told
    assert "--merge-adapter writes the model with the adapter in it" in told
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (2, ["q_proj", "v_proj"])
    optimizer = load_data(tmp_path / "run" / "config.toml")["optimizer"]
    assert optimizer["lr"] == pytest.approx(1e-5), "ten times that of all weights"
