"""Prompts of `mw generate`: from flags, lines of a file or a pipe, or drawn to measure with."""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.bounds import require

if TYPE_CHECKING:
    from meshwright.run.serve.asked import Sampling

_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")


class Line(msgspec.Struct, frozen=True, kw_only=True):
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

    def sampling(self, usual: "Sampling", where: str) -> "Sampling":
        """Return how its answer is drawn; `usual` is what the flags say."""
        given: dict[str, Any] = {
            name: value for name in _SAMPLED if (value := getattr(self, name)) is not None
        }
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        try:
            return msgspec.structs.replace(usual, **given)
        except InputError as error:
            raise located(error, where) from None


class Prompt(NamedTuple):
    """One prompt."""

    where: str
    """The flag, or the line of a file, that it stands in."""
    line: Line


class Prompts(NamedTuple):
    """All prompts, in order."""

    found: list[Prompt]
    left: list[str]
    """Fields of lines that say nothing here."""


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="may be given several times"
    )
    parser.add_argument(
        "--file", metavar="FILE",
        help='prompts, one to a line: text, or JSON with "prompt"; there "adapter", "max_tokens" '
        "and other flags of sampling go before those given here",
    )  # fmt: skip
    parser.add_argument("--draw", metavar="N", help="measure with so many prompts of random tokens")
    parser.add_argument("--prompt-tokens", metavar="N-M", help="their lengths (default 512)")


def check_prompts(args: argparse.Namespace) -> None:
    """Raise where flags say two things, or one that nobody would read."""
    written = [flag for flag in ("--prompt", "--file") if getattr(args, flag[2:])]
    problems = []
    if args.draw is not None:
        what = "prompts are drawn, and these would not be read"
        problems += [Problem(flag, what, "leave out one of the two") for flag in written]
        if args.record:
            what = "what a model thinks of random tokens teaches nobody"
            problems.append(Problem("--draw", what, "name prompts or chats with --file"))
    elif args.prompt_tokens is not None:
        what = "is the length of prompts that are drawn"
        problems.append(Problem("--prompt-tokens", what, "add --draw 16, say, or leave it out"))
    if args.draw is None and args.random_weights:
        what = "random weights have no words to read a prompt with"
        problems.append(Problem("--random-weights", what, "use --draw 16, say"))
    if args.record and args.prompt:
        what = "is not answered: --record takes the lines of a file"
        problems.append(Problem("--prompt", what, "write it into the --file"))
    if args.record and args.file is None:
        fix = "name prompts or chats with --file"
        problems.append(Problem("--record", "there is nothing to answer", fix))
    require(problems)


def read_prompts(args: argparse.Namespace) -> Prompts:
    """Return the prompts of flags and of a file, or what comes through a pipe."""
    found = [Prompt("--prompt", Line(prompt=text)) for text in args.prompt]
    left: list[str] = []
    if args.file is not None:
        found += _of_file(args.file, left)
    if not found:
        text = "" if sys.stdin.isatty() else sys.stdin.read()
        if not text.strip():
            fix = "use --prompt TEXT, --file FILE, --draw N, or a pipe"
            raise InputError([Problem("--prompt", "there is nothing to continue", fix)])
        found = [Prompt("stdin", Line(prompt=text))]
    return Prompts(found, left)


def _of_file(name: str, left: list[str]) -> list[Prompt]:
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
                found.append(Prompt(where, msgspec.convert(fields, Line)))
            except msgspec.DecodeError as error:
                what = f'is no JSON with a "prompt": {error}'
                raise InputError([Problem(where, what, "mend the line")]) from None
            left += fields.keys() - {*Line.__struct_fields__, *left}
        elif text.strip():
            found.append(Prompt(where, Line(prompt=text)))
    if not found:
        raise InputError([Problem(name, "holds no prompt", "write one to a line")])
    return found


class Drawn(NamedTuple):
    """Prompts of random tokens, by how many and how long they are."""

    prompts: int
    least: int
    most: int

    def tokens(self, vocab: int, seed: int) -> list[list[int]]:
        """Draw them."""
        rng, most = random.Random(seed), min(10_000, vocab)
        lengths = (rng.randint(self.least, self.most) for _ in range(self.prompts))
        return [[rng.randrange(most) for _ in range(length)] for length in lengths]


def drawn_of(args: argparse.Namespace) -> Drawn:
    """Return what is to be drawn."""
    try:
        low, _, high = (args.prompt_tokens or "512").partition("-")
        drawn = Drawn(int(args.draw), int(low), int(high or low))
        if not (drawn.prompts > 0 and 0 < drawn.least <= drawn.most):
            raise ValueError
    except ValueError:
        what = f"{args.draw} prompts of {args.prompt_tokens} tokens"
        fix = "use --draw 256 --prompt-tokens 100-1024, say"
        raise InputError([Problem("--draw", what, fix)]) from None
    return drawn


def located(error: InputError, where: str, own: Sequence[str] = ("prompt",)) -> InputError:
    """Say in which flag or line something is wrong; fields of `own` are what stands there."""
    return InputError(
        problem._replace(where=where if problem.where in own else f"{where}: {problem.where}")
        for problem in error.problems
    )
