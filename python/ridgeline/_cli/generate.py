"""``ridgeline generate``."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from ridgeline.llm import LLM
from ridgeline.outputs import RequestOutput
from ridgeline.progress import ProgressBar
from ridgeline.sampling_params import SamplingParams


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="complete prompts with a model",
        description="Completes each prompt. Text goes to stdout, everything else to stderr; the "
        "last line gives the speed of prefill and of decode.",
    )
    add = parser.add_argument
    add("prompts", nargs="+", metavar="PROMPT", help='text; "-": read stdin')
    add("--model", required=True, help="a folder in Hugging Face layout, or a GGUF file")
    add(
        "--max-tokens",
        default=128,
        help="the most tokens of a text (%(default)s)",
        type=int,
        metavar="N",
    )
    add("--temperature", type=float, default=0.7, metavar="T",
        help="0: always the likeliest token (%(default)s)")  # fmt: skip
    add(
        "--top-k",
        default=0,
        help="choose among the N likeliest tokens; 0: all",
        type=int,
        metavar="N",
    )
    add("--top-p", type=float, default=0.95, metavar="P",
        help="choose among the likeliest tokens that hold P of the mass (%(default)s)")  # fmt: skip
    add("--seed", default=0, help="of sampling (%(default)s)", type=int, metavar="N")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends a text; repeatable")
    add("--stream", action="store_true", help="print text as it comes, one prompt at a time")
    add("--device", help="cpu, cuda or cuda:N; without it CUDA if it can be used")
    add("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    add(
        "--quantization",
        help="int4, w4a8, fp8 or int8: the weights, while loading; of MXFP4 fp8",
        metavar="KIND",
    )
    add("--kv-cache-dtype", default="auto", metavar="KIND", help="auto, fp8 or int8")
    add(
        "--max-model-len",
        help="the most tokens of a prompt and its text together",
        type=int,
        metavar="N",
    )
    add("--trace", metavar="FILE", help="write the scheduler's decisions there as JSON lines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The exit code: 1 if what a step of some prompt raised has ended its text."""
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=options.stop,
    )
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in options.prompts]
    start = time.perf_counter()
    with LLM(
        options.model,
        device=options.device,
        dtype=options.dtype,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        max_model_len=options.max_model_len,
        trace=options.trace,
        progress=sys.stderr.isatty(),
    ) as llm:
        loaded = time.perf_counter() - start
        print(f"loaded {options.model} in {loaded:.1f} s", file=sys.stderr)
        outputs = _stream(llm, prompts, params) if options.stream else _bar(llm, prompts, params)
    print(_summary(outputs), file=sys.stderr)
    failed = [(i, output.error) for i, output in enumerate(outputs) if output.error is not None]
    for i, error in failed:
        print(f"ridgeline: error: prompt {i}: {error!r}", file=sys.stderr)
    return 1 if failed else 0


def _stream(llm: LLM, prompts: list[str], params: SamplingParams) -> list[RequestOutput]:
    """One prompt after the other, so that the texts do not mix."""
    outputs = []
    for prompt in prompts:
        print(prompt, end="", flush=True)
        for piece in llm.stream(prompt, params):
            print(piece.text, end="", flush=True)
            if piece.request is not None:
                outputs.append(piece.request)
        print()
    return outputs


def _bar(llm: LLM, prompts: list[str], params: SamplingParams) -> list[RequestOutput]:
    """All prompts together behind a progress bar, then their texts."""
    assert params.max_tokens is not None
    bar = ProgressBar(len(prompts), tokens=len(prompts) * params.max_tokens)
    try:
        outputs = llm.generate(prompts, params, progress=bar.update)
    finally:
        bar.close()
    for output in outputs:
        print(f"{output.prompt}{output.outputs[0].text}")
    return outputs


def _summary(outputs: list[RequestOutput]) -> str:
    """Prefill and decode speed apart, each over the time in which some request did it."""
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    decoded = sum(max(len(output.outputs[0].token_ids) - 1, 0) for output in outputs)
    begun = [m for m in _metrics(outputs) if m.first_token_time is not None]
    prefill = _covered([(m.first_scheduled_time, m.first_token_time) for m in begun])
    decode = _covered([(m.first_token_time, m.finished_time) for m in begun])
    return (
        f"prefill: {prompt_tokens} tokens, {_rate(prompt_tokens, prefill)}; "
        f"decode: {decoded} tokens, {_rate(decoded, decode)}"
    )


def _metrics(outputs: list[RequestOutput]) -> list[Any]:
    return [output.metrics for output in outputs]


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tokens/s" if tokens and seconds > 0 else "no time"
