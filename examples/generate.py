"""Text from a trained model, by the smallest loop there is: always the likeliest next token.

    mw convert demo-out/run demo-out/exported
    python examples/generate.py demo-out/exported "def main(" "12 + 30 ="

Takes any Hugging Face folder with a tokenizer.json. The whole text goes through the model for every
token, as nothing is kept from one to the next: good enough to see what a small model has learnt.
"""

import argparse

import torch

from meshwright.run.nn import Decoder, huggingface
from meshwright.run.train.data import TextTokenizer, open_tokenizer


@torch.inference_mode()
def continued(decoder: Decoder, tokenizer: TextTokenizer, prompt: str, tokens: int) -> str:
    """Return what the model thinks comes after a prompt, up to the end of the document."""
    ids = tokenizer.encode([prompt])[0].tolist()
    given = len(ids)
    for _ in range(tokens):
        logits_V = decoder(torch.tensor([ids[-decoder.model.max_positions :]]))[0, -1]
        best = int(logits_V.argmax())
        if best == tokenizer.vocabulary.eos:
            break
        ids.append(best)
    return tokenizer.decode(ids[given:])


def main() -> None:
    """Print each prompt, a mark, and what the model adds."""
    parser = argparse.ArgumentParser(description="Text from a trained model.")
    parser.add_argument("folder", help="what mw convert wrote")
    parser.add_argument("prompts", nargs="+", metavar="prompt")
    parser.add_argument("--tokens", type=int, default=40, help="how many to add (default: 40)")
    parser.add_argument("--line", action="store_true", help="only up to the end of the line")
    asked = parser.parse_args()
    decoder = huggingface.load_hf_checkpoint(None, asked.folder, dtype=torch.float32).eval()
    tokenizer = open_tokenizer(asked.folder)
    for prompt in asked.prompts:
        text = continued(decoder, tokenizer, prompt, asked.tokens)
        print(f"{prompt}▸{text.partition(chr(10))[0] if asked.line else text}")


if __name__ == "__main__":
    main()
