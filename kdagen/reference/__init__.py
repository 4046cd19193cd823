"""Kimi Delta Attention without kernels: token recurrence, float64 oracle and chunk form."""
