"""The whole engine: decode at several batch sizes, time to first token, throughput, prefix cache.

The model has the shapes of Llama-3.1-8B and random weights (on the CPU: a small one of its kind);
outputs run to their full length. Each case is run once before it is timed, so that graphs are
captured. A decode step's floor reads every weight but the embedding and every visible key and
value once, at the read roof.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline import LLM, RequestOutput, SamplingParams
from timer import Bench

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 128001,
}
SMALL = LLAMA_8B | {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 0,
}
WEIGHT_BITS = {None: 16, "fp8": 8, "int4": 4.125}  # int4 with one 16-bit scale a group of 128


@dataclass(frozen=True)
class Case:
    """Requests submitted together: each has ``shared`` prompt tokens in common and its own."""

    name: str
    requests: int
    prompt: int
    output: int
    shared: int = 0

    def prompts(self, vocab: int, seed: int) -> list[list[int]]:
        draw = random.Random(seed)

        def tokens(count: int) -> list[int]:
            return [draw.randrange(vocab) for _ in range(count)]

        common = tokens(self.shared)
        return [common + tokens(self.prompt - self.shared) for _ in range(self.requests)]


DECODE = [Case("decode", batch, 128, 256) for batch in (1, 32, 128)]
LONG = [
    Case("ttft", 1, 4096, 1),
    Case("long_context", 1, 32768, 128),
    Case("throughput", 512, 512, 256),
    Case("prefix", 64, 2048 + 64, 32, shared=2048),
]
TINY = [Case("decode", 1, 8, 8), Case("decode", 4, 8, 8), Case("prefix", 4, 80, 4, shared=64)]


def weight_bytes(config: dict[str, Any], quantization: str | None) -> float:
    """Of all matrices that a step multiplies by: layers, and the head in 16 bits."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = hidden * (2 * hidden + 2 * kv) + 3 * hidden * width
    bits = WEIGHT_BITS[quantization]
    return config["num_hidden_layers"] * layer * bits / 8 + 2 * hidden * config["vocab_size"]


def step_floor(bench: Bench, case: Case, config: dict[str, Any], quantization: str | None) -> float:
    """Seconds of a decode step in the middle of the outputs."""
    dim = config["hidden_size"] // config["num_attention_heads"]
    row = 2 * 2 * dim * config["num_key_value_heads"] * config["num_hidden_layers"]
    keys = case.requests * (case.prompt + case.output / 2)
    return (weight_bytes(config, quantization) + keys * row) / bench.roofs.read


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def run(llm: LLM, prompts: list[list[int]], output: int) -> tuple[list[RequestOutput], float]:
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return outputs, time.perf_counter() - begin


def measure(
    bench: Bench, llm: LLM, case: Case, config: dict[str, Any], quantization: str | None
) -> None:
    prompts = case.prompts(config["vocab_size"], seed=1)
    run(llm, case.prompts(config["vocab_size"], seed=0), case.output)
    names = [case.name]
    if case.shared:  # the second time everything but the last tokens of a prompt is cached
        names.append(f"{case.name}_warm")
    for name in names:
        outputs, seconds = run(llm, prompts, case.output)
        row = {
            "bench": "llm",
            "impl": "ridgeline",
            "case": name,
            "requests": case.requests,
            "prompt": case.prompt,
            "output": case.output,
            "weights": quantization or "16 bits",
            "tok_s": round(case.requests * case.output / seconds, 1),
            "seconds": round(seconds, 4),
            "ttft_ms": round(1e3 * statistics.median(o.metrics.ttft or 0.0 for o in outputs), 3),
        }
        gaps = [gap for each in outputs for gap in each.metrics.inter_token]
        if gaps:
            itl = statistics.median(gaps)
            row["itl_ms_p50"] = round(1e3 * itl, 4)
            row["itl_ms_p99"] = round(1e3 * percentile(gaps, 0.99), 4)
            row["mbu"] = round(step_floor(bench, case, config, quantization) / itl, 4)
        bench.add(row | bench.machine())


def main() -> None:
    bench = Bench.from_args(__doc__)
    on_gpu = bench.device != "cpu"
    config = LLAMA_8B if on_gpu else SMALL
    cases = TINY if not on_gpu else DECODE if bench.quick else DECODE + LONG
    for quantization in (None, "fp8", "int4") if on_gpu else (None,):
        options: dict[str, Any] = {"max_model_len": 33024} if on_gpu else {"num_blocks": 64}
        begin = time.perf_counter()
        with LLM.from_config(
            config, device=bench.device, quantization=quantization, **options
        ) as llm:
            print(f"start: {time.perf_counter() - begin:.1f} s", flush=True)
            for case in cases:
                measure(bench, llm, case, config, quantization)
        if on_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
