"""`Words`: text to tokens and back, special tokens, and the text of a conversation.

    words = load_words("path/of/model")
    words.encode("Hello")               [9707]
    words.chat([{"role": "user", "content": "Hi"}])     "<|im_start|>user …"

A Hugging Face folder is read from `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`
and `generation_config.json`; a GGUF file holds all of it itself.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.errors import InputError, MissingPart, Problem
from meshwright.run.serve.asked import Sampling
from meshwright.run.serve.model.chat import ChatTemplate, Message
from meshwright.run.serve.model.gguf_file import GgufFile, is_gguf
from meshwright.run.serve.model.gguf_words import tokenizer_of
from meshwright.run.serve.model.messages import plain_messages
from meshwright.run.serve.model.token_bytes import TokenBytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DRAWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Words:
    """A tokenizer with what its model adds: ends of text and a template for conversations."""

    def __init__(
        self,
        tokenizer: "Tokenizer",
        *,
        ends: Iterable[int] = (),
        special: Mapping[str, str] | None = None,
        template: str = "",
        sampling: Sampling = Sampling(),  # noqa: B008 - a frozen value
    ) -> None:
        """Join a tokenizer and what the model says of it.

        `ends` are tokens that end an answer; `special` names tokens, such as `bos_token`.
        """
        self.sampling = sampling
        """How the model's makers would draw its tokens."""
        self.tokenizer, self.special = tokenizer, dict(special or {})
        self.ends = frozenset(ends)
        """Tokens that end an answer."""
        added = tokenizer.get_added_tokens_decoder()
        self.marks = frozenset(number for number, token in added.items() if token.special)
        """Special tokens, which no text shows."""
        # Numbers may be left out, so counting the tokens does not tell.
        self.size: int = max(tokenizer.get_vocab().values(), default=-1) + 1
        """Tokens are numbers below this one."""
        self._template = ChatTemplate(template, self.special) if template else None
        self._bytes = TokenBytes(tokenizer)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text, with those that prompts begin with where `special`.

        Special tokens that the text spells out are read as such.
        """
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens; bytes that are no whole character become U+FFFD."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special)
        return text

    def spelled(self, token: int) -> bytes:
        """Return the bytes that a token stands for; special ones as they are written."""
        return self._bytes(token)

    def reader(self, shown: Iterable[str] = ()) -> Callable[[Sequence[int]], str]:
        """Return what makes text of tokens, special ones among `shown` included."""
        kept = {number for token in shown if (number := self.number(token)) is not None}
        if not kept:
            return self.decode
        hidden = self.marks - kept

        def read(tokens: Sequence[int]) -> str:
            visible = [token for token in tokens if token not in hidden]
            return self.decode(visible, skip_special=False)

        return read

    def token(self, number: int) -> str | None:
        """Return how the vocabulary writes a token; None where there is none."""
        found: str | None = self.tokenizer.id_to_token(number)
        return found

    def number(self, token: str) -> int | None:
        """Return the number of a token as the vocabulary writes it."""
        found: int | None = self.tokenizer.token_to_id(token)
        return found

    @property
    def template(self) -> ChatTemplate | None:
        """The model's template for conversations."""
        return self._template

    @property
    def chats(self) -> bool:
        """Whether the model has a template for conversations."""
        return self._template is not None

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **values: Any,
    ) -> str:
        """Return the text of a conversation as the model's template writes it.

        It has its special tokens already: encode it with `special=False`. `values` are the
        template's own, and `add_generation_prompt`.
        """
        if self._template is None:
            what = "the model has no chat template"
            raise InputError([Problem("messages", what, "use /v1/completions with a prompt")])
        return self._template.render(plain_messages(messages), tools=tools, **values)


def load_words(path: str | Path) -> Words:
    """Read the words of the model that lies at a path."""
    path = Path(path)
    return _from_gguf(path) if is_gguf(path) else _from_folder(path)


def _from_gguf(path: Path) -> Words:
    with GgufFile(path) as file:
        tokenizer, special, ends = tokenizer_of(file)
        template = file.text("tokenizer.chat_template", "")
    return Words(tokenizer, ends=ends, special=special, template=template)


def _from_folder(folder: Path) -> Words:
    path = folder / "tokenizer.json"
    if not path.exists():
        what = "there is no such file"
        fix = "write it with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        raise InputError([Problem(str(path), what, fix)])
    tokenizer = _opened(path)
    config = _json(folder / "tokenizer_config.json")
    special = {role: word for role in _ROLES if (word := _written(config.get(role))) is not None}
    return Words(
        tokenizer,
        ends=_ends(folder, tokenizer, special.get("eos_token")),
        special=special,
        template=_template(folder, config),
        sampling=_sampling(folder / "generation_config.json"),
    )


def _opened(path: Path) -> "Tokenizer":
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        hint = "pip install 'meshwright[serve]'"
        raise MissingPart("reading text needs tokenizers, which is not installed", hint) from error
    try:
        return Tokenizer.from_file(str(path))
    # The library raises bare exceptions.
    except Exception as error:
        what = f"is no tokenizer that the tokenizers library reads: {error}"
        raise InputError([Problem(str(path), what, "fetch it again")]) from error


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError([Problem(str(path), f"is no JSON: {error}", "fetch it again")]) from error
    if not isinstance(data, dict):
        raise InputError([Problem(str(path), "is no JSON object", "fetch it again")])
    return data


def _written(token: object) -> str | None:
    """Return how a special token is written: the config has it as a text or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text()
    found = config.get("chat_template")
    if isinstance(found, list):
        # Several by name: the one for conversations is called default.
        named = {each.get("name"): each.get("template") for each in found}
        found = named.get("default")
    return found if isinstance(found, str) else ""


def _sampling(path: Path) -> Sampling:
    """Return how tokens are drawn where nobody says; what the file leaves out is left alone."""
    config = _json(path)
    given = {name: config[name] for name in _DRAWN if config.get(name) is not None}
    try:
        return msgspec.convert(given, Sampling)
    except (msgspec.ValidationError, InputError) as error:
        what = f"says how to draw tokens in a way that cannot be: {error}"
        raise InputError([Problem(str(path), what, "mend it")]) from error


def _ends(folder: Path, tokenizer: "Tokenizer", written: str | None) -> frozenset[int]:
    """Return the tokens that end an answer: those generation is told of, and the text's own."""
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        found = _json(folder / name).get("eos_token_id")
        if found is not None:
            ends |= {int(each) for each in (found if isinstance(found, list) else [found])}
            break
    number = None if written is None else tokenizer.token_to_id(written)
    return frozenset(ends if number is None else ends | {number})
