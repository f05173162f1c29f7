"""Attention beyond the op table: layouts, batches and chunks agree; ids, lengths and workspace."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_reference as reference
import ridgeline
from attention_reference import visible
from numerics import assert_close, competitor_bound
from ridgeline import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS, KV_HEADS, DIM = 4, 2, 64
LONG = 700  # keys of two splits at 64 columns, with a tail


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).cpu()


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def normal(device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def ints(device: str, values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Paged:
    """Sequences of given lengths scattered over a cache, the rest of which is `rest`."""

    def __init__(
        self,
        device: str,
        lengths: list[int],
        block: int = 16,
        rest: float = 0.0,
        dim: int = DIM,
        kv_heads: int = KV_HEADS,
    ) -> None:
        self.lengths = lengths
        keys, values = (
            [normal("cpu", n, kv_heads, dim, seed=s + b) for b, n in enumerate(lengths)]
            for s in (100, 200)
        )
        counts = [-(-n // block) for n in lengths]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)) + 1
        shape = (len(order) + 3, block, kv_heads, dim)
        k_cache, v_cache = (torch.full(shape, rest, dtype=torch.bfloat16) for _ in range(2))
        tables = torch.zeros(len(lengths), max([*counts, 1]), dtype=torch.int32)
        used = 0
        for b, count in enumerate(counts):
            mine = order[used : used + count]
            used += count
            tables[b, :count] = mine.int()
            for cache, rows in ((k_cache, keys[b]), (v_cache, values[b])):
                flat = torch.full((count * block, kv_heads, dim), rest, dtype=torch.bfloat16)
                flat[: lengths[b]] = rows
                cache[mine] = flat.view(count, block, kv_heads, dim)
        # One copy each: with a device that others share, every one may wait its turn.
        self.k, self.v = (torch.cat(rows).to(device).split(lengths) for rows in (keys, values))
        self.k_cache, self.v_cache = k_cache.to(device), v_cache.to(device)
        self.tables = tables.to(device)
        self.seq_lens = ints(device, lengths)

    def run(self, q: Tensor, cu_q: list[int] | None = None, **options: Any) -> Any:
        if cu_q is not None:
            options["max_q"] = max(b - a for a, b in zip(cu_q, cu_q[1:]))
        offsets = None if cu_q is None else ints(str(q.device), cu_q)
        return ops.paged_attention(
            q, self.k_cache, self.v_cache, self.tables, self.seq_lens, offsets, return_lse=True,
            **options,
        )  # fmt: skip

    def check(
        self,
        q: Tensor,
        cu_q: list[int],
        result: tuple[Tensor, Tensor],
        beside: int = 0,
        **options: Any,
    ) -> None:
        """Each sequence of a call's result: near the reference, and with the bits it has alone, or
        beside another of so many queries."""
        out, lse = result
        for b, (begin, end) in enumerate(zip(cu_q, cu_q[1:])):
            rows, own = q[begin:end], (out[begin:end], lse[:, begin:end])
            if begin == end:
                continue
            if not self.lengths[b]:
                assert not own[0].any()
                continue
            exact = reference.one_sequence(
                rows.double(), self.k[b].double(), self.v[b].double(), **options
            )
            rounded, _ = reference.one_sequence(rows, self.k[b], self.v[b], **options)
            bound = competitor_bound(rounded, exact[0], torch.bfloat16)
            assert_close(own[0], exact[0], bound, f"out of sequence {b}")
            assert_close(own[1], exact[1], 1e-4, f"lse of sequence {b}")
            count, which = end - begin, [b, b] if beside else [b]
            alone = ops.paged_attention(
                torch.cat([rows, rows.new_zeros(beside, *rows.shape[1:])]), self.k_cache,
                self.v_cache, self.tables[which], self.seq_lens[which],
                ints(str(q.device), [0, count, count + beside][: len(which) + 1]), return_lse=True,
                max_q=max(count, beside), **options,
            )  # fmt: skip
            assert same(own, (alone[0][:count], alone[1][:, :count])), f"sequence {b}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [16, 48, 256])  # 48 does not divide the tile of 64 keys
@pytest.mark.parametrize("q_len", [1, 7, 130])  # decode, verify, prefill of more than one tile
def test_paged_equals_contiguous(device: str, block: int, q_len: int) -> None:
    paged = Paged(device, [LONG], block)
    q = normal(device, q_len, HEADS, DIM)
    options = {"window": 300, "softcap": 20.0}
    out, lse = paged.run(q, [0, q_len], **options)
    dense = ops.attention(q[None], paged.k[0][None], paged.v[0][None], return_lse=True, **options)
    assert same((out, lse), (dense[0][0], dense[1][0]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("invariant", [False, True])
def test_batched_equals_alone(device: str, invariant: bool) -> None:
    """A sequence's bits do not depend on what else is in the batch, nor on the longest."""
    lengths, q_lens = [LONG, 65, 1, 200, 0, 64], [1, 65, 1, 20, 0, 5]
    paged = Paged(device, lengths)
    cu_q = torch.tensor([0, *q_lens]).cumsum(0).tolist()
    q = normal(device, cu_q[-1], HEADS, DIM)
    out, lse = paged.run(q, cu_q, batch_invariant=invariant)
    for b, (begin, end) in enumerate(zip(cu_q, cu_q[1:])):
        if begin == end:
            continue
        alone = ops.paged_attention(
            q[begin:end], paged.k_cache, paged.v_cache, paged.tables[b : b + 1],
            paged.seq_lens[b : b + 1], ints(device, [0, end - begin]), return_lse=True,
            max_q=end - begin, batch_invariant=invariant,
        )  # fmt: skip
        assert same((out[begin:end], lse[:, begin:end]), alone), f"sequence {b}"


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [8, 32, 40])  # rows of a KV head: one, whole pairs, an odd number
def test_one_sequence_alone_equals_batched(dim: int, heads: int) -> None:
    """Alone it is a cluster's of blocks for each of 8 KV heads, in a batch any block's. Lengths:
    the edges of a leaf of short sequences, all numbers of them that end parts of other sizes, the
    longest short one, others."""
    lengths = [1, 64, 65, 129, 200, 257, 321, 400, 449, 512, 513, 700, 1024, 4000, 0]
    paged = Paged("cuda", lengths, 64, math.nan, dim, kv_heads=8)
    q = normal("cuda", len(lengths), heads, dim)
    out, lse = paged.run(q)
    assert out.isfinite().all()
    for b in range(len(lengths)):
        one = slice(b, b + 1)
        alone = ops.paged_attention(
            q[one], paged.k_cache, paged.v_cache, paged.tables[one], paged.seq_lens[one],
            return_lse=True,
        )  # fmt: skip
        assert same((out[one], lse[:, one]), alone), f"sequence {b}"


@pytest.mark.parametrize("device", DEVICES)
def test_decode_rows_need_no_offsets(device: str) -> None:
    paged = Paged(device, [5, LONG, 64])
    q = normal(device, 3, HEADS, DIM)
    assert same(paged.run(q), paged.run(q, [0, 1, 2, 3]))


def test_bounds_far_above_the_lengths_change_nothing() -> None:
    q, kv = torch.randn(6, 4, 64), torch.randn(6, 2, 64)
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    tight = ops.attention_varlen(q, kv, kv, offsets, offsets, 4, 4)
    most = 2**31 - 1
    assert torch.equal(tight, ops.attention_varlen(q, kv, kv, offsets, offsets, most, most))


@pytest.mark.parametrize("device", DEVICES)
def test_varlen_equals_each_sequence(device: str) -> None:
    q_lens, k_lens = [3, 0, 100, 1], [40, 9, 100, LONG]
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).tolist() for lens in (q_lens, k_lens))
    q = normal(device, cu_q[-1], HEADS, DIM)
    k, v = (normal(device, cu_k[-1], KV_HEADS, DIM, seed=s) for s in (1, 2))
    out, lse = ops.attention_varlen(
        q, k, v, ints(device, cu_q), ints(device, cu_k), 100, LONG, return_lse=True
    )
    for b in range(len(q_lens)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone = ops.attention(q[rows][None], k[keys][None], v[keys][None], return_lse=True)
        assert same((out[rows], lse[:, rows]), (alone[0][0], alone[1][0])), f"sequence {b}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [1, 16, 100])
@pytest.mark.parametrize("invariant", [False, True])
def test_chunked_agrees_with_whole(device: str, chunk: int, invariant: bool) -> None:
    """Bit for bit on the CPU, in batch-invariant mode and in chunks of many queries; else as the
    weights round."""
    length = 230
    paged = Paged(device, [length])
    q = normal(device, length, HEADS, DIM)
    whole, whole_lse = paged.run(q, [0, length], batch_invariant=invariant)
    for begin in range(0, length, chunk):
        end = min(begin + chunk, length)
        part, lse = ops.paged_attention(
            q[begin:end], paged.k_cache, paged.v_cache, paged.tables, ints(device, [end]),
            ints(device, [0, end - begin]), return_lse=True, max_q=end - begin,
            batch_invariant=invariant,
        )  # fmt: skip
        if device == "cpu" or invariant or (end - begin) * (HEADS // KV_HEADS) > 64:
            assert same((part, lse), (whole[begin:end], whole_lse[:, begin:end]))
        largest = paged.v[0].abs().max().item()
        allowed = 4 * torch.finfo(torch.bfloat16).eps * largest
        assert (part.float() - whole[begin:end].float()).abs().max() <= allowed
        assert (lse - whole_lse[:, begin:end]).abs().max() <= 1e-5 * whole_lse.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128, 256])  # a step of the softmax: 128 keys, at 256 64
@pytest.mark.parametrize("heads", [2, 8, 10])  # rows of a KV head: one, four, five
@pytest.mark.parametrize("options", [{}, {"window": 150, "softcap": 20.0}], ids=["", "window"])
def test_few_queries_have_the_bits_of_a_prompt(dim: int, heads: int, options: dict) -> None:
    """In batch-invariant mode, by whichever kernel each, also beside a chunk of a prompt."""
    ends = [5, 63, 64, 65, 128, 129, 192, 193, 700]  # steps and half steps begin and end
    paged = Paged("cuda", ends[-1:], 64, math.nan, dim)
    q = normal("cuda", ends[-1], heads, dim)
    out, lse = paged.run(q, [0, ends[-1]], batch_invariant=True, **options)
    for q_lens in ([1] * len(ends), [3] * len(ends), [1] * (len(ends) - 1) + [400]):
        rows = torch.cat([torch.arange(end - n, end) for end, n in zip(ends, q_lens)]).cuda()
        cu_q = torch.tensor([0, *q_lens]).cumsum(0)
        few = ops.paged_attention(
            q[rows], paged.k_cache, paged.v_cache, paged.tables.repeat(len(ends), 1),
            ints("cuda", ends), cu_q.int().cuda(), return_lse=True, max_q=max(q_lens),
            batch_invariant=True, **options,
        )  # fmt: skip
        assert same(few, (out[rows], lse[:, rows]))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("longest", [1500, 8200])  # 64 keys a tile, 112
@pytest.mark.parametrize(
    "options", [{}, {"window": 300}, {"causal": False, "softcap": 20.0}], ids=["", "window", "full"]
)
def test_heads_of_64_before_many_keys(block: int, longest: int, options: dict) -> None:
    """Tiles of 256 and of 192 queries: some warpgroups have no rows or see fewer keys."""
    lengths, q_lens = [longest, 1100, 1025], [1500, 833, 577]
    paged = Paged("cuda", lengths, block, math.nan)
    cu_q = torch.tensor([0, *q_lens]).cumsum(0).tolist()
    q = normal("cuda", cu_q[-1], HEADS, DIM)
    out, lse = paged.run(q, cu_q, **options)
    paged.check(q, cu_q, (out, lse), **options)
    cu_k = ints("cuda", [0, *torch.tensor(lengths).cumsum(0).tolist()])
    contiguous = ops.attention_varlen(
        q, torch.cat(paged.k), torch.cat(paged.v), ints("cuda", cu_q), cu_k, 1500, longest,
        return_lse=True, **options,
    )  # fmt: skip
    assert same((out, lse), contiguous)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [72, 128])  # of 128 columns, some of them padded
@pytest.mark.parametrize(
    "causal, k_lens", [(False, [2300, 40, 81, 1]), (True, [4100, 40, 600, 577])]
)
def test_tiles_of_192_queries_of_head_size_128(causal: bool, k_lens: list[int], dim: int) -> None:
    """Of 80 keys; with rows of no sequence and of no warpgroup, and keys that some do not see."""
    q_lens = [385, 0, 100, 577]
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).tolist() for lens in (q_lens, k_lens))
    q = normal("cuda", cu_q[-1], HEADS, dim)
    k, v = (normal("cuda", cu_k[-1], KV_HEADS, dim, seed=s) for s in (1, 2))
    out, lse = ops.attention_varlen(
        q, k, v, ints("cuda", cu_q), ints("cuda", cu_k), 577, max(k_lens), causal=causal,
        return_lse=True,
    )  # fmt: skip
    for b in (0, 2, 3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        exact = reference.one_sequence(
            q[rows].double(), k[keys].double(), v[keys].double(), causal=causal
        )
        rounded, _ = reference.one_sequence(q[rows], k[keys], v[keys], causal=causal)
        bound = competitor_bound(rounded, exact[0], torch.bfloat16)
        assert_close(out[rows], exact[0], bound, f"out of sequence {b}")
        assert_close(lse[:, rows], exact[1], 1e-4, f"lse of sequence {b}")


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 64])
def test_long_prompts_of_head_size_128(block: int) -> None:
    """Over block tables, too, in tiles of 80 keys, so with the bits of contiguous keys."""
    lengths, q_lens = [6100, 90], [6000, 50]
    paged = Paged("cuda", lengths, block, math.nan, 128)
    cu_q, cu_k = ([0, *torch.tensor(n).cumsum(0).tolist()] for n in (q_lens, lengths))
    q = normal("cuda", cu_q[-1], HEADS, 128)
    contiguous = ops.attention_varlen(
        q, torch.cat(paged.k), torch.cat(paged.v), ints("cuda", cu_q), ints("cuda", cu_k),
        6000, 6100, return_lse=True,
    )  # fmt: skip
    assert same(paged.run(q, cu_q), contiguous)


@pytest.mark.parametrize("device", DEVICES)
def test_merged_halves_equal_the_whole(device: str) -> None:
    q = normal(device, 1, 40, HEADS, DIM, dtype=torch.float32)
    k, v = (normal(device, 1, 300, KV_HEADS, DIM, seed=s, dtype=torch.float32) for s in (1, 2))
    whole, whole_lse = ops.attention(q, k, v, causal=False, return_lse=True)
    parts: list[Tensor] = []
    for keys in (slice(0, 130), slice(130, None)):
        part = ops.attention(q, k[:, keys], v[:, keys], causal=False, return_lse=True)
        parts += [t.contiguous() for t in part]
    out, lse = ops.merge_attention(*parts)
    assert (out - whole).abs().max() <= 1e-6 * v.abs().max()
    assert (lse - whole_lse).abs().max() <= 1e-6 * whole_lse.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("side", [0, 2], ids=["out_a", "out_b"])
def test_merging_refuses_what_lies_off_16_bytes(side: int) -> None:
    """A kernel that reads it so would end the process's use of the GPU."""
    out, lse = normal("cuda", 5, 4, 64), torch.zeros(4, 5, device="cuda")
    parts = [out, lse, out, lse]
    parts[side] = torch.empty(out.numel() + 1, dtype=out.dtype, device="cuda")[1:].view_as(out)
    with pytest.raises(ValueError, match="expected data aligned to 16 bytes"):
        ops.merge_attention(*parts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rest", [float("nan"), float("inf")])
def test_what_no_sequence_owns_has_no_effect(device: str, rest: float) -> None:
    """Unused slots, free blocks and block 0 (under a padded table) may hold anything."""
    lengths, q_lens = [LONG, 17, 0, 130], [1, 3, 0, 130]
    cu_q = torch.tensor([0, *q_lens]).cumsum(0).tolist()
    clean, dirty = (Paged(device, lengths, rest=value) for value in (0.0, rest))
    q = normal(device, cu_q[-1], HEADS, DIM)
    for options in ({}, {"window": 40}, {"k_start": ints(device, [500, 16, 0, 3])}):
        for paged in (clean, dirty):
            if options and paged is dirty:  # what lies before every visible key is no one's either
                paged.k_cache[paged.tables[0, :20].long()] = rest
                paged.v_cache[paged.tables[0, :20].long()] = rest
        assert same(clean.run(q, cu_q, **options), dirty.run(q, cu_q, **options)), str(options)
        if options:
            dirty = Paged(device, lengths, rest=rest)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cu_q", [[3, 8], [129, 130], [0, 1, 130], [0, 0, 130], [0, 130, 260]])
def test_fewer_queries_than_rows_have_room_for(device: str, cu_q: list[int]) -> None:
    """With 130 rows for each sequence, prefill takes those of few queries too, and rows of none."""
    paged = Paged(device, [LONG, 300][: len(cu_q) - 1], rest=math.nan)
    rows = 130 * (len(cu_q) - 1)
    q = normal(device, rows, HEADS, DIM)
    out, lse = ops.paged_attention(
        q, paged.k_cache, paged.v_cache, paged.tables, paged.seq_lens, ints(device, cu_q),
        max_q=130, return_lse=True,
    )  # fmt: skip
    for b, (begin, end) in enumerate(zip(cu_q, cu_q[1:])):
        if begin < end:
            want = ops.attention(q[None, begin:end], paged.k[b][None], paged.v[b][None])[0]
            assert (out[begin:end] - want).abs().max() < 0.02
    owned = torch.zeros(rows, dtype=torch.bool, device=device)
    owned[cu_q[0] : cu_q[-1]] = True
    assert bool((out[~owned] == 0).all()) and bool((lse[:, ~owned] == -math.inf).all())
    assert bool(lse[:, owned].isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
def test_a_window_hides_exactly_the_older_keys(device: str) -> None:
    """Against the mask written out, one visible key at a time: v is one-hot in the position."""
    length, window = 64, 5
    q = torch.zeros(1, length, 1, DIM, dtype=torch.bfloat16, device=device)
    eye = torch.eye(length, DIM, dtype=torch.bfloat16, device=device)[None, :, None]
    out = ops.attention(q, torch.zeros_like(eye), eye, window=window)
    assert isinstance(out, Tensor)
    assert torch.equal(out[0, :, 0].cpu() != 0, visible(length, length, True, window, 0))


@pytest.mark.parametrize("device", DEVICES)
def test_contents_out_of_range_are_refused(device: str) -> None:
    """Always on the CPU, on a GPU under debug_checks()."""
    paged = Paged(device, [40, 20])
    q = normal(device, 2, HEADS, DIM)

    def call(**changed: Tensor) -> None:
        inputs = {"block_tables": paged.tables, "seq_lens": paged.seq_lens} | changed
        ops.paged_attention(q, paged.k_cache, paged.v_cache, **inputs)

    blocks = paged.k_cache.shape[0]
    for bad in (blocks, -1):
        table = paged.tables.clone()
        table[0, 1] = bad
        with ridgeline.debug_checks(), pytest.raises(ValueError, match=f"block_tables.*got {bad}"):
            call(block_tables=table)
    for bad in (49, -1):
        with ridgeline.debug_checks(), pytest.raises(ValueError, match=f"seq_lens.*got {bad}"):
            call(seq_lens=ints(device, [bad, 20]))
    with ridgeline.debug_checks(), pytest.raises(ValueError, match=r"cu_q.*got 3"):
        call(cu_q=ints(device, [0, 1, 3]))


def test_offsets_and_bounds_are_refused_on_the_cpu() -> None:
    paged = Paged("cpu", [40, 20])
    q = normal("cpu", 4, HEADS, DIM)
    tables, caches = (paged.tables, paged.seq_lens), (paged.k_cache, paged.v_cache)
    with pytest.raises(ValueError, match=r"cu_q: expected ascending offsets.*got 1 at 2 after 3"):
        ops.paged_attention(q, *caches, *tables, ints("cpu", [0, 3, 1]))
    with pytest.raises(ValueError, match=r"cu_q.*max_q = 1.*got 3 in sequence 1"):
        ops.paged_attention(q, *caches, *tables, ints("cpu", [0, 1, 4]), max_q=1)
    with pytest.raises(ValueError, match=r"k_start.*got -2 at 0"):
        ops.paged_attention(q[:2], *caches, *tables, k_start=ints("cpu", [-2, 0]))
    with pytest.raises(ValueError, match=r"block_tables: expected the first row's blocks where"):
        ops.paged_attention(q[:2], *caches, *tables, shared_blocks=1)


@pytest.mark.gpu
def test_without_checks_bad_ids_read_block_zero_and_lengths_are_cut() -> None:
    paged = Paged("cuda", [48, 20])
    q = normal("cuda", 2, HEADS, DIM)
    zeroed, broken = paged.tables.clone(), paged.tables.clone()
    zeroed[0, 1] = 0
    for bad in (10**9, -(10**9)):
        broken[0, 1] = bad
        results = []
        for paged.tables in (zeroed, broken):
            results.append(paged.run(q))
        assert same(*results)
    whole = paged.run(q)
    paged.seq_lens = ints("cuda", [10**9, 20])
    assert same(whole, paged.run(q))


@pytest.mark.gpu
def test_a_given_workspace_changes_nothing() -> None:
    paged = Paged("cuda", [LONG, 3])
    q = normal("cuda", 2, HEADS, DIM)
    max_k = paged.tables.shape[1] * 16
    size = ops.attention_workspace_bytes(2, HEADS, KV_HEADS, DIM, 1, max_k)
    assert size > 0
    expected = paged.run(q)
    for fill in (0, 255):  # any contents: 255 is NaN
        space = torch.full((size,), fill, dtype=torch.uint8, device="cuda")
        assert same(expected, paged.run(q, workspace=space))
    small = torch.empty(size - 1, dtype=torch.uint8, device="cuda")
    with pytest.raises(
        ValueError, match=rf"workspace: expected at least {size} bytes, got {size - 1}"
    ):
        paged.run(q, workspace=small)


@pytest.mark.gpu
def test_counters_change_no_bit_and_are_zero_again() -> None:
    paged = Paged("cuda", [LONG, 3, 0, 129], dim=128)
    q = normal("cuda", 4, HEADS, 128)
    expected = paged.run(q)
    counters = torch.zeros(4 * KV_HEADS + 2, dtype=torch.int32, device="cuda")
    for _ in range(2):
        assert same(expected, paged.run(q, counters=counters))
        assert not counters.any()
    with pytest.raises(ValueError, match=r"counters: expected at least 10 .*, got 9"):
        paged.run(q, counters=counters[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 128, 256])  # a tile each, one of them padded
@pytest.mark.parametrize("q_len", [1, 5])  # one MMA of rows; many, on wgmma
def test_many_sequences_equal_each_alone(dim: int, q_len: int) -> None:
    """More items than the GPU holds, dealt in any order: lengths from none to many leaves, an item
    each alone, several an item in the batch."""
    lengths = [(797 * i) % 1500 for i in range(127)] + [6000]
    paged = Paged("cuda", lengths, block=64, dim=dim)
    q = normal("cuda", 128 * q_len, 16, dim)  # a group of 8
    counters = torch.zeros(128 * KV_HEADS + 2, dtype=torch.int32, device="cuda")
    cu_q = [q_len * b for b in range(129)]
    out, lse = paged.run(q, cu_q, counters=counters)
    assert not counters.any()
    assert same((out, lse), paged.run(q, cu_q)), "joined by a kernel of its own"
    for b in [*range(0, 127, 9), 127]:
        rows = slice(cu_q[b], cu_q[b + 1])
        alone = ops.paged_attention(
            q[rows], paged.k_cache, paged.v_cache, paged.tables[b : b + 1],
            paged.seq_lens[b : b + 1], ints("cuda", [0, q_len]), max_q=q_len, return_lse=True,
            counters=counters,
        )  # fmt: skip
        assert same((out[rows], lse[:, rows]), alone), f"sequence {b}"


@pytest.mark.gpu
def test_many_keys_a_block_equal_each_alone() -> None:
    """More than 2048 keys a block of the GPU: items are small, those of the last sequences more so,
    which are more than a warp's lanes."""
    lengths = [1 + 797 * b % 3800 for b in range(40)]
    paged = Paged("cuda", lengths, 64, math.nan, kv_heads=8)
    q = normal("cuda", len(lengths), 32, DIM)
    counters = torch.zeros(8 * len(lengths) + 2, dtype=torch.int32, device="cuda")
    out, lse = paged.run(q, counters=counters)
    assert not counters.any()
    assert same((out, lse), paged.run(q)), "joined by a kernel of its own"
    for b in (0, 7, 31, 32, 34, 35, 39):
        one = slice(b, b + 1)
        alone = ops.paged_attention(
            q[one], paged.k_cache, paged.v_cache, paged.tables[one], paged.seq_lens[one],
            return_lse=True, counters=counters,
        )  # fmt: skip
        assert same((out[one], lse[:, one]), alone), f"sequence {b}"


@pytest.mark.gpu
def test_very_many_keys_a_block_equal_each_alone() -> None:
    """More than 6 x 2048 keys a block of the GPU, in few blocks of the cache: items of more than
    1024 keys, and small ones of the last sequences."""
    batch = 120
    paged = Paged("cuda", [4096] * 4, 64, kv_heads=8)
    draw = torch.Generator().manual_seed(2)
    tables = torch.randint(1, 4 * 64 + 1, (batch, 64), generator=draw).int().cuda()
    lengths = ints("cuda", [4096 - 31 * b % 700 for b in range(batch)])
    q = normal("cuda", batch, 32, DIM)
    counters = torch.zeros(8 * batch + 2, dtype=torch.int32, device="cuda")

    def run(part: slice, **options: Any) -> Any:
        return ops.paged_attention(
            q[part], paged.k_cache, paged.v_cache, tables[part], lengths[part], return_lse=True,
            **options,
        )  # fmt: skip

    out, lse = run(slice(None), counters=counters)
    assert not counters.any()
    assert same((out, lse), run(slice(None))), "joined by a kernel of its own"
    for b in (0, 1, 31, 32, 77, 111, 112, 119):
        one = slice(b, b + 1)
        assert same((out[one], lse[:, one]), run(one, counters=counters)), f"sequence {b}"


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[8193, 9001, 16384, 3], [20000, 12345, 33000]])
def test_long_sequences_equal_each_alone(lengths: list[int]) -> None:
    """Leaves of 512 keys to 1024: alone each is a block's of a cluster, or, of more than 16k,
    any block's."""
    paged = Paged("cuda", lengths, 64, math.nan, 128, kv_heads=8)
    q = normal("cuda", len(lengths), 32, 128)
    counters = torch.zeros(8 * len(lengths) + 2, dtype=torch.int32, device="cuda")
    out, lse = paged.run(q, counters=counters)
    paged.check(q, list(range(len(lengths) + 1)), (out, lse))
    for b in range(len(lengths)):
        one = slice(b, b + 1)
        alone = ops.paged_attention(
            q[one], paged.k_cache, paged.v_cache, paged.tables[one], paged.seq_lens[one],
            return_lse=True, counters=counters,
        )  # fmt: skip
        assert same((out[one], lse[:, one]), alone), f"sequence {b}"


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("batch", [2, 4, 8])  # all cut in two or more, and so few that SMs idle
def test_few_short_sequences_equal_each_alone(batch: int, dim: int) -> None:
    """From 257 to 512 keys: more than one item each, beside sequences that are one."""
    lengths = [512, 257, 385, 320, 256, 511, 64, 448][:batch]
    paged = Paged("cuda", lengths, 64, math.nan, dim, kv_heads=8)
    q = normal("cuda", batch, 32, dim)
    counters = torch.zeros(8 * batch + 2, dtype=torch.int32, device="cuda")
    out, lse = paged.run(q, counters=counters)
    assert not counters.any()
    assert same((out, lse), paged.run(q)), "joined by a kernel of its own"
    paged.check(q, list(range(batch + 1)), (out, lse))


@pytest.mark.gpu
@pytest.mark.parametrize("heads, lengths", [(96, [300, 1]), (72, [385, 1])])
def test_short_sequences_of_many_heads_equal_each_alone(heads: int, lengths: list[int]) -> None:
    """More heads than items are wanted, and still more than one item a sequence."""
    paged = Paged("cuda", lengths, 64, math.nan, 128, kv_heads=heads)
    q = normal("cuda", len(lengths), heads, 128)
    paged.check(q, list(range(len(lengths) + 1)), paged.run(q))


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 4])
def test_shared_keys_are_the_same_keys(q_len: int) -> None:
    """Read once or by each sequence: the same up to rounding; alone with one neighbour or many, and
    with any workspace, bit for bit. Rows of no sequence become zero."""
    block, shared, own = 64, 40, [700, 64, 1, 0, 130] * 7
    paged = Paged("cuda", [shared * block + n + q_len for n in own], block, math.nan, dim=128)
    paged.tables[:, :shared] = paged.tables[0, :shared]
    q = normal("cuda", len(own) * q_len, 16, 128)
    cu_q = [q_len * b for b in range(len(own) + 1)]
    plain, plain_lse = paged.run(q, cu_q)
    max_k = paged.tables.shape[1] * block
    size = ops.attention_workspace_bytes(
        len(own), 16, KV_HEADS, 128, q_len, max_k, shared_keys=shared * block
    )
    space = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
    counters = torch.zeros(len(own) * KV_HEADS + 2, dtype=torch.int32, device="cuda")
    out, lse = paged.run(q, cu_q, shared_blocks=shared, workspace=space, counters=counters)
    assert same((out, lse), paged.run(q, cu_q, shared_blocks=shared))
    assert not counters.any()
    assert (out.float() - plain.float()).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps
    assert (lse - plain_lse).abs().max() <= 1e-5 * plain_lse.abs().max()
    few = [0, q_len, 2 * q_len]
    rows = q[: 2 * q_len]
    pair = ops.paged_attention(
        torch.cat([rows, rows[:1]]), paged.k_cache, paged.v_cache, paged.tables[:2],
        paged.seq_lens[:2], ints("cuda", few), max_q=q_len + 1, return_lse=True,
        shared_blocks=shared,
    )  # fmt: skip
    assert same((out[: few[2]], lse[:, : few[2]]), (pair[0][:-1], pair[1][:, :-1]))
    assert not pair[0][-1].any() and (pair[1][:, -1] == -math.inf).all()


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("q_len", [1, 5, 100])  # one route each on Hopper
@pytest.mark.parametrize("shared", [0, 9])
def test_each_route_runs_alone(q_len: int, shared: int) -> None:
    """Small, and no reference: what compute-sanitizer watches."""
    paged = Paged("cuda", [600 + q_len, 580, 900], 64, dim=128)
    paged.tables[:, :shared] = paged.tables[0, :shared]
    q = normal("cuda", 3 * q_len, 8, 128)
    counters = torch.zeros(3 * KV_HEADS + 2, dtype=torch.int32, device="cuda")
    cu_q = [q_len * b for b in range(4)]
    first = paged.run(q, cu_q, shared_blocks=shared, counters=counters)
    assert same(first, paged.run(q, cu_q, shared_blocks=shared))
    assert not counters.any()


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(
    "dim, max_k, causal",  # a tile of prompts each on Hopper, chosen by the lengths' bound
    [(64, 500, True), (64, 9000, True), (128, 500, True), (128, 2000, False), (128, 5000, True),
     (256, 500, True)],
)  # fmt: skip
def test_each_tile_of_prompts_runs_alone(dim: int, max_k: int, causal: bool) -> None:
    """Sequences that end within tiles, and rows that see fewer tiles than others, or none: small,
    and no reference. compute-sanitizer watches how warpgroups meet."""
    lengths = [(400, 530), (70, 70), (3, 0), (65, 129)]  # 512 queries would be a chunk
    cu_q, cu_k = ([0, *torch.tensor(n).cumsum(0).tolist()] for n in zip(*lengths))
    q = normal("cuda", cu_q[-1], 4, dim)
    k, v = (normal("cuda", cu_k[-1], KV_HEADS, dim) for _ in range(2))
    bounds = ints("cuda", cu_q), ints("cuda", cu_k), 400, max_k
    first = ops.attention_varlen(q, k, v, *bounds, causal=causal)
    assert isinstance(first, Tensor) and first.isfinite().all()
    assert torch.equal(first, ops.attention_varlen(q, k, v, *bounds, causal=causal))


@pytest.mark.gpu
def test_explain_names_the_route() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the routes of Hopper")

    def explained(
        q_len: int, dim: int = 128, heads: int = 16, kv: torch.dtype | None = None, **options: Any
    ) -> Any:
        paged = Paged("cuda", [1024 + q_len] * 2, 64, dim=dim)
        paged.tables[:, :16] = paged.tables[0, :16]
        caches = paged.k_cache, paged.v_cache
        if kv is not None:
            caches = tuple(cache.to(kv) for cache in caches)
            scale = torch.ones(caches[0].shape[:3], dtype=torch.bfloat16, device="cuda")
            options |= {"k_scale": scale, "v_scale": scale}
        return ridgeline.explain(
            "paged_attention", normal("cuda", 2 * q_len, heads, dim), *caches, paged.tables,
            paged.seq_lens, ints("cuda", [0, q_len, 2 * q_len]), max_q=q_len, **options,
        )  # fmt: skip

    def kernels(explanation: Any) -> str:
        return " ".join(kernel.name for kernel in explanation.kernels)

    assert "decode_sm90" in kernels(explained(1)) and not explained(1).slower
    assert "rows_sm90" in kernels(explained(5)) and "wgmma" in explained(5).choices[0]
    assert "prefill_sm90" in kernels(explained(100)) and not explained(100).slower
    shared = explained(1, shared_blocks=16)
    assert "join_common" in kernels(shared) and "1024 shared keys" in shared.choices[0]
    for dim in (64, 256):
        assert "decode_sm90" in kernels(explained(1, dim)) and not explained(1, dim).slower
    for dim, kernel in ((64, "decode_sm90"), (128, "decode_sm90"), (256, "split_kernel")):
        assert kernel in kernels(explained(1, dim, kv=torch.float8_e4m3fn))
    assert "scale" in explained(100, scale=-1.0).slower[0]
    assert "without a window" in explained(1, shared_blocks=16, window=100).slower[0]


def test_workspace_grows_with_rows_and_splits_only() -> None:
    def size(batch: int = 1, max_q: int = 1, max_k: int = 1024) -> int:
        return ops.attention_workspace_bytes(batch, 32, 8, 128, max_q, max_k)

    assert size(max_k=64) == 0, "one split writes the result itself"
    assert size(max_k=1024) == 16 * 32 * (128 + 2) * 4, "sixteen splits of 64 keys"
    assert size(batch=3) == 3 * size()
    assert size(max_q=16) == 16 * size()
    assert size(max_q=8192) == size(max_q=16) + 16, "prefill rows need none, their queue 16 bytes"
    for heads in (64, 96):
        short = ops.attention_workspace_bytes(1, heads, heads, 128, 1, 512)
        assert short == 4 * heads * 2 * (128 + 2) * 4, "a short sequence is up to four items"
    assert size(max_k=1 << 20) == 64 * 32 * (128 + 1) * 4, "no more than 64 splits"
    with pytest.raises(ValueError, match=r"heads: expected a multiple of kv_heads, 3, got 4"):
        ops.attention_workspace_bytes(1, 4, 3, 128, 1, 1024)


@pytest.mark.gpu
@pytest.mark.slow
def test_caches_of_more_than_two_to_the_31_elements() -> None:
    block, kv_heads, dim = 64, 8, 128
    count = (1 << 31) // (block * kv_heads * dim) + 2
    cache = torch.zeros(count, block, kv_heads, dim, dtype=torch.bfloat16, device="cuda")
    cache[count - 1] = normal("cuda", block, kv_heads, dim)
    small = cache[-1:].clone()
    q, lengths = normal("cuda", 1, 8, dim), ints("cuda", [block])
    far = ops.paged_attention(q, cache, cache, ints("cuda", [[count - 1]]), lengths)
    near = ops.paged_attention(q, small, small, ints("cuda", [[0]]), lengths)
    assert torch.equal(far, near)


@pytest.mark.parametrize("window", [True, 2.0, "2", 0], ids=repr)
def test_a_window_that_is_no_number_of_keys_is_refused(window: Any) -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="^window: expected None or an integer from 1 on, got"):
        ops.attention(q, q, q, window=window)
