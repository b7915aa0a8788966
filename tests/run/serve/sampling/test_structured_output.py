"""Grammars let through exactly what they allow, and are refused where they cannot be applied."""

import json
import random

import pytest

pytest.importorskip("torch", reason="masks are torch tensors")
pytest.importorskip("llguidance", reason="structured answers need llguidance")
pytest.importorskip("tokenizers", reason="a tokenizer is made for the test")

import tokenizers
import torch

from meshwright.errors import InputError
from meshwright.run.kernels.sampling.token_bitmask import apply_token_bitmask
from meshwright.run.kernels.triton_compat import HAS_TRITON
from meshwright.run.serve.sampling.grammar_bitmask import GrammarBitmask
from meshwright.run.serve.sampling.sampler import TokenSampler
from meshwright.run.serve.sampling.structured_output import GrammarCompiler, GrammarMatcher
from meshwright.run.serve.sampling_params import (
    SamplingParams,
    StructuredOutputsKind,
    StructuredOutputsParams,
)

PAIRS = ["tr", "tru", "true", '{"', '":', '",', "in", "ĠĠ"]


def small_tokenizer() -> tuple[str, dict[str, int]]:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate([*alphabet, *PAIRS])}
    merges = [(word[:-1], word[-1]) for word in PAIRS]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made.to_str(), made.get_vocab()


TEXT, WORDS = small_tokenizer()
EOS = WORDS["<end>"]
# Models have more logits than words.
VOCAB = len(WORDS) + 7
TOKENIZER = tokenizers.Tokenizer.from_str(TEXT)
GRAMMARS = GrammarCompiler(TEXT, VOCAB, [EOS])

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 4},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "age", "ok"],
        "additionalProperties": False,
    }
)


def guide(kind: StructuredOutputsKind, text: str = "") -> GrammarMatcher:
    return GRAMMARS.compile(StructuredOutputsParams(kind=kind, text=text))


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def allowed(
    masks: GrammarBitmask, one: GrammarMatcher, proposed: tuple[int, ...] = ()
) -> list[set[int]]:
    masks.start_fill([(1, one, proposed)], lines=len(proposed) + 2)
    mask_LW = masks.result()
    assert mask_LW is not None
    assert bool((mask_LW[0] == -1).all())
    bits = (mask_LW[1:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return [set(line.nonzero().flatten().tolist()) for line in bits.flatten(1)]


@pytest.fixture(scope="module")
def masks() -> GrammarBitmask:
    return GrammarBitmask(VOCAB, "cpu", threads=1)


@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        ("json_schema", SCHEMA, None),
        ("json_object", "", None),
        ("regex", "[a-c]{3}-[0-9]+", None),
        ("grammar", 'start: "x" ("," "x")*', None),
        ("grammar", 'root ::= "yes" | "no" " "?', None),
        ("choice", '["red", "green \\"leaf\\""]', {"red", 'green "leaf"'}),
    ],
)
def test_whatever_is_drawn_satisfies_the_grammar(
    masks: GrammarBitmask, kind: StructuredOutputsKind, text: str, wanted: set[str] | None
) -> None:
    for seed in range(6):
        one = guide(kind, text)
        tokens: list[int] = []
        chance = random.Random(seed)
        while not one.is_terminated and len(tokens) < 120:
            able = sorted(allowed(masks, one)[0])
            assert able
            if one.matcher.is_accepting() and EOS in able:
                break
            # Prefer what closes, so that answers end soon.
            closing = [token for token in able if token in ids('"},')]
            tokens.append(chance.choice(closing if closing and chance.random() < 0.7 else able))
            one.accept_tokens(tokens[-1:])
        answer = TOKENIZER.decode(tokens)
        if kind.startswith("json"):
            if one.matcher.is_accepting():
                assert isinstance(json.loads(answer), dict)
        elif wanted is not None:
            assert answer in wanted


def test_a_schema_is_kept_to(masks: GrammarBitmask) -> None:
    one = guide("json_schema", SCHEMA)
    one.accept_tokens(ids('{"name":"Jo"'))
    after = allowed(masks, one)[0]
    assert WORDS[","] in after
    assert WORDS["}"] not in after
    one.accept_tokens(ids(',"age":9'))
    assert one.count_allowed(ids("9,")) == 2
    assert one.count_allowed(ids("99")) == 1
    one.accept_tokens(ids(',"ok":true}'))
    assert one.is_terminated
    assert one.matcher.is_accepting()


def test_after_the_end_only_an_end_of_text_is_allowed(masks: GrammarBitmask) -> None:
    one = guide("choice", '["ab"]')
    one.accept_tokens(ids("ab"))
    assert one.is_terminated
    assert allowed(masks, one) == [{EOS}]


def test_what_comes_after_the_end_does_not_count(masks: GrammarBitmask) -> None:
    one, (a, b) = guide("regex", "ab*"), ids("ab")
    one.accept_tokens([a, b, EOS, a])
    assert one.is_terminated
    one = guide("regex", "ab")
    one.accept_tokens([a, b, EOS])
    assert one.is_terminated
    # A proposal never goes past an end, so no line of logits is without a grammar.
    assert guide("regex", "ab*").count_allowed([a, b, EOS, a]) == 2
    assert allowed(masks, guide("regex", "ab"), (a, b))[2] == {EOS}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("choice", json.dumps([str(number) for number in range(5000)])),
        ("regex", "a" * 300_000),
    ],
)
def test_what_would_keep_others_waiting_is_refused(kind: StructuredOutputsKind, text: str) -> None:
    with pytest.raises(InputError, match="are taken"):
        guide(kind, text)


def test_spaces_cannot_go_on_for_ever() -> None:
    one = guide("json_object")
    one.accept_tokens(ids("{"))
    assert one.count_allowed(ids(" " * 200)) <= 64


def test_masks_follow_proposed_tokens_and_leave_the_guide_where_it_is(
    masks: GrammarBitmask,
) -> None:
    one = guide("regex", "ab[0-9]c")
    a, b, c, seven = (WORDS[letter] for letter in "abc7")
    lines = allowed(masks, one, (a, b, seven))
    assert lines[:2] == [{a}, {b}]
    assert lines[2] == {WORDS[digit] for digit in "0123456789"}
    assert lines[3] == {c}
    assert allowed(masks, one) == [{a}]
    # What follows a proposal that is not allowed is never used.
    assert allowed(masks, one, (a, c, seven))[:2] == [{a}, {b}]


def test_a_guide_starts_anew_for_each_answer() -> None:
    first = guide("choice", '["ab"]')
    first.accept_tokens(ids("ab"))
    assert guide("choice", '["ab"]').count_allowed(ids("ab")) == 2


def test_a_token_that_is_not_allowed_is_an_error() -> None:
    one = guide("choice", '["ab"]')
    with pytest.raises(InputError, match="grammar"):
        one.accept_tokens(ids("x"))


def test_the_sampler_draws_only_what_the_mask_allows(masks: GrammarBitmask) -> None:
    sampler = TokenSampler(2, VOCAB, "cpu", eos=[EOS])
    sampler.add_row(0, SamplingParams(temperature=5.0, seed=1), (1,))
    sampler.add_row(1, SamplingParams(temperature=5.0, seed=2), (1,))
    one, text = guide("regex", "[xy]{6}"), []
    for _ in range(6):
        plan = sampler.build_metadata([0, 1])
        masks.start_fill([(0, one, ())], lines=2)
        drawn = sampler.sample(torch.zeros(2, VOCAB), plan, mask_RW=masks.result())
        text.append(int(drawn.token_ids[0]))
        one.accept_tokens(text[-1:])
    assert set(TOKENIZER.decode(text)) <= {"x", "y"}
    masks.start_fill([], lines=2)
    assert masks.result() is None


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton here")
def test_the_kernel_forbids_what_plain_torch_forbids() -> None:
    # Wider than a block and no multiple of a word.
    source = torch.Generator().manual_seed(0)
    mask = torch.randint(-(2**31), 2**31, (2, 129), generator=source).to(torch.int32)
    plain, by_kernel = torch.zeros(2, 4099), torch.zeros(2, 4099)
    apply_token_bitmask(plain, mask, backend="torch")
    apply_token_bitmask(by_kernel, mask, backend="triton")
    assert plain.equal(by_kernel)
    assert 0 < int(plain.isinf().sum()) < 2 * 4099


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json_schema", "{", "no JSON"),
        ("json_schema", '{"type": "strng"}', "did you mean string?"),
        ("json_schema", "5", "object or true"),
        ("json_schema", "false", "object or true"),
        ("json_schema", '{"not": {"const": 1}}', "Unimplemented"),
        ("json_schema", '{"x-guidance": {"lenient": true}, "not": {"const": 1}}', "Unimplemented"),
        ("json_schema", '{"enum": []}', "Unsatisfiable"),
        ("json_schema", '{"$ref": "http://example.org/a"}', "not present"),
        ("json_schema", '{"a":' * 20_000, "no JSON"),
        ("regex", "", "empty"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", r"[^\s\S]", "no answer"),
        ("grammar", "start: nothing", "unknown name"),
        ("grammar", "hello", "GBNF"),
        ("choice", "[]", "list of texts"),
        ("choice", "[1]", "list of texts"),
        ("choice", '["a", ""]', "none of them empty"),
    ],
)
def test_what_cannot_be_applied_is_refused(
    kind: StructuredOutputsKind, text: str, why: str
) -> None:
    with pytest.raises(InputError, match=why) as refused:
        guide(kind, text)
    assert refused.value.problems[0].where == kind
    assert refused.value.problems[0].fix
