"""Prompts of exact lengths that share what their requests share, and nothing else.

Every block of tokens is drawn from a seed of its own, so that the same request has the same prompt
in every run and in any order, and so that no other prompt begins like it by chance.
"""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from meshwright.spec.workload.requests import WorkloadRequest

MIN_TOKEN_ID = 256
"""Ids below this are left out where the vocabulary is large: many have special tokens there."""

Ids = npt.NDArray[np.int64]


class RandomPrompts:
    """Draws the tokens of prompts for one run."""

    def __init__(self, seed: str, vocabulary: int) -> None:
        self._seed = seed
        self._low = MIN_TOKEN_ID if vocabulary >= 4 * MIN_TOKEN_ID else 0
        self._high = vocabulary

    def generate_ids(self, index: int, request: WorkloadRequest) -> Ids:
        """Return the tokens of one request's prompt."""
        parts, left = list[Ids](), request.prompt_tokens
        for block in request.prefix_blocks:
            drawn = self._draw(f"block/{block}", request.block_tokens)[:left]
            parts.append(drawn)
            left -= len(drawn)
        if left:
            parts.append(self._draw(f"request/{index}", left))
        return np.concatenate(parts)

    def _draw(self, what: str, count: int) -> Ids:
        key = blake2b(f"{self._seed}/{what}".encode(), digest_size=16).digest()
        rng = np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))
        return rng.integers(self._low, self._high, count)


_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were her all she there would their we him been has when who will "
    "more no if out so said what up its about into than them can only other new some could time "
    "these two may then do first any my now such like our over man me even most made after also "
    "did many before must through back years where much your way well down should because each "
    "just those people how too little state good very make world still own see men work long get "
    "here between both life being under never day same another know while last might us great old "
    "year off come since against go came right used take three"
)
COMMON_WORDS = tuple(_COMMON.split())
"""Common words of English, most of which are one token each in most vocabularies."""


def ids_to_text(ids: Ids, words: tuple[str, ...], between: str = " ") -> str:
    """Return a text with one word for each token; all begin alike, as a first word has no space."""
    first = COMMON_WORDS[0] if between else words[0]
    return between.join([first, *(words[number] for number in (ids[1:] % len(words)).tolist())])
