"""Query-related mechanisms: what asks, and how many ask."""

from regard.query.multi_head import MultiHeadAttention, MultiQueryConcat
from regard.query.multi_hop import MultiHopAttention, Transform
from regard.query.parts import Others
from regard.query.queries import (
    AuxiliaryQuery,
    ConstantQuery,
    ContextQuery,
    LearnableQuery,
    PooledQuery,
    RNNStateQuery,
)
from regard.query.self_attention import SelfAttention

__all__ = [
    "AuxiliaryQuery",
    "ConstantQuery",
    "ContextQuery",
    "LearnableQuery",
    "MultiHeadAttention",
    "MultiHopAttention",
    "MultiQueryConcat",
    "Others",
    "PooledQuery",
    "RNNStateQuery",
    "SelfAttention",
    "Transform",
]
