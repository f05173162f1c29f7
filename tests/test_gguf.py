"""GGUF files have the values that the gguf package reads, and generate the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import tiny_model
from ridgeline import LLM, SamplingParams
from ridgeline.memory import tensor_bytes
from ridgeline.models.gguf import GgufFile
from ridgeline.models.linear import DenseLinear, Int4Linear, W4A8Linear
from ridgeline.models.loader import LoadOptions, load_decoder
from ridgeline.quant.ggml import EXPANDED, q4_0
from ridgeline.quant.stored import GroupedCodes
from tiny_model import one_thread  # noqa: F401

gguf = pytest.importorskip("gguf")
Kind = gguf.GGMLQuantizationType

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
PROMPT = tiny_model.prompt_of(20)


def random_blocks(rows: int, columns: int, kind: Kind, draw: np.random.Generator) -> np.ndarray:
    """Bytes at random, but for scales that keep the values small."""
    size, bytes_ = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (rows, columns // size, bytes_), dtype=np.uint8)
    at, largest = {Kind.Q6_K: ([208], 2e-4), Kind.Q4_K: ([0, 2], 2e-3)}.get(kind, ([0], 0.02))
    for start in at:
        scale = (draw.random((rows, columns // size, 1)) * largest).astype(np.float16)
        blocks[..., start : start + 2] = scale.view(np.uint8)
    return blocks.reshape(rows, -1)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp's converter puts them: pairs side by side."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return rows.swapaxes(1, 2).reshape(weight.shape)


def save(
    path: Path, kind: Kind, arch: str = "llama", keys: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None, **overrides: Any,
) -> PreTrainedModel:  # fmt: skip
    """A model whose layers and head are of ``kind``; transformers' has the same values."""
    model = tiny_model.save_model(path.parent / "hf", arch, **(SHAPE | overrides))
    config, draw = model.config, np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim if arch != "qwen2" else 64)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_eos_token_id(0)
    for key, value in (keys or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{arch}.{key}", value)
    state = model.state_dict()
    for name, tensor in state.items():
        module, _, end = name.rpartition(".")
        layer, _, rest = module.removeprefix("model.layers.").partition(".")
        short = NAMES.get(module) or f"blk.{layer}.{NAMES[rest]}"
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        swap = heads.get(short.rpartition(".")[2]) if arch == "llama" else None
        values = tensor.numpy()
        if tensor.dim() == 1 or kind in (Kind.F16, Kind.F32):
            stored = values.astype(
                np.float16 if kind == Kind.F16 and tensor.dim() > 1 else np.float32
            )
            state[name].copy_(torch.from_numpy(stored.astype(np.float32)))
            stored = stored.astype(np.float32) if tensor.dim() == 1 else stored
            writer.add_tensor(f"{short}.{end}", permuted(stored, swap) if swap else stored)
            continue
        blocks = random_blocks(*tensor.shape, kind, draw)
        state[name].copy_(torch.from_numpy(gguf.dequantize(blocks, kind)))
        stored = permuted(blocks, swap) if swap else blocks
        writer.add_tensor(f"{short}.{end}", stored, raw_dtype=kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("kind", [Kind.Q4_0, *(Kind[name] for name in EXPANDED)])
def test_blocks_have_the_values_that_the_package_reads(kind: Kind):
    data = random_blocks(8, 512, kind, np.random.default_rng(1))
    theirs = torch.from_numpy(gguf.dequantize(data, kind))
    ours = q4_0 if kind == Kind.Q4_0 else EXPANDED[kind.name]
    values = ours(torch.from_numpy(data))
    if isinstance(values, GroupedCodes):
        values = values.dequantize(torch.float32)
    assert torch.equal(values, theirs)


@pytest.mark.filterwarnings("ignore:.* matrices .* are kept as")
@pytest.mark.parametrize(
    ("kind", "arch", "kept"),
    [
        (Kind.F32, "llama", DenseLinear),
        (Kind.F16, "qwen3", DenseLinear),
        (Kind.Q4_0, "llama", Int4Linear),
        (Kind.Q4_0, "qwen2", Int4Linear),
        (Kind.Q6_K, "llama", DenseLinear),
    ],
    ids=lambda value: getattr(value, "name", getattr(value, "__name__", value)),
)
def test_tokens_are_those_of_transformers_with_the_same_values(tmp_path, kind, arch, kept):
    path = tmp_path / "model.gguf"
    model = save(path, kind, arch)
    file = GgufFile(path)
    decoder = load_decoder(file.config(), file, LoadOptions(torch.device("cpu"), torch.float32, 64))
    assert all(type(layer.qkv) is kept for layer in decoder.layers)
    with LLM(path, device="cpu", num_blocks=4, max_num_seqs=2) as llm:
        (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4))
    assert output.outputs[0].token_ids == tiny_model.greedy(model, PROMPT, 4)


def test_sixteen_bits_are_quantised_while_loading(tmp_path: Path):
    path = tmp_path / "model.gguf"
    save(path, Kind.F16)
    file = GgufFile(path)
    options = LoadOptions(torch.device("cpu"), torch.float32, 64, quantization="w4a8")
    assert type(load_decoder(file.config(), file, options).layers[0].qkv) is W4A8Linear


@pytest.mark.filterwarnings("ignore:.* matrices .* are kept as")
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0, Kind.Q4_K, Kind.F16], ids=lambda k: k.name)
def test_what_weights_will_take_is_known_before_they_are_read(tmp_path: Path, kind: Kind):
    save(tmp_path / "model.gguf", kind, hidden_size=512, intermediate_size=1024)
    file = GgufFile(tmp_path / "model.gguf")
    options = LoadOptions(torch.device("cpu"), torch.float16, 64)
    taken = tensor_bytes([load_decoder(file.config(), file, options)])
    expected = file.kept_bytes(torch.float16)
    assert expected == 0 if kind == Kind.F16 else 0.97 * taken < expected < 1.03 * taken


def test_what_is_expanded_is_said(tmp_path: Path):
    save(tmp_path / "model.gguf", Kind.Q8_0)
    with pytest.warns(UserWarning, match="8 matrices .*Q8_0 has no exact counterpart here"):
        LLM(tmp_path, device="cpu", num_blocks=4, max_num_seqs=2).close()
    with pytest.raises(ValueError, match="quantization must be None"):
        LLM(tmp_path, device="cpu", num_blocks=4, max_num_seqs=2, quantization="int4")


def test_worked_out_frequencies_and_scalings(tmp_path: Path):
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    save(tmp_path / "a.gguf", Kind.F32, tensors={"rope_freqs.weight": factors})
    rope = GgufFile(tmp_path / "a.gguf").config().layers[0].rope
    assert rope.kind == "longrope" and rope.scaling["attention_factor"] == 1
    assert rope.scaling["short_factor"] == pytest.approx(factors.tolist())
    keys = {
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 2.0,
        "rope.scaling.original_context_length": 64.0,
    }
    save(tmp_path / "b.gguf", Kind.F32, keys=keys)
    rope = GgufFile(tmp_path / "b.gguf").config().layers[0].rope
    assert (rope.kind, rope.scaling["factor"]) == ("linear", 2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention.sliding_window": 8.0}, r"llama\.attention\.sliding_window=8.0"),
        ({"expert_count": 8.0}, "experts"),
        ({"rope.dimension_count": 32.0}, "rope.dimension_count: expected whole heads, got 32"),
        ({"rope.scaling.type": "xpos"}, "rope_type must be one of"),
    ],
)
def test_metadata_that_is_not_understood_is_refused(tmp_path: Path, keys, message: str):
    save(tmp_path / "model.gguf", Kind.F32, keys=keys)
    with pytest.raises(ValueError, match=rf"model\.gguf: .*{message}"):
        GgufFile(tmp_path / "model.gguf").config()


@pytest.mark.parametrize("key", ["embedding_length", "attention.head_count", "context_length"])
def test_metadata_that_is_missing_is_named(tmp_path: Path, key: str):
    save(tmp_path / "model.gguf", Kind.F32)
    file = GgufFile(tmp_path / "model.gguf")
    del file.values[f"llama.{key}"]
    with pytest.raises(ValueError, match=rf"no metadata for: llama\.{key}$"):
        file.config()


def test_files_that_do_not_fit_or_are_broken(tmp_path: Path):
    path = tmp_path / "model.gguf"
    save(path, Kind.F32, tensors={"blk.0.extra": np.zeros(3, dtype=np.float32)})
    with pytest.raises(ValueError, match="not part of the architecture: blk.0.extra"):
        LLM(path, device="cpu", num_blocks=4, max_num_seqs=2)
    contents = path.read_bytes()
    for broken in (b"", b"GGUF", contents[:100], contents[:5000], contents[:-64], b"\xff" * 400):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"model\.gguf is truncated or not a GGUF file"):
            GgufFile(path)
    (tmp_path / "second.gguf").write_bytes(contents)
    with pytest.raises(ValueError, match="several GGUF files, name one: model.gguf, second.gguf"):
        LLM(tmp_path, device="cpu")


def test_an_architecture_whose_file_says_too_little_is_refused(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="must be one of llama, qwen2, qwen3, got 'gemma2'"):
        GgufFile(tmp_path / "model.gguf").config()
