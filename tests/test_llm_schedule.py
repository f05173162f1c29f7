"""A request's tokens do not depend on how its computation is cut, shared or interrupted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import tiny_model
from ridgeline import LLM, SamplingParams, ops
from ridgeline.graphs import GraphKey, StepGraphs, shared_bucket
from ridgeline.models.config import ModelConfig
from ridgeline.models.linear import DenseLinear
from ridgeline.models.weights import parameters
from ridgeline.runner import Runner
from tiny_model import one_thread  # noqa: F401

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=17, max_tokens=20, ignore_eos=True)
PROMPTS = [tiny_model.prompt_of(length) for length in (1, 16, 17, 60, 33, 5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_model.save_llama(folder)
    return folder


@contextmanager
def open_llm(folder: Path, **options) -> Iterator[LLM]:
    with LLM(folder, **({"device": "cpu", "block_size": 16, "max_num_seqs": 8} | options)) as llm:
        yield llm
        llm._parts.core.scheduler.check_invariants()
        assert llm.stats().used_blocks == 0


def tokens(llm: LLM, prompts, params) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module", params=[GREEDY, SEEDED], ids=["greedy", "seeded"])
def params(request: pytest.FixtureRequest) -> SamplingParams:
    return request.param


@pytest.fixture(scope="module")
def alone(folder: Path, params: SamplingParams) -> list[list[int]]:
    """Each prompt by itself, in one piece, without a prefix cache."""
    with open_llm(folder, enable_prefix_caching=False) as llm:
        return [tokens(llm, [prompt], params)[0] for prompt in PROMPTS]


def test_batched_is_alone(folder: Path, params, alone):
    with open_llm(folder) as llm:
        assert tokens(llm, PROMPTS, params) == alone


def test_chunked_is_whole(folder: Path, params, alone):
    with open_llm(folder, max_num_batched_tokens=8) as llm:
        assert tokens(llm, PROMPTS, params) == alone
        assert llm.stats().steps > sum(map(len, PROMPTS)) // 8


def test_preempted_is_not_preempted(folder: Path, params, alone):
    # The longest request takes 5 blocks of 16; all six together 18.
    with open_llm(folder, num_blocks=1 + 8) as llm:
        assert tokens(llm, PROMPTS, params) == alone
        assert llm.stats().preemptions > 0


def test_a_prefix_hit_is_a_miss(folder: Path, params, alone):
    with open_llm(folder) as llm:
        tokens(llm, PROMPTS, params)
        assert tokens(llm, PROMPTS, params) == alone
        assert llm.stats().prefix_hit_tokens >= 16 + 48 + 32


def test_shared_prefixes_are_computed_once(folder: Path):
    start = tiny_model.prompt_of(64)
    prompts = [start + tiny_model.prompt_of(3, i) for i in range(4)]
    with open_llm(folder, enable_prefix_caching=False) as llm:
        expected = tokens(llm, prompts, GREEDY)
    with open_llm(folder) as llm:
        assert tokens(llm, prompts, GREEDY) == expected
        assert llm.stats().prefix_hit_tokens == 3 * 64


class EagerGraphs(StepGraphs):
    """Runs what a graph would replay: padded steps, without a GPU."""

    def run(self, key: GraphKey, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.used = {*getattr(self, "used", ()), key}
        if hasattr(self, "lent"):
            self.lent.fill_(float("nan"))  # which another graph may write over
        self.lent = compute()
        return self.lent


def eager_graphs(runner: Runner) -> EagerGraphs:
    blocks, size = runner._limits.max_blocks_per_seq, runner._cache.block_size
    return EagerGraphs(8, 8192, blocks, size, 0, runner._model.embedding.device)


def test_a_short_sequence_alone_reads_few_columns(folder: Path, monkeypatch):
    """One longer than LONE_KEYS, and several, read whole tables; the tokens are the same."""
    with open_llm(folder) as llm:
        expected = tokens(llm, PROMPTS, GREEDY)
    with open_llm(folder) as llm:
        runner = llm._parts.runner
        runner.asynchronous = True
        monkeypatch.setattr("ridgeline.graphs.LONE_KEYS", 48)
        runner._graphs = eager_graphs(runner)
        assert [tokens(llm, prompt, GREEDY)[0] for prompt in PROMPTS] == expected
        widths = {key.blocks for key in runner._graphs.used if key.seqs == 1}
        size, whole = runner._cache.block_size, runner._limits.max_blocks_per_seq
        assert widths == {48 // size, whole} and whole > 48 // size


def test_padded_decode_steps_are_those_without_padding(folder: Path, params, alone):
    with open_llm(folder) as llm:
        runner = llm._parts.runner
        runner.asynchronous = True
        runner._graphs = eager_graphs(runner)
        several = dataclasses.replace(params, n=2)
        assert tokens(llm, PROMPTS, params) == alone
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:3], several)] == alone[:3]
        assert tokens(llm, PROMPTS[0], params) == alone[:1]
        blocks = runner._limits.max_blocks_per_seq
        decode = {(8, 8, 8, 1, 0, blocks), (1, 1, 1, 1, 0, blocks)}
        mixed = {(32, 9, 8, 32, 0, blocks), (192, 9, 8, 192, 0, blocks)}
        assert runner._graphs.used >= decode | mixed


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "padded"])
def test_blocks_in_common_are_named_to_attention(folder: Path, graphs: bool, monkeypatch):
    """The op on the CPU checks that all sequences have them."""
    start = tiny_model.prompt_of(16 * 9)
    prompts = [start + tiny_model.prompt_of(3, i) for i in range(5)]
    with open_llm(folder, enable_prefix_caching=False) as llm:
        expected = tokens(llm, prompts, GREEDY)
    monkeypatch.setattr("ridgeline.runner._SPARED_BYTES", 1)
    given, attention = set(), ops.rope_paged_attention

    def noted(*args, shared_blocks, **options):
        given.add(shared_blocks)
        return attention(*args, shared_blocks=shared_blocks, **options)

    monkeypatch.setattr(ops, "rope_paged_attention", noted)
    with open_llm(folder) as llm:
        runner = llm._parts.runner
        if graphs:
            runner._graphs = eager_graphs(runner)
        assert tokens(llm, prompts, GREEDY) == expected
        assert given == {0, 8 if graphs else 9}  # a graph for 8, not for each count
    given.clear()
    with open_llm(folder, batch_invariant=True) as llm:
        assert tokens(llm, prompts, GREEDY) == expected
    assert given == {0}


def test_few_counts_of_blocks_get_a_graph():
    buckets = [shared_bucket(blocks) for blocks in range(2049)]
    assert all(0 <= n - bucket <= n / 5 for n, bucket in enumerate(buckets))
    assert len(set(buckets)) <= 8 + 4 * 8 + 1


@contextmanager
def open_ahead(folder: Path, **options) -> Iterator[LLM]:
    """Scheduled one step ahead, as on a GPU: a step's tokens are unknown when the next is cut."""
    with open_llm(folder, **options) as llm:
        llm._parts.runner.asynchronous = True
        yield llm
        assert llm.stats().in_flight == 0


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 8}, {"num_blocks": 1 + 8}],
    ids=["whole", "chunked", "preempted"],
)
def test_one_step_ahead_is_step_by_step(folder: Path, params, alone, options):
    with open_ahead(folder, **options) as llm:
        assert tokens(llm, PROMPTS, params) == alone
        assert tokens(llm, PROMPTS, params) == alone


def test_one_step_ahead_ends_and_counts_as_step_by_step(folder: Path):
    """Ends that only the commit finds, counts of tokens not seen yet, n outputs."""
    with open_llm(folder) as llm:
        stop = tokens(llm, PROMPTS[:1], GREEDY)[0][4]
        requests = [
            GREEDY,
            SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop]),
            SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.5, min_tokens=9),
            SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=20, frequency_penalty=1.0),
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, logprobs=1),
            SamplingParams(temperature=1.3, seed=8, max_tokens=9),
        ]
        expected = llm.generate(PROMPTS, requests)
    with open_ahead(folder) as llm:
        ahead = llm.generate(PROMPTS, requests)
    for a, b in zip(expected, ahead):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
        assert [o.finish_reason for o in a.outputs] == [o.finish_reason for o in b.outputs]
    assert len(ahead[4].prompt_logprobs) == len(PROMPTS[4])


@pytest.mark.parametrize("end", ["stop token", "abort"])
def test_nothing_stays_in_flight_when_the_last_request_ends_early(folder: Path, end: str):
    with open_ahead(folder) as llm:
        stop = tokens(llm, PROMPTS[0], GREEDY)[0][4]
        params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop])
        for piece in llm.stream(PROMPTS[0], params if end == "stop token" else GREEDY):
            if end == "abort":
                llm.abort(piece.request_id)
        assert llm.stats().in_flight == 0


def test_abort_one_step_ahead_leaves_the_others_alone(folder: Path, params, alone):
    with open_ahead(folder) as llm:
        got: list[list[int]] = [[] for _ in PROMPTS]
        for piece in llm.stream(PROMPTS, params):
            got[piece.prompt_index] += piece.token_ids
            if piece.prompt_index == 2 and len(got[2]) == 5 and piece.finish_reason is None:
                assert llm.abort(piece.request_id)
    assert got[2] == alone[2][:5]
    assert [g for i, g in enumerate(got) if i != 2] == [a for i, a in enumerate(alone) if i != 2]


def test_a_request_may_follow_an_abort_whose_step_is_still_in_flight(folder: Path, params, alone):
    with open_ahead(folder) as llm:
        first, second = llm.stream(PROMPTS[0], params), llm.stream(PROMPTS[1], params)
        piece, got = next(first), next(second).token_ids
        assert llm.stats().in_flight == 1 and llm.abort(piece.request_id)
        third = llm.stream(PROMPTS[2], params)
        assert [token for piece in third for token in piece.token_ids] == alone[2]
        assert got + [token for piece in second for token in piece.token_ids] == alone[1]


def test_n_outputs_are_those_of_n_requests_when_blocks_are_few(folder: Path):
    params = SamplingParams(n=3, temperature=1.2, seed=5, max_tokens=30, ignore_eos=True)
    with open_llm(folder) as llm:
        roomy = llm.generate(PROMPTS, params)
        assert llm.stats().copies > 0
    with open_llm(folder, num_blocks=1 + 12) as llm:
        tight = llm.generate(PROMPTS, params)
        assert llm.stats().preemptions > 0
    for a, b in zip(roomy, tight):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]


@pytest.mark.parametrize("block_size", [16, 48, 64, 256])
def test_the_block_size_changes_nothing(folder: Path, params, alone, block_size: int):
    with open_llm(folder, block_size=block_size) as llm:
        assert tokens(llm, PROMPTS, params) == alone


def test_batch_invariant_gives_the_same_logprobs_to_the_bit(folder: Path):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    with open_llm(folder, batch_invariant=True) as llm:
        together = llm.generate(PROMPTS, params)
        for prompt, output in zip(PROMPTS, together):
            (single,) = llm.generate(prompt, params)
            assert single.outputs[0].logprobs == output.outputs[0].logprobs


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_a_quantised_cache_stays_near(folder: Path, kv_cache_dtype: str):
    """Log-probabilities move, but little; copies and preemption take the scales along."""
    prompt = tiny_model.prompt_of(40)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with open_llm(folder) as llm:
        exact = llm.generate(prompt, params)[0].prompt_logprobs[1:]
    with open_llm(folder, kv_cache_dtype=kv_cache_dtype) as llm:
        near = llm.generate(prompt, params)[0].prompt_logprobs[1:]
        roomy = llm.generate(PROMPTS, SamplingParams(n=2, seed=3, max_tokens=20))
    moved = [
        abs(a[token].logprob - b[token].logprob) for token, a, b in zip(prompt[1:], exact, near)
    ]
    assert 0 < sum(moved) / len(moved) < 0.5
    with open_llm(folder, kv_cache_dtype=kv_cache_dtype, num_blocks=1 + 10) as llm:
        tight = llm.generate(PROMPTS, SamplingParams(n=2, seed=3, max_tokens=20))
        assert llm.stats().preemptions > 0
    same = [
        a.outputs[i].token_ids == b.outputs[i].token_ids
        for a, b in zip(roomy, tight) for i in range(2)
    ]  # fmt: skip
    assert all(same)


class RoundedInputs(DenseLinear):
    """Multiplies what codes of each token stand for."""

    quantize = staticmethod(ops.quantize_fp8)

    def __call__(self, x, activation=None, *, norm=None, residual=None):
        codes, scale = self.quantize(x if norm is None else norm(x))
        return super().__call__(codes.float() * scale.view(-1, 1), activation, residual=residual)


class RoundedToInt8(RoundedInputs):
    quantize = staticmethod(ops.quantize_int8)


@pytest.mark.parametrize(
    ("quantization", "hidden", "inner"),
    [
        *(("int4", 128, 256), ("int4", 64, 96), ("w4a8", 128, 256), ("w4a8", 64, 96)),
        *(("fp8", 128, 256), ("int8", 128, 256)),
    ],
)
def test_quantised_weights_give_what_their_dequantised_values_give(
    tmp_path: Path, quantization: str, hidden: int, inner: int
):
    """Of int4 also where 128 does not divide the columns: groups of 64 and of 32."""
    tiny_model.save_llama(tmp_path, hidden_size=hidden, intermediate_size=inner)
    prompt = tiny_model.prompt_of(30)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with open_llm(tmp_path, quantization=quantization) as llm:
        quantised = llm.generate(prompt, params)[0].prompt_logprobs[1:]
        layers = llm._parts.runner._model.layers
        for layer in layers:
            for name in ("qkv", "output", "up", "down"):
                linear = getattr(layer, name)
                if quantization in ("int4", "w4a8"):
                    group, columns = linear.weight.group, linear.weight.K
                    assert group == {128: 128, 256: 128, 64: 64, 96: 32}[columns]
                    weight = linear.weight.dequantize().float()
                else:
                    weight = linear.weight.float() * linear.scale.view(-1, 1)
                kinds = {None: DenseLinear, "fp8": RoundedInputs, "int8": RoundedToInt8}
                same = kinds[linear.codes](weight, linear.bias)
                object.__setattr__(layer, name, same)
        dense = llm.generate(prompt, params)[0].prompt_logprobs[1:]
    # An input between two codes may fall to either. Inputs that are not rounded move it by 0.8.
    bound = 5e-3 if quantization == "int4" else 5e-2
    for token, a, b in zip(prompt[1:], quantised, dense):
        assert a[token].logprob == pytest.approx(b[token].logprob, abs=bound)


def test_every_parameter_of_the_spec_is_named_once(folder: Path):
    names = [q.name for p in parameters(ModelConfig.from_path(folder)) for q in p.parts]
    assert len(names) == len(set(names))
