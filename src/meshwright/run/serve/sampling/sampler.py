"""`TokenSampler`: holds the sampling state of each row, and samples the next tokens of many rows.

A step goes in two parts, so that the host is done before the device is:

    lines = sampler.build_metadata(rows)    host: what these rows need; sends what changed
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
from meshwright.run.kernels.sampling.gumbel_argmax import sample_gumbel_argmax
from meshwright.run.kernels.sampling.penalties import PenaltyParams, apply_penalties
from meshwright.run.kernels.sampling.row_params import LogitRows, RowSamplingTensors
from meshwright.run.kernels.sampling.token_bitmask import apply_token_bitmask
from meshwright.run.kernels.sampling.top_k_top_p import compute_logit_thresholds
from meshwright.run.kernels.triton_compat import KernelBackend
from meshwright.run.serve.sampling.penalties import TokenCounts
from meshwright.run.serve.sampling.sampled_logprobs import (
    SampledLogprobs,
    copy_raw_logits,
    gather_logprobs,
)
from meshwright.run.serve.sampling.sampling_metadata import (
    MIN_TEMPERATURE,
    LogitEdits,
    PenaltyRows,
    SamplingMetadata,
    find_sampling_problems,
    truncates_distribution,
    uses_penalties,
)
from meshwright.run.serve.sampling_params import SamplingParams

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class SamplerOutput(NamedTuple):
    """What a step drew."""

    token_ids: torch.Tensor
    """-1 where no logit was a number: the engine ends that request with an error."""
    logprobs: SampledLogprobs | None


class TokenSampler:
    """Draws tokens for the rows of one engine; `eos` are the tokens that end a text."""

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        device: torch.device | str,
        *,
        eos: Sequence[int] = (),
        backend: KernelBackend = "auto",
    ) -> None:
        self.device = torch.device(device)
        self.vocab_size = vocab_size
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
        self._asked: dict[int, SamplingParams] = {}
        self._touched: dict[int, tuple[IntArray, FloatArray, IntArray]] = {}
        self._counts = TokenCounts(vocab_size, self.device)
        self._one = torch.ones(1, dtype=torch.int64, device=self.device)
        self._planned: tuple[object, SamplingMetadata] | None = None
        temperature, top_p, min_p, *_ = self._reals_CR
        self.row_params = RowSamplingTensors(temperature, top_p, min_p, *self._wholes_CR)
        """Addresses stay the same for the sampler's life, so that graphs can be captured."""

    def warm_up(self, logits_LV: torch.Tensor) -> None:
        """Compile the kernels of common steps for logits such as these, lest requests wait."""
        rows_L = torch.zeros(len(logits_LV), dtype=torch.int64, device=self.device)
        places = LogitRows(rows_L, rows_L)
        floor_L = compute_logit_thresholds(
            logits_LV, places, self.row_params, backend=self._backend
        )
        for floor in (None, floor_L):
            sample_gumbel_argmax(logits_LV, places, self.row_params, floor, backend=self._backend)

    def add_row(
        self,
        row: int,
        sampling: SamplingParams,
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
        problems = find_sampling_problems(sampling, self.vocab_size)
        if problems:
            raise InputError(problems)
        self.remove_row(row)
        self._asked[row] = sampling
        warm = sampling.temperature > MIN_TEMPERATURE
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
        self._wholes[row] = (min(sampling.top_k, self.vocab_size), mixed, len(output), asked)
        if uses_penalties(sampling):
            self._counts.add(row, prompt, output)
        self._touch(row, sampling)
        told = sampling.logprobs is not None
        self._needs[row] = (
            truncates_distribution(sampling),
            row in self._touched,
            row in self._counts,
            told,
        )

    def remove_row(self, row: int) -> None:
        """Take a row back: it draws greedily and needs nothing until it is set again."""
        self._asked.pop(row, None)
        self._touched.pop(row, None)
        self._counts.remove(row)
        self._reals[row] = (0, 1, 0, 1, 0, 0)
        self._wholes[row] = 0
        self._needs[row] = False
        self._changed.add(row)

    def build_metadata(
        self, rows: Sequence[int], widths: Sequence[int] | None = None
    ) -> SamplingMetadata:
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
        self,
        logits_RV: torch.Tensor,
        lines: SamplingMetadata,
        *,
        mask_RW: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Draw one token for each row and count it; logits may be changed in place.

        `mask_RW` are words of 32 bits, lowest first: the tokens that grammars allow.
        """
        raw_TV = copy_raw_logits(logits_RV, lines)
        tokens_R = self.pick_tokens(self.process_logits(logits_RV, lines, mask_LW=mask_RW), lines)
        self.count_accepted(lines, tokens_R)
        return SamplerOutput(tokens_R, gather_logprobs(raw_TV, lines, tokens_R))

    def count_accepted(
        self, lines: SamplingMetadata, tokens_L: torch.Tensor, kept_L: torch.Tensor | None = None
    ) -> None:
        """Count the tokens that rows went on with: all, or those where `kept_L` is true."""
        once_L = self._one.expand(len(tokens_L)) if kept_L is None else kept_L.to(torch.int64)
        self.row_params.num_sampled.index_add_(0, lines.logit_rows.rows, once_L)
        if lines.penalty_rows is not None:
            lines_P, slots_P, _ = lines.penalty_rows
            times_P = once_L[lines_P] * (tokens_L[lines_P] >= 0)
            self._counts.count(slots_P, tokens_L[lines_P], times_P)

    def process_logits(
        self,
        logits_LV: torch.Tensor,
        lines: SamplingMetadata,
        *,
        inputs_L: torch.Tensor | None = None,
        mask_LW: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits with biases, penalties, bans and masks; they may be changed in place.

        Biases and penalties make float32 of them.

        `inputs_L` are the tokens that were fed to the model at these lines: needed where tokens
        were proposed, for penalties that count them.
        """
        if lines.logit_edits is None and lines.penalty_rows is None and mask_LW is None:
            return logits_LV
        biased = lines.logit_edits is not None and lines.logit_edits.bias is not None
        if biased or lines.penalty_rows is not None:
            logits_LV = logits_LV.float()
        if lines.logit_edits is not None and lines.logit_edits.bias is not None:
            where = (lines.logit_edits.logit_rows, lines.logit_edits.token_ids)
            logits_LV.index_put_(where, lines.logit_edits.bias, accumulate=True)
        if lines.penalty_rows is not None:
            self._penalise(logits_LV, lines, lines.penalty_rows, inputs_L)
        if lines.logit_edits is not None:
            lines_B, tokens_B, _, until_B = lines.logit_edits
            rows_B = lines.logit_rows.rows[lines_B]
            position_B = self.row_params.num_sampled[rows_B] + lines.logit_rows.offsets[lines_B]
            value_B = logits_LV[lines_B, tokens_B]
            value_B = torch.where(position_B < until_B, -torch.inf, value_B)
            logits_LV.index_put_((lines_B, tokens_B), value_B)
        if mask_LW is not None:
            apply_token_bitmask(logits_LV, mask_LW, backend=self._backend)
        return logits_LV

    def compute_logit_thresholds(
        self, changed_LV: torch.Tensor, lines: SamplingMetadata
    ) -> torch.Tensor | None:
        """Return the least logit that each line may choose; None where all may choose any."""
        if not lines.truncates:
            return None
        return compute_logit_thresholds(
            changed_LV, lines.logit_rows, self.row_params, backend=self._backend
        )

    def pick_tokens(self, changed_LV: torch.Tensor, lines: SamplingMetadata) -> torch.Tensor:
        """Return the token that each line draws, of what `process_logits` returned."""
        floor_L = self.compute_logit_thresholds(changed_LV, lines)
        return sample_gumbel_argmax(
            changed_LV, lines.logit_rows, self.row_params, floor_L, backend=self._backend
        )

    def compute_probs(self, changed_LV: torch.Tensor, lines: SamplingMetadata) -> torch.Tensor:
        """Return the distribution that each line draws from, of what `process_logits` returned."""
        logits_LV = changed_LV.float()
        floor_L = self.compute_logit_thresholds(logits_LV, lines)
        if floor_L is not None:
            logits_LV = logits_LV.masked_fill(logits_LV < floor_L[:, None], -torch.inf)
        temperature_L1 = self.row_params.temperature[lines.logit_rows.rows, None]
        warm_LV = (logits_LV / temperature_L1.clamp(min=MIN_TEMPERATURE)).softmax(1)
        likeliest_L1 = logits_LV.argmax(1, keepdim=True)
        certain_LV = torch.zeros_like(logits_LV).scatter_(1, likeliest_L1, 1.0)
        return torch.where(temperature_L1 > 0, warm_LV, certain_LV)

    def _penalise(
        self,
        logits_LV: torch.Tensor,
        lines: SamplingMetadata,
        penalised: PenaltyRows,
        inputs_L: torch.Tensor | None,
    ) -> None:
        lines_P, slots_P, pairs = penalised
        factors = (each.contiguous() for each in self._reals_CR[3:, lines.logit_rows.rows[lines_P]])
        proposed = None
        if pairs is not None:
            if inputs_L is None:
                raise ValueError("penalties after proposed tokens need the tokens: give inputs_L")
            proposed = (pairs[0], inputs_L[pairs[1]].to(torch.int64).clamp(min=0))
        asked = PenaltyParams(lines_P, slots_P, *factors)
        apply_penalties(logits_LV, asked, self._counts.counts, proposed, backend=self._backend)

    def _planned_anew(self, rows: Sequence[int], widths: Sequence[int] | None) -> SamplingMetadata:
        rows_L = np.asarray(rows, np.int64)
        offsets_L = np.zeros_like(rows_L)
        if widths is not None:
            rows_L = np.repeat(rows_L, widths)
            offsets_L = np.concatenate([np.arange(width) for width in widths])
        is_cut_L, is_touched_L, is_penalised_L, is_told_L = self._needs[rows_L].T
        told = np.flatnonzero(is_told_L)
        touched = self._plan_touched(rows_L, np.flatnonzero(is_touched_L))
        penalised = self._plan_penalised(rows_L, offsets_L, np.flatnonzero(is_penalised_L))
        return SamplingMetadata(
            logit_rows=LogitRows(self._sent(rows_L), self._sent(offsets_L)),
            row_ends=tuple(range(1, len(rows) + 1) if widths is None else accumulate(widths)),
            truncates=bool(is_cut_L.any()),
            logit_edits=touched,
            penalty_rows=penalised,
            logprob_rows=tuple(told.tolist()),
            logprob_rows_index=self._sent(told) if len(told) else None,
            max_top_logprobs=max(
                (self._asked[row].logprobs or 0 for row in rows_L[told].tolist()), default=0
            ),
        )

    def _touch(self, row: int, sampling: SamplingParams) -> None:
        ending = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ending.update(self._eos)
        banned = ending if sampling.min_tokens else set()
        tokens = sorted(banned | set(sampling.logit_bias))
        if tokens:
            bias = [sampling.logit_bias.get(token, 0.0) for token in tokens]
            until = [sampling.min_tokens if token in banned else 0 for token in tokens]
            self._touched[row] = (np.array(tokens), np.array(bias), np.array(until))

    def _plan_touched(self, rows_L: IntArray, lines: IntArray) -> LogitEdits | None:
        if not len(lines):
            return None
        each = [self._touched[row] for row in rows_L[lines].tolist()]
        lines_B = np.repeat(lines, [len(tokens) for tokens, _, _ in each])
        tokens_B, bias_B, until_B = (np.concatenate(column) for column in zip(*each, strict=True))
        bias = self._sent(bias_B, torch.float32) if bias_B.any() else None
        return LogitEdits(self._sent(lines_B), self._sent(tokens_B), bias, self._sent(until_B))

    def _plan_penalised(
        self, rows_L: IntArray, offsets_L: IntArray, lines: IntArray
    ) -> PenaltyRows | None:
        if not len(lines):
            return None
        slots = [self._counts.row_slot(row) for row in rows_L[lines].tolist()]
        pairs = [
            (index, line - back)
            for index, line in enumerate(lines.tolist())
            for back in range(offsets_L[line])
        ]
        proposed = None
        if pairs:
            index, source = zip(*pairs, strict=True)
            proposed = (self._sent(index), self._sent(source))
        return PenaltyRows(self._sent(lines), self._sent(slots), proposed)

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
