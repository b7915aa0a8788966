"""`Batches`: the batch of any step, as a pure function of the step.

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
from meshwright.run.train.data.batch import Batch, Buffers, assemble, place
from meshwright.run.train.data.blend import Blend, Drawn
from meshwright.run.train.data.corpus import Ints, Tokens
from meshwright.run.train.data.fingerprint import fingerprint
from meshwright.run.train.data.pieces import Pieces
from meshwright.run.train.data.prefetch import Loader, ToGpu
from meshwright.run.train.data.stream import Stream
from meshwright.run.train.data.vocabulary import Vocabulary
from meshwright.spec.workload import Packing


@dataclass(frozen=True)
class Shape:
    """How much a step reads, and which part of it is ours."""

    length: int
    """Positions of a sequence."""
    global_batch: int
    """Sequences of a step over all ranks."""
    packing: Packing
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        problems = []
        if self.global_batch % self.world:
            what = f"{self.global_batch} sequences do not split over {self.world} ranks"
            fix = f"use {-(-self.global_batch // self.world) * self.world}"
            problems.append(Problem("global_batch", what, fix))
        if not 0 <= self.rank < self.world:
            what = f"there is no rank {self.rank} among {self.world}"
            problems.append(Problem("rank", what, f"use 0 to {self.world - 1}"))
        if problems:
            raise InputError(problems)

    @property
    def batch(self) -> int:
        """Sequences of a step on one rank."""
        return self.global_batch // self.world


class Batches:
    """All batches of a run, each made when it is asked for."""

    def __init__(
        self,
        streams: Sequence[Stream],
        blend: Blend,
        shape: Shape,
        *,
        vocabulary: Vocabulary | None = None,
        vocabulary_size: int | None = None,
        fingerprint_of: str = "",
        ahead: int = 4,
        workers: int = 1,
    ) -> None:
        self.streams = tuple(streams)
        self.blend = blend
        self.shape = shape
        self.vocabulary = vocabulary
        self._size = vocabulary_size
        self._ahead, self._workers = ahead, workers
        self._padding = vocabulary.padding if vocabulary else 0
        self._dtype = np.result_type(*(stream.corpus.dtype for stream in streams))
        parts = [stream.corpus.fingerprint for stream in streams]
        self.fingerprint = fingerprint(*parts, *blend.quotas.tolist(), fingerprint_of)

    @property
    def sequences(self) -> int:
        """Sequences until every source was read once, and the last-ending one to its end."""
        return max(
            -(-stream.cutting.sequences * self.blend.period // int(quota))
            for stream, quota in zip(self.streams, self.blend.quotas, strict=True)
        )

    @property
    def most_documents(self) -> int:
        """Documents that one sequence can hold, its padding counted as one."""
        return max(stream.cutting.most_documents for stream in self.streams)

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text to a token over all sources, for losses per byte; None if not known."""
        corpora = [stream.corpus for stream in self.streams]
        if not all(corpus.text_bytes for corpus in corpora):
            return None
        return sum(one.text_bytes for one in corpora) / sum(one.tokens for one in corpora)

    def epochs(self, step: int) -> tuple[float, ...]:
        """Return how often each source has been read once `step` steps are done."""
        done = step * self.shape.global_batch
        return tuple(
            done * int(quota) / self.blend.period / stream.cutting.sequences
            for stream, quota in zip(self.streams, self.blend.quotas, strict=True)
        )

    def at(self, step: int, into: Buffers | None = None) -> Batch:
        """Return the batch of a step, in main memory; the same whenever it is asked."""
        batch, length = self.shape.batch, self.shape.length
        first = step * self.shape.global_batch + self.shape.rank * batch
        drawn = self.blend.drawn(np.arange(first, first + batch))
        pieces, source = self._pieces(drawn)
        placed = place(pieces, batch)
        rows: Tokens = np.empty((batch, length + 1), self._dtype)
        for number in np.unique(source):
            mine = np.flatnonzero(source == number)
            self.streams[number].corpus.copy(
                pieces.start[mine],
                pieces.length[mine],
                rows.reshape(-1),
                pieces.row[mine] * (length + 1) + placed.offset[mine],
            )
        if into is None:
            into = self.buffers()
        made = assemble(step, rows, pieces, placed, padding=self._padding, into=into)
        self._check(rows, drawn.source)
        return made

    def buffers(self, *, pinned: bool = False) -> Buffers:
        """Return memory for one batch."""
        packed = self.shape.packing == "pack"
        return Buffers(self.shape.batch, self.shape.length, packed=packed, pinned=pinned)

    def _pieces(self, drawn: Drawn) -> tuple[Pieces, Ints]:
        """Return the pieces of all rows in order, and the source of each."""
        found, sources = [], []
        for number in np.unique(drawn.source):
            mine = np.flatnonzero(drawn.source == number)
            part = self.streams[number].pieces(drawn.place[mine])
            found.append(part._replace(row=mine[part.row]))
            sources.append(np.full(len(part.row), number))
        if len(found) == 1:
            return found[0], sources[0]
        pieces = Pieces(*(np.concatenate(column) for column in zip(*found, strict=True)))
        order = np.argsort(pieces.row, kind="stable")
        return Pieces(*(column[order] for column in pieces)), np.concatenate(sources)[order]

    def _check(self, rows: Tokens, sources: Ints) -> None:
        """Refuse an id that the model does not know: a GPU would stop without saying why."""
        if self._size is None or (rows.max() < self._size and rows.min() >= 0):
            return
        row, place = np.argwhere((rows >= self._size) | (rows < 0))[0]
        where = self.streams[int(sources[row])].corpus.name
        what = f"holds token {rows[row, place]}, the model knows {self._size:,}"
        fix = "tokenise with the model's tokenizer, or give the model a larger vocabulary"
        raise InputError([Problem(where, what, fix)])

    def iterate(
        self,
        from_step: int = 0,
        *,
        until: int | None = None,
        device: torch.device | str = "cpu",
        ahead: int | None = None,
        workers: int | None = None,
    ) -> Loader:
        """Return an iterator that makes batches in the background, from a step on.

        Close it (it is a context manager) when no more batches are wanted.
        """
        there = torch.device(device)
        return Loader(
            self.at,
            self.buffers,
            first=from_step,
            until=until,
            sender=ToGpu(there) if there.type == "cuda" else None,
            ahead=self._ahead if ahead is None else ahead,
            workers=self._workers if workers is None else workers,
        )
