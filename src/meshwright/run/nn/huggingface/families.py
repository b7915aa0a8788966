"""All families whose checkpoints can be read, and but for the multimodal ones written."""

from meshwright.errors import InputError
from meshwright.run.nn.huggingface.dense import DENSE
from meshwright.run.nn.huggingface.family import Family
from meshwright.run.nn.huggingface.gpt import GPT
from meshwright.run.nn.huggingface.hybrid import HYBRID
from meshwright.run.nn.huggingface.multimodal import MULTIMODAL
from meshwright.run.nn.huggingface.sparse import SPARSE
from meshwright.spec.model import Model
from meshwright.spec.names import unknown_name

FAMILIES: dict[str, Family] = {**DENSE, **GPT, **SPARSE, **HYBRID, **MULTIMODAL}


def families() -> tuple[str, ...]:
    """Return every `model_type` whose checkpoints can be read, sorted."""
    return tuple(sorted(FAMILIES))


def family_of(model: Model) -> Family:
    """Return the table of a model's family."""
    if model.family in FAMILIES:
        return FAMILIES[model.family]
    problem = unknown_name("family of checkpoints", model.family, FAMILIES, "family")
    known = "known are " + ", ".join(families())
    raise InputError([problem._replace(fix=f"{problem.fix}; {known}")])
