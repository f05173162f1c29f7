"""rope_paged_attention is rope_write_kv and paged_attention, bit for bit, also as one kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ridgeline
from ridgeline import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCK, KV_HEADS = 64, 8


class Step:
    """One token of one sequence; slots that hold no older key, the new one's too, are NaN."""

    def __init__(
        self, device: str, length: int, group: int, dim: int, dtype: torch.dtype, poison: bool
    ) -> None:
        generator = torch.Generator().manual_seed(length)
        blocks = length // BLOCK + 2
        self.table = (torch.randperm(blocks, generator=generator) + 1).int()[None].to(device)
        shape = (blocks + 1, KV_HEADS, BLOCK, dim)

        def cache() -> Tensor:
            values = torch.randn(shape, generator=generator)
            for n in range(length - 1 if poison else blocks * BLOCK, blocks * BLOCK):
                values[self.table[0, n // BLOCK], :, n % BLOCK] = math.nan
            values[0] = math.nan
            return values.to(dtype).to(device).transpose(1, 2)

        self.caches = cache(), cache()
        heads = (group + 2) * KV_HEADS
        projection = torch.randn((1, heads, dim), generator=generator).to(dtype).to(device)
        self.q, self.k, self.v = projection.split((group * KV_HEADS, KV_HEADS, KV_HEADS), 1)
        self.cos_sin = torch.randn((length + 1, dim), generator=generator).to(device)
        self.positions = torch.tensor([length - 1], dtype=torch.int32, device=device)
        self.slots = self.table[0, (length - 1) // BLOCK : (length - 1) // BLOCK + 1] * BLOCK
        self.slots = self.slots + (length - 1) % BLOCK
        self.seq_lens = torch.tensor([length], dtype=torch.int32, device=device)

    def bits(self, whole: bool, **options: Any) -> list[Tensor]:
        """Result, lse and caches of the op, or of its two parts."""
        q, caches = self.q.clone(), [c.clone() for c in self.caches]
        options |= {"return_lse": True}
        if whole:
            results = ops.rope_paged_attention(
                q, self.k, self.v, self.positions, self.cos_sin, self.slots, *caches, self.table,
                self.seq_lens, weights_ready=True, **options,
            )  # fmt: skip
        else:
            ops.rope_write_kv(q, self.k, self.v, self.positions, self.cos_sin, *caches, self.slots)
            results = ops.paged_attention(q, *caches, self.table, self.seq_lens, **options)
        assert all(t.isfinite().all() for t in results)
        return [t.contiguous().view(torch.uint8) for t in (*results, *caches)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 96])  # no kernel takes fresh keys of 96
@pytest.mark.parametrize("group", [1, 3, 8, 9])  # nor nine rows a KV head
def test_equals_its_parts(device: str, dtype: torch.dtype, dim: int, group: int) -> None:
    """Lengths: the first key, the edges of a tile, uncut and cut among blocks."""
    for length in [1, 2, 64, 65, 129, 500, 700, 1025]:
        step = Step(device, length, group, dim, dtype, poison=True)
        for a, b in zip(step.bits(True), step.bits(False), strict=True):
            assert torch.equal(a, b), f"length {length}"


@pytest.mark.parametrize("device", DEVICES)
def test_options_hold_for_the_fresh_key(device: str) -> None:
    """A window that begins in its tile, one that is the key alone, sinks and a softcap."""
    sinks = torch.linspace(-1, 3, 4 * KV_HEADS, device=device)
    for length in (130, 600):
        step = Step(device, length, 4, 128, torch.bfloat16, poison=True)
        options: dict[str, Any]
        for options in ({"window": 1}, {"window": 70}, {"sinks": sinks, "softcap": 3.0}):
            for a, b in zip(step.bits(True, **options), step.bits(False, **options), strict=True):
                assert torch.equal(a, b), f"length {length}, {options}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv", [torch.float8_e4m3fn, torch.int8])
def test_equals_its_parts_in_caches_of_8_bits(device: str, kv: torch.dtype) -> None:
    step = Step(device, 130, 4, 128, torch.bfloat16, poison=False)
    codes = [(20 * c.nan_to_num()).clamp(-127, 127).to(kv) for c in step.caches]
    scales = [torch.full(c.shape[:3], 0.1, dtype=torch.bfloat16, device=device) for c in codes]

    def bits(whole: bool) -> list[Tensor]:
        q, caches = step.q.clone(), [c.clone() for c in codes]
        k_scale, v_scale = (scale.clone() for scale in scales)
        key = step.k, step.v, step.positions, step.cos_sin
        of_keys = {"k_scale": k_scale, "v_scale": v_scale}
        read = step.table, step.seq_lens
        if whole:
            out = ops.rope_paged_attention(
                q, *key, step.slots, *caches, *read, weights_ready=True, **of_keys
            )
        else:
            ops.rope_write_kv(q, *key, *caches, step.slots, **of_keys)
            out = ops.paged_attention(q, *caches, *read, **of_keys)
        assert isinstance(out, Tensor) and out.isfinite().all()
        return [t.contiguous().view(torch.uint8) for t in (out, *caches, k_scale, v_scale)]

    for a, b in zip(bits(True), bits(False), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name, value", [("seq_lens", 999), ("table", 77)])
def test_refused_contents_have_changed_nothing(name: str, value: int) -> None:
    step = Step("cpu", 20, 4, 64, torch.bfloat16, poison=False)
    getattr(step, name).fill_(value)
    q, caches = step.q.clone(), [c.clone() for c in step.caches]
    with pytest.raises(ValueError, match=f"{name.replace('table', 'block_tables')}.*got {value}"):
        ops.rope_paged_attention(
            q, step.k, step.v, step.positions, step.cos_sin, step.slots, *caches, step.table,
            step.seq_lens,
        )  # fmt: skip
    for now, before in zip((q, *caches), (step.q, *step.caches), strict=True):
        assert torch.equal(now.view(torch.int16), before.view(torch.int16))


@pytest.mark.gpu
def test_waits_for_what_the_kernel_ahead_writes() -> None:
    """Behind a long product that writes the projection; the same as after its end."""
    step = Step("cuda", 200, 4, 128, torch.bfloat16, poison=True)
    heads = 6 * KV_HEADS * 128
    weight = torch.randn(heads, 8192, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, 8192, device="cuda", dtype=torch.bfloat16)
    results = []
    for chained in (True, False):
        projection = ops.linear(x, weight, weights_ready=True).view(1, 6 * KV_HEADS, 128)
        if not chained:
            torch.cuda.synchronize()
        step.q, step.k, step.v = projection.split((4 * KV_HEADS, KV_HEADS, KV_HEADS), 1)
        caches = [c.clone() for c in step.caches] if not chained else step.caches
        out = ops.rope_paged_attention(
            step.q, step.k, step.v, step.positions, step.cos_sin, step.slots, *caches, step.table,
            step.seq_lens, weights_ready=True,
        )  # fmt: skip
        results.append(out)
    assert torch.equal(*results)


@pytest.mark.gpu
def test_is_one_kernel_where_nothing_is_in_the_way() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute 9.0")
    step = Step("cuda", 200, 4, 128, torch.bfloat16, poison=False)

    def kernels(**options: Any) -> list[str]:
        found = ridgeline.explain(
            "rope_paged_attention", step.q, step.k, step.v, step.positions, step.cos_sin,
            step.slots, *step.caches, step.table, step.seq_lens,
            **({"weights_ready": True} | options),
        )  # fmt: skip
        return [kernel.name for kernel in found.kernels]

    (name,) = kernels()
    assert "decode_cluster" in name
    for options in (
        {"weights_ready": False},
        {"interleaved": True},
        {"batch_invariant": True},
        {"cu_q": torch.tensor([0, 1], dtype=torch.int32, device="cuda")},
    ):
        assert "kv_write" in kernels(**options)[0], options
