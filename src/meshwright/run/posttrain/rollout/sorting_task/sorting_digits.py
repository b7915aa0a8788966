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
from meshwright.run.posttrain.rollout.environment import DatasetPart, EnvironmentStep
from meshwright.run.posttrain.rollout.rollout import RolloutTurn
from meshwright.run.posttrain.rollout.seeds import derive_run_number
from meshwright.run.posttrain.rollout.verifiers.verifier_job import VerifierJob
from meshwright.spec.field_checks import check_choice, check_integer, raise_problems

_VERIFIERS = {
    "exact": "meshwright.run.posttrain.rollout.sorting_task.sorting_verifiers:verify_sorted",
    "share": "meshwright.run.posttrain.rollout.sorting_task.sorting_verifiers:sorted_fraction",
}
"""The verifier of each kind of reward."""
_MOST = 1024
_SKEW = 6
_ONE_OF = 10
"""One list of so many is held out."""


class DigitTokenizer:
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
        self.prompt = task.build_prompt(digits)

    def step(self, turn: RolloutTurn, /) -> EnvironmentStep:
        """End after the first answer, which a verifier is to judge."""
        job = {
            "digits": list(self._digits),
            "answer": list(turn.tokens),
            "end": self._task.words.end,
        }
        check = VerifierJob(name=self._task.reward, verifier=self._task.verifiers[0], payload=job)
        return EnvironmentStep(done=True, verifier_jobs=(check,))


class SortingDigits:
    """An environment of one turn: a list of digits, and a reward for sorting it."""

    def __init__(
        self,
        *,
        digits: int = 4,
        longest: int | None = None,
        part: DatasetPart = "train",
        reward: Literal["exact", "share"] = "exact",
        seed: int = 0,
    ) -> None:
        """Ask for lists of so many digits; `share` rewards places that are right by themselves.

        With `longest` lists have from `digits` to so many: most are short, and a few very long.
        """
        raise_problems(
            check_integer("digits", digits, least=2, most=_MOST),
            check_integer(
                "longest", digits if longest is None else longest, least=digits, most=_MOST
            ),
            check_choice("part", part, ("train", "held-out")),
            check_choice("reward", reward, ("exact", "share")),
        )
        self.digits, self.part, self.reward, self.seed = digits, part, reward, seed
        self.longest = digits if longest is None else longest
        self.words = DigitTokenizer()
        # A group asks for one list many times.
        self.sample_digits = cache(self._drawn)
        """The list of a number: drawn at random, among those of this part."""
        upto = "" if self.longest == digits else f" to {self.longest}"
        self.name = f"sort {digits}{upto} digits ({part})"
        self.may_block = False
        self.verifiers = (_VERIFIERS[reward],)

    @property
    def max_tokens(self) -> int:
        """The tokens of the longest right answer."""
        return self.longest + 1

    def reset(self, prompt: int, /) -> _Asked:
        """Begin with the list of a number."""
        return _Asked(self, self.sample_digits(prompt))

    def _drawn(self, prompt: int) -> tuple[int, ...]:
        many = self._length(prompt)
        for attempt in range(10_000):
            drawn = tuple(
                derive_run_number(self.seed, prompt, attempt, place) % 10 for place in range(many)
            )
            if is_held_out(drawn) == (self.part == "held-out"):
                return drawn
        raise AssertionError("a tenth of all lists is held out, so one comes soon")

    def _length(self, prompt: int) -> int:
        """Return how many digits a list has: by a high power of a chance, so that few are long."""
        if self.longest == self.digits:
            return self.digits
        share = derive_run_number(self.seed, prompt, -1) / (1 << 62)
        return self.digits + round((self.longest - self.digits) * share**_SKEW)

    def build_prompt(self, digits: Sequence[int]) -> tuple[int, ...]:
        """Return the prompt that asks for a list."""
        return (self.words.begin, *digits, self.words.asked)

    def build_answer(self, digits: Sequence[int]) -> tuple[int, ...]:
        """Return the right answer, as supervised training shows it."""
        return (*sorted(digits), self.words.end)

    def demonstrations(
        self, prompts: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return prompts with their right answers."""
        for prompt in prompts:
            digits = self.sample_digits(prompt)
            yield self.build_prompt(digits), self.build_answer(digits)


def is_held_out(digits: Sequence[int]) -> bool:
    """Tell whether a list is kept from training; it depends on nothing but the list."""
    return derive_run_number(0, len(digits), *digits) % _ONE_OF == 0
