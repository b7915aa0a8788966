"""Answers under prompts they do not belong to, from which KTO estimates how far a policy has moved.

own, strange = prepare(records, words, length=2048), prepare(mismatched(records), words, …)
"""

from collections.abc import Sequence
from typing import Any

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.data.records import DataRecord


def mismatch_completions(records: Sequence[DataRecord]) -> list[DataRecord]:
    """Return records in which each prompt has the answer to the next prompt that differs.

    Records have `prompt` and `completion`, or `messages` that end with an answer. Neighbours often
    are answers to one prompt, so the next record alone would not do.
    """
    parts = [_parts(record) for record in records]
    count = len(parts)
    # From the back, twice around: the last records find theirs at the beginning.
    strange = [-1] * count
    for place in reversed(range(2 * count - 1)):
        here, after = place % count, (place + 1) % count
        strange[here] = after if parts[after][0] != parts[here][0] else strange[after]
    if count and strange[0] < 0:
        what = f"all {count:,} records have the same prompt"
        raise InputError([Problem("data", what, "give answers to several prompts")])
    return [
        DataRecord(record.source, _joined(record.values, parts[other][1]))
        for record, other in zip(records, strange, strict=True)
    ]


def _parts(record: DataRecord) -> tuple[Any, Any]:
    """Return prompt and answer."""
    values = record.values
    if values.get("messages"):
        *prompt, answer = values["messages"]
        if prompt and answer.get("role") == "assistant":
            return prompt, answer
    elif "prompt" in values and "completion" in values:
        return values["prompt"], values["completion"]
    what = "has no prompt with one answer"
    fix = "give prompt and completion, or messages that end with the assistant's"
    raise InputError([Problem(record.source, what, fix)])


def _joined(values: dict[str, Any], answer: Any) -> dict[str, Any]:
    if values.get("messages"):
        return {**values, "messages": [*values["messages"][:-1], answer]}
    return {**values, "completion": answer}
