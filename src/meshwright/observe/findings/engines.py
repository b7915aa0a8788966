"""Serving engines: which one a trace shows, and the flags that mend a pattern there."""

import re
from collections.abc import Iterable

_KNOWN = (
    ("SGLang", re.compile(r"\bsglang\b|\bsgl_kernel\b|sgl-workspace")),
    ("vLLM", re.compile(r"\bvllm(::|/|\.|_C\b)|^vllm\b")),
)
"""How their Python files, operators and kernels are called; SGLang may load parts of vLLM."""
REMEDIES = {
    "vLLM": {
        "launch-bound": "leave out --enforce-eager, so that a step is launched as CUDA graphs",
        "late-host": "--async-scheduling prepares the next step while this one runs",
        "tiny-kernels": "larger batches: --max-num-seqs, --max-num-batched-tokens",
        "underfilled-device": "larger batches: --max-num-seqs, --max-num-batched-tokens",
        "exposed-all-reduce": "leave out --disable-custom-all-reduce; a smaller "
        "--tensor-parallel-size with more replicas (--data-parallel-size)",
        "exposed-all-to-all": "--enable-dbo computes one half of a batch while the other travels",
        "exposed-send-receive": "inside a node --tensor-parallel-size instead of "
        "--pipeline-parallel-size",
        "small-collectives": "leave out --disable-custom-all-reduce",
        "straggler-more-work": "--enable-eplb evens out the load of experts",
    },
    "SGLang": {
        "launch-bound": "leave out --disable-cuda-graph; --cuda-graph-max-bs as large as batches",
        "late-host": "leave out --disable-overlap-schedule, which prepares the next step meanwhile",
        "tiny-kernels": "larger batches: --max-running-requests",
        "underfilled-device": "larger batches: --max-running-requests",
        "exposed-all-reduce": "--enable-flashinfer-allreduce-fusion, and leave out "
        "--disable-custom-all-reduce; a smaller --tp-size with more replicas (--dp-size)",
        "exposed-all-to-all": "--enable-two-batch-overlap computes one half of a batch while the "
        "other travels",
        "exposed-send-receive": "inside a node --tp-size instead of --pp-size",
        "small-collectives": "leave out --disable-custom-all-reduce",
        "straggler-more-work": "--enable-eplb evens out the load of experts",
    },
}


def engine_of(names: Iterable[str]) -> str:
    """The engine that these names of spans show; empty for none."""
    known = list(names)
    return next((one for one, rule in _KNOWN if any(map(rule.search, known))), "")
