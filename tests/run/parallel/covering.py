"""Layouts of up to eight ranks that together show every pair of choices at least once.

All choices of a few switches are combined; what makes no sense is left out; from the rest, layouts
are taken greedily, always the one that shows most pairs that were not shown yet (a pairwise
covering array, Cohen et al. 1997). The list is the same every time.
"""

from itertools import combinations, product
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.spec.layout import Layout
from meshwright.spec.model import (
    AttentionSpec,
    BlockSpec,
    MLPSpec,
    Model,
    MoESpec,
    Rotary,
    build_decoder_model,
)
from meshwright.spec.model.block import NormKind, NormSpec
from tests.run.parallel.equivalence import Case

HEADS = AttentionSpec(heads=4, kv_heads=2, head_dim=8, qk_norm="full", rotary=Rotary())
"""One norm over the queries of all heads, and one over the keys, as OLMo has them."""


def olmo2(layers: int = 4, kind: NormKind = "rms") -> Model:
    """Return a model like OLMo 2: norms behind the parts alone, and of all heads together."""
    block = BlockSpec(name="dense", mixer=HEADS, mlp=MLPSpec(width=48), norms="post")
    norm = NormSpec(kind=kind, eps=1e-6, bias=kind == "layer")
    return Model(
        name="olmo2", hidden=32, vocab=61, blocks=(block,), pattern=f"{layers}*dense", norm=norm
    )


def olmoe(layers: int = 4) -> Model:
    """Return a model like OLMoE: queries, keys and values are clipped behind those norms."""
    routed = MoESpec(count=4, top_k=2, width=16, normalise=False)
    block = BlockSpec(name="moe", mixer=replace(HEADS, clip=0.9), mlp=routed)
    return Model(name="olmoe", hidden=32, vocab=61, blocks=(block,), pattern=f"{layers}*moe")


MODELS: dict[str, Model] = {
    "dense": build_decoder_model(
        "dense", layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61
    ),
    "tied": build_decoder_model("tied", layers=4, hidden=32, heads=4, ffn=48, vocab=61, tied=True),
    "experts": build_decoder_model(
        "experts",
        layers=4,
        hidden=32,
        heads=4,
        kv_heads=2,
        ffn=48,
        vocab=61,
        dense_layers=2,
        experts=MoESpec(count=4, top_k=2, width=16, shared_width=16),
    ),
    "olmo2": olmo2(),
    "olmoe": olmoe(),
}

PIPELINES: dict[str, tuple[int, int, tuple[int, ...] | None]] = {
    "none": (1, 1, None),
    "gpipe": (2, 1, None),
    "1f1b": (2, 1, (1, 3)),
    "interleaved": (2, 2, None),
    "zb-h1": (2, 1, None),
    "zb-v": (2, 2, None),
    "dualpipe-v": (2, 2, None),
}
"""Ranks, chunks per rank and uneven stages of each schedule."""

CONTEXTS = {"none": 1, "ring": 2, "allgather": 2, "ulysses": 2}


class Choice(NamedTuple):
    """One row of the array."""

    model: str
    tensor: str
    """none, whole or sequence: whether ranks share tensors, and tokens between them."""
    context: str
    pipeline: str
    dp: int
    zero: int
    ep: int
    recompute: str
    packed: bool

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        shared = 1 if self.tensor == "none" else 2
        return shared * CONTEXTS[self.context] * PIPELINES[self.pipeline][0] * self.dp

    @property
    def name(self) -> str:
        """What a test calls it."""
        parts = [self.model]
        parts += [f"tp2 {self.tensor}"] if self.tensor != "none" else []
        parts += [f"cp2 {self.context}"] if self.context != "none" else []
        parts += [f"pp2 {self.pipeline}"] if self.pipeline != "none" else []
        parts += [f"dp{self.dp} zero{self.zero}"] if self.dp > 1 else []
        parts += [f"ep{self.ep}"] if self.ep > 1 else []
        parts += [f"{self.recompute} recompute"] if self.recompute != "none" else []
        return ", ".join(parts + (["packed"] if self.packed else []))

    def case(self) -> Case:
        """Return the model and layout of it."""
        pp, chunks, uneven = PIPELINES[self.pipeline]
        layout = Layout(
            tp=1 if self.tensor == "none" else 2,
            sequence_parallel=self.tensor == "sequence",
            cp=CONTEXTS[self.context],
            cp_kind="ring" if self.context == "none" else self.context,  # type: ignore[arg-type]
            pp=pp,
            virtual_stages=chunks,
            stage_layers=uneven,
            schedule="1f1b" if self.pipeline == "none" else self.pipeline,  # type: ignore[arg-type]
            dp=self.dp,
            zero=self.zero,
            ep=self.ep,
            expert_tp=1 if MODELS[self.model].moe is not None else None,
            recompute=self.recompute,  # type: ignore[arg-type]
            recompute_ops=("layernorm", "mlp_act") if self.recompute == "selective" else (),
            microbatch=1,
            precision="fp32",
        )
        return Case(self.name, MODELS[self.model], layout, sequences=8, packed=self.packed)


def choices() -> list[Choice]:
    """Return every choice that makes sense."""
    columns = (
        MODELS,
        ("none", "whole", "sequence"),
        CONTEXTS,
        PIPELINES,
        (1, 2, 4),
        (0, 1, 2, 3),
        (1, 2),
        ("none", "selective", "full"),
        (False, True),
    )
    return [choice for choice in (Choice(*row) for row in product(*columns)) if _sensible(choice)]


def _sensible(choice: Choice) -> bool:
    if not 1 < choice.ranks <= 8:
        return False
    if choice.zero and choice.dp == 1:
        return False
    if choice.ep > 1 and MODELS[choice.model].moe is None:
        return False
    if choice.pipeline == "dualpipe-v" and choice.dp == 4:
        return False  # two microbatches are too few to feed both ends
    in_stage = choice.ranks // PIPELINES[choice.pipeline][0]
    return in_stage % choice.ep == 0


def covering() -> list[Choice]:
    """Return rows that show every pair of values that any choice shows."""
    every = choices()
    numbers: dict[tuple[object, ...], int] = {}
    shown = []
    for choice in every:
        pairs = (numbers.setdefault(pair, len(numbers)) for pair in pairs_of(choice))
        shown.append(sum(1 << number for number in pairs))  # as bits: sets take seconds
    sizes = [-choice.ranks for choice in every]
    left, found = (1 << len(numbers)) - 1, []
    while left:
        news = ((bits & left).bit_count() for bits in shown)
        merits = list(zip(news, sizes, strict=True))
        best = merits.index(max(merits))
        found.append(every[best])
        left &= ~shown[best]
    return found


def pairs_of(choice: Choice) -> list[tuple[object, ...]]:
    """Return every two values of a row, with where they stand."""
    return [
        (one, choice[one], other, choice[other])
        for one, other in combinations(range(len(choice)), 2)
    ]
