"""Settings of supervised recipes: what is minimised, which answers are trained, what is adapted.

    [recipe]                [chats]                     [adapter]
    kind = "dpo"            train_on = "assistant"      rank = 16
    beta = 0.1              length_policy = "truncate"  target_modules = ["q_proj", "v_proj"]

Everything else of a run stands where it stands for `mw train`.
"""

from typing import Literal, get_args

import msgspec

from meshwright.run.posttrain.data.completion_spans import TrainOn
from meshwright.run.posttrain.data.prepared_dataset import LengthPolicy
from meshwright.run.posttrain.data.record_format import DatasetKind
from meshwright.run.posttrain.objectives.distillation_loss import KLDirection
from meshwright.spec.field_checks import FieldChecker, check_number

LogRatioReduction = Literal["sum", "mean"]
"""Of the tokens of an answer: their sum, or their mean."""


class SFTRecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="sft",
          tag_field="kind"):  # fmt: skip
    """The answers of chats, word for word, by every weight."""


class LoRARecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="lora",
              tag_field="kind"):  # fmt: skip
    """The answers of chats by an adapter."""


class DoRARecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="dora",
              tag_field="kind"):  # fmt: skip
    """The answers of chats by an adapter that learns lengths of rows too."""


class DPORecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="dpo",
          tag_field="kind"):  # fmt: skip
    """The chosen one of two answers before the rejected one."""

    beta: float = 0.1
    """How much it costs to move away from the model that the run began with."""
    label_smoothing: float = 0.0
    """Share of the pairs that are thought to be labelled the wrong way round."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.positive(beta=self.beta)
        bounds.problems += check_number("label_smoothing", self.label_smoothing, 0.0, 0.499)
        bounds.raise_problems()


class IPORecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ipo",
          tag_field="kind"):  # fmt: skip
    """The same, up to a margin of 1 / 2β and no further."""

    beta: float = 0.1
    """The paper's τ."""
    log_ratio_reduction: LogRatioReduction = "sum"
    """What is compared of two answers: `sum` is the paper's, `mean` over tokens is TRL's."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.positive(beta=self.beta)
        bounds.one_of("log_ratio_reduction", self.log_ratio_reduction, get_args(LogRatioReduction))
        bounds.raise_problems()


class KTORecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="kto",
          tag_field="kind"):  # fmt: skip
    """Answers that were judged one by one."""

    beta: float = 0.1
    """How much it costs to move away from the model that the run began with."""
    desirable_weight: float = 1.0
    """What answers that are liked count."""
    undesirable_weight: float = 1.0
    """What the others count."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.positive(
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        bounds.raise_problems()


class RewardModelRecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
                        tag="reward",
             tag_field="kind"):  # fmt: skip
    """A number for each answer: higher for the chosen one of two."""

    center_rewards_coefficient: float = 0.0
    """Multiple of (sum of both rewards)² that keeps rewards around 0."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_negative(center_rewards_coefficient=self.center_rewards_coefficient)
        bounds.raise_problems()


class DistillationRecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
                         tag="distillation",
             tag_field="kind"):  # fmt: skip
    """What a teacher thought likely at each token of its answers."""

    direction: KLDirection = "forward"
    """`forward` covers what the teacher does, `reverse` keeps to it."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.one_of("direction", self.direction, get_args(KLDirection))
        bounds.raise_problems()


Recipe = (
    SFTRecipe
    | LoRARecipe
    | DoRARecipe
    | DPORecipe
    | IPORecipe
    | KTORecipe
    | RewardModelRecipe
    | DistillationRecipe
)
RECIPE_NAMES = ("sft", "lora", "dora", "dpo", "ipo", "kto", "reward", "distillation")
REQUIRED_DATASET_KINDS: dict[str, DatasetKind] = {
    "dpo": "pairs",
    "ipo": "pairs",
    "reward": "pairs",
    "kto": "verdicts",
}
"""What records have to be; chats for all others."""
METRIC_UNITS = {"dpo": "pair", "ipo": "pair", "reward": "pair", "kto": "answer"}
"""What a loss is a mean over; trained tokens for all others."""


def get_recipe_name(recipe: Recipe) -> str:
    """Return the word for a recipe."""
    return str(recipe.__struct_config__.tag)


class ChatDataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How records become tokens."""

    train_on: TrainOn = "assistant"
    """What is trained: all `assistant` messages, the `last` one, `each` as an example of its own,
    or `all` tokens of the chat."""
    length_policy: LengthPolicy = "truncate"
    """What becomes of examples longer than a sequence: `truncate`, `drop`, `split` or
    `error`."""
    tokenizer: str = ""
    """Folder or GGUF file with tokenizer and template; left out, those of `initial_load_path`."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.one_of("train_on", self.train_on, get_args(TrainOn))
        bounds.one_of("length_policy", self.length_policy, get_args(LengthPolicy))
        bounds.raise_problems()
