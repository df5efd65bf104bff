"""Nodes: the class of every node of a graph of which a few are known; Cora, Citeseer, or a generated graph."""

from regard.recipes.nodes.network import GraphNetwork, NodeClasses
from regard.recipes.nodes.recipe import RECIPE, Nodes

__all__ = ["RECIPE", "GraphNetwork", "NodeClasses", "Nodes"]
