"""Drop-in use: a transformers model as it is, after ``optimize_``, and quantised; an encoder's MLP;
a mixture's experts.

The decoder has the shapes of Llama-3.1-8B and random weights, made on the device (on the CPU: a
small one of its kind). ``eager``: ``generate()`` as it comes, prompt included. ``graphs``: the same
over a static cache with ``DecodeGraphs``. ``step``: one step of decoding over a static cache as one
CUDA graph, greedy on the device. ``prefill``: one forward of a whole prompt. ``--compile`` adds
torch.compile's ``generate()``, which takes about half a minute a row to build. Experts are a layer
of Qwen3-30B-A3B's, by the functions that transformers has and by ours.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bench_llm import LLAMA_8B, SMALL
from ridgeline import optimize_, quantize_
from ridgeline.roofline import Cost
from timer import Bench, compiled

Model: TypeAlias = Any  # a LlamaForCausalLM: transformers is imported where it is installed


def make_model(device: str, layers: int | None) -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(SMALL if device == "cpu" else LLAMA_8B)
    for key in ("architectures", "model_type", "torch_dtype"):
        del shape[key]
    if layers is not None:
        shape["num_hidden_layers"] = layers
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16)
    return model.eval()


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median over calls; the first is not counted."""
    times = []
    for _ in range(repeats + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def generate(model: Model, prompt: Tensor, tokens: int, **options: Any) -> None:
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )


def captured_step(model: Model, prompt: Tensor, tokens: int) -> Callable[[], None]:
    """A greedy step over a static cache as one graph, after the prompt."""
    from transformers import StaticCache

    length = prompt.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=length + tokens + 8)
    token = model(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
    position = torch.full((1, 1), length, device=prompt.device)

    def step() -> None:
        out = model(token, past_key_values=cache, position_ids=position, logits_to_keep=1)
        token.copy_(out.logits[:, -1:].argmax(-1))
        position.add_(1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure_batch(bench: Bench, model: Model, impl: str, batch: int, compile_too: bool) -> None:
    cuda = bench.device != "cpu"
    length, tokens = (128, 32 if bench.quick else 64) if cuda else (8, 4)
    prompt = torch.randint(model.config.vocab_size, (batch, length), device=bench.device)

    def add(mode: str, taken: float, count: int) -> None:
        row = {"bench": "transformers", "impl": impl, "mode": mode, "batch": batch}
        row |= {"prompt": length, "output": tokens, "tok_s": round(batch * count / taken, 1)}
        bench.add(row | {"ms": round(1e3 * taken / count, 3)} | bench.machine())

    add("eager", seconds(lambda: generate(model, prompt, tokens), 2), tokens)
    if cuda:
        from ridgeline.integrations.transformers import DecodeGraphs

        graphs, static = DecodeGraphs(model), {"cache_implementation": "static"}
        generate(model, prompt, tokens, **static, disable_compile=True)
        taken = seconds(lambda: generate(model, prompt, tokens, **static, disable_compile=True), 2)
        add("graphs", taken, tokens)
        graphs.undo()
        replay, count = captured_step(model, prompt, tokens), tokens // 4
        add("step", seconds(lambda: [replay() for _ in range(count)], 3), count)
    if compile_too and cuda:
        from transformers import CompileConfig

        options = {"cache_implementation": "static", "compile_config": CompileConfig()}
        generate(model, prompt, tokens, **options)  # the second call still records graphs
        add("compile", seconds(lambda: generate(model, prompt, tokens, **options), 2), tokens)
        torch._dynamo.reset()


def measure_decoder(bench: Bench, model: Model, impl: str, compile_too: bool) -> None:
    for batch in (1, 32):
        measure_batch(bench, model, impl, batch, compile_too and batch == 1)
    length = 4096 if bench.device != "cpu" else 64
    prompt = torch.randint(model.config.vocab_size, (1, length), device=bench.device)
    taken = seconds(lambda: model(prompt, logits_to_keep=1), 3)
    row = {"bench": "transformers", "impl": impl, "mode": "prefill", "batch": 1, "prompt": length}
    bench.add(row | {"ttft_ms": round(1e3 * taken, 3)} | bench.machine())


def measure_encoder(bench: Bench) -> None:
    """The MLP and norms of BERT-large: a linear layer, GELU, one more, and LayerNorm with GELU."""
    rows, dim = (8192, 1024) if bench.device != "cpu" else (16, 32)

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        block = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, 4 * dim),
            nn.GELU(),
            nn.Linear(4 * dim, dim),
            nn.LayerNorm(dim),
            nn.GELU(),
        )
        return block.to(bench.device, torch.bfloat16).eval()

    plain, ours = make(), make()
    optimize_(ours)
    weights = sum(p.nbytes for p in plain.parameters())
    cost = Cost(bytes=weights + 2 * 2 * rows * dim, flops=2 * rows * 8 * dim * dim, unit="bf16")

    def inputs() -> list[Tensor]:
        return [torch.randn(rows, dim, device=bench.device, dtype=torch.bfloat16)]

    bench.compare(
        op="encoder_mlp",
        calls={"torch_eager": plain, "torch_compile": compiled(plain), "ridgeline": ours},
        make=inputs,
        cost=cost,
        fields={"dtype": "bf16", "rows": rows, "cols": dim},
        launches=5,
    )


def measure_experts(bench: Bench, tokens: int) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    count, chosen, hidden, inner = (128, 8, 2048, 768) if bench.device != "cpu" else (8, 2, 64, 48)
    config = Qwen3MoeConfig(num_experts=count, hidden_size=hidden, moe_intermediate_size=inner)
    with torch.device(bench.device):
        experts = Qwen3MoeExperts(config).to(torch.bfloat16)
    for weight in experts.parameters():
        weight.normal_(std=0.02)
    draw = torch.Generator().manual_seed(tokens)
    choice = torch.rand(tokens, count, generator=draw).topk(chosen).indices
    touched = len(choice.unique())
    of_one = sum(weight[0].nbytes for weight in experts.parameters())
    cost = Cost(
        bytes=touched * of_one + 2 * 2 * tokens * hidden,
        flops=2 * tokens * chosen * 3 * hidden * inner,
        unit="bf16",
    )

    def inputs() -> list[Tensor]:
        """Other experts each time: the same ones would be read from L2."""
        names = torch.randperm(count, generator=draw)
        x = torch.randn(tokens, hidden, device=bench.device, dtype=torch.bfloat16)
        shares = torch.rand(tokens, chosen, device=bench.device, dtype=torch.bfloat16)
        return [x, names[choice].to(bench.device), shares]

    def by(implementation: str) -> Callable[..., Tensor]:
        def call(*given: Tensor) -> Tensor:
            config._experts_implementation = implementation
            return experts(*given)

        return call

    theirs = ["grouped_mm"] + ["batched_mm"] * (tokens <= 8)  # copies the weights of each choice
    bench.compare(
        op="transformers_experts",
        calls={implementation: by(implementation) for implementation in (*theirs, "ridgeline")},
        make=inputs,
        cost=cost,
        fields={"dtype": "bf16", "tokens": tokens, "experts": count, "chosen": chosen}
        | {"K": hidden, "inner": inner, "touched": touched},
        launches=20 if tokens < 1024 else 5,
        touched=cost.bytes,
    )


@torch.inference_mode(False)
@torch.no_grad()
def main() -> None:
    arguments = sys.argv[1:]
    compile_too = "--compile" in arguments
    layers = next((int(a.removeprefix("--layers=")) for a in arguments if "--layers=" in a), None)
    rest = [a for a in arguments if a != "--compile" and not a.startswith("--layers=")]
    bench = Bench.from_args(__doc__, rest)
    measure_encoder(bench)
    if find_spec("transformers") is None:
        print("transformers is not installed: pip install ridgeline[test]")
        return
    from ridgeline.integrations.transformers import enable

    enable()
    numbers = [1, 64, 8192] if bench.quick else [1, 8, 64, 1024, 8192]
    for tokens in numbers if bench.device != "cpu" else [1, 64]:
        measure_experts(bench, tokens)
    model = make_model(bench.device, layers)
    measure_decoder(bench, model, "transformers", compile_too)
    done = optimize_(model)
    print(done)
    measure_decoder(bench, model, "ridgeline", compile_too)
    done.undo()
    for format in ("int4", "w4a8"):
        model = make_model(bench.device, layers)  # quantised for good
        print(quantize_(model, format))
        gc.collect()
        optimize_(model)
        measure_decoder(bench, model, f"ridgeline {format}", compile_too)


if __name__ == "__main__":
    main()
