"""
What a recipe can say. `table`: the options; `values`: those that are names or mappings; `environments`: the types of
`env`; `rules`: what several may say together; `names`: what other trainers call them. Imports no torch.
"""
