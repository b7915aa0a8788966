"""Settings of supervised recipes: what is minimised, which answers are trained, what is adapted.

    [recipe]                [chats]                     [adapter]
    kind = "dpo"            train = "answers"           rank = 16
    beta = 0.1              too_long = "cut"            targets = ["q_proj", "v_proj"]

Everything else of a run stands where it stands for `mw train`.
"""

from typing import Literal, get_args

import msgspec

from meshwright.run.posttrain.data.answers import Train
from meshwright.run.posttrain.data.forms import Kind
from meshwright.run.posttrain.data.prepared import TooLong
from meshwright.run.posttrain.objectives.distillation import Direction
from meshwright.spec.bounds import Bounds, real

Gains = Literal["sum", "mean"]
"""Of the tokens of an answer: their sum, or their mean."""


class Sft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="sft",
          tag_field="kind"):  # fmt: skip
    """The answers of chats, word for word, by every weight."""


class LoraSft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="lora",
              tag_field="kind"):  # fmt: skip
    """The answers of chats by an adapter."""


class DoraSft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="dora",
              tag_field="kind"):  # fmt: skip
    """The answers of chats by an adapter that learns lengths of rows too."""


class Dpo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="dpo",
          tag_field="kind"):  # fmt: skip
    """The chosen one of two answers before the rejected one."""

    beta: float = 0.1
    """How much it costs to move away from the model that the run began with."""
    flips: float = 0.0
    """Share of the pairs that are thought to be labelled the wrong way round."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.positive(beta=self.beta)
        bounds.problems += real("flips", self.flips, 0.0, 0.499)
        bounds.require()


class Ipo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="ipo",
          tag_field="kind"):  # fmt: skip
    """The same, up to a margin of 1 / 2β and no further."""

    beta: float = 0.1
    """The paper's τ."""
    gains: Gains = "sum"
    """What is compared of two answers: `sum` is the paper's, `mean` over tokens is TRL's."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.positive(beta=self.beta)
        bounds.one_of("gains", self.gains, get_args(Gains))
        bounds.require()


class Kto(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="kto",
          tag_field="kind"):  # fmt: skip
    """Answers that were judged one by one."""

    beta: float = 0.1
    """How much it costs to move away from the model that the run began with."""
    wanted: float = 1.0
    """What answers that are liked count."""
    unwanted: float = 1.0
    """What the others count."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.positive(beta=self.beta, wanted=self.wanted, unwanted=self.unwanted)
        bounds.require()


class Reward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="reward",
             tag_field="kind"):  # fmt: skip
    """A number for each answer: higher for the chosen one of two."""

    centre: float = 0.0
    """Multiple of (sum of both rewards)² that keeps rewards around 0."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.not_negative(centre=self.centre)
        bounds.require()


class Distil(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="distil",
             tag_field="kind"):  # fmt: skip
    """What a teacher thought likely at each token of its answers."""

    direction: Direction = "forward"
    """`forward` covers what the teacher does, `reverse` keeps to it."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.one_of("direction", self.direction, get_args(Direction))
        bounds.require()


Recipe = Sft | LoraSft | DoraSft | Dpo | Ipo | Kto | Reward | Distil
KINDS = ("sft", "lora", "dora", "dpo", "ipo", "kto", "reward", "distil")
WANTED: dict[str, Kind] = {"dpo": "pairs", "ipo": "pairs", "reward": "pairs", "kto": "verdicts"}
"""What records have to be; chats for all others."""
COUNTED = {"dpo": "pair", "ipo": "pair", "reward": "pair", "kto": "answer"}
"""What a loss is a mean over; trained tokens for all others."""


def name_of(recipe: Recipe) -> str:
    """Return the word for a recipe."""
    return str(recipe.__struct_config__.tag)


class ChatSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How records become tokens."""

    train: Train = "answers"
    """Which answers are trained: all, the `last`, `each` as an example of its own, or `all` tokens
    of the chat."""
    too_long: TooLong = "cut"
    """What becomes of examples longer than a sequence: `cut`, `drop`, `split` or `refuse`."""
    words: str = ""
    """Folder or GGUF file with tokenizer and template; left out, those of `start_from`."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.one_of("train", self.train, get_args(Train))
        bounds.one_of("too_long", self.too_long, get_args(TooLong))
        bounds.require()
