"""Data: text to tokens on disk, and tokens on disk to the batch of any step.

text, standard → tokenizer → tokenising   files of text become a folder of shards
shards, megatron → corpus                 tokenised documents, memory-mapped
selection → concat | packing | pieces     documents are cut into sequences
stream, blend → batches → prefetch        the batch of a step, made in the background
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.train.data.batch import Batch
    from meshwright.run.train.data.batches import Batches
    from meshwright.run.train.data.byte_pairs import train_tokenizer
    from meshwright.run.train.data.corpus import Corpus
    from meshwright.run.train.data.megatron import write_megatron
    from meshwright.run.train.data.opening import open_data
    from meshwright.run.train.data.prefetch import Loader
    from meshwright.run.train.data.settings import DataSettings, Source
    from meshwright.run.train.data.shards import write_shards
    from meshwright.run.train.data.sources import open_corpus
    from meshwright.run.train.data.standard import standard_text
    from meshwright.run.train.data.tokenising import tokenise
    from meshwright.run.train.data.tokenizer import Tokenizer, open_tokenizer
    from meshwright.run.train.data.vocabulary import Vocabulary

_HERE = "meshwright.run.train.data"
_HOMES = {
    "Batch": f"{_HERE}.batch",
    "Batches": f"{_HERE}.batches",
    "Corpus": f"{_HERE}.corpus",
    "DataSettings": f"{_HERE}.settings",
    "Loader": f"{_HERE}.prefetch",
    "Source": f"{_HERE}.settings",
    "Tokenizer": f"{_HERE}.tokenizer",
    "Vocabulary": f"{_HERE}.vocabulary",
    "open_corpus": f"{_HERE}.sources",
    "open_data": f"{_HERE}.opening",
    "open_tokenizer": f"{_HERE}.tokenizer",
    "standard_text": f"{_HERE}.standard",
    "tokenise": f"{_HERE}.tokenising",
    "train_tokenizer": f"{_HERE}.byte_pairs",
    "write_megatron": f"{_HERE}.megatron",
    "write_shards": f"{_HERE}.shards",
}

__all__ = [
    "Batch",
    "Batches",
    "Corpus",
    "DataSettings",
    "Loader",
    "Source",
    "Tokenizer",
    "Vocabulary",
    "open_corpus",
    "open_data",
    "open_tokenizer",
    "standard_text",
    "tokenise",
    "train_tokenizer",
    "write_megatron",
    "write_shards",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
