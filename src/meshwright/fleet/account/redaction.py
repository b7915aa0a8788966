"""Names of users as pseudonyms: the same for the same user of one store, and not to be guessed."""

import hashlib
import hmac
import os
import secrets
from base64 import b32encode
from pathlib import Path

import pyarrow as pa

from meshwright.errors import InputError, Problem

_KEY = "pseudonyms.key"


def load_redaction_key(folder: Path) -> bytes:
    """Return the key of a store's pseudonyms; makes it where there is none.

    A hash without a key would not hide names: whoever has a list of them could try each.
    """
    path = folder / _KEY
    try:
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return path.read_bytes()
        with os.fdopen(handle, "wb") as file:
            key = secrets.token_bytes(32)
            file.write(key)
        return key
    except OSError as error:
        what = f"the key of pseudonyms cannot be kept: {error.strerror or error}"
        fix = "let --redact be used by somebody who may write to the store"
        raise InputError([Problem(str(path), what, fix)]) from None


def redact_column(rows: pa.Table, key: bytes, column: str = "user") -> pa.Table:
    """Return the rows with pseudonyms in a column."""
    encoded = rows[column].combine_chunks()
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().combine_chunks()
    hidden = pa.array(
        [make_pseudonym(name, key) for name in encoded.dictionary.to_pylist()], "string"
    )
    taken = hidden.take(encoded.indices)
    return rows.set_column(rows.column_names.index(column), column, taken)


def make_pseudonym(name: str, key: bytes) -> str:
    """Return what a user is called instead."""
    digest = hmac.new(key, name.encode(), hashlib.sha256).digest()
    return f"user-{b32encode(digest)[:8].decode().lower()}"
