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
from meshwright.run.nn.huggingface import load
from meshwright.run.posttrain.adapters import load_adapter
from meshwright.run.posttrain.loop import Outcome, run
from meshwright.run.posttrain.loop import keeping as keeping_module
from meshwright.run.posttrain.loop.answers import Rows
from meshwright.run.posttrain.loop.keeping import Keeping
from meshwright.run.posttrain.loop.prepare import logprobs
from meshwright.run.posttrain.loop.settings import (
    AdapterSettings,
    LoopSettings,
    NetworkSettings,
    ObjectiveSettings,
    WarmUpSettings,
)
from meshwright.run.posttrain.loop.tasks import tasks_of
from meshwright.run.posttrain.loop.trainer import LoopTrainer
from meshwright.run.posttrain.objectives.tokens import padded
from meshwright.run.posttrain.workers.settings import WorkerSettings
from meshwright.run.serve.asked import Ask, Sampling
from meshwright.run.serve.llm import LLM
from meshwright.run.train.checkpoint.folder import read_record
from meshwright.run.train.optimizer.settings import OptimizerSettings
from meshwright.spec.files import load_data
from meshwright.spec.layout import Layout
from tests.run.posttrain.loop.small import EVALUATED, settings
from tests.run.posttrain.loop.test_run import figures
from tests.run.posttrain.supervised.tiny import model_folder

Captured = pytest.CaptureFixture[str]
RANK = 4
PULLED = ObjectiveSettings(minibatches=2, kl=0.04)


def adapted(**given: Any) -> LoopSettings:
    chosen: dict[str, Any] = {"adapter": AdapterSettings(rank=RANK), "objective": PULLED}
    return settings(**chosen | given)


def of_model(folder: Path | None = None, **given: Any) -> LoopSettings:
    """Return a run that begins with a model, and moves far from it."""
    chosen: dict[str, Any] = {
        "model": str(model_folder()),
        "warm_up": WarmUpSettings(),
        "folder": "" if folder is None else str(folder),
        "optimizer": OptimizerSettings(lr=3e-2, schedule="constant", warmup_steps=0, decay=0.0),
    }
    return adapted(**chosen | given)


def learnt(outcome: Outcome) -> list[torch.Tensor]:
    """Return all that a run came to, frozen weights too."""
    assert outcome.adapter is not None
    return [*outcome.adapter.parameters(), *outcome.decoder.parameters()]


def same(one: Outcome, other: Outcome) -> bool:
    pairs = zip(learnt(one), learnt(other), strict=True)
    return all(torch.equal(mine, its) for mine, its in pairs)


@pytest.mark.parametrize(
    "kind", [{}, {"dora": True}, {"rslora": True, "targets": ("q_proj", "down_proj")}]
)
def test_both_sides_say_the_same_and_the_weights_beside_it_stay(kind: dict[str, Any]) -> None:
    outcome = run(of_model(adapter=AdapterSettings(rank=RANK, **kind)))
    assert max(row["logp_gap_max"] for row in outcome.rows) <= 1e-5
    assert outcome.rows[-1]["kl"] > 1e-4, "the policy moved"
    began = load(None, model_folder(), dtype=torch.float32)
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
        {"placement": "asynchronous", "max_staleness": 0},
        {"placement": "colocated", "evaluate": EVALUATED},
        {"workers": WorkerSettings(count=1)},
    ],
)
def test_ways_without_staleness_come_to_the_same_bits(other: dict[str, Any]) -> None:
    plain, driven = run(adapted()), run(adapted(**other))
    assert same(plain, driven)
    for one, its in zip(figures(plain.rows), figures(driven.rows), strict=True):
        assert one == {name: its[name] for name in one}


def test_workers_by_turns_take_the_frozen_weights_again() -> None:
    workers = WorkerSettings(count=2)
    turns = run(of_model(workers=workers, placement="colocated"))
    assert same(turns, run(of_model(workers=workers)))
    assert max(row["logp_gap_max"] for row in turns.rows) <= 1e-5


def test_an_engine_in_fp8_has_matrices_of_its_own_and_leaves_the_trainers_alone() -> None:
    wide = NetworkSettings(layers=1, hidden=64, heads=2, ffn=64)
    given: dict[str, Any] = {"network": wide, "precision": "bf16"}
    exact, rounded = (run(adapted(**given, engine_weights=each)) for each in ("model", "fp8"))
    assert rounded.rows[0]["logp_gap_max"] > exact.rows[0]["logp_gap_max"], "it rounds more"
    pairs = zip(exact.decoder.parameters(), rounded.decoder.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("placement", ["one-step-off", "asynchronous"])
def test_an_adapter_is_trained_while_the_engine_draws(placement: str) -> None:
    outcome = run(adapted(placement=placement, steps=4))
    assert [row["staleness_max"] for row in outcome.rows] == [0, 1, 1, 1]


def test_a_critic_learns_beside_an_adapter(tmp_path: Path) -> None:
    aim = ObjectiveSettings(advantage="gae", minibatches=2)
    outcome = run(of_model(tmp_path / "run", objective=aim))
    assert all("value_loss" in row for row in outcome.rows)
    assert same(outcome, run(of_model(tmp_path / "run", objective=aim)))


class Stops(Exception):
    """Ends a run."""


@pytest.mark.parametrize("of", [adapted, of_model], ids=["network", "model"])
def test_a_run_that_was_ended_goes_on_to_the_same_bits(
    of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"steps": 4, "checkpoint_steps": 1, "placement": "colocated"}
    whole = run(of(**given))
    step = LoopTrainer.step

    def stops(self: LoopTrainer, number: int, groups: Sequence[Any]) -> dict[str, float]:
        if number == 2:
            raise Stops
        return step(self, number, groups)

    with monkeypatch.context() as patch:
        patch.setattr(LoopTrainer, "step", stops)
        with pytest.raises(Stops):
            run(of(**given, folder=str(tmp_path / "run")))
    resumed = run(of(**given, folder=str(tmp_path / "run")))
    assert len(resumed.rows) == 2
    assert same(whole, resumed)


def test_a_checkpoint_has_the_adapter_and_not_the_folders_weights(tmp_path: Path) -> None:
    run(of_model(tmp_path / "run", steps=1))
    (newest,) = (tmp_path / "run" / "checkpoints").glob("*1")
    names = {name.partition(".")[0] for name in read_record(newest).tensors}
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
    run(of_model(tmp_path / "run", steps=1, **given))
    before = files_of(tmp_path / "run")
    retrain_one_tensor(replaceable)
    with pytest.raises(InputError, match=r"model: .* holds other weights .*: put its weights back"):
        run(of_model(tmp_path / "run", steps=2, **given))
    assert files_of(tmp_path / "run") == before


def test_a_run_goes_on_beside_the_same_weights_in_other_files(
    tmp_path: Path, replaceable: Path
) -> None:
    given: dict[str, Any] = {"model": str(replaceable)}
    run(of_model(tmp_path / "run", steps=1, **given))
    file = replaceable / "model.safetensors"
    tensors = load_file(file)
    homes = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for home in set(homes.values()):
        its = {name: one for name, one in tensors.items() if homes[name] == home}
        save_file(its, replaceable / home, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": homes}
    (replaceable / "model.safetensors.index.json").write_text(json.dumps(index))
    file.unlink()
    outcome = run(of_model(tmp_path / "run", steps=2, **given))
    assert [row["step"] for row in outcome.rows] == [2]


def test_a_run_goes_on_that_was_begun_before_its_weights_were_told_apart(
    tmp_path: Path, replaceable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"model": str(replaceable)}
    with monkeypatch.context() as older:
        older.setattr(keeping_module, "base_fingerprint", lambda _: "")
        run(of_model(tmp_path / "run", steps=1, **given))
    assert len(run(of_model(tmp_path / "run", steps=2, **given)).rows) == 1
    retrain_one_tensor(replaceable)
    with pytest.raises(InputError, match="holds other weights"):  # known from then on
        run(of_model(tmp_path / "run", steps=3, **given))


def test_kl_is_taken_to_the_weights_beside_the_adapter_without_a_copy_of_them() -> None:
    given = of_model()
    keeping = Keeping(given, lambda _: None)
    trainer = LoopTrainer(given, tasks_of(given), keeping)
    trainer.begin()
    assert trainer.adapter is not None
    for name, each in trainer.adapter.named_parameters():
        if "lora_B" in name:
            each.data.normal_(std=0.1)
    tokens = torch.arange(12).view(2, 6) % 10
    rows = Rows(
        own=torch.arange(2),
        tokens=tokens,
        targets=tokens.roll(-1, 1),
        sampled=torch.zeros(2, 6),
        counted=padded(torch.ones(2, 6, dtype=torch.bool)),
    )
    base: Decoder = load(None, model_folder(), dtype=torch.float32)
    referring = trainer._referring()
    assert callable(referring)
    assert torch.equal(referring([rows])[0], logprobs(base, rows))
    assert not torch.equal(logprobs(trainer.decoder, rows), logprobs(base, rows))
    moments = 2 * 4 * sum(each.numel() for each in trainer.adapter.parameters())
    assert trainer.held_bytes == moments, "neither a reference nor states of frozen weights"
    keeping.close()


def answers(llm: LLM, adapter: str | None = None) -> list[tuple[int, ...]]:
    greedy = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [(12, 3, 1, 10), (4, 4, 9), (1, 2, 3, 4, 5)]
    asks = [Ask(prompt=each, sampling=greedy, adapter=adapter) for each in prompts]
    return [each.choices[0].tokens for each in llm.answer(asks)]


@pytest.fixture(scope="module", params=[False, True], ids=["lora", "dora"])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Outcome]:
    """A run that began with a model, and how it ended."""
    folder = tmp_path_factory.mktemp("loop") / "run"
    own = AdapterSettings(rank=RANK, dora=request.param)
    return folder, run(of_model(folder, adapter=own))


def test_the_adapter_lies_in_the_runs_folder_as_it_is_exported(
    trained: tuple[Path, Outcome], tmp_path: Path, capsys: Captured
) -> None:
    folder, outcome = trained
    assert main(["export", str(folder), str(tmp_path / "out"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["step"], answer["format"]) == (3, "float32")
    assert outcome.adapter is not None
    wanted = dict(outcome.adapter.named_parameters())
    for place in (folder / "adapter", tmp_path / "out"):
        decoder = load(None, model_folder(), dtype=torch.float32)
        found = dict(load_adapter(decoder, place).named_parameters())
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_engine_answers_with_the_exported_adapter_as_with_the_merged_model(
    trained: tuple[Path, Outcome], tmp_path: Path
) -> None:
    folder, outcome = trained
    assert main(["export", str(folder), str(tmp_path / "merged"), "--merge", "-q"]) == 0
    given: dict[str, Any] = {"device": "cpu", "precision": "fp32"}
    served = LLM(model_folder(), adapters={"own": str(folder / "adapter")}, **given)
    mine = answers(served, "own")
    assert mine == answers(LLM(tmp_path / "merged", **given))
    assert mine != answers(served), "the adapter does something"
    prompt = (12, 3, 1, 10)
    ids = torch.tensor([[*prompt, *mine[0]]])
    with torch.no_grad():
        picked = outcome.decoder(ids)[0].argmax(-1)[len(prompt) - 1 : -1]
    assert tuple(picked.tolist()) == mine[0], "as the trainer would answer"


def test_peft_opens_it(trained: tuple[Path, Outcome]) -> None:
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
    averaged = OptimizerSettings(
        lr=3e-2, schedule="constant", warmup_steps=0, decay=0.0, average=0.5,
        average_precision=precision,
    )  # fmt: skip
    outcome = run(of_model(tmp_path / "run", optimizer=averaged))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--average", "-q"]) == 0
    decoder = load(None, model_folder(), dtype=torch.float32)
    mean = dict(load_adapter(decoder, tmp_path / "out").named_parameters())
    assert outcome.adapter is not None
    for name, each in outcome.adapter.named_parameters():
        if "lora_B" in name:
            assert 0 < mean[name].norm() < each.norm(), "it lags behind from nought"


def test_what_is_recorded_trains_an_adapter_to_the_same_bits(tmp_path: Path) -> None:
    recorded = run(of_model(tmp_path / "run"))
    replayed = run(of_model(replay=str(tmp_path / "run" / "rollouts.jsonl")))
    assert same(recorded, replayed)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"adapter": AdapterSettings(dropout=0.1)}, "adapter.dropout: the engine drew with all"),
        ({"layout": Layout(dp=2)}, "layout: an adapter is trained on one device"),
        ({"workers": WorkerSettings(count=1, tp=2)}, "workers.tp: .* on one device"),
        (
            {"adapter": AdapterSettings(dora=True), "engine_weights": "fp8"},
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
    wrong = AdapterSettings(targets=("q_proj", "v_prj"))
    with pytest.raises(InputError, match=r"adapter.targets: 'v_prj' names no linear layer"):
        run(adapted(adapter=wrong, folder=str(tmp_path / "run")))
    assert not list((tmp_path / "run").glob("checkpoints/*step*")), "others may take its place"


def test_the_command_line_trains_an_adapter_and_says_what_to_do_with_it(
    tmp_path: Path, capsys: Captured
) -> None:
    words = ["steps=1", "prompts=2", "samples=2", "threads=1", "task.name=sorting-digits"]
    words += ["adapter.rank=2", "adapter.targets=q_proj,v_proj", "--folder", str(tmp_path / "run")]
    assert main(["train", "--recipe", "grpo", str(model_folder()), *words]) == 0
    told = capsys.readouterr().err
    assert f"--adapter own={tmp_path / 'run' / 'adapter'}" in told
    assert "--merge writes the model with the adapter in it" in told
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (2, ["q_proj", "v_proj"])
    optimizer = load_data(tmp_path / "run" / "config.toml")["optimizer"]
    assert optimizer["lr"] == pytest.approx(1e-5), "ten times that of all weights"
