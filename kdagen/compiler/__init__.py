"""Compiling for a TPU without one, reading the compiler's schedule, and time from that."""
