"""`SortingDigits`: the smallest task that really needs its reward, and can be learned on one core.

    task = SortingDigits(digits=4)
    task.words.text(task.reset(0).prompt)       "^7391>"

The model reads `^7391>` and is to write `1379` and the end. Of all lists a tenth is held out, by a
hash of the list itself: no prompt for training ever shows one, whatever its number or seed.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.rollouts.environment import Reply
from meshwright.run.posttrain.rollouts.record import Turn
from meshwright.run.posttrain.rollouts.seeds import number_of
from meshwright.run.posttrain.rollouts.verifiers.check import Check
from meshwright.spec.bounds import require, whole, word

Part = Literal["train", "held-out"]
_JUDGES = "meshwright.run.posttrain.rollouts.tasks.judge_sorting"
_MOST = 1024
_SKEW = 6
_ONE_OF = 10
"""One list of so many is held out."""


class DigitWords:
    """The vocabulary: ten digits, the end of a prompt, of an answer, a beginning and a filler."""

    asked, end, begin, pad = 10, 11, 12, 13
    vocab = 14
    _WRITTEN = "0123456789>$^_"

    def tokens(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, one of each character."""
        unknown = sorted(set(text) - set(self._WRITTEN))
        if unknown:
            what = f"{unknown[0]!r} is no word of this vocabulary"
            raise InputError([Problem("text", what, f"use {self._WRITTEN}")])
        return tuple(self._WRITTEN.index(each) for each in text)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return "".join(self._WRITTEN[token] for token in tokens)


class _Asked:
    """One list to be sorted."""

    def __init__(self, task: "SortingDigits", digits: tuple[int, ...]) -> None:
        self._task, self._digits = task, digits
        self.prompt = task.prompt_of(digits)

    def step(self, turn: Turn, /) -> Reply:
        """End after the first answer, which a verifier is to judge."""
        job = {
            "digits": list(self._digits),
            "answer": list(turn.tokens),
            "end": self._task.words.end,
        }
        check = Check(name=self._task.reward, verifier=self._task.verifiers[0], job=job)
        return Reply(done=True, checks=(check,))


class SortingDigits:
    """An environment of one turn: a list of digits, and a reward for sorting it."""

    def __init__(
        self,
        *,
        digits: int = 4,
        longest: int | None = None,
        part: Part = "train",
        reward: Literal["exact", "share"] = "exact",
        seed: int = 0,
    ) -> None:
        """Ask for lists of so many digits; `share` rewards places that are right by themselves.

        With `longest` lists have from `digits` to so many: most are short, and a few very long.
        """
        require(
            whole("digits", digits, least=2, most=_MOST),
            whole("longest", digits if longest is None else longest, least=digits, most=_MOST),
            word("part", part, ("train", "held-out")),
            word("reward", reward, ("exact", "share")),
        )
        self.digits, self.part, self.reward, self.seed = digits, part, reward, seed
        self.longest = digits if longest is None else longest
        self.words = DigitWords()
        # A group asks for one list many times.
        self.digits_of = cache(self._drawn)
        """The list of a number: drawn at random, among those of this part."""
        upto = "" if self.longest == digits else f" to {self.longest}"
        self.name = f"sort {digits}{upto} digits ({part})"
        self.waits = False
        self.verifiers = (f"{_JUDGES}:{reward}",)

    @property
    def max_tokens(self) -> int:
        """The tokens of the longest right answer."""
        return self.longest + 1

    def reset(self, prompt: int, /) -> _Asked:
        """Begin with the list of a number."""
        return _Asked(self, self.digits_of(prompt))

    def _drawn(self, prompt: int) -> tuple[int, ...]:
        many = self._length(prompt)
        for attempt in range(10_000):
            drawn = tuple(
                number_of(self.seed, prompt, attempt, place) % 10 for place in range(many)
            )
            if is_held_out(drawn) == (self.part == "held-out"):
                return drawn
        raise AssertionError("a tenth of all lists is held out, so one comes soon")

    def _length(self, prompt: int) -> int:
        """Return how many digits a list has: by a high power of a chance, so that few are long."""
        if self.longest == self.digits:
            return self.digits
        share = number_of(self.seed, prompt, -1) / (1 << 62)
        return self.digits + round((self.longest - self.digits) * share**_SKEW)

    def prompt_of(self, digits: Sequence[int]) -> tuple[int, ...]:
        """Return the prompt that asks for a list."""
        return (self.words.begin, *digits, self.words.asked)

    def answer_of(self, digits: Sequence[int]) -> tuple[int, ...]:
        """Return the right answer, as supervised training shows it."""
        return (*sorted(digits), self.words.end)

    def shown(self, prompts: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return prompts with their right answers."""
        for prompt in prompts:
            digits = self.digits_of(prompt)
            yield self.prompt_of(digits), self.answer_of(digits)


def is_held_out(digits: Sequence[int]) -> bool:
    """Tell whether a list is kept from training; it depends on nothing but the list."""
    return number_of(0, len(digits), *digits) % _ONE_OF == 0
