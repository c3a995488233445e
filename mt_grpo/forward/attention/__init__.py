"""
Attention over packed trees: three implementations of one rule, `token q sees token k iff k <= q <= subtree_end[k]`.

`segment` runs on any device, `flex` on a GPU. `dense` has the whole mask: for small rows, and the oracle of the tests.
"""
