"""`Engine`: what serving software adds to the work itself, and how it fills its steps.

The same model on the same GPU takes longer under one engine than under another because of what
the host does between two steps, how many small kernels a layer has, how well kernels fit, and how
requests are batched. Each of these is a figure with a physical meaning; `validation/serving/fit.py`
fits them to published rows, all rows of an engine together.
"""

from typing import Literal

import msgspec

from meshwright.spec.serving import Mixing

Room = Literal["of_free", "of_all"]


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One serving engine, or a family of its versions."""

    name: str
    step_s: float = 1e-3
    """Host time of a step that the GPU waits for."""
    request_s: float = 2e-6
    """The same for each request in the step."""
    prefill_s: float = 50e-6
    """What each layer adds to a step with parts of prompts: its kernels are launched singly."""
    hidden: bool = False
    """The host prepares the next step while the GPU works, so that the longer of both counts."""
    gap: float = 1.0
    """Time of products over what the kernel tables say of them alone."""
    attention_gap: float = 1.0
    """The same of prompts' attention."""
    kv_share: float = 0.8
    """Share of the memory bandwidth at which decoding reads keys and values."""
    attention_s: float = 6e-6
    """What one layer's attention takes before it reads: launch, split and merge."""
    small_kernels: float = 5.0
    """Small kernels of a layer: norms, rotation, storing keys and values, activation, casts."""
    reduce_s: float = 6e-6
    """Latency of an all-reduce of a few tokens over fast links."""
    link_share: float = 0.6
    """Share of the fast links' bandwidth that all-reduces and exchanges reach."""
    expert_s: float = 15e-6
    """Routing, sorting and summing of one layer of experts."""
    arrival_s: float = 5e-3
    """From a request at the server to its first step, and from a token to the client."""
    room: Room = "of_all"
    """Whether `memory_share` is of the whole device, or of what weights and buffers leave."""
    memory_share: float = 0.9
    """Share of the memory that keys and values may have (with the weights, for `of_all`)."""
    reserve_bytes: float = 2e9
    """Memory for libraries, captured graphs and workspaces."""
    batch_requests: int = 256
    """Requests of a step at most, where a run does not say."""
    batch_tokens: int = 8192
    """Tokens of a step at most."""
    mixing: Mixing = "mixed"
    """Whether prompts share steps with decoding requests."""


TENSORRT_LLM = Engine(
    name="TensorRT-LLM", room="of_free", memory_share=0.95, batch_requests=4096,
    step_s=2e-3, request_s=3e-6, prefill_s=2.37e-4, gap=1.13, attention_gap=0.8, kv_share=0.95,
    attention_s=2.14e-5, small_kernels=11.0, reduce_s=2.2e-5, link_share=0.109, expert_s=3.03e-6,
    arrival_s=3.57e-3, reserve_bytes=2.41e9,
)  # fmt: skip
TENSORRT_LLM_TORCH = Engine(
    name="TensorRT-LLM PyTorch", room="of_free", memory_share=0.95, batch_requests=4096,
    step_s=6.3e-4, request_s=6.49e-6, prefill_s=2.28e-4, gap=1.04, attention_gap=0.96, kv_share=0.95,
    attention_s=5.75e-6, small_kernels=4.79, reduce_s=6e-6, link_share=0.204, expert_s=7.65e-6,
    arrival_s=0.0663, reserve_bytes=8.72e9,
)  # fmt: skip
VLLM = Engine(
    name="vLLM", memory_share=0.9, batch_requests=1024,
    step_s=1.29e-3, request_s=4.4e-7, prefill_s=2.27e-4, gap=0.97, attention_gap=2.5, kv_share=0.95,
    attention_s=1.51e-5, small_kernels=5.44, reduce_s=7.4e-6, link_share=0.156, expert_s=5.03e-6,
    arrival_s=0.0505, reserve_bytes=1.11e9,
)  # fmt: skip
SGLANG = Engine(
    name="SGLang", memory_share=0.88, batch_requests=4096, mixing="apart", hidden=True,
    step_s=1e-3, request_s=2e-6, prefill_s=2.71e-4, gap=0.95, attention_gap=0.8, kv_share=0.622,
    attention_s=2e-5, small_kernels=12.0, reduce_s=9.53e-6, link_share=0.507, expert_s=2.82e-5,
    arrival_s=0.283, reserve_bytes=4.09e9,
)  # fmt: skip
ENGINES = (TENSORRT_LLM, TENSORRT_LLM_TORCH, VLLM, SGLANG)
