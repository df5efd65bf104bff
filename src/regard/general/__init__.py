"""The general mechanisms: scores, alignments, dimensionality, masks, and the attention they make up."""
