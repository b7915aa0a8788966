"""`RecipeTask`: a recipe's data read and prepared, and who learns from them.

asked = ask_recipe("lora.toml")
task, job = open_recipe(asked.job)
train(job, Path("runs/lora"), task=task)
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.holding import Holding
from meshwright.run.nn.huggingface import load
from meshwright.run.parallel.spread import Spread
from meshwright.run.posttrain.adapters.adapter import require_targets
from meshwright.run.posttrain.data import ChatBatches, Prepared, prepare
from meshwright.run.posttrain.data.encoding import end_of
from meshwright.run.posttrain.data.mismatched import mismatched
from meshwright.run.posttrain.data.prepared import is_of
from meshwright.run.posttrain.data.records import Record, read_records
from meshwright.run.posttrain.supervised.answers import AnswerLearner
from meshwright.run.posttrain.supervised.distil import DistilLearner
from meshwright.run.posttrain.supervised.examples import Examples
from meshwright.run.posttrain.supervised.job import RecipeJob
from meshwright.run.posttrain.supervised.learner import RecipeLearner
from meshwright.run.posttrain.supervised.preference import (
    PairLearner,
    VerdictLearner,
    reference_name,
)
from meshwright.run.posttrain.supervised.reference import kept_reference
from meshwright.run.posttrain.supervised.reward import RewardLearner
from meshwright.run.posttrain.supervised.settings import WANTED, Distil, name_of
from meshwright.run.posttrain.supervised.teacher import TeacherSet, read_teacher
from meshwright.run.serve.model.gguf_file import is_gguf
from meshwright.run.serve.model.gguf_weights import fill_from_gguf
from meshwright.run.serve.model.words import load_words
from meshwright.run.train.data.batches import Batches
from meshwright.run.train.data.selection import Split
from meshwright.run.train.data.settings import as_sources
from meshwright.run.train.job import Job
from meshwright.run.train.learner import Learner
from meshwright.run.train.task import held_out_workload

_REFERRING = ("dpo", "ipo", "kto")
_ONE_DEVICE = Problem(
    "start_from",
    "ranks that share a model cannot begin with a GGUF file",
    "export it as a Hugging Face folder first, or use dp alone",
)


class Opened(NamedTuple):
    """A recipe that can be trained."""

    task: "RecipeTask"
    job: RecipeJob
    """The job with the tokens that its epochs are."""


def open_recipe(job: RecipeJob) -> Opened:
    """Read and prepare the data of a recipe; a fault of theirs is told with its file and line."""
    problems = job.check()
    if problems:
        raise InputError(problems)
    if job.adapter is not None:
        require_targets(job.model, job.adapter.lora())
    task = RecipeTask(job)
    return Opened(task, task.counted(job))


class RecipeTask:
    """What a recipe is trained on, in memory."""

    def __init__(self, job: RecipeJob) -> None:
        self.kind = name_of(job.recipe)
        self.words = load_words(_words_path(job))
        self.teachers: list[TeacherSet] = []
        self.trained = self._prepared(job, "train")
        has_held = bool(job.data.validation or job.data.validation_sources)
        self.held = self._prepared(job, "validation") if has_held else None
        sets = [self.trained, *([] if self.held is None else [self.held])]
        self.strange: dict[int, int] = {}
        """For KTO: the example with the same prompt and the answer of another, by number."""
        if self.kind == "kto":
            sets = self._with_strangers(job, sets)
        self.examples = Examples(sets)

    def counted(self, job: RecipeJob) -> RecipeJob:
        """Return a job whose epochs are counted in tokens."""
        if job.epochs is None:
            return job
        batches = self.batches(job, rank=0, world=1)
        steps = max(1, math.ceil(job.epochs * batches.sequences / job.workload.global_batch))
        tokens = steps * job.workload.tokens_per_step
        workload = msgspec.structs.replace(job.workload, tokens=tokens)
        return msgspec.structs.replace(job, workload=workload, epochs=None)

    def problems(self, job: Job) -> Sequence[Problem]:
        """Return what ranks could not begin with; the data's faults were told as they were read."""
        start = job.start_from
        shared = job.layout.gpus > 1 and self.spreads(job)
        return [_ONE_DEVICE] if shared and start is not None and is_gguf(Path(start)) else []

    def batches(self, job: Job, *, rank: int, world: int) -> ChatBatches:
        """Plan the sequences of what is trained."""
        return ChatBatches(
            self.trained,
            global_batch=job.workload.global_batch,
            packing="none" if job.workload.packing == "none" else "pack",
            seed=job.seed,
            shuffle=job.data.shuffle,
            rank=rank,
            world=world,
            vocabulary_size=job.model.vocab,
            ahead=job.data.ahead,
            workers=job.data.workers,
        )

    def held_out(self, job: Job) -> Batches | None:
        """Plan the sequences of what is held out, in the order of the files."""
        if self.held is None:
            if job.evaluation.every_steps:
                warnings.warn("nothing is held out, so nothing is evaluated", stacklevel=3)
            return None
        return ChatBatches(
            self.held,
            global_batch=held_out_workload(job).global_batch,
            packing="none" if job.workload.packing == "none" else "pack",
            shuffle=False,
            vocabulary_size=job.model.vocab,
            first=len(self.trained.starts) - 1,
        )

    def spreads(self, job: Job) -> bool:
        """Let ranks hold parts of a model whose every weight learns answers, as with text."""
        assert isinstance(job, RecipeJob)
        return job.spreads

    def needs_start(self, job: Job, folder: Path) -> bool:
        """Tell whether frozen weights, or a reference that was not kept, have to be read again."""
        assert isinstance(job, RecipeJob)
        if job.adapter is not None:
            return True
        name = reference_name(job, self.examples)
        return self.kind in _REFERRING and kept_reference(folder, name) is None

    def load(
        self, decoder: Decoder, start_from: str, holdings: Mapping[str, Holding] | None = None
    ) -> None:
        """Read a Hugging Face folder, or a GGUF file on one device."""
        load_start(decoder, start_from, holdings)

    def learner(
        self, decoder: Decoder, job: Job, folder: Path, spread: Spread | None = None
    ) -> Learner:
        """Return who learns by this recipe."""
        assert isinstance(job, RecipeJob)
        if self.kind in ("dpo", "ipo"):
            return PairLearner(decoder, job, self.examples, folder, spread)
        if self.kind == "kto":
            held_from, of = len(self.trained.starts) - 1, (self.examples, folder, spread)
            return VerdictLearner(decoder, job, *of, strange=self.strange, held_from=held_from)
        if self.kind == "reward":
            return RewardLearner(decoder, job, spread)
        if self.kind == "distil":
            return DistilLearner(decoder, job, self.examples, self.teachers, spread)
        if job.chats.too_long == "split":  # an example may lie in several sequences
            return RecipeLearner(decoder, job, spread)
        return AnswerLearner(decoder, job, self.examples, spread)

    def _prepared(self, job: RecipeJob, split: Split) -> Prepared:
        sources, share = _sources(job, split)
        if isinstance(job.recipe, Distil):
            found = read_teacher(
                sources,
                length=job.workload.sequence_length,
                too_long=job.chats.too_long,
                split=split,
                validation=share,
                padding=end_of(self.words),
            )
            self.teachers.append(found)
            return found.prepared
        prepared = self._read(job, sources, split, share)
        wanted = WANTED.get(self.kind, "chats")
        if prepared.kind != wanted:
            what = f"holds {prepared.kind}, and {self.kind} learns from {wanted}"
            raise InputError([Problem(prepared.records[0], what, _FIXES[wanted])])
        return prepared

    def _read(
        self, job: RecipeJob, sources: Sequence[str] | list[Record], split: Split, share: float
    ) -> Prepared:
        try:
            return prepare(
                sources,
                self.words,
                length=job.workload.sequence_length,
                train=job.chats.train,
                too_long=job.chats.too_long,
                split=split,
                validation=share,
            )
        except InputError as error:
            if self.words.chats:
                raise
            # What serving would hint at is no help to who trains.
            fix = "set chats.words to a folder with a chat template, or give texts: prompt and "
            raise InputError(
                problem._replace(fix=f"{fix}completion")
                if "no chat template" in problem.what
                else problem
                for problem in error.problems
            ) from None

    def _with_strangers(self, job: RecipeJob, sets: Sequence[Prepared]) -> list[Prepared]:
        """Add, for each set, its prompts under answers of others, and note which is which."""
        all_sets, before, firsts = list(sets), sum(len(one.starts) - 1 for one in sets), 0
        splits: tuple[Split, ...] = ("train", "validation")
        for own, split in zip(sets, splits, strict=False):
            sources, share = _sources(job, split)
            records = [
                one
                for number, one in enumerate(read_records(sources))
                if is_of(number, split, share)
            ]
            if len(records) < 2:
                what = f"has {len(records)} records to {split}, and KTO compares several prompts"
                raise InputError([Problem(own.records[0], what, "give more records")])
            other = self._read(job, mismatched(records), split, 0.0)
            places = {where: before + number for number, where in enumerate(other.records)}
            self.strange |= {
                firsts + number: places[where]
                for number, where in enumerate(own.records)
                if where in places
            }
            all_sets.append(other)
            before += len(other.starts) - 1
            firsts += len(own.starts) - 1
        return all_sets


_FIXES = {
    "chats": "give records with messages, or prompt and completion",
    "pairs": "give records with chosen and rejected, and their prompt",
    "verdicts": "give records with prompt, completion and a label of true or false",
}


def load_start(
    decoder: Decoder, start_from: str, holdings: Mapping[str, Holding] | None = None
) -> None:
    """Fill a decoder from a Hugging Face folder, or from a GGUF file on one device."""
    if not is_gguf(Path(start_from)):
        load(decoder, start_from, holdings=holdings)
    elif holdings is None:
        fill_from_gguf(decoder, start_from)
    else:
        raise InputError([_ONE_DEVICE])


def _words_path(job: RecipeJob) -> str:
    if not job.words:
        what = "nothing says which tokenizer and template the model has"
        fix = "set start_from, or chats.words to a folder with tokenizer.json"
        raise InputError([Problem("chats.words", what, fix)])
    return job.words


def _sources(job: RecipeJob, split: Split) -> tuple[list[str], float]:
    """Return the files of a split, and the share of them that is held out."""
    own = split == "validation" and bool(job.data.validation_sources)
    given = as_sources(job.data.validation_sources if own else job.data.sources)
    weighted = [one for one in given if one.weight is not None]
    if weighted:
        what = "has a weight, and records are all trained alike"
        raise InputError([Problem(weighted[0].path, what, "leave the weight out")])
    missing = [one.path for one in given if not Path(one.path).exists()]
    if missing:
        raise InputError(
            [Problem(path, "there is no such file", "check data.sources") for path in missing]
        )
    return [one.path for one in given], 0.0 if own else job.data.validation
