"""Flags that say how the tokens of an answer are drawn."""

import argparse
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError, Problem

if TYPE_CHECKING:
    from meshwright.run.serve.sampling_params import SamplingParams

_REALS = ("temperature", "top_p", "min_p")
_WHOLES = ("top_k", "max_tokens", "seed")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", metavar="T", help="0 takes the likeliest token")
    group.add_argument("--top-p", metavar="P", help="of the likeliest that make up P")
    group.add_argument("--top-k", metavar="K", help="of the K likeliest")
    group.add_argument("--min-p", metavar="P", help="of those at least P times as likely")
    group.add_argument("--max-tokens", metavar="N", help="end after so many")
    group.add_argument("--seed", metavar="N", help="draw the same again")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text"
    )


def read_sampling_params(args: argparse.Namespace, **usual: Any) -> "SamplingParams":
    """Return what the flags say, and `usual` where they say nothing."""
    from meshwright.run.serve.sampling_params import SamplingParams

    given = dict(usual)
    for names, kind in ((_REALS, float), (_WHOLES, int)):
        for name in names:
            text = getattr(args, name)
            if text is not None:
                given[name] = _number(name, text, kind)
    return SamplingParams(stop=tuple(args.stop), **given)


def _number(name: str, text: str, kind: type[float] | type[int]) -> float:
    try:
        return kind(text)
    except ValueError:
        flag = f"--{name.replace('_', '-')}"
        what = f"{text!r} is no {'number' if kind is float else 'whole number'}"
        raise InputError([Problem(flag, what, f"give a number, such as {kind(1)}")]) from None
