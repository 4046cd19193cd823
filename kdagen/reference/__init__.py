"""Kimi Delta Attention without kernels: the token recurrence, its float64 oracle and the chunk form."""
