"""Parts of `scripts.fuzz_readers`: what is spoiled, how, how it is read, and under what guard."""
