"""The whole engine: start, decode, time to first token, throughput, prefix cache, stalls.

The model has the shapes of Llama-3.1-8B and random weights (on the CPU: a small one of its kind);
outputs run to their full length. Each case is run before it is timed, so that graphs are
captured. A decode step's floor (``mbu``) reads every weight but the embedding and every visible
key and value once, at the read roof; a prompt's (``mfu``, of time to first token) multiplies by
the weights and computes causal attention at the matrix roof.
"""

from __future__ import annotations

import random
import statistics
import threading
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
# Of 4 bits with one 16-bit scale a group of 128.
WEIGHT_BITS = {None: 16, "fp8": 8, "int4": 4.125, "w4a8": 4.125}


@dataclass(frozen=True)
class Case:
    """Requests submitted together: each has ``shared`` prompt tokens in common and its own."""

    name: str
    requests: int
    prompt: int
    output: int
    shared: int = 0

    def prompts(self, vocab: int, seed: int) -> list[list[int]]:
        draw = random.Random(f"{self} {seed}")  # no two cases begin alike

        def tokens(count: int) -> list[int]:
            return [draw.randrange(vocab) for _ in range(count)]

        common = tokens(self.shared)
        return [common + tokens(self.prompt - self.shared) for _ in range(self.requests)]


DECODE = [Case("decode", batch, 128, 256) for batch in (1, 32, 128)]
PROMPTS = [Case("ttft", 1, 4096, 1), Case("ttft", 1, 8192, 1)]
THROUGHPUT = Case("throughput", 512, 512, 256)
LONG = [
    *PROMPTS,
    Case("long_context", 1, 32768, 128),
    THROUGHPUT,
    Case("prefix", 64, 2048 + 64, 32, shared=2048),
    Case("no_prefix", 64, 2048 + 64, 32),
]
TINY = [Case("decode", 1, 8, 8), Case("decode", 4, 8, 8), Case("prefix", 4, 80, 4, shared=64)]
REPEATS = 4  # of prompts alone: one is over in a tenth of a second
WARM_OUTPUT = 64  # of the run before a case: enough that all its batches are full for a while


@dataclass(frozen=True)
class Stall:
    """Requests that decode while a long prompt comes in: the gaps between their tokens."""

    requests: int
    prompt: int
    output: int
    long_prompt: int


@dataclass(frozen=True)
class Setup:
    """An engine, and what it is asked to do."""

    options: dict[str, Any]
    cases: list[Case]
    stall: Stall | None = None

    @property
    def quantization(self) -> str | None:
        return self.options.get("quantization")

    @property
    def kv_bytes(self) -> int:
        """Of a stored key's or value's element."""
        return 1 if self.options.get("kv_cache_dtype") else 2

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.options.items()) or "default"


FAST = [
    Setup({}, DECODE),
    Setup({"quantization": "fp8"}, DECODE),
    Setup({"quantization": "int4"}, DECODE),
    Setup({"quantization": "w4a8"}, DECODE),
]
FULL = [
    Setup({}, DECODE + LONG),
    Setup({"quantization": "fp8"}, DECODE + PROMPTS),
    Setup({"quantization": "int4"}, DECODE + PROMPTS),
    Setup({"quantization": "w4a8"}, DECODE + PROMPTS),
    Setup({"quantization": "fp8", "kv_cache_dtype": "fp8"}, [THROUGHPUT]),
    Setup({"batch_invariant": True}, DECODE),
    Setup({"latency_target": 0.0125}, [], Stall(16, 128, 768, 32768)),
]
CPU = [Setup({}, TINY, Stall(2, 8, 64, 256))]


def weight_bytes(config: dict[str, Any], quantization: str | None) -> float:
    """Of all matrices that a step multiplies by: layers, and the head in 16 bits."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = hidden * (2 * hidden + 2 * kv) + 3 * hidden * width
    bits = WEIGHT_BITS[quantization]
    return config["num_hidden_layers"] * layer * bits / 8 + 2 * hidden * config["vocab_size"]


def step_floor(bench: Bench, case: Case, config: dict[str, Any], setup: Setup) -> float:
    """Seconds of a decode step in the middle of the outputs."""
    dim = config["hidden_size"] // config["num_attention_heads"]
    row = 2 * setup.kv_bytes * dim * config["num_key_value_heads"] * config["num_hidden_layers"]
    keys = case.requests * (case.prompt + case.output / 2)
    return (weight_bytes(config, setup.quantization) + keys * row) / bench.roofs.read


def prompt_floor(bench: Bench, case: Case, config: dict[str, Any], setup: Setup) -> float:
    """Seconds of a prompt's products: with the layers' weights, and of causal attention."""
    layers = weight_bytes(config, None) / 2 - config["hidden_size"] * config["vocab_size"]
    products = 2 * layers * case.prompt
    unit = "fp8" if setup.quantization in ("fp8", "w4a8") else "bf16"
    attention = 2 * case.prompt**2 * config["hidden_size"] * config["num_hidden_layers"]
    flops = bench.roofs.flops
    return products / flops[unit] + attention / flops["bf16"]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def gaps_of(outputs: list[RequestOutput]) -> list[float]:
    return [gap for each in outputs for gap in each.metrics.inter_token]


def run(llm: LLM, prompts: list[list[int]], output: int) -> tuple[list[RequestOutput], float]:
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return outputs, time.perf_counter() - begin


def add(bench: Bench, setup: Setup, case: str, fields: dict[str, Any]) -> None:
    row = {"bench": "llm", "impl": "ridgeline", "case": case, "options": setup.name}
    bench.add(row | fields | bench.machine())


def measure(bench: Bench, llm: LLM, case: Case, config: dict[str, Any], setup: Setup) -> None:
    prompts = case.prompts(config["vocab_size"], seed=1)
    run(llm, case.prompts(config["vocab_size"], seed=0), min(case.output, WARM_OUTPUT))
    names = [case.name]
    if case.shared:  # the second time everything but the last tokens of a prompt is cached
        names.append(f"{case.name}_warm")
    for name in names:
        outputs, seconds = run(llm, prompts, case.output)
        for i in range(REPEATS if case.output == 1 else 0):
            outputs += run(llm, case.prompts(config["vocab_size"], seed=2 + i), case.output)[0]
        ttft = statistics.median(o.metrics.ttft or 0.0 for o in outputs)
        row = {
            "requests": case.requests,
            "prompt": case.prompt,
            "output": case.output,
            "tok_s": round(case.requests * case.output / seconds, 1),
            "seconds": round(seconds, 4),
            "ttft_ms": round(1e3 * ttft, 3),
        }
        gaps = gaps_of(outputs)
        if gaps:
            itl = statistics.median(gaps)
            row["itl_ms_p50"] = round(1e3 * itl, 4)
            row["itl_ms_p99"] = round(1e3 * percentile(gaps, 0.99), 4)
            row["mbu"] = round(step_floor(bench, case, config, setup) / itl, 4)
        else:
            row["mfu"] = round(prompt_floor(bench, case, config, setup) / ttft, 4)
        add(bench, setup, name, row)


def measure_stall(
    bench: Bench, llm: LLM, stall: Stall, config: dict[str, Any], setup: Setup
) -> None:
    """The gaps between tokens alone, and while another thread's long prompt is computed."""
    vocab = config["vocab_size"]
    short = Case("", stall.requests, stall.prompt, stall.output)
    long = Case("", 1, stall.long_prompt, 1)
    run(llm, long.prompts(vocab, seed=2), 1)
    run(llm, short.prompts(vocab, seed=0), WARM_OUTPUT)
    alone, _ = run(llm, short.prompts(vocab, seed=1), stall.output)
    other: list[float] = []

    def both(seed: int) -> list[RequestOutput]:
        def interrupt() -> None:
            time.sleep(2 * stall.requests * statistics.median(gaps_of(alone)))
            outputs, _ = run(llm, long.prompts(vocab, seed=seed + 1), 1)
            other.append(outputs[0].metrics.ttft or 0.0)

        thread = threading.Thread(target=interrupt)
        thread.start()
        beside, _ = run(llm, short.prompts(vocab, seed=seed), stall.output)
        thread.join()
        return beside

    both(seed=3)  # captures the graphs of steps of both
    beside = both(seed=5)
    before, during = gaps_of(alone), gaps_of(beside)
    row = {
        "requests": stall.requests,
        "prompt": stall.prompt,
        "output": stall.output,
        "long_prompt": stall.long_prompt,
        "ttft_ms": round(1e3 * other[-1], 3),
        "alone_itl_ms_p50": round(1e3 * statistics.median(before), 4),
        "itl_ms_p50": round(1e3 * statistics.median(during), 4),
        "itl_ms_p99": round(1e3 * percentile(during, 0.99), 4),
        "itl_ms_max": round(1e3 * max(during), 4),
    }
    add(bench, setup, "stall", row)


def measure_start(
    bench: Bench, llm: LLM, begin: float, config: dict[str, Any], setup: Setup
) -> None:
    """Seconds until requests are served, and until the graphs of up to 64 rows are captured."""
    started = time.perf_counter() - begin
    rows = 64 if bench.device != "cpu" else 4
    prompts = Case("", rows, 4, 1).prompts(config["vocab_size"], seed=5)
    # Outputs of 2, 4, 6 ... tokens: the batch shrinks through all sizes.
    params = [
        SamplingParams(max_tokens=2 * i, temperature=0.0, ignore_eos=True)
        for i in range(1, rows + 1)
    ]
    llm.generate(prompts, params)
    captured = time.perf_counter() - begin
    fields = {"rows": rows, "start_s": round(started, 3), "captured_s": round(captured, 3)}
    add(bench, setup, "start", fields | {"graphs": llm.stats().graphs})


def main() -> None:
    bench = Bench.from_args(__doc__)
    on_gpu = bench.device != "cpu"
    config = LLAMA_8B if on_gpu else SMALL
    sizes: dict[str, Any] = {"num_blocks": 64}
    if on_gpu:
        sizes = {"max_model_len": 33024, "max_num_seqs": 512}
    for setup in CPU if not on_gpu else FAST if bench.quick else FULL:
        begin = time.perf_counter()
        with LLM.from_config(config, device=bench.device, **sizes, **setup.options) as llm:
            measure_start(bench, llm, begin, config, setup)
            for case in setup.cases:
                measure(bench, llm, case, config, setup)
            if setup.stall is not None:
                measure_stall(bench, llm, setup.stall, config, setup)
        if on_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
