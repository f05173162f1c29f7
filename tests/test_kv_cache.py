"""Cache writers beyond the op table: quantised caches, fused = separate, ids out of range."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import ridgeline
from ridgeline import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CACHE_DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.int8]
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
BLOCKS, SIZE, Q_HEADS, HEADS = 5, 16, 6, 2


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).cpu()


class Caches:
    """K, V and scales in the engine's storage, every byte 0xFF (NaN, or -1) at first."""

    def __init__(self, dtype: torch.dtype, dim: int, device: str) -> None:
        def filled(*shape: int, dtype: torch.dtype) -> Tensor:
            raw = torch.full((*shape, dtype.itemsize), 255, dtype=torch.uint8, device=device)
            return raw.view(dtype)[..., 0]

        self.k, self.v = (
            filled(BLOCKS, HEADS, SIZE, dim, dtype=dtype).transpose(1, 2) for _ in range(2)
        )
        self.scales: dict[str, Tensor] = {}
        if dtype in LARGEST:
            for name in ("k_scale", "v_scale"):
                self.scales[name] = filled(BLOCKS, SIZE, HEADS, dtype=torch.bfloat16)

    def tensors(self) -> list[Tensor]:
        return [self.k, self.v, *self.scales.values()]


def inputs(tokens: int, dim: int, device: str, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens + dim)
    qkv = torch.randn(tokens, Q_HEADS + 2 * HEADS, dim, generator=generator).to(dtype).to(device)
    return list(qkv.split((Q_HEADS, HEADS, HEADS), 1))


def expected_codes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales by their definition."""
    scale = (x.float().abs().amax(-1) / LARGEST[dtype]).to(torch.bfloat16)
    divided = (x.float() / scale.float()[..., None]).nan_to_num(0.0)
    divided = divided.clamp(-LARGEST[dtype], LARGEST[dtype])
    return (divided.round() if dtype == torch.int8 else divided).to(dtype), scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [64, 128, 42])  # 42: no whole 16-byte pieces
@pytest.mark.parametrize("dtype", list(LARGEST))
@pytest.mark.sanitize
def test_quantised_writes(dtype: torch.dtype, dim: int, device: str) -> None:
    _, k, v = inputs(7, dim, device)
    # Many scales; by the outermost CUDA divides otherwise than by the rest.
    sizes = torch.tensor([1e-30, 1e-4, 3e-2, 1, 30, 1e3, 1e30], device=device)
    k = k * sizes[:, None, None].to(k.dtype)
    k[3] = 0  # a vector of zeros has scale 0
    k[4, :, 5] = -0.0
    caches = Caches(dtype, dim, device)
    untouched = Caches(dtype, dim, device)
    slots = torch.tensor([16, 79, 33, 20, 0, 50, 51], dtype=torch.int32, device=device)
    ops.write_kv(k, v, caches.k, caches.v, slots, **caches.scales)
    for x, cache, scale, fresh in (
        (k, caches.k, caches.scales["k_scale"], untouched.k),
        (v, caches.v, caches.scales["v_scale"], untouched.v),
    ):
        codes, scales = expected_codes(x.cpu(), dtype)
        written = slots.cpu().long()
        rest = torch.ones(BLOCKS * SIZE, dtype=torch.bool).index_fill(0, written, False)
        flat, flat_scale = cache.cpu().reshape(-1, HEADS, dim), scale.cpu().view(-1, HEADS)
        assert torch.equal(flat_scale[written], scales)
        assert torch.equal(bits(flat[written]), bits(codes))
        assert torch.equal(bits(flat[rest]), bits(fresh.cpu().reshape(-1, HEADS, dim)[rest]))
        assert bool(flat_scale[rest].isnan().all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(LARGEST))
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_vector_with_a_value_that_is_not_finite_reads_as_nan(
    bad: float, dtype: torch.dtype, device: str
) -> None:
    _, k, v = inputs(1, 64, device)
    k[0, 1, 5] = bad
    caches = Caches(dtype, 64, device)
    slot = torch.tensor([17], dtype=torch.int32, device=device)
    ops.write_kv(k, v, caches.k, caches.v, slot, **caches.scales)
    scales = caches.scales["k_scale"][1, 1]
    values = caches.k[1, 1].float() * scales.float()[:, None]
    assert bool(values[0].isfinite().all())
    assert not bool(scales[1].isfinite())
    assert bool((~values[1].isfinite()).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [64, 40])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_fused_equals_rope_then_write(
    dtype: torch.dtype, rotary_dim: int, interleaved: bool, device: str
) -> None:
    q, k, v = inputs(9, 64, device)
    original = k.clone()
    table = torch.randn(32, rotary_dim, generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.arange(9, dtype=torch.int32, device=device) * 3
    slots = torch.arange(16, 25, dtype=torch.int32, device=device)
    fused, separate = (Caches(dtype, 64, device) for _ in range(2))
    q2, k2 = q.clone(), k.clone()
    ops.rope_write_kv(
        q, k, v, positions, table, fused.k, fused.v, slots, **fused.scales, interleaved=interleaved
    )
    assert torch.equal(k, original), "rope_write_kv only reads k"
    ops.rope(q2, k2, positions, table, interleaved=interleaved)
    ops.write_kv(k2, v, separate.k, separate.v, slots, **separate.scales)
    assert torch.equal(q, q2)
    for a, b in zip(fused.tensors(), separate.tensors()):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.gpu
@pytest.mark.parametrize("rotary_dim, interleaved", [(64, False), (48, True), (0, False)])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_many_tokens_are_written_as_few(
    dtype: torch.dtype, rotary_dim: int, interleaved: bool
) -> None:
    """From 65536 head vectors on four heads share a lane's angles. The last slot is outside."""
    tokens, heads, dim = 8201, 4, 64
    generator = torch.Generator("cuda").manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    qkv = random(tokens, 4 * heads, dim).bfloat16()
    table = random(tokens, rotary_dim)
    positions = torch.arange(tokens, dtype=torch.int32, device="cuda").flip(0)
    slots = torch.randperm(tokens, generator=generator, device="cuda").int() + SIZE
    slots[-1] = 1 << 30
    written = []
    for step in (tokens, 1000):
        rows = qkv.clone()
        blocks = tokens // SIZE + 2
        shape = (blocks, SIZE, heads)
        caches = [torch.zeros(*shape, dim, device="cuda").to(dtype) for _ in range(2)]
        scales = []
        if dtype in LARGEST:
            scales = [torch.zeros(*shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        for first in range(0, tokens, step):
            part = slice(first, first + step)
            q, k, v = rows[part].split((2 * heads, heads, heads), 1)
            if rotary_dim:
                rope = positions[part], table
                ops.rope_write_kv(
                    q, k, v, *rope, *caches, slots[part], *scales, interleaved=interleaved
                )
            else:
                ops.write_kv(k, v, *caches, slots[part], *scales)
        written.append([bits(tensor) for tensor in (rows, *caches, *scales)])
    assert all(torch.equal(many, few) for many, few in zip(*written))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_copied_blocks_carry_their_scales(dtype: torch.dtype, device: str) -> None:
    _, k, v = inputs(SIZE, 64, device)
    caches = Caches(dtype, 64, device)
    slots = torch.arange(SIZE, 2 * SIZE, dtype=torch.int32, device=device)
    ops.write_kv(k, v, caches.k, caches.v, slots, **caches.scales)
    before = [t.clone() for t in caches.tensors()]
    pairs = torch.tensor([[1, 3], [0, 0]], dtype=torch.int32, device=device)
    ops.copy_blocks(caches.k, caches.v, pairs, **caches.scales)
    for tensor, old in zip(caches.tensors(), before):
        assert torch.equal(bits(tensor[3]), bits(old[1]))
        for block in (0, 1, 2, 4):
            assert torch.equal(bits(tensor[block]), bits(old[block]))


def write_call(device: str, **ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """One rope_write_kv of two tokens, with some ids replaced: everything before and after."""
    q, k, v = inputs(2, 64, device)
    caches = Caches(torch.bfloat16, 64, device)
    table = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(device)
    positions = ids.get("positions", torch.tensor([0, 1], dtype=torch.int32)).to(device)
    slots = ids.get("slots", torch.tensor([16, 17], dtype=torch.int32)).to(device)
    before = [t.clone() for t in (q, *caches.tensors())]
    ops.rope_write_kv(q, k, v, positions, table, caches.k, caches.v, slots)
    return before, [q, *caches.tensors()]


BAD_IDS = [
    ("slots", [16, BLOCKS * SIZE]),
    ("slots", [-1, 17]),
    ("positions", [0, 8]),
    ("positions", [-1, 0]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, ids", BAD_IDS)
def test_refuses_ids_out_of_range(name: str, ids: list[int], device: str) -> None:
    with ridgeline.debug_checks(), pytest.raises(ValueError, match=rf"{name}: expected values in"):
        write_call(device, **{name: torch.tensor(ids, dtype=torch.int32)})


@pytest.mark.parametrize("device", DEVICES)
def test_queries_that_are_the_keys_too_are_refused(device: str) -> None:
    """They were rotated twice."""
    caches = Caches(torch.bfloat16, 64, device)
    _, k, v = inputs(4, 64, device)
    ids, table = torch.arange(4, device=device), torch.ones(8, 64, device=device)
    before = k.clone()
    with pytest.raises(ValueError, match="^k: expected other memory than q"):
        ops.rope(k, k, ids, table)
    with pytest.raises(ValueError, match="^k: expected other memory than q"):
        ops.rope_write_kv(k, k, v, ids, table, caches.k, caches.v, ids)
    ops.rope(k, k[:, :0], ids, table)
    assert not torch.equal(before, k)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_cuda_ignores_ids_out_of_range() -> None:
    before, after = write_call("cuda", slots=torch.tensor([17, 2**31 - 1], dtype=torch.int32))
    _, good = write_call("cuda", slots=torch.tensor([17, 0], dtype=torch.int32))
    for old, new, reference in zip(before[1:], after[1:], good[1:]):
        assert torch.equal(bits(new[1:]), bits(reference[1:])), "the good slot is written"
        assert torch.equal(bits(new[0]), bits(old[0])), "nothing else is"
    _, clamped = write_call("cuda", positions=torch.tensor([1, -5], dtype=torch.int32))
    _, at_zero = write_call("cuda", positions=torch.tensor([1, 0], dtype=torch.int32))
    assert all(map(torch.equal, map(bits, clamped), map(bits, at_zero)))


@pytest.mark.parametrize(
    "pairs, message",
    [
        ([[1, BLOCKS]], "expected blocks in"),
        ([[-1, 2]], "expected blocks in"),
        ([[1, 2], [3, 2]], "each destination once, got 2"),
        ([[1, 2], [2, 3]], "no destination among the sources, got 2"),
    ],
)
def test_copy_refuses_what_depends_on_the_order(pairs: list[list[int]], message: str) -> None:
    caches = Caches(torch.bfloat16, 64, "cpu")
    before = [t.clone() for t in caches.tensors()]
    with pytest.raises(ValueError, match=message):
        ops.copy_blocks(caches.k, caches.v, torch.tensor(pairs, dtype=torch.int32))
    for new, old in zip(caches.tensors(), before):
        assert torch.equal(bits(new), bits(old))


@pytest.mark.gpu
def test_cuda_skips_pairs_out_of_range() -> None:
    caches = Caches(torch.bfloat16, 64, "cuda")
    caches.k[1], caches.v[1] = 1.0, 2.0
    pairs = torch.tensor([[BLOCKS, 2], [1, -1], [1, 3]], dtype=torch.int32, device="cuda")
    ops.copy_blocks(caches.k, caches.v, pairs)
    assert bool((caches.k[3] == 1).all()) and bool((caches.v[3] == 2).all())
    for block in (0, 2, 4):
        assert bool(caches.k[block].isnan().all()) and bool(caches.v[block].isnan().all())
