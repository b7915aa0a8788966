"""From logits to text: the next token, what grammars allow, where answers end, what they call."""
