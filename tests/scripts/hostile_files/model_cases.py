"""Hostile files of models and tokenizers, by the target of `scripts.fuzzing` that reads them."""

import json
import struct
from pathlib import Path
from typing import Any

from scripts.fuzzing import seed_files

Cases = dict[tuple[str, str], bytes]
_U32, _STRING, _ARRAY, _U64, _F64 = 4, 8, 9, 10, 12


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _pair(key: bytes, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _array(kind: int, count: int, body: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + body


def _tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    return _text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def _gguf(*pairs: bytes, tensors: tuple[bytes, ...] = (), data: bytes = b"", **head: int) -> bytes:
    counts = struct.pack(
        "<IQQ", head.get("version", 3), head.get("tensor_count", len(tensors)),
        head.get("pair_count", len(pairs)),
    )  # fmt: skip
    header = b"GGUF" + counts + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


def gguf_cases(folder: Path) -> Cases:
    """Return GGUF files: made header by header, and a valid one cut and changed."""
    name, two = _pair(b"general.name", _STRING, _text(b"m")), _tensor(b"a", (4,), 0, 0)
    nested = _array(_ARRAY, 1, _array(_ARRAY, 1, _array(_U32, 1, bytes(4))))
    bodies = {
        "elements without end": _gguf(_pair(b"a", _ARRAY, _array(_U32, 1 << 62))),
        "texts without end": _gguf(_pair(b"a", _ARRAY, _array(_STRING, 1 << 62))),
        "lists without end": _gguf(_pair(b"a", _ARRAY, _array(_ARRAY, 1 << 62))),
        "an overflow": _gguf(_pair(b"a", _ARRAY, _array(_U64, (1 << 61) + 1))),
        "a nested list": _gguf(_pair(b"a", _ARRAY, nested)),
        "a deep list": _gguf(_pair(b"a", _ARRAY, _array(_ARRAY, 1) * 4_000)),
        "empty texts": _gguf(_pair(b"a", _ARRAY, _array(_STRING, 8_000, bytes(64_000)))),
        "pairs without end": _gguf(name, pair_count=1 << 63),
        "tensors without end": _gguf(name, tensor_count=1 << 63),
        "a long key": struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 62),
        "a long text": _gguf(_pair(b"a", _STRING, struct.pack("<Q", 1 << 62))),
        "an unknown kind": _gguf(_pair(b"a", 77, bytes(8))),
        "a list of an unknown kind": _gguf(_pair(b"a", _ARRAY, _array(77, 1, bytes(8)))),
        "a key twice": _gguf(name, name),
        "a tensor twice": _gguf(tensors=(two, two), data=bytes(64)),
        "a far tensor": _gguf(tensors=(_tensor(b"a", (4,), 0, 1 << 62),), data=bytes(64)),
        "a large tensor": _gguf(tensors=(_tensor(b"a", (1 << 40, 1 << 40), 0, 0),)),
        "many dimensions": _gguf(tensors=(_tensor(b"a", (1,) * 900, 0, 0),), data=bytes(64)),
        "dimensions without end": _gguf(tensors=(_text(b"a") + struct.pack("<I", 1 << 31),)),
        "no dimensions": _gguf(tensors=(_tensor(b"a", (), 0, 0),), data=bytes(64)),
        "an empty tensor": _gguf(tensors=(_tensor(b"a", (0, 4), 0, 0),), data=bytes(64)),
        "an unknown type": _gguf(tensors=(_tensor(b"a", (4,), 999, 0),), data=bytes(64)),
        "a broken block": _gguf(tensors=(_tensor(b"a", (33,), 8, 0),), data=bytes(64)),
        "shared bytes": _gguf(tensors=(two, _tensor(b"b", (4,), 0, 0)), data=bytes(64)),
        "many views of one place": _gguf(
            tensors=tuple(_tensor(b"%d" % n, (1 << 12,), 0, 0) for n in range(500)),
            data=bytes(1 << 14)),
        "an odd offset": _gguf(tensors=(_tensor(b"a", (4,), 0, 3),), data=bytes(64)),
        "no alignment": _gguf(_pair(b"general.alignment", _U32, bytes(4)), tensors=(two,)),
        "an odd alignment": _gguf(_pair(b"general.alignment", _U32, b"\x03\0\0\0"), tensors=(two,)),
        "a text as alignment": _gguf(_pair(b"general.alignment", _STRING, _text(b"32"))),
        "a far alignment": _gguf(_pair(b"general.alignment", _U32, b"\0\0\0\x80"), tensors=(two,)),
        "version 1": _gguf(name, version=1),
        "a far version": _gguf(name, version=1 << 31),
        "another order of bytes": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        "no header": b"GGUF",
        "nothing": b"",
        "another magic": b"GGML" + bytes(60),
    }  # fmt: skip
    found = {("gguf", case): body for case, body in bodies.items()}
    path = folder / "valid.gguf"
    seed_files.write_small_gguf(path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 211):
        found["gguf", f"cut at {size}"] = whole[:size]
    for key, value in (
        ("llama.attention.head_count", 0), ("llama.attention.head_count", 3),
        ("llama.attention.head_count_kv", 0), ("llama.embedding_length", 0),
        ("llama.embedding_length", 1 << 31), ("llama.block_count", 0),
        ("llama.block_count", (1 << 32) - 1), ("llama.context_length", 0),
        ("llama.feed_forward_length", 0), ("llama.vocab_size", 1 << 31),
        ("tokenizer.ggml.bos_token_id", (1 << 32) - 1), ("tokenizer.ggml.eos_token_id", 1 << 31),
    ):  # fmt: skip
        at = whole.index(key.encode()) + len(key) + 4
        changed = whole[:at] + struct.pack("<I", value) + whole[at + 4 :]
        found["gguf", f"{key} {value}"] = changed
    for old, new in (
        (b"a b", b"ab "), (b"gpt-2", b"gpt-9"), (b"token_embd.weight", b"token_embd.weighs"),
        (b"blk.0.attn_q.weight", b"blk.9.attn_q.weight"), (b"gpt2", b"none"),
        (b"output_norm.weight", b"\xff" * 18),
    ):  # fmt: skip
        found["gguf", f"{old!r} as {new!r}"] = whole.replace(old, new)
    return found


_F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def _framed(header: str | bytes, data: bytes = bytes(4), length: int | None = None) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def safetensors_cases() -> Cases:
    """Return safetensors files."""
    one = json.dumps(_F32)
    changes: dict[str, dict[str, Any]] = {
        "a negative size": {"shape": [-1]}, "an overflow": {"shape": [1 << 32, 1 << 32]},
        "a large shape": {"shape": [1 << 40]}, "many dimensions": {"shape": [1] * 9_000},
        "an unknown type": {"dtype": "F999"}, "a type that is a list": {"dtype": ["F32"]},
        "offsets in reverse": {"data_offsets": [4, 0]},
        "far offsets": {"data_offsets": [0, 1 << 62]},
        "negative offsets": {"data_offsets": [-4, 0]}, "three offsets": {"data_offsets": [0, 4, 8]},
        "a fraction": {"shape": [0.5]}, "no shape": {"shape": None}, "a text": {"shape": "1"},
        "more keys": {"x": 1}, "an empty tensor": {"shape": [0], "data_offsets": [0, 0]},
        "numbers of another size": {"dtype": "F64"},
    }  # fmt: skip
    found = {name: _framed(json.dumps({"a": _F32 | change})) for name, change in changes.items()}
    found |= {
        "a tensor twice": _framed(f'{{"a": {one}, "a": {one}}}'),
        "other tensors twice": _framed(
            '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
            '"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
        "facts twice": _framed(f'{{"__metadata__": {{"k": "1", "k": "2"}}, "a": {one}}}'),
        "facts that are no text": _framed(f'{{"__metadata__": {{"k": 1}}, "a": {one}}}'),
        "a gap": _framed(json.dumps({"a": _F32, "b": _F32 | {"data_offsets": [8, 12]}}), bytes(12)),
        "shared bytes": _framed(json.dumps({"a": _F32, "b": _F32})),
        "bytes left over": _framed(json.dumps({"a": _F32}), bytes(99)),
        "no data": _framed(json.dumps({"a": _F32}), b""),
        "a far length": _framed("{}", length=1 << 63),
        "no length": b"\x00\x00", "nothing": b"", "a list": _framed("[]"), "no JSON": _framed("{"),
        "deep": _framed('{"a":' * 20_000), "no UTF-8": _framed(b'{"\xff": 1}'),
        "a long name": _framed(json.dumps({"a" * 60_000: _F32})),
        "many tensors": _framed(json.dumps(
            {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(900)}
        ), b""),
    }  # fmt: skip
    return {("safetensors", name): body for name, body in found.items()}


def _split(pattern: str) -> dict[str, Any]:
    regex = {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


def _replace(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


def tokenizer_cases(folder: Path) -> Cases:
    """Return `tokenizer.json` files."""
    seeds = [json.loads(data) for data in seed_files.make_tokenizer(folder)]
    base = seeds[0]
    model, padding, truncation = base["model"], base["padding"], base["truncation"]
    changes: dict[str, dict[str, Any]] = {
        "a broken pattern": {"pre_tokenizer": _split("(")},
        "a deep pattern": {"pre_tokenizer": _split("(" * 9_000)},
        "a pattern of many repeats": {"pre_tokenizer": _split("((a{1,99}){1,99}){1,99}")},
        "a pattern that searches long": {"pre_tokenizer": _split(r"(\w+\s?)+x|(a+)+$")},
        "a pattern that looks back": {"pre_tokenizer": _split("(?<=a*)b")},
        "an empty pattern": {"pre_tokenizer": _split("")},
        "a token with a far number": {"model": model | {"vocab": {"a": 4294967295}, "merges": []}},
        "numbers twice": {"model": model | {"vocab": {"a": 1, "b": 1}, "merges": []}},
        "a negative number": {"model": model | {"vocab": {"a": -1}, "merges": []}},
        "no vocabulary": {"model": model | {"vocab": {}, "merges": []}},
        "merges of no tokens": {"model": model | {"merges": [["x", "y"]]}},
        "merges of one part": {"model": model | {"merges": ["x"]}},
        "an unknown model": {"model": {"type": "none"}},
        "no model": {"model": None},
        "padding to a far length": {"padding": padding | {"strategy": {"Fixed": 10**9}}},
        "padding to a multiple": {"padding": padding | {"pad_to_multiple_of": 1 << 40}},
        "padding to a multiple of 0": {"padding": padding | {"pad_to_multiple_of": 0}},
        "a stride beyond the length": {"truncation": truncation | {"stride": 99, "max_length": 1}},
        "a long replacement": {"normalizer": _replace("a" * 5_000)},
        "replacements of replacements": {"normalizer": {
            "type": "Sequence", "normalizers": [_replace("a" * 50)] * 5}},
        "replacements in the decoder": {"decoder": {
            "type": "Sequence", "decoders": [_replace("a" * 50)] * 5}},
        "a long prefix": {"normalizer": {"type": "Prepend", "prepend": "a" * 60_000}},
        "a replacement of nothing": {"normalizer": {
            "type": "Replace", "pattern": {"Regex": ""}, "content": "ab"}},
        "added tokens far away": {"added_tokens": [
            {"id": 10**9, "content": "x", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}]},
        "a long added token": {"added_tokens": [
            {"id": 3, "content": "x" * 9_000, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": True, "special": False}]},
        "a broken map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "a template of unknown tokens": {"post_processor": {
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "z", "type_id": 0}}],
            "pair": [], "special_tokens": {}}},
    }  # fmt: skip
    found = {name: json.dumps(base | change).encode() for name, change in changes.items()}
    scores = seeds[1]["model"] | {"vocab": [["a", 1e308], ["b", -1e308]], "unk_id": 9}
    found |= {
        "scores out of range": json.dumps(seeds[1] | {"model": scores}).encode(),
        "deep": b'{"normalizer":' + b'{"type":"Sequence","normalizers":[' * 9_000,
        "no object": b"[]", "nothing": b"", "binary": bytes(range(256)) * 20,
        "no UTF-8": json.dumps(base).encode()[:-1] + b', "x": "\xff"}',
    }  # fmt: skip
    return {("tokenizer", name): body for name, body in found.items()}
