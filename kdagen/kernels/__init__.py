"""What generated kernels import: plain JAX and Pallas helpers, none of which knows of a search."""
