"""Segment: the class of every pixel; CamVid, membranes, or drawn shapes on a textured ground."""

from regard.recipes.segment.recipe import RECIPE, Segment
from regard.recipes.segment.unet import UNet

__all__ = ["RECIPE", "Segment", "UNet"]
