"""Every token computed once: packed token trees through any decoder of transformers."""
