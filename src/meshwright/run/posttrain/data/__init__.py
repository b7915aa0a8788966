"""Data of post-training: chats and judged answers to tokens that say which of them are trained.

records                          files (JSON lines, Parquet) to records
record_format                    a record as chats with a choice of answers to train, or as a pair
                                 of texts
completion_spans                 where answers stand in the text that the chat template writes
encoding                         text to tokens, cut where serving would begin an answer
prepared_dataset, dataset_stats  all of it in memory, fitted to a length, and what became of it
chat_batches                     the packed batch of any step, a function of the step and the seed
mismatched_pairs                 answers under prompts of others, for KTO
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.posttrain.data.chat_batches import (
        BatchExamples,
        ChatBatches,
        mask_batch_tokens,
    )
    from meshwright.run.posttrain.data.completion_spans import TrainOn
    from meshwright.run.posttrain.data.dataset_stats import DatasetStats
    from meshwright.run.posttrain.data.encoding import TokenizedExample, encode_chat, encode_text
    from meshwright.run.posttrain.data.mismatched_pairs import mismatch_completions
    from meshwright.run.posttrain.data.prepared_dataset import (
        LengthPolicy,
        PreparedDataset,
        prepare_dataset,
    )
    from meshwright.run.posttrain.data.record_format import ChatExample, TextExample

_HERE = "meshwright.run.posttrain.data"
_MODULES = {
    "ChatExample": "meshwright.run.posttrain.data.record_format",
    "ChatBatches": "meshwright.run.posttrain.data.chat_batches",
    "TokenizedExample": "meshwright.run.posttrain.data.encoding",
    "DatasetStats": "meshwright.run.posttrain.data.dataset_stats",
    "BatchExamples": "meshwright.run.posttrain.data.chat_batches",
    "PreparedDataset": "meshwright.run.posttrain.data.prepared_dataset",
    "TextExample": "meshwright.run.posttrain.data.record_format",
    "LengthPolicy": "meshwright.run.posttrain.data.prepared_dataset",
    "TrainOn": "meshwright.run.posttrain.data.completion_spans",
    "mask_batch_tokens": "meshwright.run.posttrain.data.chat_batches",
    "encode_chat": "meshwright.run.posttrain.data.encoding",
    "encode_text": "meshwright.run.posttrain.data.encoding",
    "mismatch_completions": "meshwright.run.posttrain.data.mismatched_pairs",
    "prepare_dataset": "meshwright.run.posttrain.data.prepared_dataset",
}

__all__ = [
    "BatchExamples",
    "ChatBatches",
    "ChatExample",
    "DatasetStats",
    "LengthPolicy",
    "PreparedDataset",
    "TextExample",
    "TokenizedExample",
    "TrainOn",
    "encode_chat",
    "encode_text",
    "mask_batch_tokens",
    "mismatch_completions",
    "prepare_dataset",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
