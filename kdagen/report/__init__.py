"""What a person reads: progress, tables, and where the numbers in them come from."""
