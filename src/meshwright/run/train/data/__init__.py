"""Data: text to tokens on disk, and tokens on disk to the batch of any step.

tokenization                           files of text become a folder of shards
corpus, corpus_loader                  tokenized documents, memory-mapped
document_split, packing                documents are cut into sequences
sequence_stream, blend, batch_dataset  the batch of a step
prefetch                               batches made in the background
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.train.data.batch import TrainBatch
    from meshwright.run.train.data.batch_dataset import BatchDataset
    from meshwright.run.train.data.corpus.corpus import Corpus
    from meshwright.run.train.data.corpus.megatron_dataset import write_megatron
    from meshwright.run.train.data.corpus.token_shards import write_token_shards
    from meshwright.run.train.data.corpus.vocabulary import Vocabulary
    from meshwright.run.train.data.corpus_loader import open_corpus
    from meshwright.run.train.data.data_config import DataConfig, DataSource
    from meshwright.run.train.data.dataset_builder import build_dataset
    from meshwright.run.train.data.prefetch import PrefetchLoader
    from meshwright.run.train.data.tokenization.bpe_trainer import train_bpe
    from meshwright.run.train.data.tokenization.builtin_text import generate_builtin_documents
    from meshwright.run.train.data.tokenization.corpus_tokenization import tokenize_files
    from meshwright.run.train.data.tokenization.tokenizer import TextTokenizer, open_tokenizer

_HERE = "meshwright.run.train.data"
_MODULES = {
    "TrainBatch": "meshwright.run.train.data.batch",
    "BatchDataset": "meshwright.run.train.data.batch_dataset",
    "Corpus": "meshwright.run.train.data.corpus.corpus",
    "DataConfig": "meshwright.run.train.data.data_config",
    "PrefetchLoader": "meshwright.run.train.data.prefetch",
    "DataSource": "meshwright.run.train.data.data_config",
    "TextTokenizer": "meshwright.run.train.data.tokenization.tokenizer",
    "Vocabulary": "meshwright.run.train.data.corpus.vocabulary",
    "open_corpus": "meshwright.run.train.data.corpus_loader",
    "build_dataset": "meshwright.run.train.data.dataset_builder",
    "open_tokenizer": "meshwright.run.train.data.tokenization.tokenizer",
    "generate_builtin_documents": "meshwright.run.train.data.tokenization.builtin_text",
    "tokenize_files": "meshwright.run.train.data.tokenization.corpus_tokenization",
    "train_bpe": "meshwright.run.train.data.tokenization.bpe_trainer",
    "write_megatron": "meshwright.run.train.data.corpus.megatron_dataset",
    "write_token_shards": "meshwright.run.train.data.corpus.token_shards",
}

__all__ = [
    "BatchDataset",
    "Corpus",
    "DataConfig",
    "DataSource",
    "PrefetchLoader",
    "TextTokenizer",
    "TrainBatch",
    "Vocabulary",
    "build_dataset",
    "generate_builtin_documents",
    "open_corpus",
    "open_tokenizer",
    "tokenize_files",
    "train_bpe",
    "write_megatron",
    "write_token_shards",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
