"""`Model`: an architecture as a value. It holds shapes and switches, never weights.

Layers are named blocks laid out by a pattern, so dense, sparse, windowed and hybrid models are
all said the same way. Counting lives in `parameters` and `flops`, foreign formats in
`huggingface`.
"""

from collections import Counter
from typing import Literal

import msgspec

from meshwright.errors import InputError
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.model.block import BlockSpec, NormSpec
from meshwright.spec.model.feedforward import MoESpec
from meshwright.spec.model.layer_pattern import expand_pattern
from meshwright.spec.model.vision import VisionTower
from meshwright.spec.model.weights import Weight
from meshwright.spec.name_suggestions import format_suggestion

Positions = Literal["rotary", "learned", "alibi", "none"]


class MtpSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Heads that predict further tokens (DeepSeek-V3): each is a product, a block and norms."""

    depth: int
    """Tokens predicted beyond the next one."""
    block: str
    """Name of the block each head runs."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(depth=self.depth)
        bounds.not_empty(block=self.block)
        bounds.raise_problems()


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An architecture: widths, blocks and their order, embeddings, towers."""

    name: str
    """Short name, as the catalog and the command line use it."""
    family: str = "llama"
    """The architecture's family, as `model_type` in a Hugging Face config."""
    hidden: int
    """Width of the residual stream."""
    vocab: int
    """Rows of the embedding table."""
    blocks: tuple[BlockSpec, ...]
    """The kinds of layer."""
    pattern: str
    """Their order, such as `3*dense 58*moe` or `8*(5*local global)`."""
    norm: NormSpec = NormSpec()
    """The norm used throughout."""
    tied: bool = False
    """The output head shares the embedding table."""
    head_bias: bool = False
    """The output head adds a bias."""
    positions: Positions = "rotary"
    """How order is told: inside attention, by a learned table, by a score slope, or not at all."""
    max_positions: int = 4096
    """Longest context the model was made for; the rows of a learned table."""
    position_offset: int = 0
    """Rows of a learned table that are never used (OPT keeps two)."""
    embedding_norm: bool = False
    """A norm follows the embedding (BLOOM)."""
    final_norm: bool = True
    """A norm stands before the output head."""
    embedding_scale: float | None = None
    """Embeddings are multiplied by this (Gemma: the square root of the width)."""
    logit_scale: float | None = None
    """Logits are multiplied by this (Cohere, Grok)."""
    logit_softcap: float | None = None
    """Logits are squashed by tanh to this range (Gemma 2)."""
    multi_token: MtpSpec | None = None
    """Heads that predict further tokens; their parameters are counted apart."""
    vision: VisionTower | None = None
    """The vision tower of a multimodal model."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_empty(name=self.name)
        bounds.count(hidden=self.hidden, vocab=self.vocab, max_positions=self.max_positions)
        bounds.count(least=0, position_offset=self.position_offset)
        bounds.mark_unreadable(
            pattern=self.pattern, blocks=self.blocks, multi_token=self.multi_token
        )
        if bounds.is_valid("pattern"):
            try:
                expand_pattern(self.pattern)
            except InputError as error:
                bounds.problems += error.problems
        if bounds.is_valid("pattern", "blocks", "multi_token"):
            self._check_blocks(bounds)
        bounds.raise_problems()

    def _check_blocks(self, bounds: FieldChecker) -> None:
        names = [block.name for block in self.blocks]
        for name, times in Counter(names).items():
            if times > 1:
                fix = f"call one of them {name}-2"
                bounds.add("blocks", f"{times} blocks are named {name!r}", fix)
        wanted = dict.fromkeys(self.layer_names, "pattern")
        if self.multi_token is not None:
            wanted.setdefault(self.multi_token.block, "multi_token.block")
        for name, where in wanted.items():
            if name not in names:
                bounds.add(
                    where, f"there is no block named {name!r}", format_suggestion(name, names)
                )

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The block name of every layer, first to last."""
        return expand_pattern(self.pattern)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.layer_names)

    def block(self, name: str) -> BlockSpec:
        """Return the block of that name."""
        return next(block for block in self.blocks if block.name == name)

    def layer_blocks(self) -> tuple[BlockSpec, ...]:
        """Return the block of every layer, first to last."""
        by_name = {block.name: block for block in self.blocks}
        return tuple(by_name[name] for name in self.layer_names)

    def count_layers_by_block(self) -> tuple[tuple[BlockSpec, int], ...]:
        """Return each block that is used with the number of layers that use it."""
        counts = Counter(self.layer_names)
        return tuple((block, counts[block.name]) for block in self.blocks if counts[block.name])

    def list_mtp_weights(self) -> tuple[Weight, ...]:
        """List the matrices of one multi-token head: its block, and the product that joins streams.

        The tables of tokens and the output head are the main model's own.
        """
        if self.multi_token is None:
            return ()
        join = Weight("join", 2 * self.hidden, self.hidden, "none")
        return (*self.block(self.multi_token.block).list_weights(self.hidden), join)

    @property
    def moe(self) -> MoESpec | None:
        """The first routed feed-forward part in the model, None for a dense one."""
        for block in self.blocks:
            if isinstance(block.mlp, MoESpec):
                return block.mlp
        return None
