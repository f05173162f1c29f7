"""Each field of ``SamplingParams`` does what it says; values out of range are refused."""

from __future__ import annotations

import math
from collections import deque
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_model
from ridgeline import LLM, SamplingParams, StreamOutput
from ridgeline.request import Request
from tiny_model import one_thread  # noqa: F401

PROMPT = tiny_model.prompt_of(20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def reference(folder: Path):
    tiny_model.save_tokenizer(folder)
    return tiny_model.save_llama(folder)


@pytest.fixture(scope="module")
def llm(folder: Path, reference):
    with LLM(folder, device="cpu", block_size=16, max_num_seqs=4) as llm:
        yield llm


def test_a_full_step_may_have_more_rows_than_tokens(folder: Path, reference):
    """Each of n sequences samples from the prompt's last position, beside a row for each token."""
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=3, prompt_logprobs=1)
    sizes = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    with LLM(folder, device="cpu", **sizes) as llm:
        (output,) = llm.generate(tiny_model.prompt_of(16), params)
    assert [len(choice.token_ids) for choice in output.outputs] == [3] * 4
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 16


def log_softmax(reference, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0].log_softmax(-1)


def run(llm: LLM, prompt=PROMPT, **params: Any):
    (output,) = llm.generate(prompt, SamplingParams(**({"temperature": 0} | params)))
    return output.outputs[0]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_those_of_transformers(llm: LLM, reference, count: int):
    output = run(llm, temperature=1.0, seed=5, max_tokens=10, ignore_eos=True, logprobs=count)
    expected = log_softmax(reference, PROMPT + output.token_ids)[len(PROMPT) - 1 : -1]
    assert len(output.logprobs) == 10
    for token, entries, row in zip(output.token_ids, output.logprobs, expected):
        assert next(iter(entries)) == token
        best = row.topk(count).indices.tolist()
        assert set(entries) == {token, *best}
        for key, entry in entries.items():
            assert entry.logprob == pytest.approx(row[key].item(), abs=1e-3)
            assert entry.decoded_token == llm._parts.tokenizer.token_text(key)
    total = sum(entries[t].logprob for t, entries in zip(output.token_ids, output.logprobs))
    assert output.cumulative_logprob == pytest.approx(total)


def test_each_request_gets_the_logprobs_it_asked_for_beside_others(llm: LLM):
    """A step has as many candidates for all rows as one of them wants."""
    asked = [{"logprobs": 0, "prompt_logprobs": 3}, {"logprobs": 4, "prompt_logprobs": 0}]
    params = [SamplingParams(temperature=0, max_tokens=4, **one) for one in asked]
    for output, one in zip(llm.generate([PROMPT, PROMPT[:7]], params), asked):
        for kind, entries in (
            ("logprobs", output.outputs[0].logprobs),
            ("prompt_logprobs", output.prompt_logprobs[1:]),
        ):
            # A token that is not among the most likely has an entry beside them.
            assert {len(each) for each in entries} <= {max(one[kind], 1), one[kind] + 1}


def test_logprobs_are_those_before_penalties_and_bias(llm: LLM):
    plain = run(llm, max_tokens=1, logprobs=3)
    moved = run(llm, max_tokens=1, logprobs=3, logit_bias={7: 100}, repetition_penalty=2.0)
    assert moved.token_ids == [7]
    for token, entry in plain.logprobs[0].items():
        assert moved.logprobs[0][token].logprob == pytest.approx(entry.logprob, abs=1e-4)


@pytest.mark.parametrize("budget", [8, 512])  # the prompt in chunks, and in one step
def test_prompt_logprobs_are_those_of_transformers(folder: Path, reference, budget: int):
    expected = log_softmax(reference, PROMPT)
    options = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": budget}
    with LLM(folder, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, logprobs=4)
        beside = SamplingParams(temperature=0, max_tokens=6)
        output, _ = llm.generate([PROMPT, PROMPT[:7]], [params, beside])
        again = llm.generate(PROMPT, params)[0]  # its blocks are cached by now
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(PROMPT)
    for position in range(1, len(PROMPT)):
        row, entries = expected[position - 1], output.prompt_logprobs[position]
        assert next(iter(entries)) == PROMPT[position]
        assert set(row.topk(2).indices.tolist()) <= set(entries)
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(row[token].item(), abs=1e-3)
    assert len(output.outputs[0].logprobs) == 2
    assert [set(e) for e in again.prompt_logprobs[1:]] == [
        set(e) for e in output.prompt_logprobs[1:]
    ]


def test_a_request_without_logprobs_gets_none_beside_one_that_has_some(llm: LLM):
    with_some, without = llm.generate(
        [PROMPT, PROMPT], [SamplingParams(logprobs=2), SamplingParams()]
    )
    assert with_some.outputs[0].logprobs is not None
    assert without.outputs[0].logprobs is None and without.outputs[0].cumulative_logprob is None


def test_a_stop_string_ends_the_text_before_it(llm: LLM):
    whole = run(llm, max_tokens=30, ignore_eos=True)
    for length in (1, 3, 6):  # inside a token, and across tokens
        stop = whole.text[8 : 8 + length]
        output = run(llm, max_tokens=30, ignore_eos=True, stop=["never there", stop])
        assert output.text == whole.text[: whole.text.index(stop)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
        assert len(output.token_ids) < 30


def test_a_stop_string_is_found_in_a_character_spread_over_tokens(llm: LLM):
    tokenizer = llm._parts.tokenizer
    (ids,) = tokenizer.encode(["x𓀀y"])
    assert len(ids) == 6
    updates: deque[StreamOutput] = deque()
    params = SamplingParams(stop="𓀀", max_tokens=6)
    options = {"prompt_index": 0, "tokenizer": tokenizer, "arrival_time": 0.0}
    (sequence,) = Request("0", None, [1], params, [0], updates, **options).sequences
    ended = [sequence.append(token, None, None, 1.0) for token in ids[:5]]
    assert ended == [False, False, False, False, True]
    assert [update.text for update in updates] == ["x", "", "", "", ""]
    final = updates[-1]
    assert (final.finish_reason, final.stop_reason) == ("stop", "𓀀")
    assert final.request is not None and final.request.outputs[0].text == "x"


@pytest.mark.parametrize("end", ["length", "abort"])
@pytest.mark.parametrize(
    ("text", "shown"), [("a xy", "a xy"), ("a 𓀀", "a \N{REPLACEMENT CHARACTER}")]
)
def test_the_end_shows_what_was_kept_back(llm: LLM, end: str, text: str, shown: str):
    """The start of a stop string that never came, bytes of a character that never came whole."""
    tokenizer = llm._parts.tokenizer
    (ids,) = tokenizer.encode([text])
    ids = ids[:-1] if text != shown else ids
    updates: deque[StreamOutput] = deque()
    options = {"prompt_index": 0, "tokenizer": tokenizer, "arrival_time": 0.0}
    request = Request("0", None, [1], SamplingParams(stop="xyz"), [0], updates, **options)
    (sequence,) = request.sequences
    for token in ids[:-1]:
        sequence.append(token, None, None, 1.0)
    sequence.append(ids[-1], end if end == "length" else None, None, 1.0)
    if end == "abort":
        assert not updates[-1].text.endswith(shown[-1])
        sequence.end("abort", 2.0)
    assert request.output.outputs[0].text == shown
    assert "".join(update.text for update in updates) == shown
    assert request.output.outputs[0].finish_reason == end


def test_stop_tokens_end_the_output_and_have_no_text(llm: LLM):
    whole = run(llm, max_tokens=12, ignore_eos=True)
    stop = whole.token_ids[5]
    at = whole.token_ids.index(stop)
    output = run(llm, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    assert output.token_ids == whole.token_ids[: at + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == llm._parts.tokenizer.decode(whole.token_ids[:at])


def test_the_end_of_sequence_ends_unless_ignored(llm: LLM):
    ends = run(llm, max_tokens=5, logit_bias={tiny_model.EOS: 1e4})
    assert ends.token_ids == [tiny_model.EOS] and ends.text == ""
    assert (ends.finish_reason, ends.stop_reason) == ("stop", None)
    goes_on = run(llm, max_tokens=5, logit_bias={tiny_model.EOS: 1e4}, ignore_eos=True)
    assert goes_on.token_ids == [tiny_model.EOS] * 5 and goes_on.finish_reason == "length"


@pytest.mark.parametrize("least", [1, 4])
def test_nothing_ends_before_min_tokens(llm: LLM, least: int):
    bias = {tiny_model.EOS: 1e4}
    output = run(llm, max_tokens=9, min_tokens=least, logit_bias=bias)
    assert len(output.token_ids) == least + 1 and output.token_ids[-1] == tiny_model.EOS
    assert tiny_model.EOS not in output.token_ids[:-1]
    whole = run(llm, max_tokens=9, ignore_eos=True)
    early = run(llm, max_tokens=9, ignore_eos=True, min_tokens=5, stop=whole.text[:2])
    assert len(early.token_ids) >= 5


def test_special_tokens_are_shown_if_asked_for(llm: LLM):
    params = {"max_tokens": 2, "logit_bias": {tiny_model.EOS: 1e4}, "ignore_eos": True}
    assert run(llm, **params).text == ""
    assert run(llm, **params, skip_special_tokens=False).text == "<|end|>" * 2


def test_detokenize_off_gives_tokens_alone(llm: LLM):
    output = run(llm, max_tokens=4, ignore_eos=True, detokenize=False)
    assert output.text == "" and len(output.token_ids) == 4


def test_max_tokens_none_fills_the_context(folder: Path, reference):
    with LLM(folder, device="cpu", max_model_len=48, block_size=16, max_num_seqs=2) as llm:
        output = run(llm, max_tokens=None, ignore_eos=True)
    assert len(PROMPT) + len(output.token_ids) == 48 and output.finish_reason == "length"


def test_penalties_follow_their_definition(llm: LLM, reference):
    """Greedy with penalties, beside the same rule written over transformers' logits."""
    params = {"repetition_penalty": 1.4, "presence_penalty": 0.2, "frequency_penalty": 1.9}
    bias = {7: 12.0, 9: 10.0}  # tokens that come again and again
    output = run(llm, max_tokens=16, ignore_eos=True, logit_bias=bias, **params)
    tokens: list[int] = []
    for _ in range(16):
        with torch.no_grad():
            logits = reference(torch.tensor([PROMPT + tokens])).logits[0, -1]
        for token in set(PROMPT + tokens):
            logits[token] = logits[token] / 1.4 if logits[token] > 0 else logits[token] * 1.4
        for token in set(tokens):
            logits[token] -= 0.2 + 1.9 * tokens.count(token)
        for token, value in bias.items():
            logits[token] += value
        tokens.append(int(logits.argmax()))
    assert output.token_ids == tokens
    assert tokens.count(7) > 2 and len(set(tokens)) > 4


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "one step ahead"])
@pytest.mark.parametrize("words", ["zq", ["zq", "qz", "qqq"], ["z"], ["qzq", "\n"]], ids=str)
def test_bad_words_never_come(llm: LLM, reference, monkeypatch, words, ahead: bool):
    """Greedy with bad words, beside the same rule written over transformers' logits."""
    monkeypatch.setattr(llm._parts.runner, "asynchronous", ahead)
    tokenizer = llm._parts.tokenizer
    z, q = (ids[0] for ids in tokenizer.encode(["z", "q"]))
    params = {"max_tokens": 20, "ignore_eos": True, "frequency_penalty": 0.7}
    params["logit_bias"] = {z: 9.0, q: 9.0}
    banned = [
        ids
        for word in ([words] if isinstance(words, str) else words)
        for ids in tokenizer.encode([word, " " + word])
    ]
    tokens: list[int] = []
    for _ in range(20):
        with torch.no_grad():
            logits = reference(torch.tensor([PROMPT + tokens])).logits[0, -1]
        for token in set(tokens):
            logits[token] -= 0.7 * tokens.count(token)
        for token in (z, q):
            logits[token] += 9.0
        for *start, end in banned:
            if tokens[len(tokens) - len(start) :] == start:
                logits[end] = -math.inf
        tokens.append(int(logits.argmax()))
    allowed = SamplingParams(temperature=0, **params)
    asked = SamplingParams(temperature=0, **params, bad_words=words)
    free, output, beside = (
        o.outputs[0].token_ids for o in llm.generate([PROMPT] * 3, [allowed, asked, allowed])
    )
    assert output == tokens
    assert free == beside != tokens


def test_bad_words_that_cannot_come_are_left_out(llm: LLM, monkeypatch):
    """A tokenizer may have tokens that the model has not."""
    free = run(llm, max_tokens=4, ignore_eos=True).token_ids
    banned = [[tiny_model.VOCAB], [tiny_model.VOCAB + 9, 5]]
    monkeypatch.setattr(llm._parts.tokenizer, "spellings", lambda words: banned)
    assert run(llm, max_tokens=4, ignore_eos=True, bad_words="x").token_ids == free


def test_penalties_do_not_reach_the_neighbours(llm: LLM):
    alone = run(llm, max_tokens=8, ignore_eos=True).token_ids
    penalised = SamplingParams(
        temperature=0, max_tokens=8, repetition_penalty=3.0, logit_bias={3: 5.0}
    )
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    beside = llm.generate([PROMPT, PROMPT, PROMPT], [penalised, plain, penalised])
    assert beside[1].outputs[0].token_ids == alone


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, "temperature must be finite and at least 0, got -0.1$"),
        ("temperature", math.nan, "temperature must be finite and at least 0, got nan$"),
        ("temperature", math.inf, "temperature must be finite"),
        ("top_p", 0.0, r"top_p must be finite and in \(0, 1\], got 0.0"),
        ("top_p", 1.01, r"top_p must be .*in \(0, 1\], got 1.01"),
        ("top_k", -2, "top_k must be at least -1, got -2"),
        ("min_p", 1.5, r"min_p must be .*in \[0, 1\], got 1.5"),
        ("temperature", 1e39, r"temperature must be finite .*, got 1e\+39, in float32 inf"),
        ("top_p", 1e-46, r"top_p must be .*in \(0, 1\], got 1e-46, in float32 0"),
        ("repetition_penalty", 10**400, "repetition_penalty must be finite"),
        ("logit_bias", {1: -1e39}, r"logit_bias\[1\] must be finite"),
        ("n", 0, "n must be from 1 to 16384, got 0"),
        ("n", 10**12, "n must be from 1 to 16384, got 1000000000000"),
        ("max_tokens", 0, "max_tokens must be at least 1, got 0"),
        ("max_tokens", -3, "max_tokens must be at least 1, got -3"),
        ("min_tokens", -1, "min_tokens must be at least 0, got -1"),
        ("min_tokens", 17, r"min_tokens must be at most max_tokens \(16\), got 17"),
        ("seed", -1, "seed must be from 0 to"),
        ("logprobs", 21, "logprobs must be from 0 to 20, got 21"),
        ("prompt_logprobs", -1, "prompt_logprobs must be from 0 to 20, got -1"),
        ("presence_penalty", 2.5, r"presence_penalty must be .*\[-2, 2\], got 2.5"),
        ("frequency_penalty", math.nan, "frequency_penalty must be finite"),
        ("repetition_penalty", 0.0, "repetition_penalty must be .*above 0, got 0.0"),
        ("stop", "", "stop must not hold an empty string"),
        ("stop", ["a", ""], "stop must not hold an empty string"),
        ("stop_token_ids", [-1], "each of stop_token_ids must be at least 0, got -1"),
        ("logit_bias", {-1: 1.0}, "each token of logit_bias must be at least 0, got -1"),
        ("logit_bias", {1: math.inf}, r"logit_bias\[1\] must be finite"),
    ],
)
def test_a_value_out_of_range_is_refused(field: str, value: Any, message: str):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{field: value})


def test_numbers_of_other_types_mean_the_same(llm: LLM):
    own: dict[str, Any] = {"n": 2, "seed": 5, "top_k": 9, "temperature": 0.5, "max_tokens": 7}
    other = {
        "n": np.int8(2), "seed": np.int64(5), "top_k": np.uint8(9), "temperature": Fraction(1, 2),
        "max_tokens": np.uint64(7),
    }  # fmt: skip
    outputs = [llm.generate(PROMPT, SamplingParams(**p))[0].outputs for p in (own, other)]
    assert [c.token_ids for c in outputs[0]] == [c.token_ids for c in outputs[1]]
    assert SamplingParams(**other) == SamplingParams(**own)


def test_more_tokens_than_fit_in_64_bits_are_as_many_as_the_context_holds(llm: LLM):
    prompt = tiny_model.prompt_of(llm.max_model_len - 5)
    assert len(run(llm, prompt, max_tokens=2**70, min_tokens=2**65).token_ids) == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "1"), ("top_k", 1.5), ("n", True), ("max_tokens", "8"), ("stop", 5),
     ("stop", [b"x"]), ("bad_words", 3), ("stop_token_ids", 3), ("logit_bias", [1]),
     ("ignore_eos", 1), ("detokenize", None)],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused(field: str, value: Any):
    with pytest.raises(TypeError, match=f"{field} must"):
        SamplingParams(**{field: value})


def test_stop_strings_without_text_are_refused():
    with pytest.raises(ValueError, match="stop needs the text: detokenize must be True"):
        SamplingParams(stop="x", detokenize=False)


def test_params_cannot_be_changed():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 2.0  # type: ignore[misc]
