"""Small tasks with a known answer, drawn without end, and one short `fit`.

Each is made so that a certain attention solves it and a mean of its inputs does not, and says where that attention should
look.
"""

from regard.recipes.planted.attributes import AttributeLookup
from regard.recipes.planted.chains import FactChain
from regard.recipes.planted.cloze import Cloze
from regard.recipes.planted.dialects import Dialects
from regard.recipes.planted.digits import CapsuleNetwork, Digits
from regard.recipes.planted.duplicate import Duplicate
from regard.recipes.planted.evidence import CapsuleClassifier, Evidence
from regard.recipes.planted.fit import Classifier, accuracy, cross_entropy, fit
from regard.recipes.planted.graphs import NodeLookup, TypedNeighbours
from regard.recipes.planted.hull import ConvexHull
from regard.recipes.planted.levels import MarkedWord, WordThenCharacter
from regard.recipes.planted.mirror import Mirror
from regard.recipes.planted.pairs import Lookup, MatchingPair
from regard.recipes.planted.patterns import StoredPattern
from regard.recipes.planted.recall import InSegments, Recall
from regard.recipes.planted.reversal import Reversal
from regard.recipes.planted.segments import NoisySegments
from regard.recipes.planted.sentiment import TargetSentiment
from regard.recipes.planted.sorting import Sorting
from regard.recipes.planted.sources import InformativeSource
from regard.recipes.planted.strides import Strides
from regard.recipes.planted.task import Batch, Task
from regard.recipes.planted.views import PairedViews

__all__ = [
    "AttributeLookup",
    "Batch",
    "CapsuleClassifier",
    "CapsuleNetwork",
    "Classifier",
    "Cloze",
    "ConvexHull",
    "Dialects",
    "Digits",
    "Duplicate",
    "Evidence",
    "FactChain",
    "InSegments",
    "InformativeSource",
    "Lookup",
    "MarkedWord",
    "MatchingPair",
    "NoisySegments",
    "PairedViews",
    "Recall",
    "Reversal",
    "Mirror",
    "NodeLookup",
    "Sorting",
    "StoredPattern",
    "Strides",
    "TargetSentiment",
    "Task",
    "TypedNeighbours",
    "WordThenCharacter",
    "accuracy",
    "cross_entropy",
    "fit",
]
