"""Kernels over packed trees against attention written out, and which of them runs where."""

import functools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forests import flex_on_a_cpu, forests, make_tree
from support.memory import peak_memory
from support.models import build_model
from torch.nn.attention.flex_attention import flex_attention

from mt_grpo.forward import attention as kernels
from mt_grpo.forward import token_logps
from mt_grpo.forward.attention import BLOCK, KERNELS, PLAIN, Chunk, Score, TreeLayout
from mt_grpo.forward.packing import pack

CPU = torch.device("cpu")
FORKED = pack([make_tree([([1, 2], [3]), ([1, 4], [5, 6])])])
scores = st.sampled_from(["plain", "cap", "bias", "sinks", "all"])


def make_qkv(size, heads=4, groups=2, dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(size)
    shapes = ((1, heads, size, dim), (1, groups, size, dim), (1, groups, size, dim))
    return [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def plain_qkv(heads=4, groups=1, dim=16, packed=FORKED):
    """As FlexAttention takes them on a CPU, where it has no backward."""
    return [tensor.detach().float() for tensor in make_qkv(len(packed.input_ids), heads, groups, dim)]


def make_score(kind, heads=4, depth=400, dtype=torch.float64):
    values = torch.linspace(-2, 2, heads * depth, dtype=dtype).view(heads, depth)
    sinks = values[:, 0].clone().requires_grad_()
    parts = {"cap": 0.7, "bias": values, "sinks": sinks}
    return PLAIN if kind == "plain" else Score(**(parts if kind == "all" else {kind: parts[kind]}))


def attend(kernel, packed, tensors, window, score=PLAIN):
    """What a kernel gives, and the gradients of all that learns."""
    output = KERNELS[kernel](TreeLayout(packed, kernel), *tensors, 0.3, window, score)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    learns = [each for each in (*tensors, score.sinks) if each is not None and each.requires_grad]
    return output.detach(), *torch.autograd.grad((output * weights).sum(), learns)


def test_scores_are_those_of_attention_written_out():
    query, key, value = (tensor.detach() for tensor in make_qkv(len(FORKED.input_ids)))
    score, depth = make_score("all"), FORKED.position_ids
    outputs = [
        KERNELS[kernel](TreeLayout(FORKED, kernel), query, key, value, 0.3, None, score)
        for kernel in ("segment", "dense")
    ]
    for head in range(4):
        for q in range(len(depth)):
            seen = [k for k in range(q + 1) if q <= FORKED.subtree_end[k]]
            raw = [0.3 * query[0, head, q] @ key[0, head // 2, k] for k in seen]
            biased = [0.7 * torch.tanh(x / 0.7) + score.bias[head, depth[k]] for x, k in zip(raw, seen, strict=True)]
            weights = torch.stack([*biased, score.sinks[head]]).softmax(dim=0)[:-1].detach()
            expected = sum(weight * value[0, head // 2, k] for weight, k in zip(weights, seen, strict=True))
            for output in outputs:
                torch.testing.assert_close(output[0, head, q].detach(), expected)


@settings(max_examples=50, deadline=None)
@given(
    forests,
    st.sampled_from([None, 1, 2, 3, 7, Chunk(1), Chunk(2), Chunk(5)]),
    st.sampled_from([1, 2, 4]),
    scores,
    st.sampled_from([2**24, 64, 1]),
)
def test_segments_attend_as_the_whole_mask_does(forest, window, groups, kind, elements):
    packed, score = pack(list(map(make_tree, forest))), make_score(kind)
    tensors = make_qkv(len(packed.input_ids), groups=groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "MASK_ELEMENTS", elements)  # long chains attend in pieces, here short ones too
        patch.setattr(kernels, "FEWEST_QUERIES", 1)
        found = attend("segment", packed, tensors, window, score)
    for ours, oracle in zip(found, attend("dense", packed, tensors, window, score), strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kind", "tokens", "branches"), [("plain", 65_536, 4), ("all", 12_288, 2)])
def test_memory_does_not_grow_with_the_square_of_a_row(kind, tokens, branches):
    packed = pack([make_tree([([1, branch] + [3] * (tokens // branches), [4])]) for branch in range(branches)])
    tensors = make_qkv(len(packed.input_ids), heads=1, groups=1, dtype=torch.float32)
    score = make_score(kind, heads=1, depth=tokens, dtype=torch.float32)
    assert peak_memory(lambda: attend("segment", packed, tensors, None, score)) < 1e9  # masks or scores take more


@pytest.mark.parametrize("window", [None, 8, Chunk(8)])
def test_the_mask_of_a_short_row_is_small(window):
    packed = pack([make_tree([([1, 2] * 10, [3]), ([1, 2] * 5, [4])])])
    assert peak_memory(lambda: attend("segment", packed, make_qkv(len(packed.input_ids)), window)) < 1e8


@settings(max_examples=50, deadline=None)
@given(forests, st.sampled_from([None, 1, 3, Chunk(1), Chunk(3)]))
def test_the_mask_shows_a_token_its_ancestors_in_the_window(forest, window):
    packed = pack(list(map(make_tree, forest)))
    size = len(packed.input_ids)
    expected = torch.zeros(size, size, dtype=torch.bool)
    for token in range(size):
        ancestor = token
        while ancestor >= 0:
            q, k = packed.position_ids[token], packed.position_ids[ancestor]
            near = q // window.size == k // window.size if isinstance(window, Chunk) else q - k < (window or size)
            expected[token, ancestor] = bool(near)
            ancestor = packed.parent[ancestor]
    assert torch.equal(TreeLayout(packed).dense_mask(CPU, window), expected)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([None, 40, 200, Chunk(40), Chunk(200)]),
    st.lists(st.integers(1, 300), min_size=1, max_size=6),
    scores,
)
def test_flex_attends_as_the_whole_mask_does(seed, window, lengths, kind):
    trees, context = [], []
    generator = torch.Generator().manual_seed(seed)
    for length in lengths:  # forks at any depth, so that blocks are full, partial and empty
        cut = int(torch.randint(len(context) + 1, (), generator=generator))
        context = context[:cut] + torch.randint(50, (length,), generator=generator).tolist()
        trees.append(make_tree([(context, [51])]))
    packed, score = pack(trees), make_score(kind, depth=2000, dtype=torch.float32)
    tensors = plain_qkv(groups=2, dim=8, packed=packed)
    with flex_on_a_cpu():
        ours = KERNELS["flex"](TreeLayout(packed, "flex"), *tensors, 0.3, window, score)
    oracle = KERNELS["dense"](TreeLayout(packed, "dense"), *tensors, 0.3, window, score)
    torch.testing.assert_close(ours, oracle, rtol=1e-4, atol=1e-5)
    layout = TreeLayout(packed)
    mask, dense = layout.block_mask(CPU, window), layout.dense_mask(CPU, window)
    full = blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    partial = blocks(mask.kv_num_blocks, mask.kv_indices)
    assert not full & partial
    for row, queries in enumerate(dense.split(BLOCK, dim=0)):
        for column, block in enumerate(queries.split(BLOCK, dim=1)):
            assert block.all() or (row, column) not in full
            assert not block.any() or (row, column) in full | partial


def blocks(counts, indices):
    """The rows and columns of blocks that a mask lists."""
    rows = range(counts.shape[-1])
    return {(row, column) for row in rows for column in indices[0, 0, row, : counts[0, 0, row]].tolist()}


def test_flex_sinks_learn_as_written_out():
    score = make_score("sinks", dtype=torch.float32)
    with flex_on_a_cpu():
        found = attend("flex", FORKED, plain_qkv(), None, score)
    torch.testing.assert_close(found, attend("dense", FORKED, plain_qkv(), None, score))


def test_flex_skips_the_blocks_of_other_branches():
    prompt, branches = list(range(BLOCK)), 4
    trees = [make_tree([([*prompt, 1000 + branch], [7] * (BLOCK - 1))]) for branch in range(branches)]
    mask = TreeLayout(pack(trees)).block_mask(CPU, None)
    assert mask.full_kv_num_blocks.flatten().tolist() == [0, 1, 1, 1, 1]  # the prompt
    assert blocks(mask.kv_num_blocks, mask.kv_indices) == {(row, row) for row in range(5)}  # its own branch


@pytest.fixture
def compiling(monkeypatch):
    """FlexAttention as it is compiled for a GPU, but for the kernels, which have no backward on a CPU."""
    torch._dynamo.reset()
    kernels._compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(kernels, "_compiled_flex", lambda device: kernels._compiled())
    with torch._dynamo.config.patch(recompile_limit=2):
        yield lambda heads: KERNELS["flex"](TreeLayout(FORKED), *plain_qkv(heads), 0.3, None)
    kernels._compiled.cache_clear()
    torch._dynamo.reset()


def test_more_head_layouts_than_dynamo_allows_are_compiled(compiling):
    """And other compiled functions keep their limit."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # FlexAttention warns where it runs uncompiled
        for heads in range(2, 7):
            oracle = KERNELS["dense"](TreeLayout(FORKED), *plain_qkv(heads), 0.3, None)
            torch.testing.assert_close(compiling(heads), oracle)
    assert torch._dynamo.config.recompile_limit == 2
    counted = torch._dynamo.utils.counters["stats"]
    other, before = torch.compile(flex_attention, dynamic=True), counted["unique_graphs"]
    other(*plain_qkv(2), block_mask=TreeLayout(FORKED).block_mask(CPU, None), enable_gqa=True)
    assert counted["unique_graphs"] == before + 1


def test_past_its_own_limit_flex_fails_and_names_the_mend(compiling, monkeypatch):
    monkeypatch.setattr(kernels, "RECOMPILE_LIMIT", 2)
    compiling(2), compiling(3)
    with pytest.raises(RuntimeError, match="compiled for 2 layouts.*with the whole mask in memory.*`segment`"):
        compiling(4)


def test_flex_on_a_cpu_is_refused_with_the_mend(tokenizer):
    with pytest.raises(ValueError, match="for GPUs only.*choose `auto` or `segment`"):
        token_logps(build_model(tokenizer), [make_tree([([1, 2], [3])])], attention="flex")


def test_auto_takes_segments_on_a_cpu_and_flex_on_a_gpu():
    layout, gpu = TreeLayout(FORKED), torch.device("cuda")
    found = layout.attention(CPU), layout.attention(gpu), layout.attention(gpu, dropout=0.1)
    assert found == ("segment", "flex", "segment")
