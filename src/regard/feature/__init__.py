"""Feature-related mechanisms: several inputs, several levels, several representations."""

from regard.feature.co_alternating import AlternatingCoAttention
from regard.feature.co_interactive import InteractiveCoAttention
from regard.feature.co_multigrained import MultiGrainedCoAttention
from regard.feature.co_parallel import ParallelCoAttention, Trilinear
from regard.feature.encoders import RecurrentEncoder
from regard.feature.gate import AttentionGate
from regard.feature.hierarchical import HierarchicalAttention, pad_levels
from regard.feature.meta_embedding import MetaEmbedding, SigmoidGate
from regard.feature.rotatory import RotatoryAttention
from regard.feature.via import AttentionViaAttention

__all__ = [
    "AlternatingCoAttention",
    "AttentionGate",
    "AttentionViaAttention",
    "HierarchicalAttention",
    "InteractiveCoAttention",
    "MetaEmbedding",
    "MultiGrainedCoAttention",
    "ParallelCoAttention",
    "RecurrentEncoder",
    "RotatoryAttention",
    "SigmoidGate",
    "Trilinear",
    "pad_levels",
]
