"""Query-related mechanisms: what asks, and how many ask."""

from regard.query.attention_over_attention import AttentionOverAttention, sum_attention
from regard.query.key_value import KeyValueMemory, Memory
from regard.query.multi_head import MultiHeadAttention, MultiQueryConcat
from regard.query.multi_hop import MultiHopAttention, Transform
from regard.query.parts import Others
from regard.query.pointer import Pointed, PointerNetwork
from regard.query.queries import (
    AuxiliaryQuery,
    ConstantQuery,
    ContextQuery,
    LearnableQuery,
    PooledQuery,
    RNNStateQuery,
)
from regard.query.saliency import FocusSaliency, focus_and_saliency
from regard.query.self_attention import SelfAttention

__all__ = [
    "AttentionOverAttention",
    "AuxiliaryQuery",
    "ConstantQuery",
    "ContextQuery",
    "FocusSaliency",
    "KeyValueMemory",
    "LearnableQuery",
    "Memory",
    "MultiHeadAttention",
    "MultiHopAttention",
    "MultiQueryConcat",
    "Others",
    "Pointed",
    "PointerNetwork",
    "PooledQuery",
    "RNNStateQuery",
    "SelfAttention",
    "Transform",
    "focus_and_saliency",
    "sum_attention",
]
