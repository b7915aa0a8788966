"""`RecipeTask`: a recipe's data read and prepared, and who learns from them.

asked = load_recipe("lora.toml")
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
from meshwright.run.nn.huggingface import load_hf_checkpoint
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.posttrain.data import ChatBatches, PreparedDataset, prepare_dataset
from meshwright.run.posttrain.data.encoding import find_end_token
from meshwright.run.posttrain.data.mismatched_pairs import mismatch_completions
from meshwright.run.posttrain.data.prepared_dataset import is_in_split
from meshwright.run.posttrain.data.records import DataRecord, read_records
from meshwright.run.posttrain.lora.decoder_adapter import validate_targets
from meshwright.run.posttrain.supervised.distillation_objective import DistillationObjective
from meshwright.run.posttrain.supervised.example_index import ExampleIndex
from meshwright.run.posttrain.supervised.preference_objective import (
    KTOObjective,
    PairPreferenceObjective,
    make_reference_cache_key,
)
from meshwright.run.posttrain.supervised.recipe_config import (
    REQUIRED_DATASET_KINDS,
    DistillationRecipe,
    get_recipe_name,
)
from meshwright.run.posttrain.supervised.recipe_job import RecipeJob
from meshwright.run.posttrain.supervised.recipe_objective import RecipeObjective
from meshwright.run.posttrain.supervised.reference_logprobs import load_cached_reference
from meshwright.run.posttrain.supervised.reward_model import RewardObjective
from meshwright.run.posttrain.supervised.sft_objective import SFTObjective
from meshwright.run.posttrain.supervised.teacher_logprobs import (
    TeacherDataset,
    read_teacher_dataset,
)
from meshwright.run.serve.model.gguf_file import is_gguf
from meshwright.run.serve.model.gguf_weights import load_gguf_into
from meshwright.run.serve.tokenizer.tokenizer import load_tokenizer
from meshwright.run.train.data.batch_dataset import BatchDataset
from meshwright.run.train.data.data_config import normalize_sources
from meshwright.run.train.data.document_split import SplitName
from meshwright.run.train.job.train_job import TrainJob
from meshwright.run.train.objective import Objective
from meshwright.run.train.train_task import make_eval_workload

_REFERRING = ("dpo", "ipo", "kto")
_ONE_DEVICE = Problem(
    "initial_load_path",
    "ranks that share a model cannot begin with a GGUF file",
    "export it as a Hugging Face folder first, or use dp alone",
)


class OpenedRecipe(NamedTuple):
    """A recipe that can be trained."""

    task: "RecipeTask"
    job: RecipeJob
    """The job with the tokens that its epochs are."""


def open_recipe(job: RecipeJob) -> OpenedRecipe:
    """Read and prepare the data of a recipe; a fault of theirs is told with its file and line."""
    problems = job.check()
    if problems:
        raise InputError(problems)
    if job.adapter is not None:
        validate_targets(job.model, job.adapter.to_lora_config())
    task = RecipeTask(job)
    return OpenedRecipe(task, task.with_epochs_as_tokens(job))


class RecipeTask:
    """What a recipe is trained on, in memory."""

    def __init__(self, job: RecipeJob) -> None:
        self.kind = get_recipe_name(job.recipe)
        self.tokenizer = load_tokenizer(_words_path(job))
        self.teacher_datasets: list[TeacherDataset] = []
        self.prepared_train = self._prepared(job, "train")
        has_held = bool(job.data.validation_fraction or job.data.validation_sources)
        self.prepared_eval = self._prepared(job, "validation") if has_held else None
        sets = [self.prepared_train, *([] if self.prepared_eval is None else [self.prepared_eval])]
        self.mismatched_ids: dict[int, int] = {}
        """For KTO: the example with the same prompt and the answer of another, by number."""
        if self.kind == "kto":
            sets = self._with_strangers(job, sets)
        self.example_index = ExampleIndex(sets)

    def with_epochs_as_tokens(self, job: RecipeJob) -> RecipeJob:
        """Return a job whose epochs are counted in tokens."""
        if job.epochs is None:
            return job
        batches = self.train_dataset(job, rank=0, world=1)
        steps = max(1, math.ceil(job.epochs * batches.num_sequences / job.workload.global_batch))
        tokens = steps * job.workload.tokens_per_step
        workload = msgspec.structs.replace(job.workload, tokens=tokens)
        return msgspec.structs.replace(job, workload=workload, epochs=None)

    def problems(self, job: TrainJob) -> Sequence[Problem]:
        """Return what ranks could not begin with; the data's faults were told as they were read."""
        start = job.initial_load_path
        shared = job.layout.gpus > 1 and self.shards_model(job)
        return [_ONE_DEVICE] if shared and start is not None and is_gguf(Path(start)) else []

    def train_dataset(self, job: TrainJob, *, rank: int, world: int) -> ChatBatches:
        """Plan the sequences of what is trained."""
        return ChatBatches(
            self.prepared_train,
            global_batch=job.workload.global_batch,
            packing="none" if job.workload.packing == "none" else "pack",
            seed=job.seed,
            shuffle=job.data.shuffle,
            rank=rank,
            world=world,
            vocabulary_size=job.model.vocab,
            ahead=job.data.prefetch_steps,
            workers=job.data.num_workers,
        )

    def eval_dataset(self, job: TrainJob) -> BatchDataset | None:
        """Plan the sequences of what is held out, in the order of the files."""
        if self.prepared_eval is None:
            if job.eval.every_steps:
                warnings.warn("no validation data: evaluation is disabled", stacklevel=3)
            return None
        return ChatBatches(
            self.prepared_eval,
            global_batch=make_eval_workload(job).global_batch,
            packing="none" if job.workload.packing == "none" else "pack",
            shuffle=False,
            vocabulary_size=job.model.vocab,
            first_example_id=len(self.prepared_train.example_starts) - 1,
        )

    def shards_model(self, job: TrainJob) -> bool:
        """Let ranks hold parts of a model whose every weight learns answers, as with text."""
        assert isinstance(job, RecipeJob)
        return job.shards_model

    def needs_initial_weights(self, job: TrainJob, folder: Path) -> bool:
        """Tell whether frozen weights, or a reference that was not kept, have to be read again."""
        assert isinstance(job, RecipeJob)
        if job.adapter is not None:
            return True
        name = make_reference_cache_key(job, self.example_index)
        return self.kind in _REFERRING and load_cached_reference(folder, name) is None

    def load_initial_weights(
        self,
        decoder: Decoder,
        initial_load_path: str,
        shard_specs: Mapping[str, ShardSpec] | None = None,
    ) -> None:
        """Read a Hugging Face folder, or a GGUF file on one device."""
        load_initial_weights(decoder, initial_load_path, shard_specs)

    def make_objective(
        self,
        decoder: Decoder,
        job: TrainJob,
        folder: Path,
        sharded_model: ShardedModel | None = None,
    ) -> Objective:
        """Return who learns by this recipe."""
        assert isinstance(job, RecipeJob)
        if self.kind in ("dpo", "ipo"):
            return PairPreferenceObjective(decoder, job, self.example_index, folder, sharded_model)
        if self.kind == "kto":
            held_from, of = (
                len(self.prepared_train.example_starts) - 1,
                (self.example_index, folder, sharded_model),
            )
            return KTOObjective(
                decoder, job, *of, mismatched_ids=self.mismatched_ids, first_eval_id=held_from
            )
        if self.kind == "reward":
            return RewardObjective(decoder, job, sharded_model)
        if self.kind == "distillation":
            return DistillationObjective(
                decoder, job, self.example_index, self.teacher_datasets, sharded_model
            )
        if job.chats.length_policy == "split":  # an example may lie in several sequences
            return RecipeObjective(decoder, job, sharded_model)
        return SFTObjective(decoder, job, self.example_index, sharded_model)

    def _prepared(self, job: RecipeJob, split: SplitName) -> PreparedDataset:
        sources, share = _sources(job, split)
        if isinstance(job.recipe, DistillationRecipe):
            found = read_teacher_dataset(
                sources,
                length=job.workload.sequence_length,
                length_policy=job.chats.length_policy,
                split=split,
                validation=share,
                padding=find_end_token(self.tokenizer),
            )
            self.teacher_datasets.append(found)
            return found.dataset
        prepared = self._read(job, sources, split, share)
        wanted = REQUIRED_DATASET_KINDS.get(self.kind, "chats")
        if prepared.kind != wanted:
            what = f"holds {prepared.kind}, and {self.kind} learns from {wanted}"
            raise InputError([Problem(prepared.sources[0], what, _FIXES[wanted])])
        return prepared

    def _read(
        self,
        job: RecipeJob,
        sources: Sequence[str] | list[DataRecord],
        split: SplitName,
        share: float,
    ) -> PreparedDataset:
        try:
            return prepare_dataset(
                sources,
                self.tokenizer,
                length=job.workload.sequence_length,
                train_on=job.chats.train_on,
                length_policy=job.chats.length_policy,
                split=split,
                validation=share,
            )
        except InputError as error:
            if self.tokenizer.has_chat_template:
                raise
            # What serving would hint at is no help to who trains.
            fix = "set chats.tokenizer to a folder with a chat template, or give texts: prompt and "
            raise InputError(
                problem._replace(fix=f"{fix}completion")
                if "no chat template" in problem.what
                else problem
                for problem in error.problems
            ) from None

    def _with_strangers(
        self, job: RecipeJob, sets: Sequence[PreparedDataset]
    ) -> list[PreparedDataset]:
        """Add, for each set, its prompts under answers of others, and note which is which."""
        all_sets, before, firsts = list(sets), sum(len(one.example_starts) - 1 for one in sets), 0
        splits: tuple[SplitName, ...] = ("train", "validation")
        for own, split in zip(sets, splits, strict=False):
            sources, share = _sources(job, split)
            records = [
                one
                for number, one in enumerate(read_records(sources))
                if is_in_split(number, split, share)
            ]
            if len(records) < 2:
                what = f"has {len(records)} records to {split}, and KTO compares several prompts"
                raise InputError([Problem(own.sources[0], what, "give more records")])
            other = self._read(job, mismatch_completions(records), split, 0.0)
            places = {where: before + number for number, where in enumerate(other.sources)}
            self.mismatched_ids |= {
                firsts + number: places[where]
                for number, where in enumerate(own.sources)
                if where in places
            }
            all_sets.append(other)
            before += len(other.example_starts) - 1
            firsts += len(own.example_starts) - 1
        return all_sets


_FIXES = {
    "chats": "give records with messages, or prompt and completion",
    "pairs": "give records with chosen and rejected, and their prompt",
    "verdicts": "give records with prompt, completion and a label of true or false",
}


def load_initial_weights(
    decoder: Decoder, initial_load_path: str, shard_specs: Mapping[str, ShardSpec] | None = None
) -> None:
    """Fill a decoder from a Hugging Face folder, or from a GGUF file on one device."""
    if not is_gguf(Path(initial_load_path)):
        load_hf_checkpoint(decoder, initial_load_path, shard_specs=shard_specs)
    elif shard_specs is None:
        load_gguf_into(decoder, initial_load_path)
    else:
        raise InputError([_ONE_DEVICE])


def _words_path(job: RecipeJob) -> str:
    if not job.tokenizer_path:
        what = "nothing says which tokenizer and template the model has"
        fix = "set initial_load_path, or chats.tokenizer to a folder with tokenizer.json"
        raise InputError([Problem("chats.tokenizer", what, fix)])
    return job.tokenizer_path


def _sources(job: RecipeJob, split: SplitName) -> tuple[list[str], float]:
    """Return the files of a split, and the share of them that is held out."""
    own = split == "validation" and bool(job.data.validation_sources)
    given = normalize_sources(job.data.validation_sources if own else job.data.sources)
    weighted = [one for one in given if one.weight is not None]
    if weighted:
        what = "has a weight, and records are all trained alike"
        raise InputError([Problem(weighted[0].path, what, "leave the weight out")])
    missing = [one.path for one in given if not Path(one.path).exists()]
    if missing:
        raise InputError(
            [Problem(path, "there is no such file", "check data.sources") for path in missing]
        )
    return [one.path for one in given], 0.0 if own else job.data.validation_fraction
