"""Data of post-training: chats and judged answers to tokens that say which of them are trained.

records             files (JSON lines, Parquet) to records
forms               a record as chats with a choice of answers to train, or as a pair of texts
answers             where answers stand in the text that the model's own template writes
encoding            text to tokens, cut where serving would begin an answer
prepared, figures   all of it in memory, fitted to a length, and what became of it
batches             the batch of any step, packed, as a function of the step and the seed
mismatched          answers under prompts of others, for KTO
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.posttrain.data.answers import Train
    from meshwright.run.posttrain.data.batches import ChatBatches, Members, counted
    from meshwright.run.posttrain.data.encoding import Example, encode_chat, encode_text
    from meshwright.run.posttrain.data.figures import Figures
    from meshwright.run.posttrain.data.forms import Chat, Text
    from meshwright.run.posttrain.data.mismatched import mismatched
    from meshwright.run.posttrain.data.prepared import Prepared, TooLong, prepare

_HERE = "meshwright.run.posttrain.data"
_HOMES = {
    "Chat": f"{_HERE}.forms",
    "ChatBatches": f"{_HERE}.batches",
    "Example": f"{_HERE}.encoding",
    "Figures": f"{_HERE}.figures",
    "Members": f"{_HERE}.batches",
    "Prepared": f"{_HERE}.prepared",
    "Text": f"{_HERE}.forms",
    "TooLong": f"{_HERE}.prepared",
    "Train": f"{_HERE}.answers",
    "counted": f"{_HERE}.batches",
    "encode_chat": f"{_HERE}.encoding",
    "encode_text": f"{_HERE}.encoding",
    "mismatched": f"{_HERE}.mismatched",
    "prepare": f"{_HERE}.prepared",
}

__all__ = [
    "Chat",
    "ChatBatches",
    "Example",
    "Figures",
    "Members",
    "Prepared",
    "Text",
    "TooLong",
    "Train",
    "counted",
    "encode_chat",
    "encode_text",
    "mismatched",
    "prepare",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
