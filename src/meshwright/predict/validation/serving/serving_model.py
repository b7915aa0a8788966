"""The model and the GPU of a published serving run, from the names its row prints.

Sources spell one model in many ways: `LLaMA v3.1 70B`, `meta-llama/Llama-3.1-70B-Instruct`,
`llama3_1-70b-fp8_dyn`, `llama2-70b-99.9`. What says something about weights, tuning or accuracy
goes; what is left is looked up in the catalog, or among the shapes beside this module.
"""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.validation.training.run_model import UnusableRowError
from meshwright.spec import catalog
from meshwright.spec.cluster import Gpu
from meshwright.spec.model import AttentionSpec, Model
from meshwright.spec.serialization import decode

_REMARKS = re.compile(
    r"(?<![a-z0-9])(?:instruct|chat|it|hf|base|pt|fp8|fp4|nvfp4|mxfp4|bf16|int4|int8|awq|gptq|dyn|pre|"
    r"quark|thinking|2507|0528|99|99\.9)(?![a-z0-9.])"
)
_SPELLINGS: tuple[tuple[str, str], ...] = (
    (r"^llama-?v?2?-?(7|13|70)b$", r"llama2-\1b"),
    (r"^llama-?v?(3|4)(?:[._](\d))?-(.+)$", r"llama\1.\2-\3"),
    (r"^gpt-?j(?:-6b)?$", "gpt-j-6b"),
    (r"^deepseek-v3.*$|^deepseek-math-v2$", "deepseek-v3"),
    (r"^deepseek-r1.*$", "deepseek-r1"),
    (r"^kimi-k2.*$", "kimi-k2"),
    (r"^minimax-m2.*$", "minimax-m2"),
    (r"^glm-5.*$", "glm-5"),
    (r"^qwen2-0\.5b$", "qwen2.5-0.5b"),
    (r"^mistral-7b.*$", "mistral-7b"),
    (r"^(?:nvidia-)?nemotron-3-(nano-30b-a3b|super-120b-a12b).*$", r"nemotron-3-\1"),
    (r"^llama4-maverick.*$", "llama4-maverick"),
    (r"^llama4-scout.*$", "llama4-scout"),
)
_GPUS: tuple[tuple[str, str], ...] = (
    (r"gb300", "gb300"),
    (r"gb200", "gb200"),
    (r"gh200", "gh200-96g"),
    (r"b300", "b300-288g-sxm"),
    (r"b200", "b200-180g-sxm"),
    (r"h200", "h200-141g-sxm"),
    (r"h100.*(?:nvl|94)", "h100-80g-sxm"),
    (r"h100.*pcie", "h100-80g-pcie"),
    (r"h100", "h100-80g-sxm"),
    (r"h800", "h800-80g-sxm"),
    (r"h20", "h20-96g-sxm"),
    (r"a100.*pcie", "a100-80g-pcie"),
    (r"a100.*40", "a100-40g-sxm"),
    (r"a100", "a100-80g-sxm"),
    (r"a800", "a800-80g-sxm"),
    (r"l40s", "l40s"),
    (r"\bl4\b", "l4"),
    (r"\ba10\b", "a10-24g"),
    (r"4090", "rtx-4090"),
    (r"rtx.*6000.*(?:pro|blackwell)|rtx.*pro.*6000", "rtx-pro-6000-server"),
    (r"mi355x", "mi355x"),
    (r"mi350x", "mi350x"),
    (r"mi325x", "mi325x"),
    (r"mi300x", "mi300x"),
)
_MEMORY = (("gh200.*(?:144|141)", 144e9), ("h20-3e", 141e9), ("h100.*(?:nvl|94)", 94e9))
"""Variants of a part that the catalog has with other memory."""
_BANDWIDTH = (("gh200.*144", 4.9e12), ("h20-3e", 4.8e12), ("h100.*(?:nvl|94)", 3.9e12))


def find_model(name: str) -> Model:
    """Return the model that a row names."""
    plain = normalize_model_name(name)
    extra = _shapes().get(plain)
    if extra is not None:
        return extra
    try:
        found = catalog.get_model(plain)
        return _unwindowed(found) if plain == "mistral-7b" else found
    except InputError:
        raise UnusableRowError(f"the shape of {name!r} is not known") from None


@cache
def _unwindowed(model: Model) -> Model:
    """Return Mistral 7B as it is since its second version, which serving benchmarks use."""
    (block,) = model.blocks
    assert isinstance(block.mixer, AttentionSpec)
    mixer = replace(block.mixer, window=None)
    return replace(model, blocks=(replace(block, mixer=mixer),))


def normalize_model_name(name: str) -> str:
    """Return a model's name without its maker, its weights' format and its tuning."""
    text = re.sub(r"\([^()]*\)", " ", name.lower()).split("/")[-1]
    text = re.sub(r"llama[\s_-]*v?\s*(\d)", r"llama\1", text.replace("llama v", "llama"))
    text = re.sub(r"(?<=[a-z0-9])_(?=\d+(?:b|-))", "." if "llama3_" in text else "-", text)
    text = re.sub(r"[\s_]+", "-", text.strip())
    before = ""
    while before != text:
        before = text
        text = re.sub(r"-+", "-", _REMARKS.sub("", text)).strip("-. ")
    text = re.sub(r"-17b-(?:16|128)e", "", text)
    for pattern, spelled in _SPELLINGS:
        found = re.match(pattern, text)
        if found:
            text = found.expand(spelled).replace(".-", "-")
            break
    return re.sub(r"^qwen-?(\d)", r"qwen\1", text)


def find_gpu(text: str) -> Gpu:
    """Return the GPU that a row names, with the memory of its variant."""
    plain = re.sub(r"[\s_]+", "-", text.lower())
    name = next((name for pattern, name in _GPUS if re.search(pattern, plain)), None)
    if name is None:
        raise UnusableRowError(f"{text!r} is no GPU of the catalog")
    if len(set(re.findall(r"mi3\d\dx", plain))) > 1:
        raise UnusableRowError("GPUs of two kinds serve together")
    gpu = catalog.get_gpu(name)
    changes: dict[str, float] = {}
    for pattern, size in _MEMORY:
        if re.search(pattern, plain):
            changes["memory_bytes"] = int(size)
    for pattern, rate in _BANDWIDTH:
        if re.search(pattern, plain):
            changes["memory_bytes_per_s"] = rate
    return _changed(gpu, tuple(sorted(changes.items()))) if changes else gpu


@cache
def _changed(gpu: Gpu, changes: tuple[tuple[str, float], ...]) -> Gpu:
    return replace(gpu, **dict(changes))


@cache
def _shapes() -> Mapping[str, Model]:
    text = files(__package__).joinpath("shapes.toml").read_text(encoding="utf-8")
    return {
        name: decode(Model, {"name": name, **data}, name)
        for name, data in tomllib.loads(text).items()
    }
