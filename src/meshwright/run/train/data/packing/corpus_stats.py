"""What a corpus is like: how long its documents are, and how well they fill sequences."""

import math

import msgspec
import numpy as np

from meshwright.run.train.data.corpus.corpus import Corpus, Ints
from meshwright.run.train.data.packing.best_fit import best_fit
from meshwright.spec.workload import LogNormalLength, Packing

MAX_SAMPLED_DOCUMENTS = 1 << 20
"""Documents looked at; of larger corpora, so many at equal distances."""


class DocumentLengthStats(msgspec.Struct, frozen=True, kw_only=True):
    """How long documents are, in tokens."""

    mean: float
    min: int
    p50: int
    p90: int
    p99: int
    max: int


class PackingStats(msgspec.Struct, frozen=True, kw_only=True):
    """How documents fill sequences of one length."""

    packing: Packing
    sequences: int
    """Sequences of an epoch, estimated where not all documents were looked at."""
    filled_fraction: float
    """Share of the positions that hold a token."""
    truncated_fraction: float
    """Share of the tokens that are thrown away."""
    split_fraction: float
    """Share of the documents that lie in more than one sequence."""


def sample_document_lengths(corpus: Corpus) -> Ints:
    """Return the lengths of all documents, or of many at equal distances."""
    count = min(corpus.num_documents, MAX_SAMPLED_DOCUMENTS)
    places = np.arange(count) * corpus.num_documents // max(1, count)
    return corpus.get_document_spans(places)[1]


def summarize_lengths(lengths: Ints) -> DocumentLengthStats:
    """Return the figures of some lengths."""
    if not lengths.size:
        return DocumentLengthStats(mean=0.0, min=0, p50=0, p90=0, p99=0, max=0)
    p50, p90, p99 = np.quantile(lengths, [0.5, 0.9, 0.99], method="inverted_cdf").tolist()
    return DocumentLengthStats(
        mean=float(lengths.mean()),
        min=int(lengths.min()),
        p50=int(p50),
        p90=int(p90),
        p99=int(p99),
        max=int(lengths.max()),
    )


def fit_length_distribution(lengths: Ints) -> LogNormalLength | None:
    """Return the log-normal lengths most like these, for a workload; None where there is none."""
    some = lengths[lengths > 0]
    if some.size < 2:
        return None
    logs = np.log(some)
    median, sigma = math.exp(logs.mean()), float(logs.std())
    return (
        LogNormalLength(median=float(f"{median:.3g}"), sigma=float(f"{sigma:.3g}"))
        if sigma
        else None
    )


def compute_packing_stats(lengths: Ints, documents: int, length: int) -> list[PackingStats]:
    """Return how `documents` documents, with lengths as these, fill sequences in each way."""
    some = lengths[lengths > 0]
    if not some.size:
        return []
    scale = documents / lengths.size
    tokens = int(some.sum())
    whole, rest = np.divmod(some, length)
    packed = int(whole.sum())
    if rest.any():
        packed += int(best_fit(rest[rest > 0], length).max()) + 1
    kept = int(np.minimum(some, length).sum())
    end_to_end = max(1, (tokens - 1) // length)
    # A document of n tokens that begins anywhere crosses an end with probability (n - 1)/T.
    crossing = float(np.minimum(1.0, (some - 1) / length).mean())
    longer = float((some > length).mean())
    ways: list[tuple[Packing, int, int, float]] = [
        ("none", some.size, kept, 0.0),
        ("concat", end_to_end, min(tokens, end_to_end * length), crossing),
        ("pack", packed, tokens, longer),
    ]
    return [
        PackingStats(
            packing=packing,
            sequences=round(sequences * scale),
            filled_fraction=held / (sequences * length),
            truncated_fraction=1 - held / tokens,
            split_fraction=split,
        )
        for packing, sequences, held, split in ways
    ]
