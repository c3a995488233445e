"""
What a recipe can say. `table`: the options; `values`: those that are names or mappings, read; `rules`: what several
may say together; `names`: what other trainers call them. Without torch: bad options are refused before its import.
"""
