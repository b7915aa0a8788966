"""Tries features with several ranks, in a process of their own that all of them share."""

import sys

import torch

from tests.run.serve.pairs.evidence import check
from tests.run.serve.pairs.trial import tried


def main(*features: str) -> None:
    """Try features with several ranks, in a process of their own that all of them share."""
    torch.set_num_threads(1)
    for name in features:
        print("ranks and", name, file=sys.stderr)
        check(tried((name, "ranks")))


if __name__ == "__main__":
    main(*sys.argv[1:])
