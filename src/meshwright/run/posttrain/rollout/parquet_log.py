"""Rollouts as a Parquet file: a tenth of the bytes of lines, and readable by columns elsewhere.

Numbers keep all their bits: log-probabilities are doubles, tokens whole numbers of 32 bits.
"""

import os
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.rollout.rollout import Rollout
from meshwright.run.posttrain.rollout.rollout_log import (
    RecordedRollouts,
    RolloutOrigin,
    read_jsonl,
    validate_format,
    validate_unique_keys,
    write_jsonl,
)

_ORIGIN = b"meshwright.origin"
_TOKENS = pa.list_(pa.int32())
_TURN = pa.struct(
    {
        "tokens": _TOKENS,
        "logprobs": pa.list_(pa.float64()),
        "finish": pa.string(),
        "version": pa.int64(),
        "seed": pa.int64(),
        "weight_updates": pa.list_(pa.list_(pa.int64())),
        "observation": _TOKENS,
        "cached_tokens": pa.int64(),
        "start_s": pa.float64(),
        "duration_s": pa.float64(),
    }
)
_PART = pa.struct(
    {
        "name": pa.string(),
        "value": pa.float64(),
        "weight": pa.float64(),
        "reason": pa.string(),
        "verifier": pa.string(),
        "fingerprint": pa.string(),
        "outcome": pa.string(),
        "duration_s": pa.float64(),
        "is_final": pa.bool_(),
    }
)
ROLLOUT_SCHEMA = pa.schema(
    {
        "key": pa.struct({"step": pa.int64(), "prompt": pa.int64(), "sample": pa.int64()}),
        "prompt": _TOKENS,
        "turns": pa.list_(_TURN),
        "rewards": pa.list_(_PART),
        "ending": pa.string(),
        "error": pa.string(),
    }
)


def write_rollout_parquet(path: str | Path, recorded: RecordedRollouts) -> None:
    """Write rollouts as a table; the file is there whole or not at all."""
    path = Path(path)
    schema = ROLLOUT_SCHEMA.with_metadata({_ORIGIN: msgspec.json.encode(recorded.origin)})
    table = pa.Table.from_pylist(msgspec.to_builtins(recorded.rollouts), schema=schema)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(table, beside, compression="zstd")
    beside.replace(path)


def read_rollout_parquet(path: str | Path) -> RecordedRollouts:
    """Read a table of rollouts."""
    path = Path(path)
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        what = f"cannot read as a Parquet file: {error}"
        raise InputError([Problem(str(path), what, "give a file of rollouts")]) from error
    written = (table.schema.metadata or {}).get(_ORIGIN)
    try:
        validate_format(path, written or b"")
        origin = msgspec.json.decode(written or b"", type=RolloutOrigin)
        rollouts = msgspec.convert(table.to_pylist(), tuple[Rollout, ...])
    except msgspec.MsgspecError as error:
        what = f"holds something else than rollouts: {error}"
        raise InputError([Problem(str(path), what, "give a file of rollouts")]) from error
    validate_unique_keys(path, rollouts)
    return RecordedRollouts(origin, rollouts)


def read_rollouts(path: str | Path) -> RecordedRollouts:
    """Read rollouts from a file of lines or a table, by its ending."""
    return read_rollout_parquet(path) if Path(path).suffix == ".parquet" else read_jsonl(path)


def write_rollouts(path: str | Path, recorded: RecordedRollouts) -> None:
    """Write rollouts as `.parquet` or, by any other ending, as lines."""
    write = write_rollout_parquet if Path(path).suffix == ".parquet" else write_jsonl
    write(path, recorded)
