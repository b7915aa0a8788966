"""`Sampler`: keeps how each row of an engine draws, and draws the next token of many at a time.

A step goes in two parts, so that the host is done before the device is:

    lines = sampler.plan(rows)              host: what these rows need; sends what changed
    drawn = sampler.sample(logits, lines)   device: no wait for it anywhere

Logits go through: logit bias, penalties, tokens banned until `min_tokens`, a grammar's mask,
temperature, top-k, top-p, min-p. A step without any of the first four reads the logits once, or a
dozen times where something is cut off; there is no sort. Log-probabilities are those of the model,
before anything of the above, as vLLM tells them by default.
"""

import secrets
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.run.kernels.language import Backend
from meshwright.run.serve.asked import Sampling
from meshwright.run.serve.sampling.choosing import choose
from meshwright.run.serve.sampling.floors import floors
from meshwright.run.serve.sampling.lines import (
    COLD,
    Lines,
    Penalised,
    Touched,
    is_cut,
    is_penalised,
    problems_of,
)
from meshwright.run.serve.sampling.masks import forbid
from meshwright.run.serve.sampling.penalties import Asked, Counts, penalise
from meshwright.run.serve.sampling.rows import Places, Settings
from meshwright.run.serve.sampling.telling import Told, raw_of, tell

Real = NDArray[np.float64]
Whole = NDArray[np.int64]


class Drawn(NamedTuple):
    """What a step drew."""

    tokens: torch.Tensor
    """-1 where no logit was a number: the engine ends that request with an error."""
    told: Told | None


class Sampler:
    """Draws tokens for the rows of one engine; `eos` are the tokens that end a text."""

    def __init__(
        self,
        rows: int,
        vocab: int,
        device: torch.device | str,
        *,
        eos: Sequence[int] = (),
        backend: Backend = "auto",
    ) -> None:
        self.device = torch.device(device)
        self.vocab = vocab
        self._eos = tuple(eos)
        self._backend = backend
        # Columns: temperature, top-p, min-p, repetition, presence, frequency.
        self._reals = np.tile(np.array([0, 1, 0, 1, 0, 0], np.float32), (rows, 1))
        # Columns: top-k, seed, tokens drawn, whether the seed was asked for.
        self._wholes = np.zeros((rows, 4), np.int64)
        self._reals_CR = torch.from_numpy(self._reals.T.copy()).to(self.device)
        self._wholes_CR = torch.from_numpy(self._wholes.T.copy()).to(self.device)
        # Columns: something is cut off, touched, penalised, told.
        self._needs = np.zeros((rows, 4), bool)
        self._changed: set[int] = set()
        self._asked: dict[int, Sampling] = {}
        self._touched: dict[int, tuple[Whole, Real, Whole]] = {}
        self._counts = Counts(vocab, self.device)
        self._one = torch.ones(1, dtype=torch.int64, device=self.device)
        self._planned: tuple[object, Lines] | None = None
        temperature, top_p, min_p, *_ = self._reals_CR
        self.settings = Settings(temperature, top_p, min_p, *self._wholes_CR)
        """Addresses stay the same for the sampler's life, so that graphs can be captured."""

    def warm_up(self, logits_LV: torch.Tensor) -> None:
        """Compile the kernels of common steps for logits such as these, lest requests wait."""
        rows_L = torch.zeros(len(logits_LV), dtype=torch.int64, device=self.device)
        places = Places(rows_L, rows_L)
        floor_L = floors(logits_LV, places, self.settings, backend=self._backend)
        for floor in (None, floor_L):
            choose(logits_LV, places, self.settings, floor, backend=self._backend)

    def set(
        self,
        row: int,
        sampling: Sampling,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        *,
        choice: int = 0,
        seeded: bool = True,
    ) -> None:
        """Give a row to a request; `output` is what it drew before it lost its row.

        Choices of one request draw differently, each by the request's seed. A seed that the user
        did not name promises nothing: `seeded` is false.
        """
        problems = problems_of(sampling, self.vocab)
        if problems:
            raise InputError(problems)
        self.clear(row)
        self._asked[row] = sampling
        warm = sampling.temperature > COLD
        self._reals[row] = (
            sampling.temperature if warm else 0,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        # An odd multiple per choice keeps the seeds of a request's choices apart.
        mixed = (seed + choice * 0x9E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF
        asked = seeded and sampling.seed is not None
        self._wholes[row] = (min(sampling.top_k, self.vocab), mixed, len(output), asked)
        if is_penalised(sampling):
            self._counts.add(row, prompt, output)
        self._touch(row, sampling)
        told = sampling.logprobs is not None
        self._needs[row] = (is_cut(sampling), row in self._touched, row in self._counts, told)

    def clear(self, row: int) -> None:
        """Take a row back: it draws greedily and needs nothing until it is set again."""
        self._asked.pop(row, None)
        self._touched.pop(row, None)
        self._counts.drop(row)
        self._reals[row] = (0, 1, 0, 1, 0, 0)
        self._wholes[row] = 0
        self._needs[row] = False
        self._changed.add(row)

    def plan(self, rows: Sequence[int], widths: Sequence[int] | None = None) -> Lines:
        """Prepare a step in which row i has `widths[i]` lines of logits, one if not given.

        The first line of a row gives its next token; the others follow tokens that were proposed.
        """
        if self._changed:
            self._send_changes()
            self._planned = None
        key = (tuple(rows), None if widths is None else tuple(widths))
        # Rows that decode stay the same for many steps.
        if self._planned is None or self._planned[0] != key:
            self._planned = (key, self._planned_anew(rows, widths))
        return self._planned[1]

    def sample(
        self, logits_RV: torch.Tensor, lines: Lines, *, mask_RW: torch.Tensor | None = None
    ) -> Drawn:
        """Draw one token for each row and count it; logits may be changed in place.

        `mask_RW` are words of 32 bits, lowest first: the tokens that grammars allow.
        """
        raw_TV = raw_of(logits_RV, lines)
        tokens_R = self.chosen(self.changed(logits_RV, lines, mask_LW=mask_RW), lines)
        self.commit(lines, tokens_R)
        return Drawn(tokens_R, tell(raw_TV, lines, tokens_R))

    def commit(
        self, lines: Lines, tokens_L: torch.Tensor, kept_L: torch.Tensor | None = None
    ) -> None:
        """Count the tokens that rows went on with: all, or those where `kept_L` is true."""
        once_L = self._one.expand(len(tokens_L)) if kept_L is None else kept_L.to(torch.int64)
        self.settings.drawn.index_add_(0, lines.places.rows, once_L)
        if lines.penalised is not None:
            lines_P, slots_P, _ = lines.penalised
            times_P = once_L[lines_P] * (tokens_L[lines_P] >= 0)
            self._counts.count(slots_P, tokens_L[lines_P], times_P)

    def changed(
        self,
        logits_LV: torch.Tensor,
        lines: Lines,
        *,
        inputs_L: torch.Tensor | None = None,
        mask_LW: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits with biases, penalties, bans and masks; they may be changed in place.

        Biases and penalties make float32 of them.

        `inputs_L` are the tokens that were fed to the model at these lines: needed where tokens
        were proposed, for penalties that count them.
        """
        if lines.touched is None and lines.penalised is None and mask_LW is None:
            return logits_LV
        biased = lines.touched is not None and lines.touched.bias is not None
        if biased or lines.penalised is not None:
            logits_LV = logits_LV.float()
        if lines.touched is not None and lines.touched.bias is not None:
            where = (lines.touched.lines, lines.touched.tokens)
            logits_LV.index_put_(where, lines.touched.bias, accumulate=True)
        if lines.penalised is not None:
            self._penalise(logits_LV, lines, lines.penalised, inputs_L)
        if lines.touched is not None:
            lines_B, tokens_B, _, until_B = lines.touched
            rows_B = lines.places.rows[lines_B]
            position_B = self.settings.drawn[rows_B] + lines.places.offsets[lines_B]
            value_B = logits_LV[lines_B, tokens_B]
            value_B = torch.where(position_B < until_B, -torch.inf, value_B)
            logits_LV.index_put_((lines_B, tokens_B), value_B)
        if mask_LW is not None:
            forbid(logits_LV, mask_LW, backend=self._backend)
        return logits_LV

    def floor(self, changed_LV: torch.Tensor, lines: Lines) -> torch.Tensor | None:
        """Return the least logit that each line may choose; None where all may choose any."""
        if not lines.cut:
            return None
        return floors(changed_LV, lines.places, self.settings, backend=self._backend)

    def chosen(self, changed_LV: torch.Tensor, lines: Lines) -> torch.Tensor:
        """Return the token that each line draws, of logits that were `changed`."""
        floor_L = self.floor(changed_LV, lines)
        return choose(changed_LV, lines.places, self.settings, floor_L, backend=self._backend)

    def probabilities(self, changed_LV: torch.Tensor, lines: Lines) -> torch.Tensor:
        """Return the distribution that each line draws from, of logits that were `changed`."""
        logits_LV = changed_LV.float()
        floor_L = self.floor(logits_LV, lines)
        if floor_L is not None:
            logits_LV = logits_LV.masked_fill(logits_LV < floor_L[:, None], -torch.inf)
        temperature_L1 = self.settings.temperature[lines.places.rows, None]
        warm_LV = (logits_LV / temperature_L1.clamp(min=COLD)).softmax(1)
        likeliest_L1 = logits_LV.argmax(1, keepdim=True)
        certain_LV = torch.zeros_like(logits_LV).scatter_(1, likeliest_L1, 1.0)
        return torch.where(temperature_L1 > 0, warm_LV, certain_LV)

    def _penalise(
        self,
        logits_LV: torch.Tensor,
        lines: Lines,
        penalised: Penalised,
        inputs_L: torch.Tensor | None,
    ) -> None:
        lines_P, slots_P, pairs = penalised
        factors = (each.contiguous() for each in self._reals_CR[3:, lines.places.rows[lines_P]])
        proposed = None
        if pairs is not None:
            if inputs_L is None:
                raise ValueError("penalties after proposed tokens need the tokens: give inputs_L")
            proposed = (pairs[0], inputs_L[pairs[1]].to(torch.int64).clamp(min=0))
        asked = Asked(lines_P, slots_P, *factors)
        penalise(logits_LV, asked, self._counts, proposed, backend=self._backend)

    def _planned_anew(self, rows: Sequence[int], widths: Sequence[int] | None) -> Lines:
        rows_L = np.asarray(rows, np.int64)
        offsets_L = np.zeros_like(rows_L)
        if widths is not None:
            rows_L = np.repeat(rows_L, widths)
            offsets_L = np.concatenate([np.arange(width) for width in widths])
        is_cut_L, is_touched_L, is_penalised_L, is_told_L = self._needs[rows_L].T
        told = np.flatnonzero(is_told_L)
        touched = self._plan_touched(rows_L, np.flatnonzero(is_touched_L))
        penalised = self._plan_penalised(rows_L, offsets_L, np.flatnonzero(is_penalised_L))
        return Lines(
            places=Places(self._sent(rows_L), self._sent(offsets_L)),
            ends=tuple(range(1, len(rows) + 1) if widths is None else accumulate(widths)),
            cut=bool(is_cut_L.any()),
            touched=touched,
            penalised=penalised,
            told=tuple(told.tolist()),
            told_index=self._sent(told) if len(told) else None,
            top=max((self._asked[row].logprobs or 0 for row in rows_L[told].tolist()), default=0),
        )

    def _touch(self, row: int, sampling: Sampling) -> None:
        ending = set(sampling.stop_tokens)
        if not sampling.ignore_eos:
            ending.update(self._eos)
        banned = ending if sampling.min_tokens else set()
        tokens = sorted(banned | set(sampling.logit_bias))
        if tokens:
            bias = [sampling.logit_bias.get(token, 0.0) for token in tokens]
            until = [sampling.min_tokens if token in banned else 0 for token in tokens]
            self._touched[row] = (np.array(tokens), np.array(bias), np.array(until))

    def _plan_touched(self, rows_L: Whole, lines: Whole) -> Touched | None:
        if not len(lines):
            return None
        each = [self._touched[row] for row in rows_L[lines].tolist()]
        lines_B = np.repeat(lines, [len(tokens) for tokens, _, _ in each])
        tokens_B, bias_B, until_B = (np.concatenate(column) for column in zip(*each, strict=True))
        bias = self._sent(bias_B, torch.float32) if bias_B.any() else None
        return Touched(self._sent(lines_B), self._sent(tokens_B), bias, self._sent(until_B))

    def _plan_penalised(self, rows_L: Whole, offsets_L: Whole, lines: Whole) -> Penalised | None:
        if not len(lines):
            return None
        slots = [self._counts.slot(row) for row in rows_L[lines].tolist()]
        pairs = [
            (index, line - back)
            for index, line in enumerate(lines.tolist())
            for back in range(offsets_L[line])
        ]
        proposed = None
        if pairs:
            index, source = zip(*pairs, strict=True)
            proposed = (self._sent(index), self._sent(source))
        return Penalised(self._sent(lines), self._sent(slots), proposed)

    def _send_changes(self) -> None:
        rows = sorted(self._changed)
        rows_C = self._sent(rows)
        reals = self._sent(self._reals[rows].T.copy(), torch.float32)
        wholes = self._sent(self._wholes[rows].T.copy())
        self._reals_CR.index_copy_(1, rows_C, reals)
        self._wholes_CR.index_copy_(1, rows_C, wholes)
        self._changed.clear()

    def _sent(
        self, values: Sequence[float] | NDArray[Any], dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        # Pinned, a copy does not wait for the device; torch keeps the memory until it was read.
        here = torch.as_tensor(np.asarray(values), dtype=dtype)
        if self.device.type != "cuda":
            return here
        return here.pin_memory().to(self.device, non_blocking=True)
