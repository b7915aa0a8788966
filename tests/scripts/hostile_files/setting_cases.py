"""Hostile settings and topologies, by the target of `scripts.fuzzing` that reads them."""

import json

from scripts.fuzzing.seed_files import LLAMA
from tests.timeline.readers.probe_chains import integers_on_one_probe_chain

Cases = dict[tuple[str, str], bytes]
_DIGITS = b"9" * 20_000


def yaml_cases() -> Cases:
    """Return YAML files of settings."""
    merged = b"".join(
        b"c%d: &c%d {<<: [%s]}\n" % (n, n, b",".join([b"*c%d" % (n - 1)] * 9)) for n in range(1, 20)
    )
    laughs = b"".join(
        b"l%d: &l%d [%s]\n" % (n, n, b",".join([b"*l%d" % (n - 1)] * 9)) for n in range(1, 20)
    )
    keys = b", ".join(b"%d: 0" % key for key in integers_on_one_probe_chain(10))
    bodies = {
        "keys on a probe chain": b"{" + keys + b"}",
        "base 60": b"a: 1" + b":1" * 10_000,
        "deep lists": b"a: " + b"[" * 2_000,
        "deep maps": b"a: " + b"{a: " * 2_000,
        "deep keys": b"? " * 2_000 + b"a",
        "deep items": b"- " * 2_000 + b"a",
        "a decimal": b"a: " + _DIGITS,
        "a hexadecimal": b"a: 0x" + _DIGITS,
        "a binary": b"a: 0b" + b"1" * 20_000,
        "a float": b"a: 1." + _DIGITS,
        "a time": b"a: 2001-12-14t21:59:43." + b"1" * 20_000,
        "merges": b"c0: &c0 {x: 1}\n" + merged,
        "laughs": b"l0: &l0 [x, x]\n" + laughs,
        "an alias to itself": b"a: &a [*a]",
        "an unknown alias": b"a: *b",
        "a key twice": b"model: llama3-8b\nmodel: llama3-70b",
        "an object": b"a: !!python/object/apply:os.system ['true']",
        "a name": b"a: !!python/name:os.system",
        "a binary value": b"a: !!binary " + b"A" * 9_999,
        "a set": b"a: !!set {b, c}",
        "ordered": b"a: !!omap [b: 1, b: 2]",
        "many documents": b"---\na\n" * 500,
        "tabs": b"\t\ta: b",
        "directives": b"%YAML 9.9\n---\na: 1",
        "comments": b"#\n" * 5_000,
        "an open quote": b'a: "' + b"\\x41" * 2_000,
        "control letters": b"a: \x07\x1b[2J",
        "no UTF-8": b"a: \xff\xfe",
        "unknown fields": b"".join(b"k%d: 1\n" % number for number in range(2_000)),
    }
    return {("spec", f"YAML {name}"): b"--- # y\n" + body for name, body in bodies.items()}


def toml_cases() -> Cases:
    """Return TOML files of settings."""
    bodies = {
        "a dotted key": b"a" + b".a" * 20_000 + b" = 1",
        "a dotted key with spaces": b"a" + b" . a" * 9_000 + b" = 1",
        "a quoted key": b'"a"' + b'."a"' * 9_000 + b" = 1",
        "a dotted table": b"[a" + b".a" * 20_000 + b"]",
        "a dotted inline table": b"a = {a" + b".a" * 20_000 + b" = 1}",
        "long keys": b"\n".join(b"a" + b".a" * 90 + b".b%d = 1" % n for n in range(90)),
        "a long word": b"a" * 60_000 + b" = 1",
        "deep lists": b"a = " + b"[" * 30_000,
        "deep tables": b"a = " + b"{a = " * 3_000,
        "a decimal": b"a = " + _DIGITS,
        "a hexadecimal": b"a = 0x" + b"f" * 20_000,
        "a float": b"a = 1." + _DIGITS,
        "underscores": b"a = 1" + b"_1" * 20_000,
        "a time": b"a = 1979-05-27T07:32:00." + _DIGITS,
        "an open text": b'a = """' + b"\\\n" * 9_000,
        "tables of a list": b"[[a]]\n" * 2_000,
        "a table twice": b"[a]\n[a]\n",
        "a key twice": b"a = 1\na = 2\n",
        "NaN": b"a = nan\nb = inf",
        "unknown fields": b"".join(b"k%d = 1\n" % number for number in range(2_000)),
        "an unknown list": b"model = [" + b"1," * 20_000 + b"]",
        "no UTF-8": b"a = '\xff'",
        "a byte order mark": b"\xef\xbb\xbfa = 1",
        "dots in a text": b'name = "' + b"a." * 300 + b'"',
    }
    return {("spec", f"TOML {name}"): body for name, body in bodies.items()}


def json_cases() -> Cases:
    """Return JSON files of settings and of models."""
    bodies = {
        "deep lists": b'{"a": ' + b"[" * 60_000,
        "deep objects": b'{"a":' * 30_000,
        "a decimal": b'{"a": ' + _DIGITS + b"}",
        "a float": b'{"a": 1e' + b"9" * 20_000 + b"}",
        "NaN": b'{"a": NaN, "b": -Infinity}',
        "a key twice": b'{"model": "llama3-8b", "model": "llama3-70b"}',
        "unknown fields": json.dumps({f"k{n}": 1 for n in range(2_000)}).encode(),
        "a far layout": b'{"model": "llama3-8b", "layout": {"tp": 1e300, "pp": -1}}',
        "a long name": b'{"model": "' + b"x" * 60_000 + b'"}',
        "no UTF-8": b'{"a": "\xff"}',
        "a lone surrogate": b'{"model": "\\ud800"}',
        "a collective": b'{"name": "x", "op": "all-gather", "ranks": 99999999999, "chunks": 9, '
                        b'"slots": 9, "sweeps": []}',
    }  # fmt: skip
    found = {("spec", f"JSON {name}"): body for name, body in bodies.items()}
    changes: tuple[dict[str, object], ...] = (
        {"num_hidden_layers": 10**9}, {"num_hidden_layers": -1}, {"num_hidden_layers": 1e308},
        {"hidden_size": 10**30}, {"hidden_size": 0}, {"num_attention_heads": 0},
        {"num_key_value_heads": 3}, {"vocab_size": -1}, {"vocab_size": "9" * 5_000},
        {"rope_theta": float("inf")}, {"rope_theta": float("nan")}, {"rope_scaling": [[]]},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 9_999}},
        {"layer_types": ["full_attention"] * 9_999}, {"layer_types": {"a": 1}},
        {"model_type": ["llama"]}, {"model_type": "x" * 9_999}, {"eos_token_id": {"a": []}},
        {"hidden_act": None}, {"head_dim": 10**400}, {"quantization_config": {"bits": -4}},
        {"text_config": LLAMA}, {"vision_config": {"depth": 10**9}},
    )  # fmt: skip
    for number, change in enumerate(changes):
        name = f"{number} {next(iter(change))}"
        found["hf_config", name] = json.dumps(LLAMA | change).encode()
    return found


def xml_cases() -> Cases:
    """Return XML files of topologies, and what `nvidia-smi` and Slurm write."""
    entities = b"".join(b'<!ENTITY a%d "%s">' % (n, b"&a%d;" % (n - 1) * 9) for n in range(1, 20))
    bodies = {
        "laughs": b'<!DOCTYPE a [<!ENTITY a0 "x">' + entities + b"]><system>&a19;</system>",
        "a large entity": b'<!DOCTYPE a [<!ENTITY b "' + b"x" * 9_999 + b'">]><system>'
                          + b"&b;" * 5_000 + b"</system>",
        "an outer entity": b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><system>&b;'
                           b"</system>",
        "an outer type": b'<!DOCTYPE a SYSTEM "http://127.0.0.1:9/a.dtd"><system/>',
        "a parameter": b"<!DOCTYPE a [<!ENTITY % b '<!ENTITY c \"d\">'> %b;]><system/>",
        "deep": b"<system>" + b"<cpu>" * 10_000,
        "wide": b"<system>" + b"<cpu/>" * 8_000 + b"</system>",
        "attributes": b"<system " + b" ".join(b'a%d="1"' % n for n in range(6_000)) + b"/>",
        "an attribute twice": b'<system version="1" version="2"/>',
        "a long attribute": b'<system version="' + b"9" * 60_000 + b'"/>',
        "a number": b'<system><cpu numaid="' + _DIGITS + b'"><pci class="0x" busid="0"/></cpu>'
                    b"</system>",
        "an endless number": b'<system><cpu numaid="inf"><pci link_speed="1e999 GT/s"/></cpu>'
                             b"</system>",
        "many channels": b'<graphs version="1"><graph id="0" pattern="4" nchannels="99999999999" '
                         b'speedintra="1" speedinter="1"/></graphs>',
        "many GPUs": b'<algo name="a" proto="Simple" nchannels="1" nchunksperloop="999999999999" '
                     b'ngpus="999999999999" coll="allreduce"></algo>',
        "a negative id": b'<algo name="a" proto="Simple" nchannels="-1" nchunksperloop="-1" '
                         b'ngpus="-1" coll="allreduce"><gpu id="-1"/></algo>',
        "UTF-16": '<?xml version="1.0" encoding="utf-16"?><system/>'.encode("utf-16"),
        "an unknown encoding": b'<?xml version="1.0" encoding="x"?><system/>',
        "NUL": b"<system>\x00</system>",
        "cut off": b"<system><cpu",
        "two roots": b"<system/><system/>",
        "comments": b"<system>" + b"<!---->" * 5_000 + b"</system>",
        "CDATA": b"<system><![CDATA[" + b"x" * 60_000,
        "instructions": b"<system>" + b"<?a?>" * 9_000 + b"</system>",
        "nothing": b"",
    }  # fmt: skip
    texts = {
        "a wide table": b"\t" + b"\t".join(b"GPU%d" % n for n in range(3_000)) + b"\nGPU0\tX\n",
        "many rows": b"\tGPU0\n" + b"GPU0\tX\n" * 5_000,
        "a far GPU": b"\tGPU99999999999999\nGPU99999999999999\tX\n",
        "NVLinks": b"\tGPU0\tGPU1\nGPU0\tX\tNV" + _DIGITS + b"\nGPU1\tNV1\tX\n",
        "a host range": b"SwitchName=s0 Nodes=n[0-99999999999]\n",
        "nested ranges": b"SwitchName=s0 Nodes=n[0-99][0-99][0-99][0-99][0-99]\n",
        "open brackets": b"SwitchName=s0 Nodes=" + b"n[" * 20_000 + b"\n",
        "a padded range": b"SwitchName=s0 Nodes=n[0-1" + b"0" * 5_000 + b"]\n",
        "a switch in itself": b"SwitchName=s0 Switches=s0\n",
        "switches in a ring": b"SwitchName=a Switches=b\nSwitchName=b Switches=a\n",
        "a chain of switches": b"".join(
            b"SwitchName=s%d Switches=s%d\n" % (n, n + 1) for n in range(1_500)),
        "continued lines": b"SwitchName=s0 \\\n" * 5_000,
        "block sizes": b"BlockName=b Nodes=n1\nBlockSizes=" + b"9" * 9_999 + b",0,-1\n",
    }  # fmt: skip
    found = {("xml", name): body for name, body in bodies.items()}
    return found | {("topology_text", name): body for name, body in texts.items()}
