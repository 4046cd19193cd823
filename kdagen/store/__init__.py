"""The table of results: its schema, its rows, and files of it that ship."""
