"""Denoise: pictures without the noise that was added to them; Fashion-MNIST, or drawn shapes."""

from regard.recipes.denoise.parts import Restored, Textures
from regard.recipes.denoise.recipe import RECIPE, Denoise

__all__ = ["RECIPE", "Denoise", "Restored", "Textures"]
