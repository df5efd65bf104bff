"""Figures of attention: the alignment heat map, and token strips, one or several.

Every function returns a `matplotlib.figure.Figure` that belongs to nobody: no backend is chosen, nothing is
registered with pyplot, nothing needs closing. Text is drawn as it is written: dollars, backslashes and angle
brackets mean themselves, and blanks and control characters are made visible.
"""

from regard.report.figures.canvas import colormap, save
from regard.report.figures.heatmap import heatmap
from regard.report.figures.strips import token_strip, token_strips, trace_strips

__all__ = ["colormap", "heatmap", "save", "token_strip", "token_strips", "trace_strips"]
