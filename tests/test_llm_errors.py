"""Bad input is refused with names and numbers, and nothing is lost: the next request works."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_model
from ridgeline import LLM, SamplingParams
from ridgeline._C import FairLock
from ridgeline.core import Core
from ridgeline.outputs import RequestOutput
from ridgeline.request import Request, Sequence
from ridgeline.sampler import Sampler
from tiny_model import one_thread  # noqa: F401

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_model.save_llama(folder)
    tiny_model.save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def shared(folder: Path):
    options = {"device": "cpu", "block_size": 16, "max_num_seqs": 4, "max_model_len": 64}
    with LLM(folder, **options) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM):
    """Afterwards everything is free and a request still gives what it gave before."""
    before = shared.generate([3, 4, 5], GREEDY)[0].outputs[0].token_ids
    yield shared
    stats = shared.stats()
    assert (stats.used_blocks, stats.running, stats.waiting, stats.in_flight) == (0, 0, 0, 0)
    assert not shared._parts.core._requests and not shared._parts.core._sequences
    assert not shared._parts.runner.sampling._extras
    assert shared.generate([3, 4, 5], GREEDY)[0].outputs[0].token_ids == before


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt"),
        ("", "prompt"),
        ([1, tiny_model.VOCAB], rf"{tiny_model.VOCAB}"),
        ([1, -1], "-1"),
        ([1, 2**63], "expected token ids, got one of over 64 bits"),
        (tiny_model.prompt_of(64), "64"),
        (tiny_model.prompt_of(1000), "1000.*64"),
    ],
    ids=["none", "no text", "above the vocabulary", "negative", "huge", "no room left", "too long"],
)
def test_a_prompt_that_cannot_be_served_is_refused(llm: LLM, prompt: Any, message: str):
    good = tiny_model.prompt_of(5)
    with pytest.raises(ValueError, match=message):
        llm.generate([prompt] if prompt == [] else prompt)
    with pytest.raises(ValueError, match=f"prompt 1: .*{message}"):
        llm.generate([good, prompt, good])


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        5,
        b"bytes",
        [b"bytes"],
        {1, 2},
        [{1, 2}],
        torch.tensor([1.5]),
        torch.tensor(3),
        {"a": 1},
        [{1: 2}],
        [1, "a"],
        [[1.5]],
        [["a"]],
        [None],
        [[True]],
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any):
    with pytest.raises(TypeError, match="must be"):
        llm.generate(prompts)


def test_arrays_of_tokens_are_prompts(llm: LLM):
    """Of one dimension one prompt, of two one a row."""
    expected = llm.generate([[3, 4, 5], [6, 7, 8]], GREEDY)
    both = llm.generate(torch.tensor([[3, 4, 5], [6, 7, 8]]), GREEDY)
    one = llm.generate(torch.tensor([3, 4, 5]), GREEDY)
    assert [o.prompt_token_ids for o in [*both, *one]] == [[3, 4, 5], [6, 7, 8], [3, 4, 5]]
    assert [o.outputs for o in [*both, *one]] == [o.outputs for o in [*expected, expected[0]]]


@pytest.mark.parametrize("messages", [None, 5, {"role": "user", "content": "x"}])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any):
    with pytest.raises(TypeError, match="messages must be a conversation or a list of them, got"):
        llm.chat(messages, chat_template="x")


def test_a_progress_that_cannot_be_called_is_refused(llm: LLM, folder: Path):
    with pytest.raises(TypeError, match="progress must be a bool or a function, got 'x'"):
        llm.generate([1], progress="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="progress must be a bool or a function, got 1"):
        LLM(folder, progress=1)  # type: ignore[arg-type]


def test_text_that_is_no_unicode_is_refused(llm: LLM):
    with pytest.raises(ValueError, match=r"'a\\ud800' is not Unicode text: .* position 1"):
        llm.generate(["fine", "a\ud800"])
    with pytest.raises(ValueError, match="is not Unicode text"):
        llm.generate([1], SamplingParams(bad_words="a\ud800"))


def test_a_prompt_larger_than_the_cache_is_refused_with_the_numbers(folder: Path):
    with LLM(folder, device="cpu", block_size=16, num_blocks=3, max_model_len=128) as llm:
        with pytest.raises(ValueError, match=r"\b2\b"):
            llm.generate(tiny_model.prompt_of(60))
        assert len(llm.generate([1, 2], GREEDY)[0].outputs[0].token_ids) == 12


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([SamplingParams()], ValueError, "params must be one, or one for each of 2"),
        ("x", TypeError, "params must be SamplingParams"),
        ({"n": 1}, TypeError, "params must be SamplingParams"),
        (SamplingParams(stop_token_ids=[9999]), ValueError, r"stop_token_ids.*384.*\[9999\]"),
        (SamplingParams(logit_bias={384: 1}), ValueError, r"logit_bias.*384.*\[384\]"),
        (SamplingParams(n=5), ValueError, "5"),
    ],
)
def test_params_that_do_not_fit_are_refused(llm: LLM, params: Any, error: type, message: str):
    with pytest.raises(error, match=message):
        llm.generate([[1], [2]], params)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dtype": "float64"}, "dtype must be one of 'auto', 'float32'.*got 'float64'"),
        ({"device": "tpu"}, "device must be"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used"),
        ({"block_size": 24}, "block_size must be one of 16, 32.*got 24"),
        ({"seed": 2**63}, r"seed must be below 2\*\*63, got 9223372036854775808"),
        ({"trace": Path(__file__).parent}, "trace must be a file, got the folder"),
        ({"max_model_len": 513}, r"max_model_len must be at most .*\(512\), got 513"),
        ({"max_model_len": 0}, "max_model_len must be at least 2, got 0"),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be in \(0, 1\], got 0"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization must be"),
        ({"num_blocks": 1}, "num_blocks must be at least 2, got 1"),
        ({"num_blocks": 1 << 40}, "num_blocks and max_num_batched_tokens: .* must fit into"),
        ({"max_num_batched_tokens": 1 << 40}, "max_num_batched_tokens: .* must fit into"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_num_batched_tokens": 100}, r"at least max_num_seqs \(256\), got 100"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        (
            {"quantization": "int3"},
            "quantization must be one of None, 'int4', 'w4a8', 'fp8', 'int8', got 'int3'",
        ),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype must be one of 'auto', 'fp8', 'int8'"),
        ({"load_format": "pickle"}, "load_format must be one of"),
    ],
)
def test_an_option_out_of_range_is_refused(folder: Path, option: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LLM(folder, **({"device": "cpu"} | option))


@pytest.mark.parametrize(
    "option",
    [
        {"num_blocks": 2.5},
        {"max_num_seqs": "4"},
        {"seed": None},
        {"enforce_eager": 1},
        {"block_size": 64.0},
        {"gpu_memory_utilization": "0.9"},
        {"latency_target": "x"},
        {"gpu_memory_utilization": True},
        {"swap_space": None},
        {"trace": 5},
        {"model": None},
    ],
)
def test_an_option_of_the_wrong_type_is_refused(folder: Path, option: dict[str, Any]):
    with pytest.raises(TypeError, match=f"{next(iter(option))} must be"):
        LLM(**({"model": folder, "device": "cpu"} | option))


def test_dtype_and_device_may_be_those_of_torch(folder: Path):
    with LLM(folder, dtype=torch.bfloat16, device=torch.device("cpu")) as llm:
        assert llm._parts is not None
        assert llm._parts.runner._cache.k[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype must be one of .*, got 'int8'"):
        LLM(folder, dtype=torch.int8, device="cpu")


def test_abort_in_the_middle_frees_the_blocks(llm: LLM):
    stream = llm.stream([tiny_model.prompt_of(20), tiny_model.prompt_of(30)], GREEDY)
    seen: dict[int, list[int]] = {0: [], 1: []}
    reasons: dict[int, str | None] = {}
    for piece in stream:
        seen[piece.prompt_index] += piece.token_ids
        reasons[piece.prompt_index] = piece.finish_reason
        if piece.prompt_index == 0 and len(seen[0]) == 3 and reasons[0] is None:
            used = llm.stats().used_blocks
            assert llm.abort(piece.request_id)
            assert not llm.abort(piece.request_id)
            assert llm.stats().used_blocks < used
    assert len(seen[0]) == 3 and len(seen[1]) == 12
    assert reasons == {0: "abort", 1: "length"}


def test_abort_of_what_does_not_run_does_nothing(llm: LLM):
    (output,) = llm.generate([1, 2], GREEDY)
    assert not llm.abort(output.request_id)
    assert not llm.abort("never")


def test_abort_of_a_waiting_request(llm: LLM):
    stream = llm.stream([tiny_model.prompt_of(9, i) for i in range(9)], GREEDY)
    first = next(stream)
    assert llm.abort(str(int(first.request_id) + 8))
    finals = [piece.request for piece in stream if piece.request is not None]
    reasons = {r.prompt_token_ids[0]: r.outputs[0].finish_reason for r in finals}
    assert sorted(reasons.values()).count("abort") == 1 and len(finals) == 9


def test_leaving_a_stream_aborts_its_requests(llm: LLM):
    for _ in llm.stream([[1, 2], [3, 4]], GREEDY):
        break
    assert llm.stats().running == 0


def test_an_exception_in_a_callback_loses_only_that_request(llm: LLM):
    prompts = [tiny_model.prompt_of(6, i) for i in range(6)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    boom = RuntimeError("boom")

    def callback(piece):
        if piece.prompt_index == 2 and piece.finish_reason is None:
            raise boom

    with pytest.warns(RuntimeWarning, match="boom"):
        outputs = llm.generate(prompts, GREEDY, progress=callback)
    for i, (output, tokens) in enumerate(zip(outputs, expected)):
        if i == 2:
            assert output.error is boom and output.outputs[0].finish_reason == "error"
            assert output.outputs[0].token_ids == tokens[:1]
        else:
            assert output.error is None and output.outputs[0].token_ids == tokens


def test_an_interrupt_in_a_callback_ends_the_call_and_not_the_model(llm: LLM):
    def callback(piece):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3, 4]], GREEDY, progress=callback)


def test_a_callback_may_generate(llm: LLM):
    inner = []

    def callback(piece):
        if not inner:
            inner.append(llm.generate([9, 8], GREEDY)[0].outputs[0].token_ids)

    outer = llm.generate([3, 4, 5], GREEDY, progress=callback)[0].outputs[0].token_ids
    assert len(outer) == 12
    assert inner[0] == llm.generate([9, 8], GREEDY)[0].outputs[0].token_ids


class Failing:
    """A runner whose steps raise while they compute a request: launched, or when fetched."""

    def __init__(self, llm: LLM, prompt: list[int], when: str, times: int = 1 << 30) -> None:
        self.core, self.prompt, self.when, self.left = llm._parts.core, prompt, when, times
        self.run = llm._parts.runner.run

    def __call__(self, batch: Any) -> Any:
        requests = [s.request for i, s in self.core._sequences.items() if i in batch.seq_ids]
        if not any(r.output.prompt_token_ids == self.prompt for r in requests) or not self.left:
            return self.run(batch)
        self.left -= 1
        if self.when == "launched":
            raise MemoryError("full")
        result = self.run(batch)
        result.tokens = self.fail
        return result

    def fail(self) -> None:
        raise MemoryError("full")


def tokens_of(request: RequestOutput) -> list[list[int]]:
    return [output.token_ids for output in request.outputs]


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "one step ahead"])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"top_k": 3, "top_p": 0.9, "n": 2},
        {"frequency_penalty": 0.5, "bad_words": "'", "logprobs": 2, "prompt_logprobs": 1},
    ],
    ids=["greedy", "drawn twice", "with penalties and log-probabilities"],
)
def test_logits_that_are_nan_end_that_request_alone(
    llm: LLM, monkeypatch, params: dict[str, Any], ahead: bool
):
    others = [[5, 6, 7], [8, 6]]
    options = [SamplingParams(seed=3, max_tokens=9, ignore_eos=True, **params)] * 3
    expected = [tokens_of(one) for one in llm.generate(others, options[:2])]
    monkeypatch.setattr(llm._parts.runner, "asynchronous", ahead)
    embedding = llm._parts.runner._model.embedding
    kept = embedding[9].clone()
    embedding[9] = math.nan
    try:
        with pytest.warns(RuntimeWarning, match="logits of request .* are not finite") as warned:
            first, lost, last = llm.generate([others[0], [1, 9], others[1]], options)
    finally:
        embedding[9] = kept
    assert [one.finish_reason for one in lost.outputs] == ["error"] * options[0].n
    assert isinstance(lost.error, FloatingPointError) and not lost.outputs[0].token_ids
    assert len(warned) == 1 and f"request {lost.request_id} " in str(lost.error)
    assert [tokens_of(first), tokens_of(last)] == expected


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "one step ahead"])
@pytest.mark.parametrize("when", ["launched", "fetched"])
@pytest.mark.parametrize("before", [2, 3])
def test_a_step_that_fails_loses_only_the_request_concerned(
    llm: LLM, monkeypatch, before: int, when: str, ahead: bool
):
    # A bias makes one token, "'", come back, so that counting or losing a step would show.
    params = SamplingParams(
        temperature=0,
        max_tokens=12,
        ignore_eos=True,
        frequency_penalty=0.9,
        logit_bias={7: 9.0},
        bad_words="''",
    )
    expected = llm.generate([5, 6, 7], params)[0].outputs[0].token_ids
    assert 2 < expected.count(7) < 12
    assert (7, 7) not in zip(expected, expected[1:])
    monkeypatch.setattr(llm._parts.runner, "asynchronous", ahead)
    other = llm.stream([5, 6, 7], params)
    got = [token for _ in range(before) for token in next(other).token_ids]
    with monkeypatch.context() as patch:
        patch.setattr(llm._parts.runner, "run", Failing(llm, [1, 2], when))
        with pytest.warns(RuntimeWarning, match="raised MemoryError"):
            (failed,) = llm.generate([1, 2], GREEDY)
    assert failed.outputs[0].finish_reason == "error"
    assert isinstance(failed.error, MemoryError)
    got += [token for piece in other for token in piece.token_ids]
    assert got == expected
    assert llm.stats().used_blocks == 0


def test_a_step_that_fails_once_loses_nobody(llm: LLM, monkeypatch):
    prompts = [[1, 2], [5, 6, 7], tiny_model.prompt_of(20)]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
    monkeypatch.setattr(llm._parts.runner, "run", Failing(llm, [1, 2], "launched", times=1))
    outputs = llm.generate(prompts, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert all(o.error is None for o in outputs)


def test_a_step_that_fails_loses_no_prompt_position(llm: LLM, monkeypatch):
    prompt = tiny_model.prompt_of(20)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0)
    stream = llm.stream(prompt, params)
    with monkeypatch.context() as patch:
        patch.setattr(llm._parts.runner, "run", Failing(llm, [1, 2], "launched"))
        with pytest.warns(RuntimeWarning, match="raised MemoryError"):
            llm.generate([1, 2], GREEDY)
    (final,) = [piece.request for piece in stream if piece.request is not None]
    assert [next(iter(entry)) for entry in final.prompt_logprobs[1:]] == prompt[1:]


def test_a_later_chunk_that_fails_ends_that_request_alone(tmp_path: Path, monkeypatch):
    """Each is tried alone to its next token: without a prefix cache all chunks come again."""
    tiny_model.save_llama(tmp_path)
    prompts = [tiny_model.prompt_of(40), tiny_model.prompt_of(40, 1)]
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "enable_prefix_caching": False}
    with LLM(tmp_path, device="cpu", **options) as llm:
        expected = llm.generate(prompts[1], GREEDY)[0].outputs[0].token_ids
        core, run = llm._parts.core, llm._parts.runner.run

        def failing(batch: Any) -> Any:
            for i, sequence in core._sequences.items():
                bad = sequence.request.output.prompt_token_ids == prompts[0]
                if bad and i in batch.seq_ids and batch.max_seq_len > 30:
                    raise MemoryError("full")
            return run(batch)

        monkeypatch.setattr(llm._parts.runner, "run", failing)
        with pytest.warns(RuntimeWarning, match="raised MemoryError"):
            outputs = llm.generate(prompts, GREEDY)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length"]
    assert outputs[1].outputs[0].token_ids == expected


def test_prompt_logprobs_that_fail_lose_only_that_request(llm: LLM, monkeypatch):
    expected = llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids
    monkeypatch.setattr(Request, "add_prompt_logprobs", lambda *_: 1 // 0)
    params = [SamplingParams(max_tokens=3, prompt_logprobs=0), GREEDY]
    outputs = llm.generate([[1, 2, 3], [5, 6, 7]], params)
    assert isinstance(outputs[0].error, ZeroDivisionError)
    assert outputs[1].outputs[0].token_ids == expected
    assert llm.stats().used_blocks == llm.stats().in_flight == 0


def test_a_tokenizer_that_fails_loses_only_that_request(llm: LLM, monkeypatch):
    prompts = [tiny_model.prompt_of(6, i) for i in range(4)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    read = Sequence._read

    def failing(self: Sequence, token: int, *, stopped: bool) -> Any:
        if self.request.prompt_index == 1 and len(self.token_ids) == 3:
            raise RuntimeError("no such character")
        return read(self, token, stopped=stopped)

    monkeypatch.setattr(Sequence, "_read", failing)
    outputs = llm.generate(prompts, GREEDY)
    for i, (output, tokens) in enumerate(zip(outputs, expected)):
        assert output.outputs[0].token_ids == (tokens[:3] if i == 1 else tokens)
        assert (str(output.error) == "no such character") == (i == 1)
    assert outputs[1].outputs[0].finish_reason == "error"
    with pytest.raises(RuntimeError, match="no such character"):
        raise outputs[1].error
    assert llm.stats().used_blocks == 0


def test_an_interrupt_between_scheduling_and_running_loses_no_token(llm: LLM, monkeypatch):
    expected = llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids
    stream = llm.stream([5, 6, 7], GREEDY)
    tokens = list(next(stream).token_ids)
    schedule = Core._schedule

    def interrupted(self: Core, only: list[int]) -> Any:
        monkeypatch.setattr(Core, "_schedule", schedule)
        schedule(self, only)
        raise KeyboardInterrupt

    monkeypatch.setattr(Core, "_schedule", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([1, 2, 3], GREEDY)
    tokens += [token for piece in stream for token in piece.token_ids]
    assert tokens == expected
    assert llm.stats().used_blocks == llm.stats().in_flight == 0


class Interrupted:
    """A scheduler behind whose method ``name`` an interrupt arrives, once it ``applies``."""

    def __init__(
        self, scheduler: Any, name: str, applies: Callable[..., bool] = lambda *_: True
    ) -> None:
        self._scheduler, self._name, self._applies = scheduler, name, applies

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._scheduler, name)
        if name != self._name:
            return method

        def interrupted(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            if self._applies(*args):
                raise KeyboardInterrupt
            return result

        return interrupted


def test_a_stream_that_nobody_reads_aborts_its_requests(llm: LLM):
    """What is left is checked behind the test."""
    llm.stream([1, 2, 3], GREEDY)
    llm.stream([[4, 5], [6]], GREEDY).close()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_model_cannot_be_copied(llm: LLM, copied: Any):
    with pytest.raises(TypeError, match="an LLM can be neither copied nor pickled"):
        copied(llm)


@pytest.fixture(params=[torch.float64, torch.bfloat16, "meta"], ids=str)
def other_default(request: pytest.FixtureRequest):
    if request.param == "meta":
        torch.set_default_device("meta")  # stands for "cuda": nothing can be read from it
    else:
        torch.set_default_dtype(request.param)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def test_defaults_of_torch_change_nothing(folder: Path, llm: LLM, other_default):
    params = SamplingParams(
        n=2, temperature=0.7, top_p=0.9, min_p=0.01, seed=3, max_tokens=9, repetition_penalty=1.2,
        logit_bias={7: 1}, bad_words=["the fox"], logprobs=2, prompt_logprobs=1,
    )  # fmt: skip
    with LLM(folder, device="cpu", num_blocks=8, max_model_len=64) as other:
        found = [each.generate([5, 6, 7, 8], params)[0] for each in (llm, other)]
    assert [each.error for each in found] == [None, None]
    torch.set_default_dtype(torch.float32)
    with torch.device("cpu"):
        plain = llm.generate([5, 6, 7, 8], params)[0]
    tokens = [[choice.token_ids for choice in each.outputs] for each in (*found, plain)]
    assert tokens == [tokens[-1]] * 3


def test_the_cpu_may_have_a_number(folder: Path):
    with LLM(folder, device="cpu:0", num_blocks=4) as llm:
        assert len(llm.generate([1, 2], GREEDY)[0].outputs[0].token_ids) == 12


@pytest.mark.parametrize("added", [False, True])
def test_an_interrupt_while_requests_are_queued_leaves_none(llm: LLM, monkeypatch, added: bool):
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    core = llm._parts.core
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if added:
            patch.setattr(core, "scheduler", Interrupted(core.scheduler, "add"))
        else:
            patch.setattr(Sampler, "add", interrupt)
        llm.generate([[1, 2], [3, 4]], SamplingParams(n=2, logprobs=1))


@pytest.mark.parametrize("at", [0, 1, 4])
def test_an_interrupt_behind_a_commit_loses_nothing_of_others(llm: LLM, monkeypatch, at: int):
    params = dataclasses.replace(GREEDY, logprobs=1, prompt_logprobs=1)
    expected = llm.generate([5, 6, 7], params)[0]
    stream, core = llm.stream([5, 6, 7], params), llm._parts.core
    steps = itertools.count()
    interrupted = Interrupted(core.scheduler, "commit", lambda *_: next(steps) == at)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(core, "scheduler", interrupted)
        llm.generate([1, 2, 3], GREEDY)
    pieces = list(stream)
    found = [token for piece in pieces for token in piece.token_ids]
    assert found == expected.outputs[0].token_ids
    prompts = [request.prompt_logprobs for request in (pieces[-1].request, expected)]
    kept, whole = [[entry and set(entry) for entry in prompt] for prompt in prompts]
    assert kept == whole
    assert llm.stats().used_blocks == llm.stats().in_flight == 0


@pytest.mark.parametrize("at", [0, 3, 11])
def test_an_interrupt_while_tokens_are_delivered_ends_that_request(llm: LLM, monkeypatch, at: int):
    expected = llm.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids
    stream = llm.stream([5, 6, 7], GREEDY)
    append = Sequence.append

    def interrupted(self: Sequence, token: int, *args: Any) -> bool:
        if len(self.token_ids) == at and self.request.output.prompt_token_ids == [1, 2, 3]:
            raise KeyboardInterrupt
        return append(self, token, *args)

    monkeypatch.setattr(Sequence, "append", interrupted)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([1, 2, 3], params, progress=lambda _: None)
    assert [token for piece in stream for token in piece.token_ids] == expected
    assert llm.stats().used_blocks == llm.stats().in_flight == 0


def test_who_waits_for_the_lock_comes_before_who_releases_it():
    lock, order = FairLock(), []

    def wait() -> None:
        with lock:
            order.append("waited")

    for _ in range(200):
        order.clear()
        thread = threading.Thread(target=wait)
        with lock, lock:
            thread.start()
            while not lock.waiting:
                time.sleep(0)
        with lock:
            order.append("released")
        thread.join()
        assert order == ["waited", "released"]


def test_an_interrupt_while_a_lock_is_awaited_gives_the_place_up():
    lock, free = FairLock(), threading.Event()

    def hold() -> None:
        with lock:
            while not lock.waiting:
                time.sleep(0)
            signal.raise_signal(signal.SIGINT)
            assert free.wait(60)

    thread = threading.Thread(target=hold)
    # A shell starts what runs in its background with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            while thread.is_alive():
                with lock:
                    pass  # until the other thread has it
    finally:
        signal.signal(signal.SIGINT, before)
    assert lock.waiting == 0
    free.set()
    with lock, lock:
        thread.join()
    with pytest.raises(RuntimeError, match="does not hold"):
        lock.__exit__(None, None, None)


def test_a_signal_handler_takes_a_lock_that_its_thread_awaits():
    lock, held, order = FairLock(), threading.Event(), []

    def hold() -> None:
        with lock:
            held.set()
            while not lock.waiting:
                time.sleep(0)
            signal.raise_signal(signal.SIGUSR1)
            while lock.waiting < 2:
                time.sleep(0)

    def handle(*_: object) -> None:
        with lock:
            order.append("handler")

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        with lock:
            order.append("main")
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert order == ["handler", "main"]


def test_python_ends_while_a_daemon_awaits_a_lock():
    script = """
import threading
from ridgeline._C import FairLock

lock = FairLock()
lock.__enter__()
threading.Thread(target=lock.__enter__, daemon=True).start()
while not lock.waiting:
    pass
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_thread_that_comes_later_is_served_beside_the_first(folder: Path):
    ended: list[str] = []
    started = threading.Event()

    def first(llm: LLM) -> None:
        params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        llm.generate([[1, 2, 3]], params, progress=lambda _: started.set())
        ended.append("first")

    with LLM(folder, device="cpu", num_blocks=32) as llm:
        thread = threading.Thread(target=first, args=(llm,))
        thread.start()
        assert started.wait(60)
        llm.generate([[4, 5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))
        ended.append("second")
        thread.join()
    assert ended == ["second", "first"]


def test_closing_ends_what_another_thread_generates(folder: Path):
    started = threading.Event()
    raised: list[BaseException] = []

    def generate(llm: LLM) -> None:
        try:
            params = SamplingParams(max_tokens=400, ignore_eos=True)
            llm.generate([[1, 2, 3]], params, progress=lambda _: started.set())
        except RuntimeError as error:
            raised.append(error)

    llm = LLM(folder, device="cpu", num_blocks=32)
    thread = threading.Thread(target=generate, args=(llm,))
    thread.start()
    assert started.wait(60)
    llm.close()
    thread.join()
    assert [str(error) for error in raised] == ["this LLM is closed"]


def test_threads_share_the_model(llm: LLM):
    prompts = [tiny_model.prompt_of(7, i) for i in range(4)]
    expected = [llm.generate(p, GREEDY)[0].outputs[0].token_ids for p in prompts]
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        results[i] = llm.generate(prompts[i], GREEDY)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] for i in range(4)] == expected


def test_the_cost_of_a_prompt_does_not_grow_with_their_number(folder: Path):
    """10^5 prompts are queued, two finish, the rest is aborted: no step looks at all of them."""
    count = 100_000
    with LLM(folder, device="cpu", max_num_seqs=2, num_blocks=8, max_model_len=32) as llm:
        start = time.process_time()
        stream = llm.stream([[1, 2, 3]] * count, SamplingParams(max_tokens=2, ignore_eos=True))
        done = 0
        for piece in stream:
            done += piece.request is not None
            if done == 2:
                break
        stream.close()
        # Anything quadratic takes minutes; linear work about 2 s.
        assert time.process_time() - start < 30
        assert llm.stats().waiting == 0 and llm.stats().used_blocks == 0
