"""Generates, tunes and dispatches Pallas kernels for Kimi Delta Attention on TPU."""
