"""What ``LLM`` gives back, against transformers and against itself asked in another way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import tiny_model
from ridgeline import LLM, RequestOutput, SamplingParams
from ridgeline.kv_cache import KVCache
from ridgeline.models.decoder import Decoder, StepInputs
from tiny_model import one_thread  # noqa: F401

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DEMO = Path(__file__).parent.parent / "models" / "demo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def reference(folder: Path):
    tiny_model.save_tokenizer(folder)
    return tiny_model.save_llama(folder)


@pytest.fixture(scope="module")
def llm(folder: Path, reference):
    with LLM(folder, device="cpu", block_size=16, max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm: LLM):
    yield
    stats = llm.stats()
    assert (stats.used_blocks, stats.running, stats.waiting, stats.in_flight) == (0, 0, 0, 0)
    llm._parts.core.scheduler.check_invariants()


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])  # around the block size, and long
def test_greedy_output_is_that_of_transformers(llm: LLM, reference, length: int):
    prompt = tiny_model.prompt_of(length)
    (output,) = llm.generate(prompt, GREEDY)
    assert output.outputs[0].token_ids == tiny_model.greedy(reference, prompt, 24)
    assert output.prompt_token_ids == prompt and output.prompt is None


@pytest.mark.skipif(not (DEMO / "config.json").exists(), reason="no bundled model")
def test_greedy_output_of_the_bundled_model_is_that_of_transformers():
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    prompts = ["def fibonacci(n):\n", "import os\n\nclass Path", "# naïve – 日本"]
    with LLM(DEMO, device="cpu", max_num_seqs=4) as llm:
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48)):
            ids = tokenizer(output.prompt)["input_ids"]
            assert output.prompt_token_ids == ids
            got = output.outputs[0].token_ids
            assert got == tiny_model.greedy(model, ids, len(got))
            assert output.outputs[0].text == tokenizer.decode(got, skip_special_tokens=True)


def test_text_goes_in_and_comes_out(llm: LLM, folder: Path, reference):
    prompt = "the quick brown"
    (output,) = llm.generate(prompt, GREEDY)
    tokenizer = llm._parts.tokenizer
    assert output.prompt == prompt
    assert output.prompt_token_ids == next(tokenizer.encode([prompt]))
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)
    assert output.outputs[0].text != ""


def test_results_are_in_the_order_of_the_prompts(llm: LLM):
    prompts = [tiny_model.prompt_of(1 + i % 30, i) for i in range(30)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 7) for i in range(30)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [llm.generate(p, q)[0].outputs[0].token_ids for p, q in zip(prompts, params)] == (
        tokens_of(outputs)
    )


def test_no_prompts_give_no_outputs(llm: LLM):
    assert llm.generate([]) == []
    assert list(llm.stream([])) == []


def test_streamed_pieces_join_to_the_generated_output(llm: LLM):
    prompts = ["the quick", "def main", tiny_model.prompt_of(20)]
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=20, logprobs=1)
    outputs = llm.generate(prompts, params)
    pieces = list(llm.stream(prompts, params))
    for i, output in enumerate(outputs):
        for completion in output.outputs:
            own = [p for p in pieces if (p.prompt_index, p.index) == (i, completion.index)]
            assert "".join(p.text for p in own) == completion.text
            assert sum((p.token_ids for p in own), []) == completion.token_ids
            logprobs = sum((p.logprobs for p in own), [])
            assert list(map(set, logprobs)) == list(map(set, completion.logprobs))
            reasons = [p.finish_reason for p in own]
            assert reasons == [None] * (len(own) - 1) + [completion.finish_reason]
        (final,) = [p.request for p in pieces if p.prompt_index == i and p.request is not None]
        assert [o.token_ids for o in final.outputs] == [o.token_ids for o in output.outputs]


def test_streaming_yields_before_the_end(llm: LLM):
    stream = llm.stream(tiny_model.prompt_of(5), GREEDY)
    first = next(stream)
    assert len(first.token_ids) == 1 and first.finish_reason is None
    stream.close()


def test_two_streams_may_be_open_at_once(llm: LLM):
    alone = tokens_of(llm.generate([tiny_model.prompt_of(9), tiny_model.prompt_of(12)], GREEDY))
    streams = [llm.stream(tiny_model.prompt_of(n), GREEDY) for n in (9, 12)]
    mixed: list[list[int]] = [[], []]
    for pieces in zip(*streams):
        for tokens, piece in zip(mixed, pieces):
            tokens += piece.token_ids
    assert mixed == alone


@pytest.mark.parametrize("n", [2, 5])
def test_n_outputs_are_independent_samples(llm: LLM, n: int):
    prompt = tiny_model.prompt_of(21)
    params = SamplingParams(n=n, temperature=1.5, seed=7, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate(prompt, params)
    assert [completion.index for completion in output.outputs] == list(range(n))
    texts = {tuple(completion.token_ids) for completion in output.outputs}
    assert len(texts) == n
    (alone,) = llm.generate(
        prompt, SamplingParams(temperature=1.5, seed=7, max_tokens=12, ignore_eos=True)
    )
    assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    (greedy,) = llm.generate(prompt, SamplingParams(n=n, temperature=0, max_tokens=12))
    assert len({tuple(completion.token_ids) for completion in greedy.outputs}) == 1


def test_a_seed_fixes_the_tokens_whatever_runs_beside(llm: LLM):
    prompt = tiny_model.prompt_of(10)
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=16, ignore_eos=True)
    alone = tokens_of(llm.generate(prompt, params))[0]
    others = [tiny_model.prompt_of(5 + i, i) for i in range(5)]
    loud = SamplingParams(temperature=2.0, max_tokens=9)
    beside = tokens_of(llm.generate([*others, prompt], [loud] * 5 + [params]))[-1]
    assert beside == alone
    other_seed = SamplingParams(temperature=1.0, seed=12, max_tokens=16, ignore_eos=True)
    assert tokens_of(llm.generate(prompt, other_seed))[0] != alone


def test_the_seed_of_the_llm_fixes_requests_without_one(folder: Path, reference):
    def sample(seed: int) -> list[list[int]]:
        with LLM(folder, device="cpu", num_blocks=8, max_num_seqs=2, seed=seed) as llm:
            return tokens_of(llm.generate([[5], [5]], SamplingParams(max_tokens=12)))

    first = sample(1)
    assert first == sample(1) and first != sample(2)
    assert first[0] != first[1]


def test_top_k_of_one_is_greedy(llm: LLM):
    prompt = tiny_model.prompt_of(8)
    params = SamplingParams(temperature=1.0, top_k=1, max_tokens=24, ignore_eos=True)
    assert tokens_of(llm.generate(prompt, params)) == tokens_of(llm.generate(prompt, GREEDY))


def test_metrics_are_in_order(llm: LLM):
    (output,) = llm.generate(tiny_model.prompt_of(30), GREEDY)
    metrics = output.metrics
    assert len(metrics.token_times) == 24 and len(metrics.inter_token) == 23
    assert "token_times" not in repr(metrics)  # a page of numbers
    assert metrics.token_times == sorted(metrics.token_times)
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time]
    assert times == sorted(times) and metrics.finished_time == metrics.token_times[-1]
    assert metrics.queue + metrics.prefill == pytest.approx(metrics.ttft)
    assert metrics.decode == pytest.approx(sum(metrics.inter_token))


def test_steps_of_whole_prompts_ask_the_last_layer_for_their_ends(folder: Path, monkeypatch):
    """Not those of a chunk, nor where a prompt's other tokens are wanted too."""
    told: list[tuple[int, bool]] = []
    plain = Decoder.hidden_states

    def noting(self: Decoder, inputs: StepInputs, cache: KVCache) -> torch.Tensor:
        told.append((inputs.input_ids.shape[0], inputs.rows_are_ends))
        return plain(self, inputs, cache)

    monkeypatch.setattr(Decoder, "hidden_states", noting)
    first = SamplingParams(temperature=0, max_tokens=1)
    sizes = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    with LLM(folder, device="cpu", **sizes) as llm:
        told.clear()  # those of the start
        llm.generate([tiny_model.prompt_of(20), tiny_model.prompt_of(31)], first)
        llm.generate([tiny_model.prompt_of(70)], first)
        llm.generate([tiny_model.prompt_of(9)], dataclasses.replace(first, prompt_logprobs=0))
    assert told == [(51, True), (64, False), (6, True), (9, False)]


def test_the_trace_has_every_decision(folder: Path, reference, tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    with LLM(folder, device="cpu", num_blocks=8, max_num_seqs=2, trace=path) as llm:
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=3, ignore_eos=True))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["seq_ids"] for line in lines if line["event"] == "added"] == [[0], [1]]
    decisions = [line for line in lines if "index" in line]
    assert [line["index"] for line in decisions] == list(range(len(decisions)))
    assert {"admitted", "finished"} <= {line["event"] for line in decisions}


def test_close_gives_the_memory_back(folder: Path, reference):
    import gc
    import weakref

    llm = LLM(folder, device="cpu", num_blocks=8, max_num_seqs=2)
    llm.generate([1, 2], GREEDY)
    stream = llm.stream([1, 2], GREEDY)
    next(stream)
    runner = llm._parts.runner
    kept = [weakref.ref(t) for t in (runner._cache.k[0], runner._model.embedding)]
    del runner
    llm.close()
    llm.close()
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
    stream.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([1])
    with pytest.raises(RuntimeError, match="closed"):
        llm.stats()


def test_an_object_that_is_dropped_gives_its_memory_back(folder: Path, reference):
    import gc
    import weakref

    llm = LLM(folder, device="cpu", num_blocks=8, max_num_seqs=2)
    kept = weakref.ref(llm._parts.runner._model.embedding)
    del llm
    gc.collect()
    assert kept() is None
