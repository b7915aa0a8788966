"""The environments that settings name, for training and held out."""

import shlex
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.prompt_task.reward_config import ModelReward
from meshwright.run.posttrain.prompt_task.task_config import LONGEST
from meshwright.run.posttrain.rl.config.rl_config import DIGITS, QUESTIONS, RLConfig
from meshwright.run.posttrain.rollout.environment import DatasetPart, Environment
from meshwright.run.posttrain.rollout.rollout_config import RolloutConfig
from meshwright.run.posttrain.rollout.sorting_task.sorting_digits import SortingDigits
from meshwright.run.posttrain.rollout.verifiers.verifier_job import VerifierLimits
from meshwright.spec.field_checks import raise_problems

if TYPE_CHECKING:
    from meshwright.run.serve.tokenizer.tokenizer import Tokenizer

_NEEDED = ("name", "verifiers", "may_block", "reset")
"""What every environment has."""


class TaskEnvironments(NamedTuple):
    """What is trained on, and what is kept from training."""

    train: Environment
    held_out: Environment
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    vocab_size: int | None
    """Words of the task; None where the model brings its own."""
    runs_programs: bool = False
    """Whether verifiers run what the model wrote."""
    notes: tuple[str, ...] = ()
    """What is worth a line of what was read."""

    def get_verifier_limits(self, settings: RLConfig) -> VerifierLimits:
        """Return what verifiers may take: programs of a model have a process each."""
        given = settings.verifier
        if not self.runs_programs or given.checks_per_process:
            return given
        return msgspec.structs.replace(given, checks_per_process=1)

    def build_rollout_config(self, settings: RLConfig) -> RolloutConfig:
        """Return how rollouts are drawn in training."""
        return RolloutConfig(
            seed=settings.seed,
            group_size=settings.group_size,
            max_tokens=self.max_tokens,
            max_turns=settings.max_turns,
            stop_token_ids=self.stop_token_ids,
            environment_timeout_s=settings.environment_timeout_s,
        )


def load_task(settings: RLConfig) -> TaskEnvironments:
    """Return the task that settings name."""
    task = settings.task
    raise_problems(task.problems())
    if settings.model:
        require_huggingface_folder(settings.model)
    if task.name == DIGITS:
        # Each run has training prompts of its own; all are judged by the same held-out ones.
        asked: dict[str, Any] = {
            "digits": task.digits, "longest": task.longest, "reward": task.reward
        }  # fmt: skip
        train = SortingDigits(**asked, seed=settings.seed)
        held_out = SortingDigits(**asked, part="held-out")
        words = train.words
        longest = settings.max_tokens or train.max_tokens
        room = settings.network.max_positions
        needed = len(train.build_prompt((0,) * train.longest)) + longest
        if not settings.model and needed > room:
            what = f"{room}, but the longest list with its answer has {needed} tokens"
            raise InputError([Problem("network.max_positions", what, f"use {needed} or more")])
        return TaskEnvironments(train, held_out, longest, (words.end,), words.vocab)
    if task.name == QUESTIONS:
        return _questions(settings)
    make = _function(task.name)
    parts: tuple[DatasetPart, ...] = get_args(DatasetPart)
    own = [_made(make, task.name, part, task.options) for part in parts]
    return TaskEnvironments(
        own[0],
        own[1],
        settings.max_tokens or int(getattr(own[0], "max_tokens", LONGEST)),
        tuple(getattr(own[0], "stop_token_ids", ())),
        getattr(own[0], "vocab_size", None),
    )


def require_huggingface_folder(model: str) -> None:
    """Refuse what is no Hugging Face folder, which is what a run can begin with."""
    path = Path(model)
    if (path / "config.json").is_file():
        return
    what, fix = f"there is no {model}", "give a Hugging Face folder"
    if path.suffix == ".gguf" and path.is_file():
        what = f"{model} is a GGUF file, and reinforcement learning begins with a folder"
        fix = f"make one of it: {shlex.join(['mw', 'convert', model, path.stem])} --dtype fp32"
    elif path.exists():
        what = f"{model} holds no config.json, so it is no Hugging Face model"
    raise InputError([Problem("model", what, fix)])


def _questions(settings: RLConfig) -> TaskEnvironments:
    """Return prompts of files, for the model that is trained."""
    from meshwright.run.posttrain.prompt_task.prompt_environment import PromptEnvironment
    from meshwright.run.posttrain.prompt_task.prompt_files import read_prompt_splits
    from meshwright.run.posttrain.rl.rendezvous import read_process_world
    from meshwright.run.serve.tokenizer.tokenizer import load_tokenizer
    from meshwright.spec.model.huggingface import load_config

    task = settings.task
    if not settings.model:
        what = f"{QUESTIONS} are texts, and a network from random weights has no tokenizer"
        raise InputError([Problem("model", what, "give a Hugging Face folder")])
    words, model = load_tokenizer(settings.model), load_config(settings.model)
    longest = settings.max_tokens or LONGEST
    room = model.max_positions - longest
    if room < 1:
        what = f"{longest} leave no room for a prompt in a context of {model.max_positions}"
        raise InputError([Problem("max_tokens", what, f"use {model.max_positions // 2} or fewer")])
    room = min(room, task.max_prompt_tokens or room)
    parts = read_prompt_splits(task, words, room=room)
    every = (*parts.train, *parts.held_out)
    most = longest + max(len(each.token_ids) + len(each.template_suffix) for each in every)
    highest = max(max(each.token_ids) for each in every)
    if highest >= model.vocab:
        what = f"its tokenizer writes token {highest:,}, and the model has {model.vocab:,}"
        raise InputError([Problem("model", what, "give it the tokenizer that belongs to it")])
    # The first rank scores for all, and who replays has scores: others need no reward models.
    scores = not settings.replay and read_process_world().rank == 0
    for place, reward in enumerate(task.rewards if scores else ()):
        if isinstance(reward, ModelReward):
            _check_reward(f"task.rewards[{place}]", reward, words, most)
    asked = settings.evaluate.num_prompts
    if asked > len(parts.held_out) and not settings.replay:
        what = f"{asked:,} are more than the {len(parts.held_out):,} prompts that are held out"
        raise InputError([Problem("evaluate.num_prompts", what, f"use {len(parts.held_out)}")])
    rewards, digest = task.question_rewards, parts.digest
    seed = settings.seed if task.shuffle else None
    train = PromptEnvironment(parts.train, rewards, words, digest=digest, seed=seed)
    held_out = PromptEnvironment(parts.held_out, rewards, words, digest=digest, part="held-out")
    programs = train.runs_programs or held_out.runs_programs
    ends = tuple(sorted(words.eos_token_ids))
    return TaskEnvironments(train, held_out, longest, ends, None, programs, parts.notes)


def _check_reward(where: str, reward: ModelReward, tokenizer: "Tokenizer", longest: int) -> None:
    from meshwright.run.posttrain.prompt_task.reward_scorer import find_reward_model_problems

    found = find_reward_model_problems(reward, tokenizer, longest)
    raise_problems(each._replace(where=f"{where}.{each.where}") for each in found)


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(import_module(module), function)
    except Exception as error:
        fix = (
            "name it as module:function, at the top level of a module on the path; "
            "PYTHONPATH=. mw train … finds modules of this folder"
        )
        raise InputError(
            [Problem("task.name", f"cannot be loaded: {_told(error)}", fix)]
        ) from error
    return found


def _made(
    make: Callable[..., Any], name: str, part: str, options: Mapping[str, Any]
) -> Environment:
    """Call somebody's function; what goes wrong in it, or is missing, is told as theirs."""
    try:
        made: Environment = make(part=part, **options)
    except Exception as error:
        fix = "see to the function, or to task.options, which it is called with"
        raise InputError([Problem("task.name", f"{name} failed: {_told(error)}", fix)]) from error
    missing = [each for each in _NEEDED if not hasattr(made, each)]
    if missing:
        what = f"what {name} returns has no {', '.join(missing)}"
        fix = f"an environment has {', '.join(_NEEDED)}"
        raise InputError([Problem("task.name", what, fix)])
    return made


def _told(error: Exception) -> str:
    """Return an error in words, with the line of somebody's file that it comes from."""
    last = extract_tb(error.__traceback__)[-1]
    ours = last.filename == __file__ or last.filename.startswith("<")
    where = "" if ours else f" ({last.filename}:{last.lineno})"
    return f"{type(error).__name__}: {error}{where}"
