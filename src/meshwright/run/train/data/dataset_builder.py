"""Build the `BatchDataset` of a config: open corpora, cut them into sequences, blend them."""

from collections.abc import Sequence

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.train.data.batch_dataset import BatchDataset, BatchShape
from meshwright.run.train.data.blend import Blend
from meshwright.run.train.data.corpus.corpus import Corpus
from meshwright.run.train.data.corpus.corpus_verification import CorpusVerification, list_checks
from meshwright.run.train.data.corpus.vocabulary import Vocabulary
from meshwright.run.train.data.corpus_loader import get_packing_cache_folder, open_source
from meshwright.run.train.data.data_config import DataConfig, normalize_sources
from meshwright.run.train.data.document_split import DocumentSplit, SplitName, select_split
from meshwright.run.train.data.packing.concat_packing import ConcatPacking
from meshwright.run.train.data.packing.packing_cache import open_packing
from meshwright.run.train.data.packing.sequence_packing import NoPacking, SequencePacking
from meshwright.run.train.data.sequence_stream import SequenceStream
from meshwright.spec.workload import TrainingWorkload


def build_dataset(
    settings: DataConfig,
    training: TrainingWorkload,
    *,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    split: SplitName = "train",
    vocabulary_size: int | None = None,
    verify: bool | None = None,
) -> BatchDataset:
    """Open the data of a run: `batches.get_batch(step)`, or `batches.iterate(from_step)`.

    `rank` and `world` count the data-parallel replicas. `vocabulary_size` is the model's; with it,
    tokens that the model does not know are refused. The order of held-out text does not depend on
    the seed. `verify` compares files with their checksums: as the settings say, but not again for
    text that is held out of what is trained on.
    """
    held = split == "validation"
    if held and not settings.validation_fraction and not settings.validation_sources:
        what = "no validation data"
        fix = "set data.validation_fraction = 0.01, or give data.validation_sources"
        raise InputError([Problem("data.validation_fraction", what, fix)])
    own = held and settings.validation_sources
    sources = normalize_sources(settings.validation_sources if own else settings.sources)
    corpora = [open_source(source.path, settings) for source in sources]
    vocabulary = _one_vocabulary(corpora, vocabulary_size)
    if verify is None:
        verify = settings.verify_checksums and bool(own or not held)
    verification = None
    if verify:
        verification = CorpusVerification(
            list_checks([corpus.checks for corpus in corpora]),
            cache_folder=get_packing_cache_folder(sources[0].path, settings),
            rank=rank,
            world=world,
        )
    share = 0.0 if own else settings.validation_fraction
    shape = BatchShape(
        training.sequence_length, training.global_batch, training.packing, rank, world
    )
    key = ("held out",) if held else (seed,)
    streams = [
        _stream(
            select_split(corpus, split, share),
            training,
            settings,
            key=(*key, number),
            path=source.path,
        )
        for number, (source, corpus) in enumerate(zip(sources, corpora, strict=True))
    ]
    weights = [
        float(stream.packing.sequences) if source.weight is None else source.weight
        for source, stream in zip(sources, streams, strict=True)
    ]
    order = (training.sequence_length, training.packing, settings.shuffle, share, *key)
    return BatchDataset(
        streams,
        Blend(weights),
        shape,
        vocabulary=vocabulary,
        vocabulary_size=vocabulary_size,
        fingerprint_of=msgspec.json.encode(order).decode(),
        ahead=settings.prefetch_steps,
        workers=settings.num_workers,
        verification=verification,
    )


def _stream(
    selection: DocumentSplit,
    training: TrainingWorkload,
    settings: DataConfig,
    *,
    key: tuple[object, ...],
    path: str,
) -> SequenceStream:
    length = training.sequence_length
    cutting: SequencePacking
    if training.packing == "none":
        cutting = NoPacking(selection, length)
    elif training.packing == "concat":
        cutting = ConcatPacking(selection, length, key=key, shuffle=settings.shuffle)
    else:
        cutting = open_packing(selection, length, get_packing_cache_folder(path, settings))
    return SequenceStream(selection.corpus, cutting, key=key, shuffle=settings.shuffle)


def _one_vocabulary(corpora: Sequence[Corpus], size: int | None) -> Vocabulary | None:
    """Return what ids mean, or refuse corpora that do not mean the same."""
    known = [(corpus, corpus.vocabulary) for corpus in corpora if corpus.vocabulary]
    if not known:
        return None
    first, vocabulary = known[0]
    problems = [
        Problem(
            corpus.name,
            f"was made with another tokenizer ({other.name}) than {first.name} ({vocabulary.name})",
            "tokenize both with one",
        )
        for corpus, other in known
        if other.digest != vocabulary.digest
    ]
    if size is not None and vocabulary.size > size:
        what = f"its tokenizer has {vocabulary.size:,} tokens, the model knows {size:,}"
        problems.append(Problem(first.name, what, f"use a model with vocab = {vocabulary.size}"))
    if problems:
        raise InputError(problems)
    return vocabulary
