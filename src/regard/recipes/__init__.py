"""Recipes: one task a file, its data, and what is trained on it."""
