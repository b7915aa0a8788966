"""A run of `mw train --recipe grpo` as the simulation sees it: its settings, or the run itself."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from meshwright.cli.answer import Table, table
from meshwright.cli.recipe_work import adapter_data
from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.policy.rollout import Placement
from meshwright.predict.rl.outcome import Outcome
from meshwright.spec.files import FORMATS, load_data
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.read import plain, read
from meshwright.spec.serving import Limits
from meshwright.spec.units import format_seconds
from meshwright.spec.work import read_model
from meshwright.spec.workload import Adapter, histogram

if TYPE_CHECKING:
    from meshwright.run.posttrain.loop.settings import LoopSettings
    from meshwright.run.posttrain.loop.tasks import Tasks

PRESETS = ("sorting-digits",)
_LYING = {"model", "layout"}
_LOOKED_AT = 512
"""Prompts of a task whose lengths are counted."""


class Loop(NamedTuple):
    """What a run does in every step."""

    model: Model
    placement: Placement
    max_staleness: int
    precision: Literal["fp32", "bf16"] | None
    """Of weights, where it is said."""
    engine_weights: Literal["model", "fp8"]
    """What engines keep matrices in."""
    rounds: dict[str, Any]
    """Fields of `Rounds`."""
    limits: Limits
    """Of one engine."""
    engines: int
    """Engines on devices of their own; 0 draws on the trainer's."""
    engine_tp: int
    layout: Layout
    """Of the trainer."""
    rows: tuple[Mapping[str, Any], ...]
    """What each step of a run told; none where it was not run yet."""
    remarks: tuple[str, ...]


def names_loop(word: str) -> bool:
    """Tell whether a word names a loop: a task, a file of settings, or a run's folder."""
    path = Path(word)
    if word in PRESETS or (path / "rollouts.jsonl").is_file():
        return True
    if path.is_dir():  # a run that only trains has no rollouts of its own
        path /= "config.toml"
    if path.suffix not in FORMATS or not path.is_file():
        return False
    from meshwright.run.posttrain.loop.settings import LoopSettings

    data = load_data(path)
    recipe = data.get("recipe")
    if isinstance(recipe, dict) and recipe.get("kind") == "grpo":
        return True
    # Files of models and of jobs have fields that no loop has, but for how a model lies on GPUs.
    given = set(data)
    return bool(given) and given <= {*LoopSettings.__struct_fields__} and given != _LYING


def describe(word: str) -> Loop:
    """Return what a loop does, by its settings and, where it has run, by what it drew."""
    try:
        settings = settings_of(word)
    except InputError as error:
        # Flags have some of the same names, and it is the file that is to be mended.
        raise InputError(_in_file(word, error.problems)) from None
    from meshwright.run.posttrain.loop.settings import DIGITS, QUESTIONS
    from meshwright.run.posttrain.loop.tasks import tasks_of
    from meshwright.run.posttrain.questions.task_settings import LONGEST

    # To ask a task of somebody's own would run what a file names, and files come from anywhere.
    tasks = tasks_of(settings) if settings.task.name == DIGITS else None
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
        lengths["longest"] = settings.max_turns * most
    aim = settings.objective
    return Loop(
        model=_model(folder, settings, tasks),
        placement=settings.placement,
        max_staleness=settings.staleness,
        precision=settings.precision,
        engine_weights=settings.engine_weights,
        rounds={
            "prompts": settings.prompts,
            "samples": settings.samples,
            **lengths,
            "packed": settings.microbatch_tokens,
            "updates": aim.minibatches,
            # Ratios are to what the engine told, unless a correction computes it once more.
            "forwards": (aim.correction != "none") + (aim.kl > 0),
            "reference": aim.kl > 0,
            "adapter": _adapter(settings),
            "seed": settings.seed,
        },
        limits=settings.limits,
        engines=settings.workers.count,
        engine_tp=settings.workers.tp,
        layout=settings.layout,
        rows=rows,
        remarks=(*remarks, *_left_out(settings)),
    )


def _adapter(settings: "LoopSettings") -> Adapter | None:
    """Return what is trained beside frozen weights, in the words of a workload."""
    if settings.adapter is None:
        return None
    return read(Adapter, adapter_data(plain(settings.adapter)), "adapter")


def _in_file(word: str, problems: Iterable[Problem]) -> Iterator[Problem]:
    for one in problems:
        yield one if one.where.startswith(word) else one._replace(where=f"{word}: {one.where}")


def settings_of(word: str) -> "LoopSettings":
    """Read the settings that a word names."""
    path = Path(word)
    if word in PRESETS:
        from meshwright.run.posttrain.loop import sorting_digits

        return sorting_digits()
    data = load_loop(path / "config.toml" if path.is_dir() else path)
    data.pop("recipe", None)
    return read_settings(data)


def load_loop(path: Path) -> dict[str, Any]:
    """Read a file of settings; paths in it count from its own folder."""
    data = load_data(path)

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


def read_settings(data: dict[str, Any]) -> "LoopSettings":
    """Read settings; options of a task are anything that its function takes."""
    from meshwright.run.posttrain.loop.settings import LoopSettings

    task = data.get("task")
    options = None
    if isinstance(task, Mapping):
        options = task.get("options")
        task = {name: value for name, value in task.items() if name != "options"}
        data = {**data, "task": task}
    settings = read(LoopSettings, data)
    if not options:
        return settings
    own = msgspec.structs.replace(settings.task, options=dict(options))
    return msgspec.structs.replace(settings, task=own)


def beside_run(loop: Loop, outcome: Outcome) -> Table:
    """Hold a predicted step against those that a run took, the first one apart."""
    rows = loop.rows[1:] or loop.rows
    ours = {"step_s": outcome.step_s, "train_s": outcome.training_s, "sync_s": outcome.sync_s}
    if loop.max_staleness == 0:
        ours["generate_s"] = outcome.waits_s["trainer"].get("groups", 0.0)
    titles = {"generate_s": "draws", "train_s": "trains", "sync_s": "sends weights"}
    found = []
    for name, predicted in ours.items():
        told = [row[name] for row in rows if name in row]
        told = told or [row[name] for row in loop.rows if name in row]
        if told:
            took = median(told)
            off = f"{predicted / took - 1:+.0%}" if took else ""
            seconds = format_seconds(predicted), format_seconds(took)
            found.append((titles.get(name, "the step"), *seconds, off))
    return table(
        "what, predicted, measured, difference",
        found,
        f"beside the run: medians of {len(rows)} steps",
        right="predicted, measured, difference",
    )


def _left_out(settings: "LoopSettings") -> Iterator[str]:
    """Say what of a loop's settings no simulation knows."""
    workers = settings.workers
    if settings.overlaps and not workers.count:
        yield "engine and trainer are taken to have a device each: on one they compete for it"
    if settings.layout.gpus > 1 and not (workers.count or settings.overlaps):
        yield "the engine is taken to have a device of its own: it draws on the first rank's"
    if workers.count and len(set(workers.devices)) < workers.count:
        yield "each worker is taken to have devices of its own"
    if settings.objective.advantage == "gae":
        yield "what the critic computes and keeps is not counted"
    if settings.adapter is not None:
        yield "what the adapter adds to an engine's steps is not counted"
    if settings.task.models:
        yield "what reward models compute and keep is not counted"
    if settings.spare_prompts:
        yield "spare prompts are not drawn: which groups carry a signal is not known before"


def _model(folder: Path, settings: "LoopSettings", tasks: "Tasks | None") -> Model:
    if settings.model:
        return read_model(settings.model, "model")
    vocab = _saved_vocab(folder) if tasks is None else tasks.vocab
    if vocab is None:
        what = "is not loaded to be simulated, so that its vocabulary is not known"
        fix = "name a model's folder (model), or simulate the folder of a run with a checkpoint"
        raise InputError([Problem("task.name", what, fix)])
    return settings.network.model(vocab)


def _saved_vocab(folder: Path) -> int | None:
    """Return how many words the embedding of a run has, by the record of its last checkpoint."""
    from meshwright.run.train.checkpoint.disk import Disk
    from meshwright.run.train.checkpoint.folder import Folder, read_record

    for found in reversed(Folder(folder / "checkpoints", Disk()).found()):
        try:
            table = read_record(found.path).tensors.get("model.embedding.weight")
        except DamagedFile:
            continue  # an older one has the same shapes
        if table is not None and len(table.shape) == 2:
            return table.shape[0]
    return None


def _lengths(
    folder: Path, settings: "LoopSettings", tasks: "Tasks | None"
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return how long prompts and answers are: those of the run, or those that the task shows."""
    if (folder / "rollouts.jsonl").is_file():
        from meshwright.run.posttrain.rollouts.log import read_jsonl

        rollouts = read_jsonl(folder / "rollouts.jsonl").rollouts
        drawn = [each.drawn for each in rollouts if each.drawn]
        if drawn:
            prompts = histogram(len(each.prompt) for each in rollouts)
            return {"prompt": prompts, "output": histogram(drawn)}, ()
    if tasks is None:
        what = f"{settings.task.name} is not loaded: its prompts and answers are as long as"
        return {}, (f"{what} --prompt and --output say",)
    numbers = range(min(settings.prompts * settings.steps, _LOOKED_AT))
    prompt = histogram(len(tasks.train.reset(number).prompt) for number in numbers)
    shown = getattr(tasks.train, "shown", None)
    assert shown is not None, "sorting shows right answers"
    right = histogram(len(answer) for _, answer in shown(numbers))
    return {"prompt": prompt, "output": right}, ("answers are taken to be as long as right ones",)


def _rows(folder: Path) -> tuple[Mapping[str, Any], ...]:
    from meshwright.run.train.outputs.jsonl import read as read_lines

    path = folder / "metrics.jsonl"
    if not path.exists():
        return ()
    return tuple(row for row in read_lines(path) if "train_s" in row)
