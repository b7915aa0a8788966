"""A run of `mw train --recipe grpo` as the simulation sees it: its settings, or the run itself."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from meshwright.cli.flags.recipe_work import adapter_to_data
from meshwright.cli.result import TableView, make_table
from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.policy.rollout import Placement
from meshwright.predict.rl.rl_metrics import RLMetrics
from meshwright.spec.file_formats import FORMATS, load_data
from meshwright.spec.job_spec import read_model
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.scheduler_config import SchedulerConfig
from meshwright.spec.serialization import decode, encode
from meshwright.spec.units import format_seconds
from meshwright.spec.workload import LoRASpec, fit_empirical_length

if TYPE_CHECKING:
    from meshwright.run.posttrain.rl.config.rl_config import RLConfig
    from meshwright.run.posttrain.rl.task_loader import TaskEnvironments

PRESETS = ("sorting-digits",)
_LYING = {"model", "layout"}
_LOOKED_AT = 512
"""Prompts of a task whose lengths are counted."""


class RLRunDescription(NamedTuple):
    """What a run does in every step."""

    model: Model
    placement: Placement
    max_staleness: int
    precision: Literal["fp32", "bf16"] | None
    """Of weights, where it is said."""
    engine_weights: Literal["none", "fp8"]
    """What engines keep matrices in."""
    rollout_parameters: dict[str, Any]
    """Fields of `RolloutBatch`."""
    limits: SchedulerConfig
    """Of one engine."""
    engines: int
    """Engines on devices of their own; 0 draws on the trainer's."""
    engine_tp: int
    layout: Layout
    """Of the trainer."""
    measured_steps: tuple[Mapping[str, Any], ...]
    """What each step of a run told; none where it was not run yet."""
    notes: tuple[str, ...]


def is_rl_run(word: str) -> bool:
    """Tell whether a word names a loop: a task, a file of settings, or a run's folder."""
    path = Path(word)
    if word in PRESETS or (path / "rollouts.jsonl").is_file():
        return True
    if path.is_dir():  # a run that only trains has no rollouts of its own
        path /= "config.toml"
    if path.suffix not in FORMATS or not path.is_file():
        return False
    from meshwright.run.posttrain.rl.config.rl_config import RLConfig

    data = load_data(path)
    recipe = data.get("recipe")
    if isinstance(recipe, dict) and recipe.get("kind") == "grpo":
        return True
    # Files of models and of jobs have fields that no loop has, but for how a model lies on GPUs.
    given = set(data)
    return bool(given) and given <= {*RLConfig.__struct_fields__} and given != _LYING


def read_rl_run(word: str) -> RLRunDescription:
    """Return what a loop does, by its settings and, where it has run, by what it drew."""
    try:
        settings = find_rl_config(word)
    except InputError as error:
        # Flags have some of the same names, and it is the file that is to be mended.
        raise InputError(_in_file(word, error.problems)) from None
    from meshwright.run.posttrain.prompt_task.task_config import LONGEST
    from meshwright.run.posttrain.rl.config.rl_config import DIGITS, QUESTIONS
    from meshwright.run.posttrain.rl.task_loader import load_task

    # To ask a task of somebody's own would run what a file names, and files come from anywhere.
    tasks = load_task(settings) if settings.task.name == DIGITS else None
    if settings.replay or settings.rollout_only:
        what = "a run that only draws, or only trains, is no loop"
        raise InputError([Problem(word, what, "leave out rollout_only and replay")])
    folder = Path(word)
    rows = _rows(folder) if folder.is_dir() else ()
    lengths, remarks = _lengths(folder, settings, tasks)
    most = settings.max_tokens if tasks is None else tasks.max_tokens
    if most is None and settings.task.name == QUESTIONS:
        most = LONGEST
    if most is not None:
        lengths["max_response_tokens"] = settings.max_turns * most
    aim = settings.objective
    return RLRunDescription(
        model=_model(folder, settings, tasks),
        placement=settings.placement,
        max_staleness=settings.max_staleness_steps,
        precision=settings.precision,
        engine_weights=settings.engine_weights,
        rollout_parameters={
            "prompts_per_step": settings.prompts_per_step,
            "group_size": settings.group_size,
            **lengths,
            "microbatch_tokens": settings.microbatch_tokens,
            "updates_per_step": aim.minibatches,
            # Ratios are to what the engine told, unless a correction computes it once more.
            "logprob_passes": (aim.importance_correction != "none") + (aim.kl_coef > 0),
            "reference": aim.kl_coef > 0,
            "adapter": _adapter(settings),
            "seed": settings.seed,
        },
        limits=settings.scheduler_config,
        engines=settings.workers.num_workers,
        engine_tp=settings.workers.tensor_parallel_size,
        layout=settings.layout,
        measured_steps=rows,
        notes=(*remarks, *_left_out(settings)),
    )


def _adapter(settings: "RLConfig") -> LoRASpec | None:
    """Return what is trained beside frozen weights, in the words of a workload."""
    if settings.adapter is None:
        return None
    return decode(LoRASpec, adapter_to_data(encode(settings.adapter)), "adapter")


def _in_file(word: str, problems: Iterable[Problem]) -> Iterator[Problem]:
    for one in problems:
        yield one if one.where.startswith(word) else one._replace(where=f"{word}: {one.where}")


def find_rl_config(word: str) -> "RLConfig":
    """Read the settings that a word names."""
    path = Path(word)
    if word in PRESETS:
        from meshwright.run.posttrain.rl import get_sorting_digits_preset

        return get_sorting_digits_preset()
    data = load_rl_config(path / "config.toml" if path.is_dir() else path)
    data.pop("recipe", None)
    return parse_rl_config(data)


def load_rl_config(path: Path) -> dict[str, Any]:
    """Read a file of settings; paths in it count from its own folder."""
    from meshwright.run.posttrain.lora.lora_config import rename_peft_fields

    data = rename_peft_fields(load_data(path))

    def beside(table: object, *names: str) -> None:
        if not isinstance(table, dict):
            return  # for whoever reads it to say
        for name in names:
            value = table.get(name)
            # What lies there goes first; a model may also be a name of the catalog.
            if isinstance(value, str) and value and (path.parent / value).exists():
                table[name] = str(path.parent / value)

    beside(data, "model", "replay")
    task = data.get("task")
    beside(task, "train", "held_out")
    rewards = task.get("rewards") if isinstance(task, dict) else None
    for reward in rewards if isinstance(rewards, list) else ():
        beside(reward, "model", "adapter")
    return data


def parse_rl_config(data: dict[str, Any]) -> "RLConfig":
    """Read settings; options of a task are anything that its function takes."""
    from meshwright.run.posttrain.lora.lora_config import rename_peft_fields
    from meshwright.run.posttrain.rl.config.rl_config import RLConfig

    data = rename_peft_fields(data)
    task = data.get("task")
    options = None
    if isinstance(task, Mapping):
        options = task.get("options")
        task = {name: value for name, value in task.items() if name != "options"}
        data = {**data, "task": task}
    settings = decode(RLConfig, data)
    if not options:
        return settings
    own = msgspec.structs.replace(settings.task, options=dict(options))
    return msgspec.structs.replace(settings, task=own)


def compare_with_run(loop: RLRunDescription, outcome: RLMetrics) -> TableView:
    """Hold a predicted step against those that a run took, the first one apart."""
    rows = loop.measured_steps[1:] or loop.measured_steps
    ours = {"step_s": outcome.step_s, "train_s": outcome.training_s, "sync_s": outcome.sync_s}
    if loop.max_staleness == 0:
        ours["generate_s"] = outcome.waits_s["trainer"].get("groups", 0.0)
    titles = {"generate_s": "draws", "train_s": "trains", "sync_s": "sends weights"}
    found = []
    for name, predicted in ours.items():
        told = [row[name] for row in rows if name in row]
        told = told or [row[name] for row in loop.measured_steps if name in row]
        if told:
            took = median(told)
            off = f"{predicted / took - 1:+.0%}" if took else ""
            seconds = format_seconds(predicted), format_seconds(took)
            found.append((titles.get(name, "the step"), *seconds, off))
    return make_table(
        "what, predicted, measured, difference",
        found,
        f"beside the run: medians of {len(rows)} steps",
        right="predicted, measured, difference",
    )


def _left_out(settings: "RLConfig") -> Iterator[str]:
    """Say what of a loop's settings no simulation knows."""
    workers = settings.workers
    if settings.overlaps and not workers.num_workers:
        yield "engine and trainer are taken to have a device each: on one they compete for it"
    if settings.layout.gpus > 1 and not (workers.num_workers or settings.overlaps):
        yield "the engine is taken to have a device of its own: it draws on the first rank's"
    if workers.num_workers and len(set(workers.devices)) < workers.num_workers:
        yield "each worker is taken to have devices of its own"
    if settings.objective.adv_estimator == "gae":
        yield "what the critic computes and keeps is not counted"
    if settings.adapter is not None:
        yield "what the adapter adds to an engine's steps is not counted"
    if settings.task.reward_models:
        yield "what reward models compute and keep is not counted"
    if settings.extra_prompts:
        yield "spare prompts are not drawn: which groups carry a signal is not known before"


def _model(folder: Path, settings: "RLConfig", tasks: "TaskEnvironments | None") -> Model:
    if settings.model:
        return read_model(settings.model, "model")
    vocab = _saved_vocab(folder) if tasks is None else tasks.vocab_size
    if vocab is None:
        what = "is not loaded to be simulated, so that its vocabulary is not known"
        fix = "name a model's folder (model), or simulate the folder of a run with a checkpoint"
        raise InputError([Problem("task.name", what, fix)])
    return settings.network.model(vocab)


def _saved_vocab(folder: Path) -> int | None:
    """Return how many words the embedding of a run has, by the record of its last checkpoint."""
    from meshwright.run.train.checkpoint.checkpoint_folder import CheckpointFolder, read_metadata
    from meshwright.run.train.checkpoint.filesystem import LocalFileSystem

    for found in reversed(CheckpointFolder(folder / "checkpoints", LocalFileSystem()).list_saved()):
        try:
            table = read_metadata(found.path).tensors.get("model.embedding.weight")
        except DamagedFile:
            continue  # an older one has the same shapes
        if table is not None and len(table.shape) == 2:
            return table.shape[0]
    return None


def _lengths(
    folder: Path, settings: "RLConfig", tasks: "TaskEnvironments | None"
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return how long prompts and answers are: those of the run, or those that the task shows."""
    if (folder / "rollouts.jsonl").is_file():
        from meshwright.run.posttrain.rollout.rollout_log import read_jsonl

        rollouts = read_jsonl(folder / "rollouts.jsonl").rollouts
        drawn = [each.sampled_token_count for each in rollouts if each.sampled_token_count]
        if drawn:
            prompts = fit_empirical_length(len(each.prompt) for each in rollouts)
            return {"prompt_lengths": prompts, "response_lengths": fit_empirical_length(drawn)}, ()
    if tasks is None:
        what = f"{settings.task.name} is not loaded: its prompts and answers are as long as"
        return {}, (f"{what} --prompt and --output say",)
    numbers = range(min(settings.prompts_per_step * settings.steps, _LOOKED_AT))
    prompt = fit_empirical_length(len(tasks.train.reset(number).prompt) for number in numbers)
    shown = getattr(tasks.train, "demonstrations", None)
    assert shown is not None, "sorting shows right answers"
    right = fit_empirical_length(len(answer) for _, answer in shown(numbers))
    return {"prompt_lengths": prompt, "response_lengths": right}, (
        "answers are taken to be as long as right ones",
    )


def _rows(folder: Path) -> tuple[Mapping[str, Any], ...]:
    from meshwright.run.train.logging.jsonl import read_rows

    path = folder / "metrics.jsonl"
    if not path.exists():
        return ()
    return tuple(row for row in read_rows(path) if "train_s" in row)
