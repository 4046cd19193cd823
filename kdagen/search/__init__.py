"""The search: which candidate to try next, which to believe, and the run over many shapes."""
