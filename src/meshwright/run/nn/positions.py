"""How modules learn the order of tokens: rotary tables, slopes of scores, growth of queries.

Frequencies and angles are computed in fp64 and kept in fp32. The stretching rules are those of
`transformers`' `modeling_rope_utils`, after the papers: linear (Chen et al., arXiv 2306.15595),
dynamic (bloc97's NTK-aware scaling), yarn (Peng et al., arXiv 2309.00071), longrope (Ding et al.,
arXiv 2402.13753), llama3 (Meta's reference code). `mrope` turns text tokens like plain rotary, as
their three positions are equal.

Shapes: B sequences, T positions, R half the dimensions that turn.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.spec.model.rotary import AttentionTemperature, Rotary


@dataclass(frozen=True)
class RotaryCosSin:
    """The cosines and sines a rotary kernel reads: fp32, (T, R) or (B, T, R)."""

    cos: Tensor
    sin: Tensor


class PositionTables:
    """The rotary tables and slopes of one model, made on the device that asks and then kept.

    They are no buffers of a module: a model may be built without memory and laid out anywhere, and
    a checkpoint holds none of them.
    """

    def __init__(self, max_positions: int) -> None:
        self.max_positions = max_positions
        self._turns: dict[tuple[object, ...], RotaryCosSin] = {}
        self._slopes: dict[tuple[object, ...], Tensor] = {}

    def get_rotary(
        self, rotary: Rotary, width: int, length: int, device: torch.device
    ) -> RotaryCosSin:
        """Return cosines and sines of the first `length` positions."""
        # Only these rules look at the length; all others share the longest table so far.
        own = length if rotary.scaling in {"dynamic", "longrope"} else None
        key = (rotary, width, device, own)
        made = self._turns.get(key)
        if made is None or len(made.cos) < length:
            made = self._turns[key] = self._make(rotary, width, length, device)
        return RotaryCosSin(made.cos[:length], made.sin[:length])

    def get_alibi_slopes(self, heads: int, device: torch.device) -> Tensor:
        """Return the slope of every head's scores."""
        key = (heads, device)
        if key not in self._slopes:
            self._slopes[key] = compute_alibi_slopes(heads).to(device)
        return self._slopes[key]

    def _make(self, rotary: Rotary, width: int, length: int, device: torch.device) -> RotaryCosSin:
        frequencies, factor = compute_rotary_frequencies(rotary, width, length, self.max_positions)
        angles_TR = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        cos, sin = angles_TR.cos() * factor, angles_TR.sin() * factor
        return RotaryCosSin(cos.to(device, torch.float32), sin.to(device, torch.float32))


class PositionInfo:
    """Where the tokens of one pass stand: their positions and documents, and what follows of them.

    Positions count from the start of each sequence, or of each document, unless given.
    """

    def __init__(
        self,
        position_tables: PositionTables,
        tokens_BT: Tensor,
        *,
        positions: Tensor | None = None,
        documents: PackedSequences | None = None,
        max_position_count: int | None = None,
        full_sequence_length: int | None = None,
    ) -> None:
        """Take the tokens of a step.

        With `full_sequence_length` they are part of longer sequences, and `documents` is given.
        """
        batch, length = tokens_BT.shape
        if positions is None and documents is not None:
            positions = documents.positions(batch, length)
        self.position_tables, self.shape, self.device = (
            position_tables,
            (batch, length),
            tokens_BT.device,
        )
        self.positions, self.documents = positions, documents
        self.full_sequence_length = full_sequence_length or length
        """Tokens of a sequence, those that other ranks have included."""
        self.max_position_count = max_position_count or self.full_sequence_length
        """One more than the highest position."""
        self._turns: dict[tuple[Rotary, int], RotaryCosSin] = {}

    def get_rotary(self, rotary: Rotary, width: int) -> RotaryCosSin:
        """Return the cosines and sines of these tokens."""
        key = (rotary, width)
        made = self._turns.get(key)
        if made is None:
            made = self.position_tables.get_rotary(
                rotary, width, self.max_position_count, self.device
            )
            if self.positions is not None:
                # Where all sequences have the same positions, one row serves them.
                rows = self.positions[0] if len(self.positions) == 1 else self.positions
                made = RotaryCosSin(made.cos[rows], made.sin[rows])
            self._turns[key] = made
        return made

    def get_alibi_slopes(self, heads: int) -> Tensor:
        """Return the slope of every head's scores."""
        return self.position_tables.get_alibi_slopes(heads, self.device)

    def get_positions_BT(self) -> Tensor:  # noqa: N802
        """Return the position of every token, (B or 1, T)."""
        if self.positions is not None:
            return self.positions
        return torch.arange(self.shape[1], device=self.device)[None]

    def get_document_ids_BT(self) -> Tensor | None:  # noqa: N802
        """Return the number of every token's document, of whole sequences; None without any."""
        return (
            None
            if self.documents is None
            else self.documents.ids(self.shape[0], self.full_sequence_length)
        )


def compute_rotary_frequencies(
    rotary: Rotary, width: int, length: int, max_positions: int
) -> tuple[Tensor, float]:
    """Return the angle each pair of dimensions turns per position, and the output's multiplier."""
    turning = int(width * rotary.fraction)
    exponents = torch.arange(0, turning, 2, dtype=torch.float64) / turning
    plain = rotary.theta**-exponents
    original = rotary.original_positions or max_positions
    match rotary.scaling:
        case "linear":
            return plain / rotary.factor, 1.0
        case "dynamic":
            grown = rotary.factor * max(length, max_positions) / max_positions - (rotary.factor - 1)
            return (rotary.theta * grown ** (turning / (turning - 2))) ** -exponents, 1.0
        case "llama3":
            return _llama3(rotary, plain, original), 1.0
        case "yarn":
            return _yarn(rotary, plain, original), compute_yarn_factor(rotary)
        case "longrope":
            factors = rotary.long_factors if length > original else rotary.short_factors
            stretch = torch.tensor(factors, dtype=torch.float64) if factors else 1.0
            return plain / stretch, _longrope_factor(rotary, original, max_positions)
    return plain, 1.0


def _llama3(rotary: Rotary, plain: Tensor, original: int) -> Tensor:
    low, high = rotary.low_frequency or 1.0, rotary.high_frequency or 4.0
    turns = original * plain / (2 * math.pi)
    # One where a wavelength fits `high` times into the original context, none below `low` times.
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / rotary.factor


def _yarn(rotary: Rotary, plain: Tensor, original: int) -> Tensor:
    pairs, base = len(plain), math.log(rotary.theta)

    def dimension(rotations: float) -> float:
        return pairs * math.log(original / (rotations * 2 * math.pi)) / base

    first, last = dimension(rotary.beta_fast or 32), dimension(rotary.beta_slow or 1)
    if rotary.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    span = last - first or 0.001
    stretched = ((torch.arange(pairs, dtype=torch.float64) - first) / span).clamp(0, 1)
    return plain * (1 - stretched) + plain / rotary.factor * stretched


def compute_yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return yarn's temperature for a context stretched by `factor`: 0.1 · mscale · ln(f) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def compute_yarn_factor(rotary: Rotary) -> float:
    """Return what yarn multiplies cosines and sines by."""
    if rotary.attention_factor is not None:
        return rotary.attention_factor
    if rotary.mscale and rotary.mscale_all_dim:
        above = compute_yarn_mscale(rotary.factor, rotary.mscale)
        return above / compute_yarn_mscale(rotary.factor, rotary.mscale_all_dim)
    return compute_yarn_mscale(rotary.factor)


def _longrope_factor(rotary: Rotary, original: int, max_positions: int) -> float:
    if rotary.attention_factor is not None:
        return rotary.attention_factor
    factor = rotary.factor if rotary.factor != 1.0 else max_positions / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def compute_alibi_slopes(heads: int) -> Tensor:
    """Return the slope of every head (Press et al., arXiv 2108.12409), fp32.

    A power of two of heads falls evenly from 2^(-8/heads) to 2^-8; other counts take the slopes of
    the power below, then every other one of the power above.
    """
    below = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / below) for head in range(below)]
    slopes += [2 ** (-4 * (head + 1) / below) for head in range(0, 2 * (heads - below), 2)]
    return torch.tensor(slopes, dtype=torch.float64).float()


def compute_query_scale(temperature: AttentionTemperature, positions: Tensor) -> Tensor:
    """Return what queries at these positions are multiplied by, fp32."""
    steps = ((positions.float() + 1) / temperature.floor).floor()
    return 1 + temperature.scale * torch.log1p(steps)
