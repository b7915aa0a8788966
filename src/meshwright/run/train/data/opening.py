"""Open what the settings name: corpora, their cutting into sequences, their blend, as `Batches`."""

from collections.abc import Sequence

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.train.data.batches import Batches, Shape
from meshwright.run.train.data.blend import Blend
from meshwright.run.train.data.concat import Concat
from meshwright.run.train.data.corpus import Corpus
from meshwright.run.train.data.pieces import Cutting, Single
from meshwright.run.train.data.plans import pack
from meshwright.run.train.data.selection import Selection, Split, select
from meshwright.run.train.data.settings import DataSettings, as_sources
from meshwright.run.train.data.sources import open_source, plan_folder
from meshwright.run.train.data.stream import Stream
from meshwright.run.train.data.vocabulary import Vocabulary
from meshwright.spec.workload import Training


def open_data(
    settings: DataSettings,
    training: Training,
    *,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    split: Split = "train",
    vocabulary_size: int | None = None,
) -> Batches:
    """Open the data of a run: `batches.at(step)`, or `batches.iterate(from_step)`.

    `rank` and `world` count the data-parallel replicas. `vocabulary_size` is the model's; with it,
    tokens that the model does not know are refused. The order of held-out text does not depend on
    the seed.
    """
    held = split == "validation"
    if held and not settings.validation and not settings.validation_sources:
        what = "nothing is held out"
        fix = "set data.validation = 0.01, or give data.validation_sources"
        raise InputError([Problem("data.validation", what, fix)])
    own = held and settings.validation_sources
    sources = as_sources(settings.validation_sources if own else settings.sources)
    corpora = [open_source(source.path, settings) for source in sources]
    vocabulary = _one_vocabulary(corpora, vocabulary_size)
    share = 0.0 if own else settings.validation
    shape = Shape(training.sequence_length, training.global_batch, training.packing, rank, world)
    key = ("held out",) if held else (seed,)
    streams = [
        _stream(
            select(corpus, split, share), training, settings, key=(*key, number), path=source.path
        )
        for number, (source, corpus) in enumerate(zip(sources, corpora, strict=True))
    ]
    weights = [
        float(stream.cutting.sequences) if source.weight is None else source.weight
        for source, stream in zip(sources, streams, strict=True)
    ]
    order = (training.sequence_length, training.packing, settings.shuffle, share, *key)
    return Batches(
        streams,
        Blend(weights),
        shape,
        vocabulary=vocabulary,
        vocabulary_size=vocabulary_size,
        fingerprint_of=msgspec.json.encode(order).decode(),
        ahead=settings.ahead,
        workers=settings.workers,
    )


def _stream(
    selection: Selection,
    training: Training,
    settings: DataSettings,
    *,
    key: tuple[object, ...],
    path: str,
) -> Stream:
    length = training.sequence_length
    cutting: Cutting
    if training.packing == "none":
        cutting = Single(selection, length)
    elif training.packing == "concat":
        cutting = Concat(selection, length, key=key, shuffle=settings.shuffle)
    else:
        cutting = pack(selection, length, plan_folder(path, settings))
    return Stream(selection.corpus, cutting, key=key, shuffle=settings.shuffle)


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
            "tokenise both with one",
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
