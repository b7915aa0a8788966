"""Requests and tokens of a step that compiled engines were built for, before 0.15.

A compiled engine has bounds that no run can go past. TensorRT-LLM's performance page of 0.10 has
one pair for all; from 0.11 to 0.14 its benchmark looked them up by model, degree and longest
sequence (`tensorrt_llm/bench/build/benchmark_config.yml`, and a table of the page of 0.11). Later
releases work them out from the room for keys and values.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class CompiledEngineLimits(NamedTuple):
    """The largest step of an engine."""

    max_requests: int
    max_tokens: int


_FIRST = CompiledEngineLimits(2048, 2048)
"""All engines of 0.10."""
_SEVENTY = {
    (1, None): CompiledEngineLimits(2048, 2048),
    (2, None): CompiledEngineLimits(256, 1024),
    (2, 4096): CompiledEngineLimits(2048, 1024),
    (4, None): CompiledEngineLimits(2048, 1024),
    (8, None): CompiledEngineLimits(8192, 16384),
}
_BUILT: dict[str, dict[tuple[int, int | None], CompiledEngineLimits]] = {
    "gpt-j-6b": {(1, None): CompiledEngineLimits(128, 2048), (1, 256): CompiledEngineLimits(2048,
    2048)},
    "llama2-7b": {(1, None): CompiledEngineLimits(4096, 8192)},
    "llama2-70b": {
        (2, None): CompiledEngineLimits(2048, 2048), (4, None): CompiledEngineLimits(4096, 8192),
        (4, 4224): CompiledEngineLimits(256, 8192),
        (8, None): CompiledEngineLimits(8192, 16384), (8, 2176): CompiledEngineLimits(1024, 16384),
    },
    "falcon-180b": {(4, None): CompiledEngineLimits(4096, 8192), (8,
    None): CompiledEngineLimits(2048, 8192)},
    "llama3-8b": {(1, None): CompiledEngineLimits(2048, 8192)},
    "llama3.1-8b": {(1, None): CompiledEngineLimits(2048, 8192)},
    "llama3-70b": _SEVENTY,
    "llama3.1-70b": _SEVENTY,
    "mixtral-8x7b": {(2, None): CompiledEngineLimits(2048, 3072), (4,
    None): CompiledEngineLimits(8192, 8192)},
    "mistral-7b": {(1, None): CompiledEngineLimits(4098, 8192)},
}  # fmt: skip
"""By model, tensor degree and tokens of a whole request; None has those not named.

Llama 3.1's engines are taken to be built like Llama 3's, which they came after.
"""


def find_compiled_limits(
    row: Mapping[str, Any], model: str, tp: int, tokens: float
) -> CompiledEngineLimits | None:
    """Return what a row's engine was built for, where its release kept a table."""
    release = re.match(r"0\.(\d+)", str(row.get("engine_version") or ""))
    if "perf-overview" not in str(row.get("source")) or release is None:
        return None
    number = int(release[1])
    if number == 10:
        return _FIRST
    if not 11 <= number <= 14:
        return None
    found = _BUILT.get(model, {})
    return found.get((tp, round(tokens))) or found.get((tp, None))
