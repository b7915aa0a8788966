"""What a published run asked of its engine: lengths, how many requests, and when they came.

Numbers that a source states once for all its rows are kept here: how many requests TensorRT-LLM's
performance page sends for each pair of lengths, how InferenceMAX draws its lengths, and the mean
lengths of MLPerf's data sets.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from meshwright.predict.serving.sim.uniform_flow import UniformLoad
from meshwright.predict.validation.serving.engine_limits import CompiledEngineLimits
from meshwright.predict.validation.training.run_model import UnusableRowError

_SENT = {
    (128, 128): 30000, (128, 2048): 3000, (128, 4096): 1500, (1000, 2000): 1500, (2048, 128): 3000,
    (2048, 2048): 1500, (5000, 500): 1500, (1000, 1000): 3000, (500, 2000): 3000,
    (20000, 2000): 1000, (1024, 1024): 3000, (8192, 1024): 1500, (1024, 8192): 1500,
    (32768, 1024): 1000, (1024, 32768): 1000, (1024, 2048): 1500,
}  # fmt: skip
"""Requests that TensorRT-LLM's performance page sends, by lengths of prompt and output."""
_USUALLY_SENT = 3000
_DATASETS: dict[str, tuple[float, float]] = {
    "llama2-70b": (295, 294.45),
    "mixtral-8x7b": (290, 144.84),
    "llama3.1-405b": (9400, 684.68),
    "llama3.1-8b": (800, 128),
    "deepseek-r1": (800, 3886.2),
    "gpt-j-6b": (880, 69),
    "llama3.1-70b": (295, 294.45),
}
"""MLPerf's data sets by model: mean tokens of prompts (estimates) and of outputs (its rules)."""
BEAMS = {"gpt-j-6b": 4}
"""MLPerf's rules have GPT-J search with four beams."""


class ServingLoad(NamedTuple):
    """The load of a run."""

    request_load: UniformLoad
    is_static_batch: bool = False
    """The batch is one that starts and ends together."""
    is_offline: bool = False
    """Throughput is that of a long run, without its beginning and end."""
    beams: int = 1
    compiled_limits: CompiledEngineLimits | None = None
    """The largest step that the engine was compiled for, where that is known."""
    assumed: tuple[str, ...] = ()


def read_load(row: Mapping[str, Any], model: str) -> ServingLoad:
    """Return what a row's run was asked, or raise what it does not say."""
    text = str(row.get("concurrency_or_batch_or_rate") or "")
    if text.lower().startswith("mlperf"):
        return _mlperf(row, model, text)
    prompt, output = _length(row, "isl"), _length(row, "osl")
    number = re.search(r"([\d.]+)", text)
    many = int(float(number[1])) if number else 0
    notes = str(row.get("notes") or "")
    if text.startswith("max (all"):
        sent = _SENT.get((round(prompt), round(output)), _USUALLY_SENT)
        return ServingLoad(UniformLoad(prompt_tokens=prompt, output_tokens=output, requests=sent))
    if text.startswith(("static batch", "batch")) and many:
        if "MTP" in text:
            raise UnusableRowError("speculative decoding with multi-token heads is not modelled")
        load = UniformLoad(
            prompt_tokens=prompt, output_tokens=output, requests=many, concurrency=many
        )
        return ServingLoad(load, is_static_batch=True)
    if text.startswith("QPS"):
        sent = int(re.findall(r"\d+", text)[-1])
        rate = None if "INF" in text else float(re.findall(r"[\d.]+", text)[0])
        return ServingLoad(
            UniformLoad(
                prompt_tokens=prompt, output_tokens=output, requests=sent, rate_per_s=rate,
                output_half_width=0.9,
            )
        )  # fmt: skip
    if "requests at once" in text and many:
        spread = 0.82 if "U(100" in notes else 0.0
        return ServingLoad(
            UniformLoad(
                prompt_tokens=prompt, output_tokens=output, requests=many, output_half_width=spread
            )
        )
    if "concurrency" in text and many:
        return _concurrent(row, prompt, output, many, text)
    if not text and many == 0 and row.get("ttft_ms"):
        return ServingLoad(
            UniformLoad(prompt_tokens=prompt, output_tokens=output, requests=1, concurrency=1)
        )
    raise UnusableRowError(f"the load {text!r} is not understood")


def _concurrent(
    row: Mapping[str, Any], prompt: float, output: float, many: int, text: str
) -> ServingLoad:
    spread, scale, sent = 0.0, 1.0, 10 * many
    notes = str(row.get("notes") or "")
    sample = "silicon_sample" in str(row.get("source"))
    if sample and "source_file" not in notes:
        # InferenceMAX draws lengths evenly from 0.8 to 1 of the nominal ones.
        spread, scale = 1 / 9, 0.9
    elif text.startswith("max concurrency"):
        spread = 1.0 if "dataset=random" in notes else 0.5
        named = re.search(r"\bn=(\d+)", notes)
        sent = int(named[1]) if named else sent
    named = re.search(r"(\d+) requests", text)
    sent = int(named[1]) if named else sent
    load = UniformLoad(
        prompt_tokens=scale * prompt, output_tokens=max(1.0, scale * output),
        requests=max(1, sent), concurrency=many, output_half_width=spread,
    )  # fmt: skip
    return ServingLoad(load)


def _mlperf(row: Mapping[str, Any], model: str, text: str) -> ServingLoad:
    lengths = _DATASETS.get(model)
    if lengths is None:
        raise UnusableRowError(f"no lengths are known of MLPerf's data set for {model}")
    prompt, output = lengths
    asked, made = row.get("req_s"), row.get("output_tok_s")
    if asked and made and model != "gpt-j-6b":
        output = made / asked
    offline = "offline" in text.lower()
    rate = None if offline else float(re.findall(r"[\d.]+", text)[-1])
    if rate is not None and model == "llama2-70b" and rate > 10_000:
        raise UnusableRowError("the target rate is no number of requests")
    beams = BEAMS.get(model, 1)
    load = UniformLoad(
        prompt_tokens=prompt,
        output_tokens=output,
        requests=1,
        rate_per_s=rate,
        output_half_width=0.9,
        cached_share=1 - 1 / beams,
    )
    return ServingLoad(
        load, is_offline=True, beams=beams, assumed=("lengths of MLPerf's data set",)
    )


def _length(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    if not isinstance(value, int | float) or not 0 < value < 10**7:
        raise UnusableRowError(f"the row does not say {name}")
    return float(value)
