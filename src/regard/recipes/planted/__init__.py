"""Small tasks with a known answer, drawn without end, and one short `fit`.

Each is made so that a certain attention solves it and a mean of its inputs does not, and says where that attention should
look.
"""

from regard.recipes.planted.chains import FactChain
from regard.recipes.planted.cloze import Cloze
from regard.recipes.planted.fit import Classifier, accuracy, cross_entropy, fit
from regard.recipes.planted.levels import MarkedWord, WordThenCharacter
from regard.recipes.planted.pairs import Lookup, MatchingPair
from regard.recipes.planted.sentiment import TargetSentiment
from regard.recipes.planted.sorting import Sorting
from regard.recipes.planted.sources import InformativeSource
from regard.recipes.planted.task import Batch, Task

__all__ = [
    "Batch",
    "Classifier",
    "Cloze",
    "FactChain",
    "InformativeSource",
    "Lookup",
    "MarkedWord",
    "MatchingPair",
    "Sorting",
    "TargetSentiment",
    "Task",
    "WordThenCharacter",
    "accuracy",
    "cross_entropy",
    "fit",
]
