"""``LLM`` on a GPU: graphs are eager steps, tokens are those of transformers up to ties."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import tiny_model
from ridgeline import LLM, SamplingParams
from ridgeline.trace import Replay

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=24, ignore_eos=True)
PROMPTS = [tiny_model.prompt_of(length) for length in (1, 16, 17, 60, 33, 5, 100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    # Heads of 64 and rows of 256: what the kernels' vector loads want.
    tiny_model.save_llama(
        folder,
        hidden_size=256,
        intermediate_size=512,
        head_dim=64,
        initializer_range=0.1,
        max_position_embeddings=1024,
    )
    tiny_model.save_tokenizer(folder)
    return folder


def open_llm(folder: Path, **options) -> LLM:
    sizes = {"device": "cuda", "block_size": 16, "max_num_seqs": 8, "num_blocks": 256}
    return LLM(folder, **(sizes | options))


def run(folder: Path, params: SamplingParams, **options):
    with open_llm(folder, **options) as llm:
        outputs = llm.generate(PROMPTS, params)
        assert llm.stats().used_blocks == 0
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"quantization": "w4a8"}], ids=str
)
def test_graph_is_eager_to_the_bit(folder: Path, params: SamplingParams, options):
    # Rows of padding give a graph more rows than the eager step has: only where results do not
    # depend on the number of rows must the bits be equal.
    options = options | {"batch_invariant": True}
    assert run(folder, params, **options) == run(folder, params, **options, enforce_eager=True)


def test_the_same_batch_twice_gives_the_same_bits(folder: Path):
    assert run(folder, GREEDY) == run(folder, GREEDY)


def test_several_outputs_begin_at_one_token(folder: Path):
    """A step of one token and three rows."""
    params = SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True)
    with open_llm(folder) as llm, open_llm(folder, enforce_eager=True) as eager:
        outputs = llm.generate([5], params)[0].outputs
        expected = eager.generate([5], params)[0].outputs
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


def test_logits_that_are_nan_end_that_request_alone(folder: Path):
    """The step behind, under way already, embeds the -1 that stands for no token."""
    with open_llm(folder, batch_invariant=True) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, SEEDED)]
        seen = {token for tokens in [*PROMPTS, *expected] for token in tokens}
        unseen = next(token for token in range(tiny_model.VOCAB) if token not in seen)
        llm._parts.runner._model.embedding[unseen] = float("nan")
        with pytest.warns(RuntimeWarning, match="logits of request .* are not finite"):
            lost, *others = llm.generate([[1, unseen], *PROMPTS], SEEDED)
        assert llm.stats().used_blocks == 0
    assert isinstance(lost.error, FloatingPointError) and not lost.outputs[0].token_ids
    assert [o.outputs[0].token_ids for o in others] == expected


def test_steps_are_captured_once_a_bucket(folder: Path):
    with open_llm(folder, enable_prefix_caching=False) as llm:
        llm.generate(PROMPTS, GREEDY)
        graphs = llm._parts.runner._graphs
        captured = len(graphs)
        assert captured > 0
        llm.generate(PROMPTS, GREEDY)
        assert len(graphs) == captured


def test_greedy_tokens_are_those_of_transformers_up_to_ties(folder: Path):
    """Where a token differs, transformers' own logits hold the two within rounding."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()
    with open_llm(folder) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs):
        tokens = output.outputs[0].token_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0].float()
        rows = logits[len(prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        gap = rows.max(1).values - chosen
        # bfloat16 keeps 8 bits: a few roundings through the layers move a logit by this much.
        assert (gap <= 2**-5 * rows.abs().max()).all(), gap


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 16}, id="chunked"),
        pytest.param({"num_blocks": 1 + 12}, id="preempted"),
        pytest.param({"enable_prefix_caching": False}, id="without a prefix cache"),
        pytest.param({"max_num_seqs": 1}, id="alone"),
        pytest.param({"enforce_eager": True}, id="eager"),
    ],
)
@pytest.mark.parametrize("quantization", [None, "w4a8"])
def test_batch_invariant_tokens_do_not_depend_on_the_schedule(
    folder: Path, options, quantization: str | None
):
    always = {"batch_invariant": True, "quantization": quantization}
    assert run(folder, SEEDED, **(always | options)) == run(folder, SEEDED, **always)


@pytest.mark.parametrize(
    "options, most",
    [
        ({"kv_cache_dtype": "fp8"}, 0.5),
        ({"kv_cache_dtype": "int8"}, 0.5),
        ({"quantization": "int4"}, 1.2),  # random weights: 0.82 on the CPU too
        ({"quantization": "w4a8"}, 1.2),
        ({"quantization": "fp8"}, 0.5),
    ],
    ids=str,
)
def test_quantised_log_probabilities_stay_near(folder: Path, options, most: float):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(**options) -> list[float]:
        with open_llm(folder, **options) as llm:
            (output,) = llm.generate(PROMPTS[-1], params)
        return [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]

    moved = [abs(a - b) for a, b in zip(logprobs(), logprobs(**options))]
    assert 0 < sum(moved) / len(moved) < most


def test_penalties_work_one_step_ahead(folder: Path):
    """Token counts include the token that the host has not seen yet: beside the same rule over
    transformers' logits, each token is the best up to rounding."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = PROMPTS[3]
    params = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, presence_penalty=2.0, frequency_penalty=2.0
    )
    with open_llm(folder) as llm:
        tokens = llm.generate(prompt, params)[0].outputs[0].token_ids
    with torch.no_grad():
        rows = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    tolerance = 2**-5 * rows.abs().max()
    for i, row in enumerate(rows):
        for token in set(tokens[:i]):
            row[token] -= 2.0 + 2.0 * tokens[:i].count(token)
        assert row.max() - row[tokens[i]] <= tolerance


def test_bad_words_work_one_step_ahead(folder: Path, monkeypatch):
    """Two tokens of the output come no more one after the other; up to there nothing changes."""
    params = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    with open_llm(folder, batch_invariant=True) as llm:
        free = llm.generate(PROMPTS, SamplingParams(**params))[3].outputs[0].token_ids
        pairs = list(zip(free, free[1:]))
        banned = pairs[5]
        # The random model's tokens are bytes that no text has.
        monkeypatch.setattr(llm._parts.tokenizer, "spellings", lambda words: [list(banned)])
        asked = SamplingParams(**params, bad_words="two tokens")
        tokens = llm.generate(PROMPTS, asked)[3].outputs[0].token_ids
    until = pairs.index(banned) + 1
    assert tokens[:until] == free[:until]
    assert banned not in zip(tokens, tokens[1:])


def test_stopping_in_the_middle_of_a_batch_leaves_the_others_alone(folder: Path):
    with open_llm(folder, batch_invariant=True) as llm:
        whole = [o.outputs[0] for o in llm.generate(PROMPTS, GREEDY)]
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=24,
                ignore_eos=True,
                stop_token_ids=out.token_ids[i : i + 1],
            )
            for i, out in enumerate(whole)
        ]
        stopped = llm.generate(PROMPTS, params)
        for i, (a, b) in enumerate(zip(whole, stopped)):
            end = a.token_ids.index(a.token_ids[i]) + 1
            assert b.outputs[0].token_ids == a.token_ids[:end]
        assert (llm.stats().in_flight, llm.stats().used_blocks) == (0, 0)


def test_the_cache_takes_what_is_left_and_close_gives_it_back(folder: Path, monkeypatch):
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()

    def as_if_alone(device: object = None) -> tuple[int, int]:
        """Other tests take and give back memory of the GPU meanwhile."""
        return free - (torch.cuda.memory_reserved() - reserved), total

    monkeypatch.setattr(torch.cuda, "mem_get_info", as_if_alone)
    share = (total - free) / total + 0.1
    with LLM(folder, device="cuda", gpu_memory_utilization=share, max_num_seqs=32) as llm:
        llm.generate(PROMPTS, GREEDY)
        inside, _ = torch.cuda.mem_get_info()
        assert free - inside > 0.05 * total
        assert total - inside <= share * total + (512 << 20)
        assert llm.num_blocks > 100
    assert torch.cuda.memory_reserved() - reserved < 256 << 20


def test_float32_is_refused(folder: Path):
    with pytest.raises(ValueError, match='dtype "float32" runs on the CPU only'):
        LLM(folder, device="cuda", dtype="float32")


def test_a_long_prefix_in_common_is_read_once(folder: Path, monkeypatch):
    """The tokens' log-probabilities stay those of each request alone, up to rounding; in
    batch-invariant mode all bits do."""
    monkeypatch.setattr("ridgeline.runner._SPARED_BYTES", 1)
    start = tiny_model.prompt_of(400) + tiny_model.prompt_of(112, 1) + tiny_model.prompt_of(80, 2)
    prompts = [start + tiny_model.prompt_of(3 + i, i) for i in range(7)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    size = {"max_model_len": 640, "num_blocks": 512}

    def together(**options):
        with open_llm(folder, **(size | options)) as llm:
            outputs = [o.outputs[0] for o in llm.generate(prompts, params)]
            graphs = llm._parts.runner._graphs
            keys = () if graphs is None else graphs._graphs
            return outputs, {key.shared_blocks for key in keys}

    shared, keys = together()
    assert max(keys) == 32  # of 37 blocks of 16: 512 keys
    alone, keys = together(max_num_seqs=1)
    assert keys == {0}
    for a, b in zip(shared, alone):
        same = next((i for i in range(12) if a.token_ids[i] != b.token_ids[i]), 12)
        assert same > 0
        for i in range(same):
            token = a.token_ids[i]
            assert abs(a.logprobs[i][token].logprob - b.logprobs[i][token].logprob) < 0.1
    assert [o.token_ids for o in shared] == [o.token_ids for o in together()[0]]
    invariant, keys = together(batch_invariant=True)
    assert keys == {0}
    single, _ = together(batch_invariant=True, max_num_seqs=1)
    assert [o.logprobs for o in invariant] == [o.logprobs for o in single]


def test_a_sequence_alone_has_the_same_bits_in_graphs(tmp_path: Path, monkeypatch):
    """Eight KV heads of 64: its attention takes the projection as it is. Past 64 keys the graph
    reads wider tables."""
    tiny_model.save_llama(
        tmp_path, hidden_size=512, num_attention_heads=8, num_key_value_heads=8,
        initializer_range=0.1,
    )  # fmt: skip
    tiny_model.save_tokenizer(tmp_path)
    monkeypatch.setattr("ridgeline.graphs.LONE_KEYS", 64)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=1)

    def alone(**options):
        with open_llm(tmp_path, max_num_seqs=1, **options) as llm:
            (output,) = llm.generate([tiny_model.prompt_of(20)], params)
            return output.outputs[0], llm.stats().graphs

    replayed, graphs = alone()
    eager, none = alone(enforce_eager=True)
    assert graphs == 3 and none == 0  # of the prompt, and of both widths
    assert replayed.token_ids == eager.token_ids
    # The eager step of the prompt asks the last layer for its end alone: another kernel.
    assert replayed.logprobs[1:] == eager.logprobs[1:]


def test_swapped_is_not_preempted_and_the_trace_replays(folder: Path, tmp_path: Path, monkeypatch):
    expected = run(folder, SEEDED, batch_invariant=True)
    monkeypatch.setattr("ridgeline.memory._HOST_BANDWIDTH", 1e18)  # always worth it
    path = tmp_path / "trace.jsonl"
    with open_llm(
        folder, batch_invariant=True, num_blocks=1 + 12, swap_space=0.05, trace=path,
        latency_target=0.01,
    ) as llm:  # fmt: skip
        outputs = llm.generate(PROMPTS, SEEDED)
        stats = llm.stats()
    assert [o.outputs[0].token_ids for o in outputs] == [tokens for tokens, _ in expected]
    assert stats.swaps == stats.preemptions > 0
    assert stats.graph_replays > 0 and stats.decode_mbu is not None
    ran = [event for event, _ in Replay(path).events() if event["event"] == "ran"]
    assert ran and all(event["predicted_us"] > 0 for event in ran)
