"""Seeds that follow from what is drawn, so that any worker draws the same and none draws it twice.

No generator is handed on: who knows (seed of the run, step, prompt, sample, turn) knows the noise.
The engine's noise depends on the seed and the position alone, so neither the order of the asks nor
what runs beside them changes a draw.
"""

import hashlib

from meshwright.run.posttrain.rollout.rollout import RolloutKey

_BITS = 62  # as many as the engine takes for its own seeds


def derive_turn_seed(run: int, key: RolloutKey, turn: int = 0, renewals: int = 0) -> int:
    """Return the seed of one turn of one sample, or of its rest after weights were renewed."""
    rest = (renewals,) if renewals else ()
    return _hashed(b"rollout", run, key.step, key.prompt, key.sample, turn, *rest)


def derive_run_number(run: int, *places: int) -> int:
    """Return a number of 62 bits for other choices of a run, such as which prompt a place has."""
    return _hashed(b"prompts", run, *places)


def _hashed(purpose: bytes, *numbers: int) -> int:
    written = ",".join(map(str, numbers)).encode()
    digest = hashlib.blake2b(written, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little") & ((1 << _BITS) - 1)
