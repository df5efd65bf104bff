"""Feature models: what the tokens of an input are before anybody looks at them.

Each takes an input and its mask and gives features (..., N, d), `out_dim` wide and zero where nothing is real. One that changes the
length says with `mask_after` which of its results are real.
"""

from regard.feature.encoders import RecurrentEncoder
from regard.model.features.chain import Chain, mask_after
from regard.model.features.convolution import Convolution1d, Convolution2d
from regard.model.features.embedding import Embedding
from regard.model.features.graph import GraphFeatures
from regard.model.features.patches import Patches
from regard.model.features.pretrained import Pretrained, Words, by_word
from regard.model.features.several import Embeddings
from regard.model.features.spectrogram import Spectrogram

__all__ = [
    "Chain",
    "Convolution1d",
    "Convolution2d",
    "Embedding",
    "Embeddings",
    "GraphFeatures",
    "Patches",
    "Pretrained",
    "RecurrentEncoder",
    "Spectrogram",
    "Words",
    "by_word",
    "mask_after",
]
