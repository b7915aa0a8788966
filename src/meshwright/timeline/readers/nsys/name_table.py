"""Names in an Nsight export: texts that are stored once, and what PyTorch writes into them.

`emit_nvtx` names a range `aten::mul, seq = 7, op_id = 12, sizes = [[2, 3], []]` (PyTorch,
torch/csrc/profiler/util.cpp); the operator is what stands before the first of these, so that all
calls of one operator have one name.
"""

import re
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from meshwright.timeline.readers.nsys.nsys_database import (
    NsysDatabase,
    build_integer_sql,
    build_text_sql,
    decode_text,
)
from meshwright.timeline.readers.parsing.label_encoder import Codes, LabelEncoder
from meshwright.timeline.readers.parsing.timestamps import Ints

# CUDA's functions carry the version of their interface: cudaLaunchKernel_v7000.
_VERSION = re.compile(r"_v\d{4,}$")
_SUFFIX = re.compile(r", (seq|op_id|sizes|input_op_ids) = ")
NO_NAME = "(no name)"
_MOST_KNOWN = 1 << 16
_KEYS = {"sizes": "Input Dims", "seq": "Sequence number"}
_ANNOTATION = re.compile(r"^(nccl:|ProfilerStep#|Optimizer\.|## )|(?i:dataloader)")


class NsysNameTable:
    """Distinct names; a row keeps the id of a stored text, or a negative number for its own."""

    def __init__(self, *, keep_details: bool) -> None:
        self.keep_details = keep_details
        self.names = LabelEncoder()
        self.details: dict[int, bytes] = {}
        """By the id of a stored text: what it says beside the operator, as a JSON object."""
        self.plain: dict[int, str] = {}
        """By the id of a stored text: the text as it is, of those that are asked for."""
        self.ready = False
        """Whether the stored texts were read."""
        self._known: dict[bytes, int] = {}
        self._operators: set[int] = set()
        """Numbers of names that came with what `emit_nvtx` adds."""
        self._ids: list[Ints] = []
        self._codes: list[Codes] = []

    def add_inline_name(self, given: bytes) -> int:
        """The key of a name that stands in the row itself."""
        return -1 - self._code(given)

    def _code(self, given: bytes) -> int:
        # The numbers of calls differ in every row: names are known once those are cut off.
        name = given.partition(b", op_id = ")[0].partition(b", seq = ")[0]
        code = self._known.get(name)
        if code is None:
            whole = decode_text(name)
            name_alone = _VERSION.sub("", _SUFFIX.split(whole, maxsplit=1)[0])
            code = self.names[name_alone]
            if len(self._known) < _MOST_KNOWN:
                self._known[name] = code
        if len(name) < len(given):
            self._operators.add(code)
        return code

    def read_string_ids(self, database: NsysDatabase, wanted: Ints) -> None:
        """Read the stored texts with these ids, which are sorted; no other text is kept."""
        self.ready = True
        for ids, values in database.iter_chunks(
            "StringIds", build_integer_sql("id"), build_text_sql("value")
        ):
            if self.plain:
                said = dict(zip(ids, values, strict=True))
                known = self.plain.keys() & said.keys()
                self.plain.update((id_, decode_text(said[id_])) for id_ in known)
            found = np.array(ids, dtype=np.int64)
            at = np.minimum(np.searchsorted(wanted, found), max(wanted.size - 1, 0))
            rows = np.flatnonzero(wanted[at] == found) if wanted.size else at[:0]
            codes = [self._code(values[row] or b"") for row in rows.tolist()]
            if self.keep_details:
                pairs = ((ids[row], parse_emit_nvtx(values[row] or b"")) for row in rows.tolist())
                self.details.update((id_, details) for id_, details in pairs if details)
            self._ids.append(found[rows])
            self._codes.append(np.array(codes, dtype=np.int32))

    def find_codes(self, keys: Ints) -> Codes:
        """The number of each row's name among `names`; a text that is not there has none."""
        stored = keys >= 0
        found = np.where(stored, self.names[NO_NAME], -1 - keys).astype(np.int32)
        ids = np.concatenate([np.empty(0, np.int64), *self._ids])
        if ids.size:
            order = np.argsort(ids, kind="stable")
            ids = ids[order]
            values = np.concatenate(self._codes)[order]
            at = np.minimum(np.searchsorted(ids, keys), ids.size - 1)
            there = stored & (ids[at] == keys)
            found[there] = values[at[there]]
        return found

    def classify_range(self, name: str) -> str:
        """What a range of this name is filed under, in the profiler of PyTorch's words."""
        if name.startswith("nccl") and not name.startswith("nccl:"):
            return "nccl"
        if self.names.get(name) in self._operators and not _ANNOTATION.search(name):
            return "cpu_op"
        return "user_annotation"


def parse_emit_nvtx(given: bytes) -> bytes:
    """What `emit_nvtx` wrote behind an operator's name, as a JSON object; empty where nothing."""
    parts = _SUFFIX.split(decode_text(given))[1:]
    found: dict[str, Any] = {}
    for name, value in zip(parts[::2], parts[1::2], strict=False):
        try:
            found[_KEYS.get(name, name)] = msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError):
            continue
    return msgspec.json.encode(found) if found else b""


def find_driver_calls(names: list[str]) -> npt.NDArray[np.bool_]:
    """Which of these functions are of the driver, as cuLaunchKernel is, not of the runtime."""
    driver = [name.startswith("cu") and not name.startswith("cuda") for name in names]
    return np.array(driver, dtype=np.bool_)
