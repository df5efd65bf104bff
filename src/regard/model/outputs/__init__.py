"""Output models: from what was read to an answer, and how far the answer is from the target."""

from regard.model.outputs.base import Output, Read, target_of
from regard.model.outputs.capsules import CapsuleClassifier
from regard.model.outputs.classifier import Classifier
from regard.model.outputs.decoding import Decoded, TokenDecoder
from regard.model.outputs.dense import DenseMap
from regard.model.outputs.labels import MultiLabel
from regard.model.outputs.language import Hidden, LanguageHead, hide_tokens, next_tokens
from regard.model.outputs.pointer import PointerOutput
from regard.model.outputs.ranker import PairRanker, Ranker
from regard.model.outputs.sequence import SequenceDecoder
from regard.model.outputs.transformer import TransformerSequenceDecoder

__all__ = [
    "CapsuleClassifier",
    "Classifier",
    "Decoded",
    "DenseMap",
    "Hidden",
    "LanguageHead",
    "MultiLabel",
    "Output",
    "PairRanker",
    "PointerOutput",
    "Ranker",
    "Read",
    "SequenceDecoder",
    "TokenDecoder",
    "TransformerSequenceDecoder",
    "hide_tokens",
    "next_tokens",
    "target_of",
]
