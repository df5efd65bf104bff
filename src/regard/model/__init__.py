"""The task model and its four parts: features, queries, attention, outputs."""

from regard.model.batch import POSSIBLE, SURE, Batch, Example, collate
from regard.model.features import Chain, Embedding
from regard.model.naming import On
from regard.model.outputs import Classifier, Decoded, Output, SequenceDecoder
from regard.model.task import TaskModel

__all__ = [
    "POSSIBLE",
    "SURE",
    "Batch",
    "Chain",
    "Classifier",
    "Decoded",
    "Embedding",
    "Example",
    "On",
    "Output",
    "SequenceDecoder",
    "TaskModel",
    "collate",
]
