"""`Tokenizer`: text to tokens and back, special tokens, and the text of a conversation.

    tokenizer = load_tokenizer("path/of/model")
    tokenizer.encode("Hello")                                                   [9707]
    tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])          "<|im_start|>user …"

A Hugging Face folder is read from `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`
and `generation_config.json`; a GGUF file holds all of it itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.file_errors import convert_library_errors
from meshwright.run.nn.huggingface.tokenizer_json import MAX_VOCAB_SIZE, open_tokenizer_json
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.run.serve.tokenizer.chat_template import ChatTemplate, TemplateMessage
from meshwright.run.serve.tokenizer.message_format import normalize_messages
from meshwright.run.serve.tokenizer.token_bytes import TokenBytes
from meshwright.spec.file_formats import load_data, read_text
from meshwright.spec.serialization import format_value

if TYPE_CHECKING:
    from tokenizers import Tokenizer as TokenizersTokenizer

_NO_ENCODE = "its rules fail at this text"
_NO_ENCODE_FIX = "use the tokenizer.json that the model was published with"
_DRAWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """A tokenizer with what its model adds: ends of text and a template for conversations."""

    def __init__(
        self,
        backend_tokenizer: "TokenizersTokenizer",
        *,
        eos_token_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str = "",
        default_sampling_params: SamplingParams = SamplingParams(),  # noqa: B008 - a frozen value
    ) -> None:
        """Join a tokenizer and what the model says of it.

        `eos_token_ids` are tokens that end an answer; `special_tokens` names tokens, such as
        `bos_token`.
        """
        self.default_sampling_params = default_sampling_params
        """How the model's makers would draw its tokens."""
        self.backend_tokenizer, self.special_tokens = backend_tokenizer, dict(special_tokens or {})
        self.eos_token_ids = frozenset(eos_token_ids)
        """Tokens that end an answer."""
        added = backend_tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(
            number for number, token in added.items() if token.special
        )
        """Special tokens, which no text shows."""
        # Numbers may be left out, so counting the tokens does not tell.
        self.vocab_size: int = max(backend_tokenizer.get_vocab().values(), default=-1) + 1
        """Tokens are numbers below this one."""
        if self.vocab_size > MAX_VOCAB_SIZE:
            what = f"has a token with the number {self.vocab_size - 1:,}"
            fix = f"use one whose numbers lie below {MAX_VOCAB_SIZE:,}"
            raise InputError([Problem("tokenizer", what, fix)])
        self._template = ChatTemplate(chat_template, self.special_tokens) if chat_template else None
        self._bytes = TokenBytes(backend_tokenizer)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text, with those that prompts begin with where `special`.

        Special tokens that the text spells out are read as such.
        """
        with convert_library_errors("tokenizer.json", _NO_ENCODE, _NO_ENCODE_FIX):
            ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens; bytes that are no whole character become U+FFFD."""
        with convert_library_errors("tokenizer.json", _NO_ENCODE, _NO_ENCODE_FIX):
            text: str = self.backend_tokenizer.decode(
                list(tokens), skip_special_tokens=skip_special
            )
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for; special ones as they are written."""
        return self._bytes(token)

    def create_decoder(self, shown: Iterable[str] = ()) -> Callable[[Sequence[int]], str]:
        """Return what makes text of tokens, special ones among `shown` included."""
        kept = {number for token in shown if (number := self.token_to_id(token)) is not None}
        if not kept:
            return self.decode
        hidden = self.special_token_ids - kept

        def read(tokens: Sequence[int]) -> str:
            visible = [token for token in tokens if token not in hidden]
            return self.decode(visible, skip_special=False)

        return read

    def id_to_token(self, number: int) -> str | None:
        """Return how the vocabulary writes a token; None where there is none."""
        found: str | None = self.backend_tokenizer.id_to_token(number)
        return found

    def token_to_id(self, token: str) -> int | None:
        """Return the number of a token as the vocabulary writes it."""
        found: int | None = self.backend_tokenizer.token_to_id(token)
        return found

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's template for conversations."""
        return self._template

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a template for conversations."""
        return self._template is not None

    def apply_chat_template(
        self,
        messages: Sequence[TemplateMessage],
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
        return self._template.render(normalize_messages(messages), tools=tools, **values)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read the words of the model that lies at a path."""
    path = Path(path)
    if path.is_dir():
        return _from_folder(path)
    # Reading GGUF needs torch, which processes that only tokenise do without.
    from meshwright.run.serve.model.gguf_file import is_gguf

    return _from_gguf(path) if is_gguf(path) else _from_folder(path)


def _from_gguf(path: Path) -> Tokenizer:
    from meshwright.run.serve.model.gguf_file import GgufFile
    from meshwright.run.serve.tokenizer.gguf_tokenizer import tokenizer_from_gguf

    with GgufFile(path) as file:
        tokenizer, special, ends = tokenizer_from_gguf(file)
        template = file.metadata_str("tokenizer.chat_template", "")
    return Tokenizer(tokenizer, eos_token_ids=ends, special_tokens=special, chat_template=template)


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        what = "there is no such file"
        fix = "write it with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        raise InputError([Problem(str(path), what, fix)])
    tokenizer = open_tokenizer_json(read_text(path), str(path))
    config = _json(folder / "tokenizer_config.json")
    special = {role: word for role in _ROLES if (word := _written(config.get(role))) is not None}
    return Tokenizer(
        tokenizer,
        eos_token_ids=_ends(folder, tokenizer, special.get("eos_token")),
        special_tokens=special,
        chat_template=_template(folder, config),
        default_sampling_params=_sampling(folder / "generation_config.json"),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return load_data(path)
    except InputError as error:
        problems = [problem._replace(fix="fetch it again") for problem in error.problems]
        raise InputError(problems) from error


def _written(token: object) -> str | None:
    """Return how a special token is written: the config has it as a text or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    found = config.get("chat_template")
    if isinstance(found, list):
        # Several by name: the one for conversations is called default.
        named = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[-1].get("template") if named else None
    return found if isinstance(found, str) else ""


def _sampling(path: Path) -> SamplingParams:
    """Return how tokens are drawn where nobody says; what the file leaves out is left alone."""
    config = _json(path)
    given = {name: config[name] for name in _DRAWN if config.get(name) is not None}
    try:
        return msgspec.convert(given, SamplingParams)
    except (msgspec.ValidationError, InputError) as error:
        what = f"says how to draw tokens in a way that cannot be: {error}"
        raise InputError([Problem(str(path), what, "mend it")]) from error


def _ends(folder: Path, tokenizer: "TokenizersTokenizer", written: str | None) -> frozenset[int]:
    """Return the tokens that end an answer: those generation is told of, and the text's own."""
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        found = _json(folder / name).get("eos_token_id")
        if found is not None:
            listed = found if isinstance(found, list) else [found]
            if not all(type(each) is int and each >= 0 for each in listed):
                where = f"{folder / name}: eos_token_id"
                what = f"{format_value(found)} is no token, nor a list of tokens"
                raise InputError([Problem(where, what, "give the numbers of tokens, such as 2")])
            ends |= set(listed)
            break
    number = None if written is None else tokenizer.token_to_id(written)
    return frozenset(ends if number is None else ends | {number})
