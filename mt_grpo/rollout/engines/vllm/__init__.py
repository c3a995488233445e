"""The client of dedicated vLLM servers."""
