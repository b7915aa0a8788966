"""A fleet as command lines of the engines that serve it: ours, vLLM, SGLang, TensorRT-LLM.

Memory shares, batch limits and degrees are given as each engine means them: some count per
attention group, some over all GPUs of a stage. Flags were held against the sources of vLLM and
SGLang of August 2026, and of TensorRT-LLM's `trtllm-serve` as it was when `--config` came. The size
of a block is left to the engines: vLLM, told one, takes only attention kernels that have it.
"""

import json
import shlex
from typing import Literal, NamedTuple, get_args

from meshwright.predict.serving.sim.serving_fleet import ReplicaPool, ServingFleet
from meshwright.spec.units import format_quantity

EngineTarget = Literal["meshwright", "vllm", "sglang", "tensorrt-llm"]
ENGINE_TARGETS: tuple[EngineTarget, ...] = get_args(EngineTarget)
PORT, JOINING = 8000, 5000
"""Where engines answer, and where the nodes of one meet."""
_ONLINE = ("bf16", "fp16", "fp8")
"""Formats that engines make while they load a 16-bit checkpoint; others have to be in it."""


class EngineCommands(NamedTuple):
    """Command lines, and what they do not say."""

    lines: tuple[str, ...]
    """One for each kind of engine of the fleet; none where the target cannot run it."""
    replica_counts: tuple[int, ...]
    """How many engines each line is started for."""
    notes: tuple[str, ...]


def find_unsupported(fleet: ServingFleet, target: EngineTarget) -> str:
    """Say why a target cannot run a fleet; nothing where it can."""
    kinds = [copies.replica.layout for copies in _kinds(fleet).values()]
    apart = fleet.prefill_pool is not None
    if target == "meshwright":
        node = fleet.serving_pool.replica.cluster.gpus_per_node
        if any(layout.pp * layout.dp * layout.ep > 1 for layout in kinds):
            return "mw serve shares a model by tp alone, without pp, dp or ep"
        if apart and any(layout.tp > 1 for layout in kinds):
            return "mw serve hands prompts over between engines of one GPU each"
        if fleet.gpus > node:
            there = format_quantity(node, "GPU")
            return f"mw serve starts its engines on one machine, of {there} here"
    if target == "vllm" and apart and any(layout.pp > 1 for layout in kinds):
        return "vLLM hands no prompts over between engines with pp (its issues 40674 and 52913)"
    if target == "tensorrt-llm" and any(layout.dp > 1 and layout.tp > 1 for layout in kinds):
        return "TensorRT-LLM's attention groups have one GPU each: with dp, tp has to be 1"
    return ""


def build_command_lines(fleet: ServingFleet, target: EngineTarget, model: str) -> EngineCommands:
    """Return the commands that start a fleet's engines, one for each kind of them."""
    if reason := find_unsupported(fleet, target):
        return EngineCommands((), (), (reason,))
    if target == "meshwright":
        # One command starts all engines.
        return EngineCommands((shlex.join(_meshwright(fleet, model)),), (1,), ())
    write = {"vllm": _vllm, "sglang": _sglang, "tensorrt-llm": _tensorrt}[target]
    kinds = _kinds(fleet)
    port = str(PORT) if _engines(fleet) == 1 else "PORT"
    lines = [
        shlex.join([*write(copies, model, role), *_placed(copies, target), "--port", port])
        for role, copies in kinds.items()
    ]
    starts = tuple(copies.count for copies in kinds.values())
    return EngineCommands(tuple(lines), starts, (*_starting(fleet, target), *_notes(fleet, target)))


def _kinds(fleet: ServingFleet) -> dict[str, ReplicaPool]:
    """Return the engines that are alike, by what they do."""
    if fleet.prefill_pool is None:
        return {"both": fleet.serving_pool}
    return {"prefill": fleet.prefill_pool, "decode": fleet.serving_pool}


def _engines(fleet: ServingFleet) -> int:
    return sum(copies.count for copies in _kinds(fleet).values())


def _nodes(copies: ReplicaPool) -> int:
    """Return how many nodes one engine lies on."""
    return -(-copies.replica.gpus // copies.replica.cluster.gpus_per_node)


def _placed(copies: ReplicaPool, target: EngineTarget) -> list[str]:
    """Return what an engine on several nodes has to be told on each of them."""
    if (nodes := _nodes(copies)) == 1 or target == "tensorrt-llm":
        return []
    words = ["--nnodes", str(nodes), "--node-rank", "RANK"]
    return words + (
        ["--master-addr", "HEAD"] if target == "vllm" else ["--dist-init-addr", f"HEAD:{JOINING}"]
    )


def _starting(fleet: ServingFleet, target: EngineTarget) -> list[str]:
    """Say how often each line is started, and where."""
    kinds, engines = _kinds(fleet), _engines(fleet)
    found = []
    for number, copies in enumerate(kinds.values(), 1):
        line = "the line" if len(kinds) == 1 else f"line {number}"
        gpus, nodes = format_quantity(copies.replica.gpus, "GPU"), _nodes(copies)
        if engines > 1:
            each = " each" if copies.count > 1 else ""
            found.append(f"{line} is for {format_quantity(copies.count, 'engine')} of {gpus}{each}")
        if nodes == 1:
            continue
        if target == "tensorrt-llm":
            found.append(
                f"{line} runs on {nodes} nodes as one MPI job: "
                f"mpirun or srun with {copies.replica.gpus} ranks, before trtllm-llmapi-launch"
            )
        else:
            headless = ", with --headless on all but RANK 0" if target == "vllm" else ""
            found.append(
                f"{line} runs on each of an engine's {nodes} nodes, RANK from 0 to {nodes - 1} "
                f"and HEAD the address of RANK 0{headless}"
            )
    node = fleet.serving_pool.replica.cluster.gpus_per_node
    if engines > 1:
        found.append(f"PORT is another for each engine on a node: {PORT}, {PORT + 1}, …")
        if any(copies.replica.gpus < node for copies in kinds.values()):
            found.append("engines on one node get GPUs of their own by CUDA_VISIBLE_DEVICES")
    if fleet.prefill_pool is not None and target == "vllm":
        found.append(
            "VLLM_NIXL_SIDE_CHANNEL_PORT is another for each engine on a node as well, and "
            "VLLM_NIXL_SIDE_CHANNEL_HOST its address"
        )
    if fleet.prefill_pool is not None and fleet.prefill_pool.count > 1 and target == "sglang":
        found.append("on one node, engines for prompts differ in --disaggregation-bootstrap-port")
    return found


def _meshwright(fleet: ServingFleet, model: str) -> list[str]:
    """Return the command that starts all engines and stands before them."""
    copies, limits = fleet.serving_pool, fleet.serving_pool.scheduler_config
    replica = copies.replica
    words = ["mw", "serve", model]
    words += _degrees(("--tp", replica.layout.tp))
    if fleet.prefill_pool is not None:
        words += ["--prefill-replicas", str(fleet.prefill_pool.count)]
        words += ["--decode-replicas", str(copies.count)]
    elif copies.count > 1:
        words += ["--replicas", str(copies.count), "--routing", fleet.routing]
    words += ["--max-num-seqs", str(limits.max_num_seqs)]
    words += ["--max-num-batched-tokens", str(limits.max_num_batched_tokens)]
    if limits.max_cudagraph_capture_size:
        words += ["--max-cudagraph-capture-size", str(limits.max_cudagraph_capture_size)]
    words += ["--gpu-memory-utilization", f"{replica.engine.gpu_memory_utilization:g}"]
    if replica.quantization.weights in {"fp8", "int4"}:
        words += ["--quantization", replica.quantization.weights]
    if replica.quantization.kv == "fp8":
        words += ["--kv-cache-dtype", "fp8"]
    if not limits.enable_prefix_caching:
        words.append("--no-enable-prefix-caching")
    return words


def _vllm(copies: ReplicaPool, model: str, role: str) -> list[str]:
    replica, limits, layout = copies.replica, copies.scheduler_config, copies.replica.layout
    words = ["vllm", "serve", model]
    words += _degrees(
        ("--tensor-parallel-size", layout.tp), ("--pipeline-parallel-size", layout.pp),
        ("--data-parallel-size", layout.dp),
    )  # fmt: skip
    if layout.ep > 1:
        words.append("--enable-expert-parallel")
    words += ["--max-num-seqs", str(limits.max_num_seqs // layout.dp)]
    words += ["--max-num-batched-tokens", str(limits.max_num_batched_tokens // layout.dp)]
    words += ["--gpu-memory-utilization", f"{replica.engine.gpu_memory_utilization:g}"]
    if replica.quantization.weights == "fp8":
        words += ["--quantization", "fp8"]
    if replica.quantization.kv == "fp8":
        words += ["--kv-cache-dtype", "fp8"]
    if not limits.enable_prefix_caching:
        words.append("--no-enable-prefix-caching")
    if role != "both":
        side = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        connector = {"kv_connector": "NixlConnector", "kv_role": side}
        words += ["--kv-transfer-config", json.dumps(connector, separators=(",", ":"))]
    return words


def _sglang(copies: ReplicaPool, model: str, role: str) -> list[str]:
    replica, limits, layout = copies.replica, copies.scheduler_config, copies.replica.layout
    words = ["sglang", "serve", "--model-path", model]
    words += _degrees(
        ("--tp-size", layout.tp * layout.dp), ("--pp-size", layout.pp), ("--dp-size", layout.dp),
        ("--ep-size", layout.ep),
    )  # fmt: skip
    if layout.dp > 1:
        words.append("--enable-dp-attention")
    words += ["--max-running-requests", str(limits.max_num_seqs)]
    words += ["--chunked-prefill-size", str(limits.max_num_batched_tokens)]
    words += ["--mem-fraction-static", f"{replica.engine.gpu_memory_utilization:g}"]
    if limits.enable_chunked_prefill and role == "both":
        words.append("--enable-mixed-chunk")
    if replica.quantization.weights == "fp8":
        words += ["--quantization", "fp8"]
    if replica.quantization.kv == "fp8":
        words += ["--kv-cache-dtype", "fp8_e4m3"]
    if not limits.enable_prefix_caching:
        words.append("--disable-radix-cache")
    if role != "both":
        words += ["--disaggregation-mode", role]
    return words


def _tensorrt(copies: ReplicaPool, model: str, role: str) -> list[str]:
    replica, limits, layout = copies.replica, copies.scheduler_config, copies.replica.layout
    words = ["trtllm-serve", model]
    words += _degrees(
        ("--tp_size", layout.tp * layout.dp), ("--pp_size", layout.pp), ("--ep_size", layout.ep)
    )
    words += ["--max_batch_size", str(limits.max_num_seqs // layout.dp)]
    words += ["--max_num_tokens", str(limits.max_num_batched_tokens // layout.dp)]
    words += ["--kv_cache_free_gpu_memory_fraction", f"{replica.engine.gpu_memory_utilization:g}"]
    if limits.enable_chunked_prefill:
        # Without it a prompt has to fit into one step.
        words.append("--enable_chunked_prefill")
    if _tensorrt_options(copies, role):
        words += ["--extra_llm_api_options", _options_file(role)]
    return words


def _options_file(role: str) -> str:
    return "options.yaml" if role == "both" else f"{role}.yaml"


def _tensorrt_options(copies: ReplicaPool, role: str) -> list[str]:
    """Return the lines of the file that says what TensorRT-LLM has no flags for."""
    replica = copies.replica
    lines = ["enable_attention_dp: true"] if replica.layout.dp > 1 else []
    kept = ["dtype: fp8"] if replica.quantization.kv == "fp8" else []
    kept += [] if copies.scheduler_config.enable_prefix_caching else ["enable_block_reuse: false"]
    if kept:
        # It takes the place of all that flags say of the cache.
        kept.append(f"free_gpu_memory_fraction: {replica.engine.gpu_memory_utilization:g}")
        lines.append(f"kv_cache_config: {{{', '.join(kept)}}}")
    if role != "both":
        lines.append("cache_transceiver_config: {backend: DEFAULT}")
    if role == "prefill":
        lines.append("disable_overlap_scheduler: true")
    return lines


def _degrees(*pairs: tuple[str, int]) -> list[str]:
    return [word for flag, value in pairs if value > 1 for word in (flag, str(value))]


def _notes(fleet: ServingFleet, target: EngineTarget) -> list[str]:
    copies = fleet.serving_pool
    replica, layout = copies.replica, copies.replica.layout
    found = []
    if replica.quantization.weights not in _ONLINE:
        found.append(f"the checkpoint itself has to be in {replica.quantization.weights}")
    if target == "tensorrt-llm":
        for role, each in _kinds(fleet).items():
            if lines := _tensorrt_options(each, role):
                found.append(f"{_options_file(role)} holds the lines {'; '.join(lines)}")
        if replica.quantization.weights == "fp8":
            found.append("the checkpoint itself has to be in fp8")
        if fleet.prefill_pool is not None:
            found.append("its file for trtllm-serve disaggregated names the engines of both kinds")
    if target == "vllm" and layout.ep == 1 and layout.dp > 1:
        found.append("without expert parallel, vLLM shares experts over all GPUs of tp × dp")
    if (total := _engines(fleet)) > 1:
        found.append(f"a router that goes by {fleet.routing} stands before {total} engines")
    return found
