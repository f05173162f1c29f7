"""Deadlines, priorities, a latency target, preemption to the host; and what is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_model
from ridgeline import LLM, SamplingParams
from tiny_model import one_thread  # noqa: F401

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = [tiny_model.prompt_of(length) for length in (1, 16, 17, 60, 33, 5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_model.save_llama(folder)
    return folder


def open_llm(folder: Path, **options) -> LLM:
    return LLM(folder, **({"device": "cpu", "block_size": 16, "max_num_seqs": 8} | options))


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    with open_llm(folder, enable_prefix_caching=False) as llm:
        return [tokens(llm.generate(prompt, GREEDY))[0] for prompt in PROMPTS]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "one step ahead"])
def test_swapped_is_not_preempted(folder: Path, monkeypatch, kv_cache_dtype: str, ahead: bool):
    with open_llm(folder, kv_cache_dtype=kv_cache_dtype) as llm:
        expected = tokens(llm.generate(PROMPTS, GREEDY))
    monkeypatch.setattr("ridgeline.memory._HOST_BANDWIDTH", 1e18)
    with open_llm(folder, kv_cache_dtype=kv_cache_dtype, num_blocks=1 + 8, swap_space=0.01) as llm:
        llm._parts.runner.asynchronous = ahead
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
        assert llm.stats().swaps == llm.stats().preemptions > 0
        llm._parts.core.scheduler.check_invariants()


def test_chunks_for_a_latency_target_change_no_token(folder: Path, alone):
    with open_llm(folder, latency_target=1e-6) as llm:
        first = llm.stream(PROMPTS[0], GREEDY)
        got = next(first).token_ids
        assert tokens(llm.generate(PROMPTS[1:], GREEDY)) == alone[1:]
        assert got + [token for piece in first for token in piece.token_ids] == alone[0]
        reasons = {d.reason.name for d in llm._parts.core.scheduler.decisions()}
        assert reasons >= {"CHUNKED_LATENCY", "HELD_LATENCY"}


def test_a_deadline_ends_with_what_there_is(folder: Path, alone):
    with open_llm(folder) as llm:
        now = [100.0]
        llm._parts.core._clock = lambda: now[0]
        stream = llm.stream(PROMPTS, GREEDY, deadline=[None, 5, None, None, None, 0.5])
        got: list[list[int]] = [[] for _ in PROMPTS]
        reasons: list[str | None] = [None] * len(PROMPTS)
        for piece in stream:
            got[piece.prompt_index] += piece.token_ids
            reasons[piece.prompt_index] = piece.finish_reason
            if piece.prompt_index == 0:
                now[0] += 1.0
    assert reasons == ["length", "deadline", "length", "length", "length", "deadline"]
    for i, (a, b) in enumerate(zip(got, alone)):
        assert a == (b[: len(a)] if i in (1, 5) else b)
    assert 1 <= len(got[5]) <= 2 and 5 <= len(got[1]) <= 7


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "one step ahead"])
def test_a_deadline_that_has_passed_ends_a_request_before_its_first_step(folder: Path, ahead: bool):
    with open_llm(folder) as llm:
        llm._parts.runner.asynchronous = ahead
        outputs = llm.generate(PROMPTS[:2], GREEDY, deadline=0.0)
        assert [o.outputs[0].finish_reason for o in outputs] == ["deadline"] * 2
        assert tokens(outputs) == [[], []] and outputs[0].metrics.ttft is None
        assert (llm.stats().steps, llm.stats().waiting, llm.stats().in_flight) == (0, 0, 0)


def test_a_smaller_priority_is_served_first(folder: Path):
    with open_llm(folder, max_num_seqs=1) as llm:
        order = [
            piece.prompt_index
            for piece in llm.stream(PROMPTS[:4], GREEDY, priority=[1, 0, 2, -1])
            if piece.finish_reason is not None
        ]
    assert order == [3, 1, 0, 2]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"priority": 1.5}, TypeError),
        ({"priority": [1]}, ValueError),
        ({"deadline": "soon"}, TypeError),
        ({"deadline": [1, 2, 3]}, ValueError),
        ({"priority": 10**9}, ValueError),
        ({"deadline": [None, float("inf")]}, ValueError),
        ({"deadline": float("nan")}, ValueError),
    ],
)
def test_service_that_cannot_be_given_is_refused(folder: Path, options, error: type):
    with open_llm(folder, num_blocks=8) as llm:
        with pytest.raises(error, match=next(iter(options))):
            llm.generate([[1], [2]], GREEDY, **options)
        assert llm.stats().waiting == 0


@pytest.mark.parametrize(
    "option",
    [
        {"latency_target": 0.0},
        {"latency_target": 1e-7},
        {"latency_target": float("inf")},
        {"swap_space": -1.0},
        {"swap_space": 1e9},
        {"trace": "/no/such/folder/trace"},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(folder: Path, option, monkeypatch):
    monkeypatch.setattr("ridgeline._setup.load_decoder", None)  # before anything is read
    with pytest.raises((ValueError, FileNotFoundError), match=next(iter(option))):
        open_llm(folder, **option)


def test_results_without_a_listener_are_those_with_one(folder: Path, alone):
    with open_llm(folder) as llm:
        pieces = []
        quiet = llm.generate(PROMPTS, GREEDY)
        heard = llm.generate(PROMPTS, GREEDY, progress=pieces.append)
    assert tokens(quiet) == tokens(heard) == alone
    assert len(pieces) == 20 * len(PROMPTS)


def test_stats_and_results_are_measured(folder: Path):
    with open_llm(folder) as llm:
        assert llm.stats().ttft_p50 is None and llm.stats().decode_rate is None
        outputs = llm.generate(PROMPTS, GREEDY)
        llm.generate(PROMPTS, GREEDY)
        stats = llm.stats()
    assert 0 < stats.ttft_p50 <= stats.ttft_p99
    assert 0 < stats.inter_token_p50 <= stats.inter_token_p99
    assert stats.prefill_rate > 0 and stats.decode_rate > 0
    shares = (stats.prefill_mfu, stats.prefill_mbu, stats.decode_mfu, stats.decode_mbu)
    assert all(0 < share < 2 for share in shares)  # a look at a busy machine is rough
    assert 0 < stats.prefix_hit_rate < 1 and stats.kv_occupancy == 0
    assert (stats.graphs, stats.graph_replays) == (0, 0)
    metrics = outputs[3].metrics
    assert metrics.prefill_rate == pytest.approx(60 / metrics.prefill)
    assert metrics.decode_rate == pytest.approx(19 / sum(metrics.inter_token))
    assert min(metrics.inter_token) <= metrics.inter_token_p50 <= metrics.inter_token_p99
