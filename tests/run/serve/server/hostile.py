"""A server that prepares requests in processes, with a real tokenizer and a hostile template."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from meshwright.run.serve.server import BackgroundServer, ServerConfig, create_app
from meshwright.run.serve.server.input_processing.process_processor import ProcessInputProcessor
from meshwright.run.serve.tokenizer.tokenizer import load_tokenizer
from tests.run.serve.server.pretend import PretendEngine

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}"
    "{% elif message.content == 'repeat' %}{{ 'a' * 10**10 }}"
    "{% elif message.content == 'power' %}{{ 10 ** (10 ** 10) }}"
    "{% elif message.content == 'center' %}{{ 'a'|center(10**11) }}"
    "{% elif message.content == 'format' %}{{ '%99999999999d' % 1 }}"
    "{% elif message.content == 'double' %}{% set ns = namespace(text='a') %}"
    "{% for a in range(60) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}"
    "{% elif message.content == 'recurse' %}{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"
    "{% elif message.content == 'range' %}{{ range(10**9)|list }}"
    "{% elif message.content == 'divide' %}{{ 1 // 0 }}"
    "{% elif message.content == 'class' %}{{ ''.__class__.__mro__ }}"
    "{% elif message.content == 'import' %}{% include '/etc/passwd' %}"
    "{% elif message.content == 'raise' %}{{ raise_exception('not so') }}"
    "{% else %}{{ message.role }}: {{ message.content }}\n{% endif %}{% endfor %}"
    "{# a role of its own: 'ipython' #}"
)


def byte_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer: a token for each byte, and four for words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate(letters)}
    merges = [("a", "b"), ("ab", "ab"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> Path:
    """Write the files of a model that requests are prepared with."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@contextmanager
def hostile_server(
    folder: Path, **config: Any
) -> Iterator[tuple[BackgroundServer, PretendEngine, ProcessInputProcessor]]:
    """Serve with requests prepared in processes."""
    engine = PretendEngine(lambda *_: "ok")
    settings = ServerConfig(**{"model": "parrot", "port": 0, "access_log": False, **config})
    processor = ProcessInputProcessor(folder, settings)
    app = create_app(engine, load_tokenizer(folder), settings, input_processor=processor)
    try:
        with BackgroundServer(app, settings) as server:
            yield server, engine, processor
    finally:
        processor.kill()
