"""From a decoder to a runner: how much memory there is, what takes it, and the cache's size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ridgeline._options import EngineOptions
from ridgeline.graphs import mixed_seqs, mixed_tokens
from ridgeline.kv_cache import (
    KVCache,
    KVCacheLayout,
    blocks_for_cpu,
    blocks_for_cuda,
    host_memory,
)
from ridgeline.memory import (
    MemoryLine,
    MemoryPlan,
    kept_weights,
    plan_memory,
    step_cost,
    tensor_bytes,
)
from ridgeline.models.config import ModelConfig
from ridgeline.models.decoder import Decoder
from ridgeline.roofline.machine import Roofs, measure_roofs
from ridgeline.roofline.peaks import peaks
from ridgeline.runner import Runner, StepLimits
from ridgeline.swap_space import swap_blocks

_CUT_TOKENS = 512  # docs/attention.md


@dataclass(frozen=True)
class Started:
    """What the loop needs: the runner, the scheduler's settings, and the memory's account."""

    runner: Runner
    settings: dict[str, Any]
    machine: str
    memory: tuple[MemoryLine, ...]


class Starter:
    """Plans before the weights are loaded, measures after.

    Raises:
        ValueError: the plan leaves no room for a cache; its lines are in the message.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int,
        stored_weights: int,
    ) -> None:
        self._config = config
        self._options = options
        self._device = device
        self._dtype = dtype
        self._max_model_len = max_model_len
        self._stored = stored_weights > 0
        self._layout = KVCacheLayout.of(config, options.block_size, options.kv_cache_dtype, dtype)
        self._on_gpu = device.type == "cuda"
        self._use_graphs = self._on_gpu and not options.enforce_eager
        budget = None
        num_blocks = options.num_blocks
        if self._on_gpu:
            free, total = torch.cuda.mem_get_info(device)
            budget = int(total * options.gpu_memory_utilization)
        elif num_blocks is None:
            num_blocks = blocks_for_cpu(self._layout, max_model_len)
        self.plan: MemoryPlan = plan_memory(
            config,
            self._layout,
            dtype,
            quantization=options.quantization,
            max_model_len=max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            budget=budget,
            num_blocks=num_blocks,
            on_gpu=self._on_gpu,
            graphs=self._use_graphs,
            stored_weights=stored_weights,
        )
        self.plan.check(None if self._on_gpu else host_memory())
        # Measuring takes a second and 2 GB, which are free yet: for the trace, and for decisions
        # by predicted time on a GPU whose peaks are not known.
        self._roofs: Roofs | None = peaks(str(device))
        predicts = options.latency_target is not None or options.swap_space > 0
        if self._on_gpu and (options.trace is not None or (predicts and self._roofs is None)):
            self._roofs = measure_roofs(str(device))
            torch.cuda.empty_cache()

    def start(self, decoder: Decoder) -> Started:
        """Allocates everything that steps will use."""
        options, layout = self._options, self._layout
        taken: dict[str, int] = {"weights": tensor_bytes([decoder])}
        if options.num_blocks is not None or not self._on_gpu:
            num_blocks = self.plan.num_blocks
        else:
            taken |= self._measure(decoder)
            activations = sum(taken.values()) - taken["weights"]
            num_blocks = blocks_for_cuda(
                layout, self._device, options.gpu_memory_utilization, activations
            )
        context = self._max_model_len
        if options.max_model_len is None:
            context = min(context, (num_blocks - 1) * options.block_size)
        host_blocks = swap_blocks(layout, options.swap_space)
        graph_bytes = taken.get("graph pool", self.plan.predicted("graph pool"))
        runner = self._make(decoder, num_blocks, context, host_blocks, graph_bytes)
        cost = step_cost(
            *(self._config, layout, self._dtype, options.quantization, self._roofs),
            kept=kept_weights(decoder) if self._stored else None,
        )
        if cost and self._use_graphs:
            cost["sizes"] = mixed_tokens(options.max_num_batched_tokens)
            cost["sized_seqs"] = mixed_seqs(options.max_num_seqs)[-1]
        settings = {
            "num_blocks": num_blocks,
            "block_size": options.block_size,
            "max_model_len": context,
            "vocab_size": self._config.vocab_size,
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "eos_token_ids": self._config.eos_token_ids,
            "enable_prefix_caching": options.enable_prefix_caching,
            "seed": options.seed,
            "decision_log_size": 1 << 16,
            "num_host_blocks": host_blocks,
            "latency_target_us": int((options.latency_target or 0) * 1e6),
            "cost": cost,
        }
        machine = "unknown machine" if self._roofs is None else self._roofs.name
        return Started(runner, settings, machine, self._account(taken, num_blocks))

    def _make(
        self, decoder: Decoder, blocks: int, context: int, host_blocks: int, graph_bytes: int
    ) -> Runner:
        limits = StepLimits(
            max_num_seqs=self._options.max_num_seqs,
            max_num_batched_tokens=self._options.max_num_batched_tokens,
            max_blocks_per_seq=-(-context // self._options.block_size),
        )
        cache = KVCache.allocate(self._layout, blocks, self._device)
        return Runner(
            decoder, cache, limits, use_graphs=self._use_graphs, graph_bytes=graph_bytes,
            host_blocks=host_blocks,
        )  # fmt: skip

    def _measure(self, decoder: Decoder) -> dict[str, int]:
        """What the largest prefill step takes, and for the pool of the graphs as much as the
        largest step that gets a graph."""
        device, options = self._device, self._options
        before = torch.cuda.memory_allocated(device)
        runner = self._make(decoder, 1, self._max_model_len, 0, 0)
        static = torch.cuda.memory_allocated(device) - before
        peaks_of = []
        most, seqs = options.max_num_batched_tokens, options.max_num_seqs
        steps = [(most, seqs, most)]
        if self._use_graphs:
            steps.append((seqs, seqs, 1))
            # The most, and the most whose keys attention cuts into partial results.
            for tokens in {mixed_tokens(most)[-1], min(most, _CUT_TOKENS)}:
                steps.append((tokens, mixed_seqs(seqs)[-1] + 1, tokens))
        for step in steps:
            torch.cuda.reset_peak_memory_stats(device)
            runner.profile(*step)
            torch.cuda.synchronize(device)
            peaks_of.append(torch.cuda.max_memory_allocated(device) - before - static)
        return {
            "step buffers": static,
            "activations of prefill": peaks_of[0],
            "graph pool": max(peaks_of[1:], default=0),
        }

    def _account(self, taken: dict[str, int], num_blocks: int) -> tuple[MemoryLine, ...]:
        """Each line of the plan beside what was taken, and the rest of what is in use."""
        lines = [
            MemoryLine(line.name, line.predicted, taken.get(line.name)) for line in self.plan.lines
        ]
        block = self._layout.block_bytes
        cache = MemoryLine("KV cache", self.plan.num_blocks * block, num_blocks * block)
        if not self._on_gpu:
            return (*lines, cache)
        free, total = torch.cuda.mem_get_info(self._device)
        named = torch.cuda.memory_allocated(self._device)
        others = torch.cuda.memory_reserved(self._device) - named
        context = total - free - torch.cuda.memory_reserved(self._device)
        lines = [
            MemoryLine(line.name, line.predicted, context)
            if line.name == "context and kernels" else line
            for line in lines
        ]  # fmt: skip
        return (*lines, cache, MemoryLine("held by PyTorch's allocator", 0, others))
