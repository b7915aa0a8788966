"""Names of kernels made short for people, and made alike for comparing runs.

void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, …>(…)
short:  vectorized_elementwise_kernel CUDAFunctor_add
alike:  the whole, since only compilers' running numbers are taken off: triton_poi_fused_add_12
"""

import re

_WRAPPERS = frozenset({
    "device_kernel", "enable_sm80_to_sm89", "enable_sm90_or_later", "enable_sm90", "Kernel",
    "Kernel2", "kernel",
})  # fmt: skip
"""Templates that say nothing of what they wrap."""
_HINT = re.compile(
    r"\b(\w*[Ff]unctor\w*|\w+_kernel(?:_cuda|_impl)?|\w*KernelImpl|\w*Gemm\w*|\w+Ops?)\b"
)
_SAYS_LITTLE = re.compile(r"^(gpu_kernel_impl|launch_|[AB]?(Unary|Binary)Functor|ReduceOp)")
_UNNAMED = re.compile(r"\(anonymous namespace\)::|<unnamed>::|\{anonymous\}::")
_NUMBERED = re.compile(r"^(triton_\w+?)_\d+(d[0-9d]+)?$")
_HASHED = re.compile(r"_[0-9a-f]{16,}$")


def shorten_name(name: str, width: int = 0) -> str:
    """A kernel's name without namespaces, template arguments and parameters; cut to a width."""
    text = _UNNAMED.sub("", name.removeprefix("void ")).strip()
    chain = re.findall(r"(?:[\w~]+::)*([\w~]+)\s*<", _leading(text))
    if chain:
        inner = re.search(r"<\s*(?:\w+::)*([A-Za-z_]\w*)", text)
        said = [part for part in (*chain, inner[1] if inner else "") if part not in _WRAPPERS]
        short = str(said[0]) if said else text
        if short == chain[0]:
            hints = [hint for hint in _HINT.findall(text[text.index("<") :]) if hint != short]
            telling: list[str] = [hint for hint in hints if not _SAYS_LITTLE.match(hint)] or hints
            short = f"{short} {telling[0]}" if telling else short
    else:
        # Parameters stand right behind a name; `Memcpy HtoD (Pageable -> Device)` has none.
        bare = re.split(r"(?<=\w)\(", text)[0]
        short = bare.rsplit("::", 1)[-1] or text
    return short if not width or len(short) <= width else short[: width - 1] + "…"


def normalize_kernel_name(name: str) -> str:
    """A kernel's name without what a compiler counts up or hashes: equal work, equal name."""
    numbered = _NUMBERED.match(name)
    return str(numbered[1]) if numbered else _HASHED.sub("", name)


def _leading(text: str) -> str:
    """The templates that open one inside the other before the first argument that is none."""
    found = re.match(r"(?:(?:[\w~]+::)*[\w~]+\s*<\s*)+", text)
    return found[0] if found else ""
