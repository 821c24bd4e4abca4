"""The kernels. Each obeys the op contract: a row's bits depend on that row alone.

Tile sizes and the order of every sum are fixed by the weights' shape and the dtype, never by the number of rows: a row
that is alone in its tile goes through the same instructions as one among others, and what pads a tile adds exact zeros.
Nor may the compiler see the batch: an argument that varies with it is not specialised (Triton compiles anew for 1 and
for multiples of 16, and might then order or fuse otherwise); every other one is a constant of the model.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def linear(
    x, weight, bias, out, num_rows, num_outputs, num_inputs, leaf_inputs, x_stride,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """out[leaf, m, n] = sum of x[m, k] * weight[n, k] over the leaf's k, in ascending tiles of INPUTS.

    Grid: tiles of rows, tiles of outputs, leaves. ``x`` [num_rows, num_inputs] with row stride ``x_stride``, ``weight``
    [num_outputs, num_inputs], ``bias`` float32 [num_outputs], ``out`` [leaves, num_rows, num_outputs].
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    leaf = tl.program_id(2).to(tl.int64)
    inner = tl.arange(0, INPUTS)
    has_row, has_output = row < num_rows, output < num_outputs
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, leaf_inputs, INPUTS):
        is_inside = start + inner < leaf_inputs
        column = leaf * leaf_inputs + start + inner
        a = tl.load(
            x + row[:, None] * x_stride + column[None, :], mask=has_row[:, None] & is_inside[None, :], other=0.0
        )
        b = tl.load(
            weight + output[None, :] * num_inputs + column[:, None],
            mask=has_output[None, :] & is_inside[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot(a, b, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + output, mask=has_output, other=0.0)[None, :]
    place = (leaf * num_rows + row[:, None]) * num_outputs + output[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])


@triton.jit
def rms_norm(x, residual, weight, normed, total, width, eps, ADD: tl.constexpr, WIDTH: tl.constexpr):
    """A program a row [width]: ``total = residual + x`` where ADD, and its norm (Zhang and Sennrich 2019)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    is_inside = column < width
    value = tl.load(x + row * width + column, mask=is_inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * width + column, mask=is_inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * width + column, rounded, mask=is_inside)
        value = rounded.to(tl.float32)
    mean = tl.sum(value * value, 0) / width
    scale = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(
        normed + row * width + column, (value / tl.sqrt(mean + eps) * scale).to(normed.dtype.element_ty), mask=is_inside
    )


@triton.jit
def silu_mul(gate_up, out, width, ELEMENTS: tl.constexpr):
    """out[m, f] = silu(gate_up[m, f]) * gate_up[m, width + f]; grid: rows, tiles of ELEMENTS."""
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_inside = element < width
    place = gate_up + row * 2 * width + element
    gate = tl.load(place, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + element, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _rotate(
    source, target, angles,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
):  # fmt: skip
    """Rotate a row's heads, [HEADS, 2 * HALF], by the angles whose cosines and then sines lie at ``angles``."""
    head, element = tl.arange(0, HEADS_PADDED)[:, None], tl.arange(0, HALF_PADDED)
    is_angle = element < HALF
    cos = tl.load(angles + element, mask=is_angle, other=0.0)[None, :]
    sin = tl.load(angles + HALF + element, mask=is_angle, other=0.0)[None, :]
    place, is_inside = head * 2 * HALF + element[None, :], (head < HEADS) & is_angle[None, :]
    a = tl.load(source + place, mask=is_inside, other=0.0).to(tl.float32)
    b = tl.load(source + HALF + place, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(target + place, (a * cos - b * sin).to(target.dtype.element_ty), mask=is_inside)
    tl.store(target + HALF + place, (b * cos + a * sin).to(target.dtype.element_ty), mask=is_inside)


@triton.jit
def rope_and_store(
    q, k, v, rope, positions, slots, rotated, k_cache, v_cache, q_stride, k_stride, v_stride,
    NUM_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, KV_HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
):  # fmt: skip
    """Queries are rotated, keys rotated and stored, values stored (Su et al. 2021, halves): three programs a row.

    The caches are [slots, NUM_KV_HEADS, 2 * HALF].
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row) * NUM_KV_HEADS * 2 * HALF
    angles = rope + tl.load(positions + row) * 2 * HALF
    if part == 0:
        target = rotated + row * NUM_HEADS * 2 * HALF
        _rotate(q + row * q_stride, target, angles, NUM_HEADS, HEADS_PADDED, HALF, HALF_PADDED)
    elif part == 1:
        _rotate(k + row * k_stride, k_cache + slot, angles, NUM_KV_HEADS, KV_HEADS_PADDED, HALF, HALF_PADDED)
    else:
        element = tl.arange(0, 2 * KV_HEADS_PADDED * HALF_PADDED)
        is_inside = element < 2 * NUM_KV_HEADS * HALF
        tl.store(v_cache + slot + element, tl.load(v + row * v_stride + element, mask=is_inside), mask=is_inside)


@triton.jit(do_not_specialize=["table_width", "num_splits"])
def attention(
    q, k_cache, v_cache, tile_sequence, tile_row, query_start, context_lens, block_tables,
    maxima, sums, products, scale, table_width, num_splits,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Part of the attention of a tile of query rows over one split of their keys (FlashAttention-2, Dao 2023).

    Grid: tiles of rows, KV heads, splits. A tile holds ROWS / GROUP_PADDED tokens of one sequence, GROUP heads each.
    A split is SPLIT keys at absolute positions, walked in tiles of KEYS, whatever the batch holds: so a row's sums are
    the same alone, in a chunk and in a decode. Leaves for ``combine``: maxima and sums [rows, heads, splits], products
    [rows, heads, splits, HEAD_DIM], float32.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tile_sequence + tile)
    end_row = tl.load(query_start + sequence + 1)
    context = tl.load(context_lens + sequence)
    lane = tl.arange(0, ROWS)
    row = tl.load(tile_row + tile) + lane // GROUP_PADDED
    in_group = lane % GROUP_PADDED
    is_row = (row < end_row) & (in_group < GROUP)
    position = context - end_row + row
    head = kv_head * GROUP + in_group
    dim = tl.arange(0, DIM_PADDED)
    is_dim = dim < HEAD_DIM
    place = (row * (NUM_KV_HEADS * GROUP) + head).to(tl.int64)
    query = tl.load(q + place[:, None] * HEAD_DIM + dim[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)

    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    product = tl.zeros((ROWS, DIM_PADDED), tl.float32)
    last = tl.max(tl.where(is_row, position, -1), 0)
    for start in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, last + 1), KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = key < context
        block = tl.load(block_tables + sequence * table_width + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = ((block * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
        # What lies behind the context may be anything, NaN too: it is not loaded.
        keys = tl.load(k_cache + slot[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
        values = tl.load(v_cache + slot[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
        scores = tl.dot(query, keys, input_precision="ieee") * scale
        is_seen = is_row[:, None] & (key[None, :] <= position[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        shrink = tl.exp(maximum - base)
        weights = tl.where(is_seen, tl.exp(scores - base[:, None]), 0.0)
        total = total * shrink + tl.sum(weights, 1)
        product = product * shrink[:, None]
        product = tl.dot(weights.to(values.dtype), values, product, input_precision="ieee")
        maximum = new_maximum
    part = place * num_splits + split
    tl.store(maxima + part, maximum, mask=is_row)
    tl.store(sums + part, total, mask=is_row)
    tl.store(products + part[:, None] * HEAD_DIM + dim[None, :], product, mask=is_row[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def combine(
    maxima, sums, products, out, num_splits,
    NUM_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """A program a row: its splits in ascending order. A split without a key adds exact zeros."""
    head, dim = tl.arange(0, HEADS_PADDED), tl.arange(0, DIM_PADDED)[None, :]
    is_head, is_inside = head < NUM_HEADS, (head[:, None] < NUM_HEADS) & (dim < HEAD_DIM)
    place = tl.program_id(0).to(tl.int64) * NUM_HEADS + head
    largest = tl.full((HEADS_PADDED,), float("-inf"), tl.float32)
    for split in range(num_splits):
        part = tl.load(maxima + place * num_splits + split, mask=is_head, other=0.0)
        largest = tl.maximum(largest, part)
    total = tl.zeros((HEADS_PADDED,), tl.float32)
    result = tl.zeros((HEADS_PADDED, DIM_PADDED), tl.float32)
    for split in range(num_splits):
        part = place * num_splits + split
        weight = tl.exp(tl.load(maxima + part, mask=is_head, other=0.0) - largest)
        total += tl.load(sums + part, mask=is_head, other=1.0) * weight
        result += tl.load(products + part[:, None] * HEAD_DIM + dim, mask=is_inside, other=0.0) * weight[:, None]
    result = result / total[:, None]
    tl.store(out + place[:, None] * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def choose(logits, token_ids, logprobs, vocab, GREEDY: tl.constexpr, CHUNK: tl.constexpr):
    """A program a row [vocab]: its maximum's lowest index where GREEDY, and the logprob of ``token_ids[row]``.

    The sum of exponentials runs over chunks of the vocabulary in ascending order.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, CHUNK)
    largest, best = float("-inf"), tl.full((), 0, tl.int64)
    for start in range(0, vocab, CHUNK):
        chunk = tl.load(logits + row * vocab + start + column, mask=start + column < vocab, other=float("-inf"))
        highest = tl.max(chunk, 0)
        if highest > largest:
            best = (start + tl.min(tl.where(chunk == highest, column, CHUNK), 0)).to(tl.int64)
            largest = highest
    total = 0.0
    for start in range(0, vocab, CHUNK):
        chunk = tl.load(logits + row * vocab + start + column, mask=start + column < vocab, other=float("-inf"))
        total += tl.sum(tl.exp(chunk - largest), 0)
    if GREEDY:
        tl.store(token_ids + row, best)
        chosen = largest
    else:
        chosen = tl.load(logits + row * vocab + tl.load(token_ids + row))
    tl.store(logprobs + row, (chosen - largest) - tl.log(total))
