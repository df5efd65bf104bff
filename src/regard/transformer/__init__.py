"""The Transformer family: positions, encoder, decoder, and whatever attends inside them.

The attention of a layer is a replaceable part. A layer calls it as

    attend(tokens, mask=mask)                    # tokens (..., N, d) read themselves: (..., N, d)
    attend(tokens, memory, mask=mask)            # tokens read a memory (..., M, d_m), only in the `cross` of a decoder
    attend(tokens, mask=mask, cache=slot)        # while decoding: `slot` is a `Slot`, and keeps keys and values

and expects the update that it adds to the tokens, without residual, normalisation or dropout of its own.

- `mask` is None or a mask object (`regard.general.masks.Mask`) that says which token may look at which key: `mask.bind(Sizes(lead,
  nq, n))` fixes it. Stacks pass a `Shared` one, made once for all layers: its `.bound` is the bound mask without heads, and padding
  holds zeros in the tokens that enter the first layer and finite numbers later. What comes out at padding is nobody's concern:
  the stack zeroes it at the end.
- `cache` is passed only when a decoder is called with one; an attention that cannot decode by portions leaves the argument out.
- State beyond that (a segment memory, hashes) belongs to a stack of its own that calls the layers.

`EncoderLayer(dim, heads, attention=make)` takes a module or a function `make(dim, heads)`, and so do the stacks
(`TransformerEncoder(dim, heads, layers, attention=make)`), which call it once a layer. `TransformerAttention` is the default; read through
`Attention`, as it does, and recording, interventions, masks and executions come along.
"""

from regard.transformer.attention import TransformerAttention
from regard.transformer.bert4rec import BERT4Rec
from regard.transformer.cache import Cache, Slot
from regard.transformer.chunked import ChunkedFeedForward
from regard.transformer.decoder import TransformerDecoder
from regard.transformer.encoder import TransformerEncoder
from regard.transformer.feedforward import FeedForward
from regard.transformer.generation import Beam, Generated, Greedy, Sample, generate
from regard.transformer.layers import DecoderLayer, EncoderLayer
from regard.transformer.linformer import LengthProjection, Linformer, LinformerAttention
from regard.transformer.lite import LightweightConvolution, LongShortAttention
from regard.transformer.lsh import Hashes, LSHAttention
from regard.transformer.models import LanguageModel, SequenceToSequence, TokenEmbedding
from regard.transformer.positions import (
    AbsolutePosition,
    AlibiPosition,
    DirectionalPosition,
    LearnedPosition,
    RelativePosition,
    RotaryPosition,
    ShawPosition,
    SinusoidalPosition,
    TransformerXLPosition,
)
from regard.transformer.reformer import Reformer, ReformerLanguageModel
from regard.transformer.reversible import ReversibleLayer
from regard.transformer.sharing import Shared
from regard.transformer.syntheses import (
    DenseSynthesis,
    DotSynthesis,
    FactorizedDenseSynthesis,
    FactorizedRandomSynthesis,
    RandomSynthesis,
)
from regard.transformer.synthesizer import SynthesizerAttention
from regard.transformer.transformer import Transformer
from regard.transformer.transformer_xl import Memory, Segment, TransformerXL, TransformerXLLayer
from regard.transformer.transformer_xl_model import TransformerXLLanguageModel

__all__ = [
    "AbsolutePosition",
    "AlibiPosition",
    "BERT4Rec",
    "Beam",
    "Cache",
    "ChunkedFeedForward",
    "DecoderLayer",
    "DenseSynthesis",
    "DirectionalPosition",
    "DotSynthesis",
    "EncoderLayer",
    "FactorizedDenseSynthesis",
    "FactorizedRandomSynthesis",
    "FeedForward",
    "Generated",
    "Greedy",
    "Hashes",
    "LSHAttention",
    "LanguageModel",
    "LearnedPosition",
    "LengthProjection",
    "LightweightConvolution",
    "Linformer",
    "LinformerAttention",
    "LongShortAttention",
    "Memory",
    "RandomSynthesis",
    "Reformer",
    "ReformerLanguageModel",
    "RelativePosition",
    "ReversibleLayer",
    "RotaryPosition",
    "Sample",
    "Segment",
    "SequenceToSequence",
    "Shared",
    "ShawPosition",
    "SinusoidalPosition",
    "Slot",
    "SynthesizerAttention",
    "TokenEmbedding",
    "Transformer",
    "TransformerAttention",
    "TransformerDecoder",
    "TransformerEncoder",
    "TransformerXL",
    "TransformerXLLanguageModel",
    "TransformerXLLayer",
    "TransformerXLPosition",
    "generate",
]
