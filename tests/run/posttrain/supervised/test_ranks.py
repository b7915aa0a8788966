"""Recipes are learnt over several ranks as on one device, or refused before anything runs.

The cells of the table in the guide on supervised recipes are those of `CELLS` and `REFUSED`.
"""

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from meshwright.run.nn.linear.fp8_conversion import apply_precision
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.zero.bucket_shard import BucketShard
from meshwright.run.posttrain.supervised import open_recipe, parse_recipe
from meshwright.run.posttrain.supervised.example_index import list_example_ids
from meshwright.run.posttrain.supervised.recipe_export import export_recipe
from meshwright.run.train.evaluation import compute_eval_loss
from meshwright.run.train.loop import train
from meshwright.run.train.run_folder.run_folder import write_config
from meshwright.run.train.trainer import Trainer
from tests.run.posttrain.supervised.tiny import (
    LENGTH,
    RECORDS,
    chats,
    deep,
    dense,
    model_folder,
    recipe_data,
    sparse,
    uneven_verdicts,
    write,
)
from tests.run.train.tiny import rows_of

WHOLE = ("sft", "dpo", "ipo", "kto", "reward", "distillation")
"""Recipes that train every weight."""
BESIDE = ("lora", "dora", "dpo+", "ipo+", "kto+", "reward+", "distillation+")
"""Recipes that train an adapter; with `~` it leaves out inputs by chance."""


class Cells(NamedTuple):
    """What is tested under one layout."""

    ranks: int
    layout: dict[str, Any]
    recipes: tuple[str, ...]


CELLS = {
    "replicas": Cells(2, {"dp": 2}, (*WHOLE, *BESIDE)),
    "zero 1": Cells(2, {"dp": 2, "zero": 1}, WHOLE),
    "zero 2": Cells(2, {"dp": 2, "zero": 2}, WHOLE),
    "zero 3": Cells(2, {"dp": 2, "zero": 3}, (*WHOLE, *BESIDE)),
    "zero 3 and stages": Cells(4, {"dp": 2, "pp": 2, "zero": 3}, ("dora", "kto+")),
    "tensors": Cells(2, {"tp": 2}, (*WHOLE, *BESIDE, "lora~", "dora~")),
    "tensors and tokens": Cells(
        2, {"tp": 2, "sequence_parallel": True}, (*WHOLE, *BESIDE, "lora~")
    ),
    "stages": Cells(2, {"pp": 2}, (*WHOLE, *BESIDE)),
    "mirrored stages": Cells(2, {"pp": 2, "schedule": "dualpipe"}, ("sft", "lora", "dpo", "kto+")),
    "context": Cells(2, {"cp": 2}, (*WHOLE, *BESIDE)),
    "context, heads traded": Cells(2, {"cp": 2, "cp_kind": "ulysses"}, ("lora", "dpo", "kto+")),
    "tensors and stages": Cells(
        4, {"tp": 2, "pp": 2, "sequence_parallel": True}, (*WHOLE, *BESIDE)
    ),
    "tensors and context": Cells(
        4, {"tp": 2, "cp": 2, "sequence_parallel": True}, ("dora", "dpo+", "kto", "reward")
    ),
    "tensors and replicas": Cells(4, {"tp": 2, "dp": 2, "zero": 3}, ("dora", "dpo+", "kto")),
}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    *(
        (kind, {"dp": 2, "zero": zero}, {"rank": 4}, "layout.zero")
        for kind in ("lora", "dora", "dpo", "ipo", "kto", "reward", "distillation")
        for zero in (1, 2)
    ),
    ("lora", {"tp": 2, "sequence_parallel": True, "overlap_tp": True}, {"rank": 4},
     "layout.overlap_tp"),
    ("lora", {"pp": 2}, {"rank": 4, "dropout": 0.1}, "adapter.dropout"),
    ("dora", {"cp": 2}, {"rank": 4, "dropout": 0.1}, "adapter.dropout"),
    (
        "lora", {"pp": 2}, {"rank": 4, "target_modules": r".*\.0\..*q_proj"},
        "adapter.target_modules",
    ),
    ("lora", {"tp": 2, "optimizer": "muon"}, {"rank": 4}, "layout.optimizer"),
    ("lora", {"precision": "fp16"}, {"rank": 4}, "layout.precision"),
]  # fmt: skip


def data_of(name: str, folder: Path, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a recipe's job; `+` says that it trains an adapter."""
    kind = name.removesuffix("+").removesuffix("~")
    folder.mkdir(exist_ok=True)
    source = write(folder / f"{kind}.jsonl", RECORDS.get(kind, chats)())
    changes: dict[str, Any] = {"workload": {"global_batch": 4}, "optimizer": {"lr": 0.001}}
    changes |= {"adapter": {"rank": 4}} if name.endswith("+") else {}
    changes |= {"adapter": {"dropout": 0.3}} if name.endswith("~") else {}
    return recipe_data(kind, source, changes | ({} if layout is None else {"layout": layout}))


def figures(data: dict[str, Any], folder: Path) -> list[float]:
    """Train some steps and evaluate."""
    task, job = open_recipe(parse_recipe(data))
    mesh = Mesh(job.layout) if job.layout.gpus > 1 else None
    trainer, found = Trainer(job, folder, mesh, task=task), []
    for step in range(3):
        losses = trainer.train_step.forward_backward(trainer.train_dataset.get_batch(step))
        report = trainer.train_step.update(losses, step).optimizer_report
        found += [float(losses.mean_loss), float(report.grad_norm), float(losses.tokens)]
        seen = [float(one) for one in losses.metrics.values()]
        found += seen if step else []  # all gain nought at first, but for rounding
    assert trainer.eval_dataset is not None
    held = compute_eval_loss(
        trainer.train_step, trainer.eval_dataset, sequences=5, device=torch.device("cpu")
    )
    trainer.close()
    return [*found, held, *(float(one) for one in trainer.objective.pop_metrics().values())]


def all_figures(recipes: dict[str, dict[str, Any]], folder: Path) -> dict[str, list[float]]:
    return {name: figures(data, folder / name) for name, data in recipes.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("alone")
    names = dict.fromkeys(name for cells in CELLS.values() for name in cells.recipes)
    return all_figures({name: data_of(name, folder) for name in names}, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_ranks_come_to_the_figures_of_one_device(
    name: str, alone: dict[str, list[float]], tmp_path: Path
) -> None:
    ranks, layout, recipes = CELLS[name]
    given = {each: data_of(each, tmp_path, layout) for each in recipes}
    for found in spawn_ranks(ranks, all_figures, given, tmp_path / "runs", timeout_s=600):
        for each in recipes:
            assert found[each] == pytest.approx(alone[each], rel=2e-4, abs=2e-5), each


def most_held(data: dict[str, Any], folder: Path) -> tuple[int, int, int]:
    """Train a step; return the bytes of all frozen weights, the most held at once, and those after.

    Of the second and third, what a rank keeps as its part is left out.
    """
    task, job = open_recipe(parse_recipe(data))
    trainer, held = Trainer(job, folder, Mesh(job.layout), task=task), [0]
    weights = [one for one in trainer.decoder.parameters() if not one.requires_grad]
    every = sum(one.numel() * one.element_size() for one in weights)

    def here() -> int:
        storages = (one.untyped_storage() for one in weights)
        return sum({one._cdata: one.nbytes() for one in storages}.values())

    def counted(shard: BucketShard, whole: Any = BucketShard.wait_for_unshard) -> None:
        whole(shard)
        held.append(here())

    with mock.patch.object(BucketShard, "wait_for_unshard", counted):
        trainer.train_step(trainer.train_dataset.get_batch(0), 0)
    trainer.close()
    return every, max(held), here()


@pytest.mark.slow
def test_frozen_weights_are_whole_only_while_they_are_used(tmp_path: Path) -> None:
    layout = {"dp": 2, "zero": 3}
    data = data_of("lora", tmp_path, layout) | {"initial_load_path": str(model_folder(deep))}
    for every, most, after in spawn_ranks(2, most_held, data, tmp_path / "run"):
        assert after == 0
        # The head, and of eight layers the last, the one at work and one on its way.
        assert 0 < most < 0.6 * every


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"dp": 2, "ep": 2}, {"tp": 2}], ids=["experts", "tensors"])
def test_models_of_experts_come_to_the_figures_of_one_device(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    recipes, base = ("lora", "dpo", "kto+"), {"initial_load_path": str(model_folder(sparse))}
    one = all_figures({name: data_of(name, tmp_path) | base for name in recipes}, tmp_path / "one")
    given = {name: data_of(name, tmp_path, layout) | base for name in recipes}
    for found in spawn_ranks(2, all_figures, given, tmp_path / "runs", timeout_s=600):
        for name in recipes:
            assert found[name] == pytest.approx(one[name], rel=2e-4, abs=2e-4), name


def runs_before_steps(data: dict[str, Any], replica: int) -> list[int]:
    """Return how many rows one of two replicas goes through before each step of KTO."""
    task, job = open_recipe(parse_recipe(data))
    batches = task.train_dataset(job, rank=replica, world=2)
    strangers = [
        [task.mismatched_ids[n] for n in list_example_ids(batches.get_batch(step))]
        for step in range(3)
    ]
    return [len(list(task.example_index.group_by_tokens(numbers, LENGTH))) for numbers in strangers]


@pytest.mark.parametrize(
    ("ranks", "layout", "model"),
    [
        (2, {"dp": 2, "zero": 3}, dense),
        (2, {"dp": 2, "ep": 2}, sparse),
        pytest.param(4, {"dp": 2, "tp": 2, "expert_tp": 4}, sparse, marks=pytest.mark.slow),
    ],
    ids=["zero 3", "experts", "parts of experts"],
)
def test_replicas_whose_answers_differ_in_length_meet_in_every_forward_pass(
    ranks: int, layout: dict[str, Any], model: Any, tmp_path: Path
) -> None:
    source = write(tmp_path / "uneven.jsonl", uneven_verdicts())
    more = {"initial_load_path": str(model_folder(model)), "data": {"sources": [str(source)],
            "validation_fraction": 0.1}}  # fmt: skip
    alone = data_of("kto", tmp_path) | more
    first, second = (runs_before_steps(alone, replica) for replica in range(2))
    assert first[0] > second[0] + 1
    wanted = figures(alone, tmp_path / "alone")
    for found in spawn_ranks(
        ranks, figures, data_of("kto", tmp_path, layout) | more, tmp_path / "runs"
    ):
        assert found == pytest.approx(wanted, rel=2e-4, abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8-rowwise", "fp8-tensorwise"])
def test_narrower_formats_come_near_float32(
    precision: str, alone: dict[str, list[float]], tmp_path: Path
) -> None:
    recipes = WHOLE if precision == "fp16" else (*WHOLE, *BESIDE)
    layouts: list[dict[str, Any]] = [{"precision": precision}, {"precision": precision, "tp": 2}]
    given, spread = ({name: data_of(name, tmp_path, each) for name in recipes} for each in layouts)
    for data in (*given.values(), *spread.values()):
        data["optimizer"] |= {
            "grad_scaler": {"init_scale": 1.0}
        }  # gradients of so small a model are large
    one = small_products_too(given, tmp_path / "one")
    ranks = spawn_ranks(2, small_products_too, spread, tmp_path / "ranks", timeout_s=600)
    for name in recipes:
        for found in (one, *ranks):  # loss and gradients of the first step
            assert found[name][:2] == pytest.approx(alone[name][:2], rel=4e-2), name


def small_products_too(recipes: dict[str, dict[str, Any]], folder: Path) -> dict[str, list[float]]:
    """Train with products in fp8 that are too small to gain by it."""
    with mock.patch.dict(apply_precision.__kwdefaults__, {"smallest": 0}):
        return all_figures(recipes, folder)


@pytest.mark.parametrize(("kind", "layout", "adapter", "where"), REFUSED)
def test_what_cannot_run_is_refused_at_once(
    kind: str, layout: dict[str, Any], adapter: dict[str, Any], where: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "records.jsonl", RECORDS.get(kind, chats)())
    changes = {"layout": layout} | ({"adapter": adapter} if adapter else {})
    job = parse_recipe(recipe_data(kind, source, changes))
    found = {problem.where: problem for problem in job.check()}
    assert list(found) == [where]
    assert found[where].fix


def test_a_gguf_file_is_refused_where_ranks_share_the_model(tmp_path: Path) -> None:
    task, job = open_recipe(parse_recipe(data_of("sft", tmp_path)))
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(60))
    given: dict[str, Any] = {"initial_load_path": str(tmp_path / "m.gguf")}
    alone = replace(job, **given)
    assert task.problems(alone) == []
    shared = replace(job, layout=replace(job.layout, tp=2), **given)
    assert [problem.where for problem in task.problems(shared)] == ["initial_load_path"]


def begun(data: dict[str, Any], folder: Path) -> None:
    """Train two steps and save; then end as a finished run does."""
    folder.mkdir(parents=True, exist_ok=True)
    task, job = open_recipe(parse_recipe(data))
    mesh = Mesh(job.layout) if job.layout.gpus > 1 else None
    trainer = Trainer(job, folder, mesh, task=task)
    for step in range(2):
        trainer.train_step(trainer.train_dataset.get_batch(step), step)
        trainer.step_number = step + 1
    trainer.save()
    if trainer.is_rank_zero:
        write_config(job, folder)
    trainer.objective.save_final(folder, speaks=trainer.is_rank_zero)
    trainer.close()


def all_begun(recipes: dict[str, dict[str, Any]], folder: Path) -> None:
    for name, data in recipes.items():
        begun(data, folder / name)


@pytest.mark.slow
def test_what_ranks_learnt_is_written_whole_and_goes_on_elsewhere(tmp_path: Path) -> None:
    layout, recipes = {"tp": 2, "pp": 2}, ("dora", "reward+", "kto")
    given = {name: data_of(name, tmp_path, layout) for name in recipes}
    spawn_ranks(4, all_begun, given, tmp_path / "ranks", timeout_s=600)
    all_begun({name: data_of(name, tmp_path) for name in recipes}, tmp_path / "alone")
    for name in ("dora", "reward+"):
        ranks, alone = tmp_path / "ranks" / name, tmp_path / "alone" / name
        export_recipe(ranks, tmp_path / "exported" / name)
        files = ["adapter_config.json", "adapter_model.safetensors"]
        files += ["reward_head.safetensors"] if name == "reward+" else []
        for file in files:
            written = (ranks / "adapter" / file).read_bytes()
            assert written == (tmp_path / "exported" / name / file).read_bytes()
            if file.endswith(".json"):
                assert written == (alone / "adapter" / file).read_bytes()
                continue
            one, other = load_file(ranks / "adapter" / file), load_file(alone / "adapter" / file)
            assert one.keys() == other.keys()
            for key, value in other.items():
                torch.testing.assert_close(one[key], value, rtol=1e-3, atol=2e-5)
    for name in recipes:  # one device goes on where four ranks stopped
        task, job = open_recipe(parse_recipe(data_of(name, tmp_path)))
        given_on: dict[str, Any] = {"task": task, "environment": {}, "stop_at_step": 4}
        with pytest.warns(UserWarning, match="a different layout"):
            train(job, tmp_path / "ranks" / name, **given_on)
        train(job, tmp_path / "alone" / name, **given_on)
        mine, wanted = rows_of(tmp_path / "ranks" / name), rows_of(tmp_path / "alone" / name)
        assert list(mine) == list(wanted) == [3, 4]
        assert list(mine.values()) == pytest.approx(list(wanted.values()), rel=2e-4)
