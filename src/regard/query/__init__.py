"""Query-related mechanisms: what asks, and how many ask."""

from regard.query.agreement import AgreementAttention
from regard.query.attention_over_attention import AttentionOverAttention, sum_attention
from regard.query.budget import Budget
from regard.query.capsule_decoder import CapsuleDecoder
from regard.query.capsule_losses import CapsuleLoss
from regard.query.capsules import CapsuleAttention, Capsules
from regard.query.capsules_hierarchical import HierarchicalCapsules
from regard.query.capsules_multi_head import MultiHeadCapsules
from regard.query.conditional import FiLMQuery, HyperQuery, LatentQueries
from regard.query.cross_modal import Crossed, CrossModalAttention, info_nce
from regard.query.dependency_tree import DependencyTree
from regard.query.energy import EnergySelection, hopfield_energy
from regard.query.graph import GraphAttention
from regard.query.graph_parts import GATScore, GATv2Score
from regard.query.key_value import KeyValueMemory, Memory
from regard.query.linear_chain import LinearChain
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
from regard.query.query_routing import QueryRouting, TopK, load_balance
from regard.query.routing import DynamicRouting, squash
from regard.query.saliency import FocusSaliency, focus_and_saliency
from regard.query.self_attention import SelfAttention
from regard.query.structured import Structure, Structured
from regard.query.transport import Sinkhorn, sinkhorn

__all__ = [
    "AgreementAttention",
    "AttentionOverAttention",
    "AuxiliaryQuery",
    "Budget",
    "CapsuleAttention",
    "CapsuleDecoder",
    "CapsuleLoss",
    "Capsules",
    "ConstantQuery",
    "ContextQuery",
    "CrossModalAttention",
    "Crossed",
    "DependencyTree",
    "DynamicRouting",
    "EnergySelection",
    "FiLMQuery",
    "FocusSaliency",
    "HierarchicalCapsules",
    "GATScore",
    "GATv2Score",
    "GraphAttention",
    "HyperQuery",
    "KeyValueMemory",
    "LatentQueries",
    "LearnableQuery",
    "LinearChain",
    "Memory",
    "MultiHeadAttention",
    "MultiHeadCapsules",
    "MultiHopAttention",
    "MultiQueryConcat",
    "Others",
    "Pointed",
    "PointerNetwork",
    "PooledQuery",
    "QueryRouting",
    "RNNStateQuery",
    "SelfAttention",
    "Sinkhorn",
    "Structure",
    "Structured",
    "TopK",
    "Transform",
    "focus_and_saliency",
    "hopfield_energy",
    "info_nce",
    "load_balance",
    "sinkhorn",
    "squash",
    "sum_attention",
]
