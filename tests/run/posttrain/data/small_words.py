"""Words with a small tokenizer and templates of the kinds that models come with."""

from functools import cache
from typing import Any

from meshwright.run.serve.tokenizer.tokenizer import Tokenizer

CHATML = """
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
MARKED = """
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}
{%- endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}
{%- endfor %}"""
FORGETFUL = """
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and not loop.last %}
    {{- message.content.split('</think>')[-1] }}
{%- else %}{{ message.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
THINKING = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>' }}{% endif")


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the user and the assistant talk and talk\n\n\n\nthe answer is the answer\n\nsystem"
    tokenizer.train_from_iterator([text] * 3, trainer)
    return tokenizer


def words_of(template: str = CHATML) -> Tokenizer:
    """Return words whose answers end with `<|im_end|>`."""
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return Tokenizer(
        _tokenizer(), eos_token_ids=(2,), special_tokens=special, chat_template=template
    )


def chat(*contents: str) -> dict[str, Any]:
    """Return a record whose messages are by user and assistant in turn."""
    roles = ("user", "assistant")
    return {
        "messages": [
            {"role": roles[number % 2], "content": content}
            for number, content in enumerate(contents)
        ]
    }
