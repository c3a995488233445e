"""Servers of a run: their addresses, which of them are up, what each conversation gets, starting and ending them."""
