"""Alignments: how scores become weights."""

from regard.general.alignments.base import Alignment
from regard.general.alignments.hard import Hard
from regard.general.alignments.local import Local
from regard.general.alignments.reinforced import Reinforced, ReinforcedPairs
from regard.general.alignments.soft import Soft
from regard.general.alignments.sparse import Entmax, Sparsemax

__all__ = ["Alignment", "Entmax", "Hard", "Local", "Reinforced", "ReinforcedPairs", "Soft", "Sparsemax"]
