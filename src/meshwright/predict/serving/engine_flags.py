"""A fleet as command lines of the engines that serve it: ours, vLLM, SGLang, TensorRT-LLM.

Memory shares, batch limits and degrees are given as each engine means them: some count per
attention group, some over all GPUs of a stage. Flags were held against the sources of vLLM and
SGLang of August 2026, and of TensorRT-LLM's `trtllm-serve` as it was when `--config` came. The size
of a block is left to the engines: vLLM, told one, takes only attention kernels that have it.
"""

import json
import shlex
from typing import Literal, NamedTuple, get_args

from meshwright.predict.serving.fleet import Copies, Fleet

Target = Literal["meshwright", "vllm", "sglang", "tensorrt-llm"]
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
    if target == "meshwright":
        return Exported((shlex.join(_meshwright(fleet, model)),), tuple(_own_notes(fleet)))
    notes = list(_notes(fleet, target))
    write = {"vllm": _vllm, "sglang": _sglang, "tensorrt-llm": _tensorrt}[target]
    if fleet.prefill is None:
        lines = [shlex.join(write(fleet.serving, model, "both"))]
    else:
        lines = [
            shlex.join(write(fleet.prefill, model, "prefill")),
            shlex.join(write(fleet.serving, model, "decode")),
        ]
    return Exported(tuple(lines), tuple(notes))


def _meshwright(fleet: Fleet, model: str) -> list[str]:
    """Return the command that starts all engines and stands before them."""
    copies, limits = fleet.serving, fleet.serving.limits
    replica = copies.replica
    words = ["mw", "serve", model]
    words += _degrees(("--tp", replica.layout.tp))
    if fleet.prefill is not None:
        words += ["--prefill", str(fleet.prefill.count), "--decode", str(copies.count)]
    elif copies.count > 1:
        words += ["--replicas", str(copies.count), "--routing", fleet.routing]
    words += ["--batch-requests", str(limits.batch_requests)]
    words += ["--batch-tokens", str(limits.batch_tokens)]
    if limits.graph_tokens:
        words += ["--graph-tokens", str(limits.graph_tokens)]
    words += ["--memory-share", f"{replica.engine.memory_share:g}"]
    if replica.formats.weights in {"fp8", "int4"}:
        words += ["--weights", replica.formats.weights]
    if replica.formats.kv == "fp8":
        words += ["--kv", "fp8"]
    if not limits.prefix_cache:
        words.append("--no-prefix-cache")
    return words


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
    if replica.formats.weights == "fp8":
        words += ["--quantization", "fp8"]
    if replica.formats.kv == "fp8":
        words += ["--kv-cache-dtype", "fp8"]
    if not limits.prefix_cache:
        words.append("--no-enable-prefix-caching")
    if role != "both":
        side = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        connector = {"kv_connector": "NixlConnector", "kv_role": side}
        words += ["--kv-transfer-config", json.dumps(connector, separators=(",", ":"))]
    return words


def _sglang(copies: Copies, model: str, role: str) -> list[str]:
    replica, limits, layout = copies.replica, copies.limits, copies.replica.layout
    words = ["sglang", "serve", "--model-path", model]
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
    replica, limits, layout = copies.replica, copies.limits, copies.replica.layout
    words = ["trtllm-serve", model]
    words += _degrees(
        ("--tp_size", layout.tp * layout.dp), ("--pp_size", layout.pp), ("--ep_size", layout.ep)
    )
    words += ["--max_batch_size", str(limits.batch_requests // layout.dp)]
    words += ["--max_num_tokens", str(limits.batch_tokens // layout.dp)]
    words += ["--kv_cache_free_gpu_memory_fraction", f"{replica.engine.memory_share:g}"]
    if limits.mixing == "mixed":
        # Without it a prompt has to fit into one step.
        words.append("--enable_chunked_prefill")
    if _tensorrt_options(copies, role):
        words += ["--extra_llm_api_options", _options_file(role)]
    return words


def _options_file(role: str) -> str:
    return "options.yaml" if role == "both" else f"{role}.yaml"


def _tensorrt_options(copies: Copies, role: str) -> list[str]:
    """Return the lines of the file that says what TensorRT-LLM has no flags for."""
    replica = copies.replica
    lines = ["enable_attention_dp: true"] if replica.layout.dp > 1 else []
    kept = ["dtype: fp8"] if replica.formats.kv == "fp8" else []
    kept += [] if copies.limits.prefix_cache else ["enable_block_reuse: false"]
    if kept:
        # It takes the place of all that flags say of the cache.
        kept.append(f"free_gpu_memory_fraction: {replica.engine.memory_share:g}")
        lines.append(f"kv_cache_config: {{{', '.join(kept)}}}")
    if role != "both":
        lines.append("cache_transceiver_config: {backend: DEFAULT}")
    if role == "prefill":
        lines.append("disable_overlap_scheduler: true")
    return lines


def _degrees(*pairs: tuple[str, int]) -> list[str]:
    return [word for flag, value in pairs if value > 1 for word in (flag, str(value))]


def _own_notes(fleet: Fleet) -> list[str]:
    layout, before = fleet.serving.replica.layout, fleet.prefill
    found = []
    if layout.pp * layout.dp * layout.ep > 1:
        found.append("mw serve shares a model by tp alone: plan with --pp 1 --dp 1 --ep 1")
    if before is not None and before.replica.layout != layout:
        found.append("engines of both kinds have the same tp in mw serve")
    return found


def _notes(fleet: Fleet, target: Target) -> list[str]:
    copies = fleet.serving
    replica, layout = copies.replica, copies.replica.layout
    found = []
    if replica.formats.weights not in _ONLINE:
        found.append(f"the checkpoint itself has to be in {replica.formats.weights}")
    if target == "tensorrt-llm":
        both = [(copies, "both" if fleet.prefill is None else "decode")]
        both += [] if fleet.prefill is None else [(fleet.prefill, "prefill")]
        for each, role in both:
            if lines := _tensorrt_options(each, role):
                found.append(f"{_options_file(role)} holds the lines {'; '.join(lines)}")
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
