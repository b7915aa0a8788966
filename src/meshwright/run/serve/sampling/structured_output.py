"""Answers that a grammar allows: JSON schemas, regular expressions, EBNF, choices.

The grammars are llguidance's (MIT, no further packages). Held against xgrammar 0.2.8 with Llama 3's
128,256 tokens on two cores: a schema is ready in 1 ms against 5.7 s, a mask takes 40 µs on average
against 565 µs where strings have a greatest length, and keywords it does not know are refused.

    compiler = GrammarCompiler(tokenizer.backend_tokenizer.to_str(), vocab, eos)
    grammar = compiler.compile(StructuredOutputsParams(kind="json_schema", text=schema))
    grammar.accept_tokens([token])      after each step; `GrammarBitmask` makes the masks

A grammar is applied to every token of an answer, or the request is refused.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from threading import Lock
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.run.serve.sampling_params import StructuredOutputsParams
from meshwright.spec.name_suggestions import format_suggestion

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Between the parts of a JSON text. Without a bound, a model may write spaces until its answer is
# cut off.
_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_KEPT = 256
MAX_GRAMMAR_CHARS, _CHOICES = 2**18, 4096
"""Characters of a grammar, and texts to choose from: compiling keeps others waiting."""
MAX_REGEX_CHARS = 2**14
"""Characters of a regular expression, whose compilation takes quadratic time: here about 1 s."""


class GrammarMatcher:
    """Follows one answer through its grammar."""

    def __init__(self, matcher: "LLMatcher", eos: frozenset[int]) -> None:
        self.matcher = matcher
        self._eos = eos

    @property
    def is_terminated(self) -> bool:
        """Whether nothing but an end of text can follow."""
        return bool(self.matcher.is_stopped())

    def accept_tokens(self, tokens: Sequence[int]) -> int:
        """Go on with tokens of the answer, ends of text too; return how many came before its end.

        An `InputError` says that the grammar cannot follow: the answer must end with that error.
        """
        for count, token in enumerate(tokens):
            if self.matcher.is_stopped() and not self.matcher.is_error():
                return count
            if not self.matcher.consume_token(token):
                why = _in_short(self.matcher.get_error())
                raise InputError([Problem("structured_outputs", why, "simplify the grammar")])
        return len(tokens)

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of some next tokens the grammar allows before an end of text.

        The guide stays where it is.
        """
        text = list(takewhile(lambda token: token not in self._eos, tokens))
        return int(self.matcher.validate_tokens(text))


class GrammarCompiler:
    """Makes guides for one tokenizer; grammars that come again are kept."""

    def __init__(self, tokenizer: str, vocab: int, eos: Sequence[int]) -> None:
        """Take a tokenizer as JSON text; `vocab` is how many logits the model gives."""
        self._json = tokenizer
        self._vocab = vocab
        self._eos = list(eos)
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()
        self._lock, self._tokenizer_lock = Lock(), Lock()

    def compile(self, grammar: StructuredOutputsParams) -> GrammarMatcher:
        """Return a guide at the beginning; an `InputError` says what is wrong with the grammar."""
        with self._lock:
            kept = self._kept.get(grammar)
        if kept is None:
            # Unlocked: a grammar that takes seconds keeps nobody waiting whose grammar is kept.
            kept = self._matcher(grammar)
        with self._lock:
            self._kept[grammar] = kept
            self._kept.move_to_end(grammar)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return GrammarMatcher(kept.deep_copy(), frozenset(self._eos))

    def _matcher(self, grammar: StructuredOutputsParams) -> "LLMatcher":
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError:
            hint = "pip install 'meshwright[serve]'"
            raise MissingDependency(
                "structured answers need the package llguidance", hint
            ) from None
        with self._tokenizer_lock:
            if self._tokenizer is None:
                # About a second for 128,000 tokens, so only where a grammar is asked for.
                try:
                    made = LLTokenizer(self._json, n_vocab=self._vocab, eos_token=self._eos)
                except ValueError as error:
                    what = f"grammars are not supported for this tokenizer: {_in_short(str(error))}"
                    problem = Problem("structured_outputs", what, "leave it out")
                    raise InputError([problem]) from None
                self._tokenizer = made
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0)
        if matcher.is_error():
            raise _refused(grammar, _in_short(matcher.get_error()))
        # The first mask shows what compiling does not: a grammar without an answer, or too large.
        tried = matcher.deep_copy()
        if not any(tried.compute_bitmask()) or tried.is_error():
            raise _refused(grammar, f"no answer can be found ({_in_short(tried.get_error())})")
        return matcher


def _source(grammar: StructuredOutputsParams) -> str:
    """Return a grammar as llguidance reads it."""
    from llguidance import LLMatcher, grammar_from

    most = MAX_REGEX_CHARS if grammar.kind == "regex" else MAX_GRAMMAR_CHARS
    if len(grammar.text) > most:
        what = f"has {len(grammar.text):,} characters, and {most:,} are taken"
        raise _refused(grammar, what, "make it shorter")
    if grammar.kind in ("json_schema", "json_object"):
        schema = {"type": "object"} if grammar.kind == "json_object" else _parsed(grammar)
        if not isinstance(schema, dict) and schema is not True:
            raise _refused(grammar, "a JSON schema is an object or true", "use an object")
        # What a request says for itself must not switch the check of unknown keywords off.
        options: Any = {"whitespace_pattern": _SPACE}
        strict: Any = {"lenient": False}
        schema = {} if schema is True else schema
        return LLMatcher.grammar_from_json_schema(schema, defaults=options, overrides=strict)
    if grammar.kind == "choice":
        choices = _parsed(grammar)
        texts = isinstance(choices, list) and all(isinstance(each, str) for each in choices)
        if not texts or not choices or "" in choices:
            raise _refused(grammar, "choices are a JSON list of texts, none of them empty")
        if len(choices) > _CHOICES:
            what = f"has {len(choices):,} choices, and {_CHOICES:,} are taken"
            raise _refused(grammar, what, "give fewer")
        return grammar_from("choice", grammar.text)
    if not grammar.text:
        raise _refused(grammar, "it is empty")
    try:
        return grammar_from("regex" if grammar.kind == "regex" else "grammar", grammar.text)
    except ValueError as error:
        raise _refused(grammar, _in_short(str(error))) from None


_JSON_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def _parsed(grammar: StructuredOutputsParams) -> Any:
    try:
        return json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise _refused(grammar, f"this is no JSON: {error}", "give JSON text") from None


def _refused(grammar: StructuredOutputsParams, why: str, fix: str = "") -> InputError:
    fixes = {
        "json_schema": _fix_schema(why),
        "regex": "use the syntax of Rust's regex, without look-around and back references",
        "grammar": "use Lark's syntax or llama.cpp's GBNF",
        "choice": 'use ["yes", "no"], say',
    }
    return InputError([Problem(grammar.kind, why, fix or fixes.get(grammar.kind, ""))])


def _fix_schema(why: str) -> str:
    """Say what mends a schema: the nearest type, or the keyword that is named left out."""
    what, _, name = why.partition(": ")
    if what == "Invalid type":
        return format_suggestion(name.strip(" \"'"), _JSON_TYPES)
    return "correct the schema there, or leave out the keyword that is not supported"


def _in_short(text: str) -> str:
    """Return the first line of an error, and the line that names it where that is another one."""
    first, *more = text.strip().split("\n")
    named = [line.removeprefix("error: ") for line in more if line.startswith("error: ")]
    return " ".join([first, *named[:1]])
