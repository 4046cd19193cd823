"""The gradient of a problem: which kernel computes it, in which order, and its source."""
