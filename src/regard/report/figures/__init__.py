"""Figures of attention: heat maps, token strips, maps of a bias and of buckets, weighted graphs, arcs over a sentence, pictures.

Every function returns a `matplotlib.figure.Figure` that belongs to nobody: no backend is chosen, nothing is
registered with pyplot, nothing needs closing. Text is drawn as it is written: dollars, backslashes and angle
brackets mean themselves, and blanks and control characters are made visible.
"""

from regard.report.figures.arcs import arcs
from regard.report.figures.bias import bias_map
from regard.report.figures.buckets import bucket_map
from regard.report.figures.canvas import colormap, save
from regard.report.figures.graph import graph
from regard.report.figures.heatmap import heatmap
from regard.report.figures.picture import picture_maps
from regard.report.figures.strips import token_strip, token_strips, trace_strips

__all__ = [
    "arcs",
    "bias_map",
    "bucket_map",
    "colormap",
    "graph",
    "heatmap",
    "picture_maps",
    "save",
    "token_strip",
    "token_strips",
    "trace_strips",
]
