"""A fleet as command lines of the engines that serve it: vLLM, SGLang, TensorRT-LLM.

Memory shares, batch limits and degrees are given as each engine means them: some count per
attention group, some over all GPUs of a stage.
"""

import shlex
from typing import Literal, NamedTuple, get_args

from meshwright.predict.serving.fleet import Copies, Fleet

Target = Literal["vllm", "sglang", "tensorrt-llm"]
TARGETS: tuple[Target, ...] = get_args(Target)
_ONLINE = ("bf16", "fp16", "fp8")
"""Formats that engines make while they load a 16-bit checkpoint; others have to be in it."""


class Exported(NamedTuple):
    """Command lines, and what they do not say."""

    lines: tuple[str, ...]
    """One for each kind of engine of the fleet."""
    notes: tuple[str, ...]


def command_lines(fleet: Fleet, target: Target, model: str) -> Exported:
    """Return the commands that start a fleet's engines, one for each kind of them."""
    write = {"vllm": _vllm, "sglang": _sglang, "tensorrt-llm": _tensorrt}[target]
    notes = list(_notes(fleet, target))
    if fleet.prefill is None:
        lines = [shlex.join(write(fleet.serving, model, "both"))]
    else:
        lines = [
            shlex.join(write(fleet.prefill, model, "prefill")),
            shlex.join(write(fleet.serving, model, "decode")),
        ]
    return Exported(tuple(lines), tuple(notes))


def _vllm(copies: Copies, model: str, role: str) -> list[str]:
    replica, limits, layout = copies.replica, copies.limits, copies.replica.layout
    words = ["vllm", "serve", model]
    words += _degrees(
        ("--tensor-parallel-size", layout.tp), ("--pipeline-parallel-size", layout.pp),
        ("--data-parallel-size", layout.dp),
    )  # fmt: skip
    if layout.ep > 1:
        words.append("--enable-expert-parallel")
    words += ["--max-num-seqs", str(limits.batch_requests // layout.dp)]
    words += ["--max-num-batched-tokens", str(limits.batch_tokens // layout.dp)]
    words += ["--gpu-memory-utilization", f"{replica.engine.memory_share:g}"]
    words += ["--block-size", str(limits.block_tokens)]
    if replica.formats.weights == "fp8":
        words += ["--quantization", "fp8"]
    if replica.formats.kv == "fp8":
        words += ["--kv-cache-dtype", "fp8"]
    if not limits.prefix_cache:
        words.append("--no-enable-prefix-caching")
    if role != "both":
        words += ["--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}']
    return words


def _sglang(copies: Copies, model: str, role: str) -> list[str]:
    replica, limits, layout = copies.replica, copies.limits, copies.replica.layout
    words = ["python", "-m", "sglang.launch_server", "--model-path", model]
    words += _degrees(
        ("--tp-size", layout.tp * layout.dp), ("--pp-size", layout.pp), ("--dp-size", layout.dp),
        ("--ep-size", layout.ep),
    )  # fmt: skip
    if layout.dp > 1:
        words.append("--enable-dp-attention")
    words += ["--max-running-requests", str(limits.batch_requests)]
    words += ["--chunked-prefill-size", str(limits.batch_tokens)]
    words += ["--mem-fraction-static", f"{replica.engine.memory_share:g}"]
    if limits.mixing == "mixed" and role == "both":
        words.append("--enable-mixed-chunk")
    if replica.formats.weights == "fp8":
        words += ["--quantization", "fp8"]
    if replica.formats.kv == "fp8":
        words += ["--kv-cache-dtype", "fp8_e4m3"]
    if not limits.prefix_cache:
        words.append("--disable-radix-cache")
    if role != "both":
        words += ["--disaggregation-mode", role]
    return words


def _tensorrt(copies: Copies, model: str, role: str) -> list[str]:
    del role  # its disaggregated servers are named in a file of their own
    replica, limits, layout = copies.replica, copies.limits, copies.replica.layout
    words = ["trtllm-serve", model]
    words += _degrees(
        ("--tp_size", layout.tp * layout.dp), ("--pp_size", layout.pp), ("--ep_size", layout.ep)
    )
    words += ["--max_batch_size", str(limits.batch_requests // layout.dp)]
    words += ["--max_num_tokens", str(limits.batch_tokens // layout.dp)]
    words += ["--kv_cache_free_gpu_memory_fraction", f"{replica.engine.memory_share:g}"]
    if layout.dp > 1 or replica.formats.kv == "fp8":
        words += ["--extra_llm_api_options", "options.yaml"]
    return words


def _degrees(*pairs: tuple[str, int]) -> list[str]:
    return [word for flag, value in pairs if value > 1 for word in (flag, str(value))]


def _notes(fleet: Fleet, target: Target) -> list[str]:
    copies = fleet.serving
    replica, layout = copies.replica, copies.replica.layout
    found = []
    if replica.formats.weights not in _ONLINE:
        found.append(f"the checkpoint itself has to be in {replica.formats.weights}")
    if target == "tensorrt-llm":
        lines = ["enable_attention_dp: true"] if layout.dp > 1 else []
        lines += ["kv_cache_config: {dtype: fp8}"] if replica.formats.kv == "fp8" else []
        if lines:
            found.append(f"options.yaml holds {' and '.join(lines)}")
        if layout.dp > 1 and layout.tp > 1:
            found.append("TensorRT-LLM's attention groups have one GPU each: tp has to be 1")
        if replica.formats.weights == "fp8":
            found.append("the checkpoint itself has to be in fp8")
        if fleet.prefill is not None:
            found.append("its file for trtllm-serve disaggregated names the engines of both kinds")
    if target == "vllm" and layout.ep == 1 and layout.dp > 1:
        found.append("without expert parallel, vLLM shares experts over all GPUs of tp × dp")
    total = copies.count + (fleet.prefill.count if fleet.prefill else 0)
    if total > 1:
        found.append(f"a router that goes by {fleet.routing} stands before {total} engines")
    return found
