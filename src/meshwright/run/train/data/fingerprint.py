"""Short names for content: equal for equal bytes, different for different ones."""

import hashlib


def compute_fingerprint(*parts: bytes | str | int) -> str:
    """Return a hash of parts; where one ends and the next begins counts too."""
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        made.update(len(data).to_bytes(8, "little") + data)
    return made.hexdigest()
