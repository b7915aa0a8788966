"""`BatchDataset`: the batch of any step, as a pure function of the step.

Sequence n of the run is the n-th of the blend, whatever runs it: step s trains sequences s·G to
(s + 1)·G, and rank r of w takes the r-th of w equal stretches of them. So a run may stop and go on
with other numbers of ranks, microbatches and workers, and train the same sequences in the same
order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from meshwright.errors import InputError, Problem
from meshwright.run.train.data.batch import BatchBuffers, TrainBatch, assemble_batch, lay_out_spans
from meshwright.run.train.data.blend import Blend, BlendSlice
from meshwright.run.train.data.corpus.corpus import Ints, Tokens
from meshwright.run.train.data.corpus.corpus_verification import CorpusVerification
from meshwright.run.train.data.corpus.vocabulary import Vocabulary
from meshwright.run.train.data.fingerprint import compute_fingerprint
from meshwright.run.train.data.packing.sequence_packing import TokenSpans
from meshwright.run.train.data.prefetch import CudaSender, PrefetchLoader
from meshwright.run.train.data.sequence_stream import SequenceStream
from meshwright.spec.workload import Packing


@dataclass(frozen=True)
class BatchShape:
    """How much a step reads, and which part of it is ours."""

    sequence_length: int
    """Positions of a sequence."""
    global_batch: int
    """Sequences of a step over all ranks."""
    packing: Packing
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        problems = []
        if self.global_batch % self.dp_size:
            what = f"{self.global_batch} sequences do not split over {self.dp_size} ranks"
            fix = f"use {-(-self.global_batch // self.dp_size) * self.dp_size}"
            problems.append(Problem("global_batch", what, fix))
        if not 0 <= self.dp_rank < self.dp_size:
            what = f"there is no rank {self.dp_rank} among {self.dp_size}"
            problems.append(Problem("dp_rank", what, f"use 0 to {self.dp_size - 1}"))
        if problems:
            raise InputError(problems)

    @property
    def local_batch(self) -> int:
        """Sequences of a step on one rank."""
        return self.global_batch // self.dp_size


class BatchDataset:
    """All batches of a run, each made when it is asked for."""

    def __init__(
        self,
        streams: Sequence[SequenceStream],
        blend: Blend,
        shape: BatchShape,
        *,
        vocabulary: Vocabulary | None = None,
        vocabulary_size: int | None = None,
        fingerprint_of: str = "",
        ahead: int = 4,
        workers: int = 1,
        verification: CorpusVerification | None = None,
    ) -> None:
        self.verification = verification
        """What reads the files beside training; None where that is not asked for."""
        self.streams = tuple(streams)
        self.blend = blend
        self.shape = shape
        self.vocabulary = vocabulary
        self._size = vocabulary_size
        self._ahead, self._workers = ahead, workers
        self._padding = vocabulary.padding_id if vocabulary else 0
        self._dtype = np.result_type(*(stream.corpus.dtype for stream in streams))
        parts = [stream.corpus.fingerprint for stream in streams]
        self.fingerprint = compute_fingerprint(*parts, *blend.quotas.tolist(), fingerprint_of)

    @property
    def num_sequences(self) -> int:
        """Sequences until every source was read once, and the last-ending one to its end."""
        return max(
            -(-stream.packing.sequences * self.blend.period // int(quota))
            for stream, quota in zip(self.streams, self.blend.quotas, strict=True)
        )

    @property
    def max_documents(self) -> int:
        """Documents that one sequence can hold, its padding counted as one."""
        return max(stream.packing.max_documents for stream in self.streams)

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text to a token over all sources, for losses per byte; None if not known."""
        corpora = [stream.corpus for stream in self.streams]
        if not all(corpus.text_bytes for corpus in corpora):
            return None
        return sum(one.text_bytes for one in corpora) / sum(one.num_tokens for one in corpora)

    def count_epochs(self, step: int) -> tuple[float, ...]:
        """Return how often each source has been read once `step` steps are done."""
        done = step * self.shape.global_batch
        return tuple(
            done * int(quota) / self.blend.period / stream.packing.sequences
            for stream, quota in zip(self.streams, self.blend.quotas, strict=True)
        )

    def get_batch(self, step: int, into: BatchBuffers | None = None) -> TrainBatch:
        """Return the batch of a step, in main memory; the same whenever it is asked."""
        if self.verification is not None:
            self.verification.raise_damage()
        batch, length = self.shape.local_batch, self.shape.sequence_length
        first = step * self.shape.global_batch + self.shape.dp_rank * batch
        drawn = self.blend.select_sources(np.arange(first, first + batch))
        pieces, source = self._pieces(drawn)
        placed = lay_out_spans(pieces, batch)
        rows: Tokens = np.empty((batch, length + 1), self._dtype)
        for number in np.unique(source):
            mine = np.flatnonzero(source == number)
            self.streams[number].corpus.copy_spans(
                pieces.start[mine],
                pieces.length[mine],
                rows.reshape(-1),
                pieces.row[mine] * (length + 1) + placed.row_offsets[mine],
            )
        if into is None:
            into = self.allocate_buffers()
        made = assemble_batch(step, rows, pieces, placed, padding=self._padding, into=into)
        self._check(rows, drawn.source)
        return made

    def allocate_buffers(self, *, pinned: bool = False) -> BatchBuffers:
        """Return memory for one batch."""
        packed = self.shape.packing == "pack"
        return BatchBuffers(
            self.shape.local_batch, self.shape.sequence_length, packed=packed, pinned=pinned
        )

    def _pieces(self, drawn: BlendSlice) -> tuple[TokenSpans, Ints]:
        """Return the pieces of all rows in order, and the source of each."""
        found, sources = [], []
        for number in np.unique(drawn.source):
            mine = np.flatnonzero(drawn.source == number)
            part = self.streams[number].get_spans(drawn.source_index[mine])
            found.append(part._replace(row=mine[part.row]))
            sources.append(np.full(len(part.row), number))
        if len(found) == 1:
            return found[0], sources[0]
        pieces = TokenSpans(*(np.concatenate(column) for column in zip(*found, strict=True)))
        order = np.argsort(pieces.row, kind="stable")
        return TokenSpans(*(column[order] for column in pieces)), np.concatenate(sources)[order]

    def _check(self, rows: Tokens, sources: Ints) -> None:
        """Refuse an id that the model does not know: a GPU would stop without saying why."""
        if self._size is None or (rows.max() < self._size and rows.min() >= 0):
            return
        row, place = np.argwhere((rows >= self._size) | (rows < 0))[0]
        where = self.streams[int(sources[row])].corpus.name
        what = f"holds token {rows[row, place]}, the model knows {self._size:,}"
        fix = "tokenize with the model's tokenizer, or give the model a larger vocabulary"
        raise InputError([Problem(where, what, fix)])

    def iterate(
        self,
        from_step: int = 0,
        *,
        until: int | None = None,
        device: torch.device | str = "cpu",
        ahead: int | None = None,
        workers: int | None = None,
    ) -> PrefetchLoader:
        """Return an iterator that makes batches in the background, from a step on.

        Close it (it is a context manager) when no more batches are wanted.
        """
        there = torch.device(device)
        return PrefetchLoader(
            self.get_batch,
            self.allocate_buffers,
            first=from_step,
            until=until,
            sender=CudaSender(there) if there.type == "cuda" else None,
            ahead=self._ahead if ahead is None else ahead,
            workers=self._workers if workers is None else workers,
        )
