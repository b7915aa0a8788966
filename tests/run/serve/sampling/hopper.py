"""Compiles the kernels of sampling for Hopper, as `tests.run.kernels.hopper` does with others."""

import json
from collections.abc import Iterator

from tests.run.kernels.hopper import BF16, FP32, INT, Kernel, compiled


def kernels() -> Iterator[Kernel]:
    """List the kernels as they are launched."""
    from meshwright.run.kernels.sampling import (
        gumbel_argmax,
        penalties,
        token_bitmask,
        top_k_top_p,
    )

    rows = {"rows": "*i64", "temperatures": FP32, "stride": INT, "vocab": INT}
    for kind, cut in ((BF16, False), (FP32, True)):
        types = rows | dict.fromkeys(("offsets", "seeds", "drawn"), "*i64")
        types |= {"logits": kind, "floors": FP32, "scores": FP32, "bests": "*i32", "span": INT}
        constants = {"STREAM": 2, "FLOORED": cut, "BLOCK": gumbel_argmax._BLOCK}
        yield Kernel(f"choose {kind}", gumbel_argmax._best_of_span, types, constants, 8)
        types = rows | {"logits": kind, "top_ks": "*i64", "floors": FP32}
        types |= dict.fromkeys(("top_ps", "min_ps"), FP32)
        yield Kernel(f"floors {kind}", top_k_top_p._floor, types, {"BLOCK": top_k_top_p._BLOCK}, 16)
        types = {"logits": kind, "masks": "*i32", "words": INT, "stride": INT, "vocab": INT}
        yield Kernel(
            f"forbid {kind}", token_bitmask._forbid, types, {"BLOCK": token_bitmask._BLOCK}, 4
        )
    types = dict.fromkeys(("repetitions", "presences", "frequencies"), FP32)
    types |= {"lines": "*i64", "slots": "*i64", "logits": FP32, "counts": "*i32"}
    types |= {"stride": INT, "count_stride": INT, "vocab": INT}
    constants = {"IN_PROMPT": penalties.IN_PROMPT, "BLOCK": penalties._BLOCK}
    yield Kernel("penalise", penalties._penalise, types, constants, 4)
    types = {"scores": FP32, "bests": "*i32", "tokens": "*i64", "splits": INT}
    yield Kernel(
        "best of line", gumbel_argmax._best_of_line, types, {"SPLITS": gumbel_argmax._SPLITS}, 4
    )


if __name__ == "__main__":
    for each in kernels():
        print(json.dumps(compiled(each)), flush=True)
