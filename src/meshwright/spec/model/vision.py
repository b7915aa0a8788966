"""The vision half of a multimodal model: a tower of blocks over patches, and its projector."""

from itertools import pairwise

import msgspec

from meshwright.spec.field_checks import FieldChecker, check_integer
from meshwright.spec.model.block import BlockSpec, NormSpec
from meshwright.spec.model.feedforward import Activation
from meshwright.spec.model.weights import Weight, sum_parameters


class VisionProjector(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What turns patch vectors into tokens of the language model."""

    merge: int = 1
    """Patches along each side that become one token (2 joins four patches)."""
    pool: int = 1
    """Patches along each side that are averaged into one token."""
    inner_widths: tuple[int, ...] = ()
    """Widths between the products; none for a single product."""
    activation: Activation = "gelu"
    """The non-linearity between the products."""
    bias: bool = True
    """The products add biases."""
    norm: NormSpec | None = None
    """A norm over the tower's width before projecting."""
    feature_layer: int = -1
    """Which layer of the tower is read, counted from the end as -1 (Llava takes -2)."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(merge=self.merge, pool=self.pool)
        bounds.mark_unreadable(inner_widths=self.inner_widths)
        for index, width in enumerate(self.inner_widths if bounds.is_valid("inner_widths") else ()):
            bounds.problems += check_integer(f"inner_widths[{index}]", width)
        bounds.raise_problems()

    def list_weights(self, tower: int, hidden: int) -> tuple[Weight, ...]:
        """List the projector's products from the tower's width to the model's."""
        widths = (tower * self.merge * self.merge, *self.inner_widths, hidden)
        return tuple(
            Weight(f"project_{index}", fan_in, fan_out, "none", self.bias)
            for index, (fan_in, fan_out) in enumerate(pairwise(widths))
        )

    def parameters(self, tower: int, hidden: int) -> int:
        """Count the projector's parameters."""
        norm = self.norm.parameters(tower) if self.norm is not None else 0
        return sum_parameters(self.list_weights(tower, hidden)) + norm


class VisionTower(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A transformer over image patches."""

    hidden: int
    """Width of the tower."""
    layers: int
    """Number of blocks."""
    block: BlockSpec
    """The one block it repeats."""
    patch: int
    """Pixels along each side of a patch."""
    projector: VisionProjector
    """The way into the language model."""
    image: int | None = None
    """Pixels along each side of the image; None takes any size."""
    temporal_patch: int = 1
    """Video frames per patch."""
    channels: int = 3
    """Colours."""
    patch_bias: bool = False
    """The patch embedding adds a bias."""
    positions: int = 0
    """Rows of the learned position table; 0 has none."""
    class_token: bool = False
    """One learned token stands before the patches."""
    pre_norm: bool = False
    """A norm before the first block."""
    post_norm: bool = False
    """A norm after the last block."""
    window: int | None = None
    """Pixels along each side of the windows attention stays in; None sees the whole image."""
    full_layers: tuple[int, ...] = ()
    """Layers, counted from 0, that see the whole image in spite of `window` (Qwen2.5-VL)."""
    norm: NormSpec
    """The norm used inside."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(
            hidden=self.hidden,
            layers=self.layers,
            patch=self.patch,
            temporal_patch=self.temporal_patch,
            channels=self.channels,
            image=self.image,
            window=self.window,
        )
        bounds.count(least=0, positions=self.positions)
        sound = bounds.is_valid("image", "patch")
        if sound and self.image is not None and self.image % self.patch:
            what = f"{self.image} is not a multiple of patch={self.patch}"
            # An image smaller than one patch is no image: the nearest one is a single patch.
            fix = f"use {max(1, self.image // self.patch) * self.patch}"
            bounds.add("image", what, fix)
        bounds.raise_problems()

    @property
    def num_patches(self) -> int:
        """Patches of one image of the fixed size."""
        return (self.image // self.patch) ** 2 if self.image else 0

    def list_weights(self) -> tuple[Weight, ...]:
        """List every matrix of the tower: the patch embedding once, each of the block's per layer.

        Learned positions, the class token and norms are no matrices; the projector lists its own.
        """
        pixels = self.channels * self.temporal_patch * self.patch * self.patch
        embedding = Weight("patches", pixels, self.hidden, "none", self.patch_bias)
        return (embedding, *self.layers * self.block.list_weights(self.hidden))

    def count_vector_parameters(self) -> int:
        """Count parameters that are not matrices: positions, the class token, norms."""
        table = (self.positions + self.class_token) * self.hidden
        norms = (self.pre_norm + self.post_norm) * self.norm.parameters(self.hidden)
        return (
            table + norms + self.layers * self.block.count_vector_parameters(self.hidden, self.norm)
        )

    def parameters(self) -> int:
        """Count the tower's parameters without the projector."""
        return sum_parameters(self.list_weights()) + self.count_vector_parameters()

    def count_rank_parameters(self, tp: int) -> tuple[int, int]:
        """Return what one of `tp` ranks holds, without the projector: matrices, and the rest.

        The block's matrices are cut as a decoder's are; the patch embedding and all that is no
        matrix is whole on every rank.
        """
        return sum(
            weight.count_rank_parameters(tp) for weight in self.list_weights()
        ), self.count_vector_parameters()
