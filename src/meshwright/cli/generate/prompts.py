"""Prompts of `mw generate`: from flags, lines of a file or a pipe, or drawn to measure with."""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.field_checks import raise_problems

if TYPE_CHECKING:
    from meshwright.run.serve.sampling_params import SamplingParams

_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")


class PromptLine(msgspec.Struct, frozen=True, kw_only=True):
    """What a line of a file says: a prompt, and what it has in place of the flags."""

    prompt: str
    adapter: str | msgspec.UnsetType | None = msgspec.UNSET
    """None is the model without any."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None

    def sampling_params(self, usual: "SamplingParams", where: str) -> "SamplingParams":
        """Return how its answer is drawn; `usual` is what the flags say."""
        given: dict[str, Any] = {
            name: value for name in _SAMPLED if (value := getattr(self, name)) is not None
        }
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        try:
            return msgspec.structs.replace(usual, **given)
        except InputError as error:
            raise locate_prompt_error(error, where) from None


class LocatedPrompt(NamedTuple):
    """One prompt."""

    source: str
    """The flag, or the line of a file, that it stands in."""
    line: PromptLine


class PromptList(NamedTuple):
    """All prompts, in order."""

    prompts: list[LocatedPrompt]
    unread: list[str]
    """Fields of lines that say nothing here."""


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="may be given several times"
    )
    parser.add_argument(
        "--input-file", metavar="FILE",
        help='prompts, one to a line: text, or JSON with "prompt"; there "adapter", "max_tokens" '
        "and other flags of sampling go before those given here",
    )  # fmt: skip
    parser.add_argument(
        "--num-prompts", metavar="N", help="measure with so many prompts of random tokens"
    )
    parser.add_argument("--random-input-len", metavar="N-M", help="their lengths (default 512)")


def check_prompts(args: argparse.Namespace) -> None:
    """Raise where flags say two things, or one that nobody would read."""
    written = [
        flag
        for flag, value in (("--prompt", args.prompt), ("--input-file", args.input_file))
        if value
    ]
    problems = []
    if args.num_prompts is not None:
        what = "prompts are drawn, and these would not be read"
        problems += [Problem(flag, what, "leave out one of the two") for flag in written]
        if args.output_file:
            what = "what a model thinks of random tokens teaches nobody"
            problems.append(
                Problem("--num-prompts", what, "name prompts or chats with --input-file")
            )
    elif args.random_input_len is not None:
        what = "is the length of prompts that are drawn"
        problems.append(
            Problem("--random-input-len", what, "add --num-prompts 16, say, or leave it out")
        )
    if args.num_prompts is None and args.load_format == "dummy":
        what = "dummy weights have no tokenizer to read a prompt with"
        problems.append(Problem("--load-format", what, "use --num-prompts 16, say"))
    if args.output_file and args.prompt:
        what = "is not answered: --output-file takes the lines of a file"
        problems.append(Problem("--prompt", what, "write it into the --input-file"))
    if args.output_file and args.input_file is None:
        fix = "name prompts or chats with --input-file"
        problems.append(Problem("--output-file", "there is nothing to answer", fix))
    raise_problems(problems)


def read_prompts(args: argparse.Namespace) -> PromptList:
    """Return the prompts of flags and of a file, or what comes through a pipe."""
    found = [LocatedPrompt("--prompt", PromptLine(prompt=text)) for text in args.prompt]
    left: list[str] = []
    if args.input_file is not None:
        found += _of_file(args.input_file, left)
    if not found:
        text = "" if sys.stdin.isatty() else sys.stdin.read()
        if not text.strip():
            fix = "use --prompt TEXT, --input-file FILE, --num-prompts N, or a pipe"
            raise InputError([Problem("--prompt", "there is nothing to continue", fix)])
        found = [LocatedPrompt("stdin", PromptLine(prompt=text))]
    return PromptList(found, left)


def _of_file(name: str, left: list[str]) -> list[LocatedPrompt]:
    """Return the prompts of a file's lines; fields that say nothing are added to `left`."""
    try:
        lines = Path(name).read_text().splitlines()
    except OSError as error:
        raise InputError([Problem(name, str(error.strerror), "check the path")]) from None
    except UnicodeDecodeError:
        raise InputError([Problem(name, "is no text", "write one prompt to a line")]) from None
    found = []
    for number, text in enumerate(lines, 1):
        where = f"{name}:{number}"
        if text.lstrip().startswith("{"):
            try:
                fields = msgspec.json.decode(text, type=dict[str, Any])
                found.append(LocatedPrompt(where, msgspec.convert(fields, PromptLine)))
            except msgspec.DecodeError as error:
                what = f'is no JSON with a "prompt": {error}'
                raise InputError([Problem(where, what, "mend the line")]) from None
            left += fields.keys() - {*PromptLine.__struct_fields__, *left}
        elif text.strip():
            found.append(LocatedPrompt(where, PromptLine(prompt=text)))
    if not found:
        raise InputError([Problem(name, "holds no prompt", "write one to a line")])
    return found


class RandomPromptOptions(NamedTuple):
    """Prompts of random tokens, by how many and how long they are."""

    num_prompts: int
    min_tokens: int
    max_tokens: int

    def sample_tokens(self, vocab: int, seed: int) -> list[list[int]]:
        """Draw them."""
        rng, most = random.Random(seed), min(10_000, vocab)
        lengths = (rng.randint(self.min_tokens, self.max_tokens) for _ in range(self.num_prompts))
        return [[rng.randrange(most) for _ in range(length)] for length in lengths]


def read_random_prompt_options(args: argparse.Namespace) -> RandomPromptOptions:
    """Return what is to be drawn."""
    try:
        low, _, high = (args.random_input_len or "512").partition("-")
        drawn = RandomPromptOptions(int(args.num_prompts), int(low), int(high or low))
        if not (drawn.num_prompts > 0 and 0 < drawn.min_tokens <= drawn.max_tokens):
            raise ValueError
    except ValueError:
        what = f"{args.num_prompts} prompts of {args.random_input_len} tokens"
        fix = "use --num-prompts 256 --random-input-len 100-1024, say"
        raise InputError([Problem("--num-prompts", what, fix)]) from None
    return drawn


def locate_prompt_error(
    error: InputError, where: str, own: Sequence[str] = ("prompt",)
) -> InputError:
    """Say in which flag or line something is wrong; fields of `own` are what stands there."""
    return InputError(
        problem._replace(where=where if problem.where in own else f"{where}: {problem.where}")
        for problem in error.problems
    )
