"""Checkpoints that other tools quantised have the values that they mean, to the bit."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import quantized_files
import tiny_model
from quantized_files import FORMATS, FileFormat
from ridgeline import LLM, SamplingParams, ops
from ridgeline.memory import stored_bytes, tensor_bytes
from ridgeline.models.config import ModelConfig
from ridgeline.models.expert_linear import (
    DenseExperts,
    Fp4ExpertLinear,
    Fp8ExpertLinear,
    Int4ExpertLinear,
    make_experts,
)
from ridgeline.models.linear import (
    DenseLinear,
    Fp8Linear,
    Int4Linear,
    Int8Linear,
    Linear,
    W4A8Linear,
    WeightOnlyFp8Linear,
)
from ridgeline.models.loader import LoadOptions, load_decoder
from ridgeline.models.stored_linear import BlockFp8Linear
from ridgeline.quant.compressed_tensors import CompressedTensors
from ridgeline.quant.formats import Gptq, format_of
from ridgeline.quant.four_bits import Mxfp4
from ridgeline.quant.layout import ScaledFormat, TensorInfo, wrong_dtype
from ridgeline.quant.stored import (
    Expanded,
    Fp4Codes,
    GroupedCodes,
    ScaledCodes,
    is_finite,
    stack,
)
from test_models import load, logits_of
from tiny_model import one_thread  # noqa: F401

KINDS = {
    "int4": Int4Linear,
    "w4a8": W4A8Linear,
    "int8": Int8Linear,
    "fp8": Fp8Linear,
    "block fp8": BlockFp8Linear,
    "weights in fp8": WeightOnlyFp8Linear,
    "dense": DenseLinear,
}
PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
PROMPT = tiny_model.prompt_of(20)
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=FORMATS, ids=lambda kind: kind.name)
def saved(request, tmp_path_factory) -> tuple[FileFormat, Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("quantized")
    return request.param, folder, quantized_files.save(folder, request.param)


def values_of(linear: Linear, dtype: torch.dtype) -> Tensor:
    if isinstance(linear, Int4Linear):
        return linear.weight.dequantize()
    if isinstance(linear, (Fp8Linear, WeightOnlyFp8Linear)):
        return ScaledCodes(linear.weight, linear.scale.reshape(-1)).dequantize(dtype)
    if isinstance(linear, BlockFp8Linear):
        return ScaledCodes(linear.weight, linear.scale, (128, 128)).dequantize(dtype)
    assert isinstance(linear, DenseLinear)
    return linear.weight


@pytest.mark.filterwarnings("ignore:.* matrices .* are kept as")
def test_weights_are_the_dequantised_ones_to_the_bit(saved):
    kind, folder, model = saved
    state = model.state_dict()
    # float16 is what the scales are stored in, so that nothing is rounded but the values.
    for dtype in (torch.float32, torch.float16):
        decoder = load(folder, dtype)
        for i, layer in enumerate(decoder.layers):
            for name, parts in PARTS.items():
                linear = getattr(layer, name)
                assert type(linear) is KINDS[kind.keeps]
                meant = torch.cat([state[f"model.layers.{i}.{part}.weight"] for part in parts])
                assert torch.equal(values_of(linear, dtype), meant.to(dtype)), (i, name)


def rounded_inputs(columns: int | None, int8: bool):
    """A hook that rounds inputs to fp8 or int8, a scale a token and ``columns`` (None: all)."""

    def hook(_, inputs: tuple[Tensor]) -> Tensor:
        (x,) = inputs
        if int8:
            scale = x.abs().amax(-1, keepdim=True) / 127
            return (x / scale).round() * scale
        groups = x.unflatten(-1, (-1, columns or x.shape[-1]))
        scale = groups.abs().amax(-1, keepdim=True) / 448
        return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)

    return hook


@pytest.mark.filterwarnings("ignore:.* matrices .* are kept as")
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_what_weights_will_take_is_known_before_they_are_read(kind: FileFormat, tmp_path: Path):
    quantized_files.save(tmp_path, kind, hidden_size=512, intermediate_size=1024)
    expected = stored_bytes(ModelConfig.from_path(tmp_path), tmp_path, torch.float16)
    taken = tensor_bytes([load(tmp_path, torch.float16)])
    assert 0.95 * taken < expected < 1.25 * taken  # files have order and padding, too


@pytest.mark.filterwarnings("ignore:.* matrices .* are kept as")
def test_logits_are_those_of_the_dequantised_model(saved):
    kind, folder, model = saved
    hooks = []
    if kind.keeps in ("int8", "fp8", "block fp8", "w4a8"):  # inputs are rounded to 8 bits too
        columns = 128 if kind.keeps == "block fp8" else None
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                rounds = rounded_inputs(columns, kind.keeps == "int8")
                hooks.append(module.register_forward_pre_hook(rounds))
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    for hook in hooks:
        hook.remove()
    actual = logits_of(load(folder), PROMPT, torch.float32)
    if hooks:  # an input between two codes may fall to either
        assert (actual - expected).norm() < 0.03 * expected.norm()
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


def test_what_is_not_kept_in_its_format_is_said(saved):
    kind, folder, _ = saved
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(folder)
    said = [str(w.message) for w in caught if "matrices" in str(w.message)]
    assert bool(said) == (kind.keeps == "dense")
    for message in said:
        assert "8 matrices (layers.0.qkv, ...) are kept as torch.float32: " in message


def test_greedy_tokens_are_those_of_the_dequantised_model(tmp_path: Path):
    model = quantized_files.save(tmp_path, quantized_files.gptq(order=True))
    with LLM(tmp_path, device="cpu", num_blocks=4, max_num_seqs=2) as llm:
        (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6))
    assert output.outputs[0].token_ids == tiny_model.greedy(model, PROMPT, 6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind",
    [
        *(quantized_files.awq(64), quantized_files.gptq(order=True), FORMATS[-3]),
        quantized_files.compressed_packed(128, inputs=quantized_files.W4AFP8),
    ],
    ids=lambda kind: kind.name,
)
def test_the_gpu_computes_what_the_cpu_does(tmp_path: Path, kind: FileFormat):
    """Product by product: through layers, inputs that fall to another fp8 code grow apart."""
    quantized_files.save(tmp_path, kind)
    cpu, gpu = load(tmp_path), load(tmp_path, torch.float16, "cuda")
    for cpu_layer, gpu_layer in zip(cpu.layers, gpu.layers, strict=True):
        for name, columns in (("qkv", 128), ("output", 128), ("up", 128), ("down", 256)):
            x = torch.randn(7, columns, generator=torch.Generator().manual_seed(0)).half()
            expected = getattr(cpu_layer, name)(x.float())
            actual = getattr(gpu_layer, name)(x.cuda()).float().cpu()
            assert (actual - expected).norm() < 2e-3 * expected.norm(), name


def test_parts_of_different_orders_are_expanded(tmp_path: Path):
    kind = quantized_files.gptq(order=True)
    model = quantized_files.save(tmp_path, kind)
    path, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.k_proj"
    tensors = load_file(path)
    order = torch.arange(128).flip(0)
    index = tensors[f"{name}.g_idx"][order]
    tensors[f"{name}.g_idx"] = index
    save_file(tensors, path)
    with pytest.warns(UserWarning, match=r"1 matrices \(layers.0.qkv\).*column orders differ"):
        decoder = load(tmp_path)
    q_rows = model.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(values_of(decoder.layers[0].qkv, torch.float32)[:128], q_rows)


def test_a_layer_left_as_it_was_is_read_so(tmp_path: Path):
    """Which layers are quantised is in the file; the lists in the configuration have dialects."""
    model = quantized_files.save(tmp_path, quantized_files.awq())
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.down_proj"
    tensors = load_file(path)
    for end in ("qweight", "qzeros", "scales"):
        del tensors[f"{name}.{end}"]
    tensors[f"{name}.weight"] = model.model.layers[1].mlp.down_proj.weight.detach().clone()
    save_file(tensors, path)
    layer = load(tmp_path).layers[1]
    assert isinstance(layer.down, DenseLinear) and isinstance(layer.up, Int4Linear)


TOKENS = quantized_files.W4AFP8


@pytest.mark.parametrize(
    ("inputs", "kept"),
    [
        (TOKENS, True),
        (TOKENS | {"strategy": "tensor", "dynamic": False}, True),  # a token's own scale instead
        ({"type": "float", "num_bits": 8}, True),
        ({"type": "float", "strategy": "token", "dynamic": True, "observer": None}, True),
        ({"type": "float", "strategy": None, "group_size": None}, True),
        (TOKENS | {"strategy": "group", "group_size": 128}, False),
        (TOKENS | {"strategy": None, "group_size": 128}, False),  # which makes it "group"
        (TOKENS | {"type": "int"}, False),
        (TOKENS | {"num_bits": 4}, False),
        ({}, False),
    ],
)
def test_inputs_of_four_bit_weights_are_fp8_where_a_token_s_scale_serves(
    tmp_path: Path, inputs: dict[str, Any], kept: bool
):
    """Others stay in 16 bits, and lose less than the file means."""
    file = quantized_files.compressed_packed(128, inputs=inputs)
    quantized_files.save(tmp_path, file)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.layers.1.mlp.up_proj.input_scale": torch.ones(1)}, path)
    for layer in load(tmp_path).layers:
        assert type(layer.up) is (W4A8Linear if kept else Int4Linear)
    experts = GroupedCodes(four_bits(64, 2).q, torch.ones(2, 64), fp8_inputs=kept)
    assert type(make_experts(experts, None, 2, torch.float32, None)[0]) is Int4ExpertLinear


@pytest.mark.parametrize("file", [quantized_files.compressed_packed(group) for group in (32, None)])
def test_what_shares_a_scale_is_told_by_the_group_size_alone(tmp_path: Path, file: FileFormat):
    quantized_files.save(tmp_path, file)
    expected = logits_of(load(tmp_path), PROMPT, torch.float32)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    weights |= {"strategy": None, "group_size": weights["group_size"] or -1}
    path.write_text(json.dumps(config))
    assert torch.equal(logits_of(load(tmp_path), PROMPT, torch.float32), expected)


@pytest.mark.parametrize("code", [-9, 8])
def test_bytes_that_are_not_of_four_bits_are_refused(tmp_path: Path, code: int):
    quantized_files.save(tmp_path, quantized_files.compressed_bytes(128, inputs=TOKENS))
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    tensors[name][3, 5] = code
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"{name}: expected integers from -8 to 7, got .*{code}"):
        load(tmp_path)


def test_parts_with_inputs_of_two_kinds_are_refused():
    groups = {str(i): {"weights": {"num_bits": 4}, "input_activations": inputs}
              for i, inputs in enumerate((None, TOKENS))}  # fmt: skip
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    with pytest.raises(ValueError, match="must quantise all weights in one way, got 2"):
        format_of(config | {"config_groups": groups})


def test_a_bias_that_the_model_lacks_must_be_zero(tmp_path: Path):
    quantized_files.save(tmp_path, quantized_files.gptq())
    path, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj.bias"
    tensors = load_file(path)
    tensors[name] = torch.zeros(128)
    save_file(tensors, path)
    assert load(tmp_path).layers[0].qkv.bias is None
    tensors[name][5] = 1
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"not part of the architecture: {name}"):
        load(tmp_path)


def test_tensors_that_do_not_fit_the_format_are_all_listed(tmp_path: Path):
    quantized_files.save(tmp_path, quantized_files.gptq())
    path, name = tmp_path / "model.safetensors", "model.layers.0.self_attn"
    tensors = load_file(path)
    del tensors[f"{name}.q_proj.scales"], tensors[f"{name}.k_proj.qweight"]
    tensors[f"{name}.v_proj.qzeros"] = torch.zeros(1, 8, dtype=torch.int32)
    tensors["model.norm.weight"] = torch.zeros(128, dtype=torch.int8)
    save_file(tensors, path)
    with pytest.raises(ValueError) as caught:
        load(tmp_path)
    for line in (
        f"missing: {name}.q_proj.scales [4, 128]",
        f"missing: {name}.k_proj.weight [64, 128]",
        f"not part of the architecture: {name}.k_proj.g_idx",
        f"wrong shape: {name}.v_proj.qzeros: expected [4, 8], got [1, 8]",
        "not a floating-point tensor: model.norm.weight is I8",
    ):
        assert line in str(caught.value)


@pytest.mark.parametrize(
    ("file", "end", "dtype", "message"),
    [
        (quantized_files.awq(), "qweight", torch.int64, "expected I32, got I64"),
        (quantized_files.awq(), "scales", torch.int64, "expected a floating dtype, got I64"),
        (quantized_files.gptq(order=True), "g_idx", torch.float32, "expected I32, got F32"),
        (FORMATS[-1], "SCB", torch.int32, "expected a floating dtype, got I32"),
    ],
)
def test_codes_of_another_dtype_are_refused(
    tmp_path: Path, file: FileFormat, end: str, dtype: torch.dtype, message: str
):
    quantized_files.save(tmp_path, file)
    path, name = tmp_path / "model.safetensors", f"model.layers.1.mlp.up_proj.{end}"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].to(dtype)}, path)
    with pytest.raises(ValueError, match=f"wrong dtype: {name}: {message}"):
        load(tmp_path)


def of_name(name: str) -> FileFormat:
    return next(kind for kind in FORMATS if kind.name == name)


@pytest.mark.parametrize(
    ("kind", "end", "dtype", "wanted"),
    [
        ("compressed-tensors, nvfp4", "weight_packed", torch.int8, "U8"),
        ("compressed-tensors, nvfp4", "weight_scale", torch.bfloat16, "F8_E4M3"),
        ("compressed-tensors, nvfp4", "weight_global_scale", torch.bfloat16, "F32"),
        ("compressed-tensors, mxfp4", "weight_scale", torch.int8, "U8"),
        ("modelopt, nvfp4", "weight", torch.int8, "U8"),
        ("bitsandbytes nf4", "weight", torch.int8, "U8"),
        ("bitsandbytes nf4", "weight.quant_map", torch.float16, "F32"),
        ("bitsandbytes nf4", "weight.absmax", torch.int8, "torch.uint8"),
        ("bitsandbytes fp4", "weight.absmax", torch.float16, "torch.float32"),
    ],
)
def test_four_bit_codes_of_another_dtype_are_refused(
    tmp_path: Path, kind: str, end: str, dtype: torch.dtype, wanted: str
):
    quantized_files.save(tmp_path, of_name(kind))
    path, name = tmp_path / "model.safetensors", f"model.layers.1.mlp.up_proj.{end}"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].to(dtype)}, path)
    with pytest.raises(ValueError, match=f"{name}: expected {wanted}, got"):
        load(tmp_path)


@pytest.mark.parametrize("changed", [{"shape": [128, 256]}, {"blocksize": 32}])
def test_a_table_s_codes_of_another_matrix_are_refused(tmp_path: Path, changed: dict[str, Any]):
    quantized_files.save(tmp_path, of_name("bitsandbytes nf4"))
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    state = f"{name}.quant_state.bitsandbytes__nf4"
    said = json.loads(bytes(tensors[state].tolist())) | changed
    tensors[state] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"{name}: expected .*'shape': \\[256, 128\\].*, got"):
        load(tmp_path)


def test_model_optimizer_may_say_it_in_a_file_of_its_own(tmp_path: Path):
    model = quantized_files.save(tmp_path, of_name("modelopt, fp8"))
    config = json.loads((tmp_path / "config.json").read_text())
    algorithm = config.pop("quantization_config")["quant_algo"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    made = values_of(load(tmp_path).layers[1].down, torch.float32)
    assert torch.equal(made, model.get_parameter("model.layers.1.mlp.down_proj.weight"))
    own["quantization"]["quant_algo"] = "W4A8_AWQ"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    with pytest.raises(ValueError, match="quant_algo must be one of 'FP8', 'NVFP4', got 'W4A8_"):
        ModelConfig.from_path(tmp_path)


@pytest.mark.parametrize("group", [-5, 4])
@pytest.mark.parametrize(
    ("file", "end"),
    [
        (quantized_files.gptq(order=True), "g_idx"),
        (quantized_files.compressed_packed(order=True), "weight_g_idx"),
    ],
    ids=["gptq", "compressed-tensors"],
)
def test_groups_that_are_not_there_are_refused(
    tmp_path: Path, file: FileFormat, end: str, group: int
):
    quantized_files.save(tmp_path, file)
    path, name = tmp_path / "model.safetensors", f"model.layers.1.mlp.up_proj.{end}"
    tensors = load_file(path)
    tensors[name][7] = group
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"{name}: expected groups from 0 to 3, got .*{group}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "dynamic": [1]}, r"dynamic must map patterns, got \[1\]"),
        ({"quant_method": "aqlm"}, "quant_method must be one of awq, .*mxfp4, got 'aqlm'"),
        ({}, "got None"),
        ({"quant_method": "gptq", "bits": 3}, r"bits must be one of 4, 8, got 3"),
        ({"quant_method": "gptq", "group_size": 0}, "group_size must be positive or -1, got 0"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format.*'marlin'"),
        ({"quant_method": "gptq", "dynamic": {"-:x": {}, "+:y": {"bits": 8}}}, r"dynamic.*'\+:y'"),
        ({"quant_method": "awq", "version": "gemv"}, "version must be one of .*got 'gemv'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "a block must be two sizes"),
        ({"quant_method": "bitsandbytes"}, "expected load_in_4bit or load_in_8bit, got neither"),
        (
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_quant_storage": "bfloat16",
            },
            "bnb_4bit_quant_storage must be one of 'uint8', got 'bfloat16'",
        ),
        ({"quant_method": "modelopt"}, "quant_algo must be one of 'FP8', 'NVFP4', got None"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "a block must be two sizes"),
        ({"quant_method": "compressed-tensors"}, "config_groups must quantise all"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "bitmask"}},
            "sparsity 'bitmask' is not read",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R": 1}}},
            "transform_config .* is not read",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"weights": {"type": "float", "num_bits": 6}}},
            },
            "weights of float 6 bits are not read",
        ),
    ],
)
def test_a_scheme_that_is_not_read_is_refused(config, message: str):
    shape = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(shape | {"quantization_config": config | {"": 0}})


@pytest.mark.parametrize("quantization", ["fp8", "w4a8"])
def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path, quantization: str):
    quantized_files.save(tmp_path, quantized_files.awq())
    options = LoadOptions(torch.device("cpu"), torch.float32, 64, quantization=quantization)
    with pytest.raises(ValueError, match=f"quantization must be None .*got '{quantization}'"):
        load_decoder(ModelConfig.from_path(tmp_path), tmp_path, options)


def test_weights_without_a_scheme_must_be_floats(tmp_path: Path):
    quantized_files.save(tmp_path, FORMATS[-1])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="q_proj.weight is I8, which config.json gives no"):
        load(tmp_path)


def e2m1(code: int) -> float:
    """Sign, two bits of exponent, one of mantissa; no infinity."""
    exponent, mantissa = code >> 1 & 3, code & 1
    value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -value if code & 8 else value


@pytest.mark.parametrize(
    ("powers", "kind"),
    [
        ([], Fp4ExpertLinear),
        ([107], Fp4ExpertLinear),
        ([129], Fp8ExpertLinear),
        ([129, 107], DenseExperts),
    ],
    ids=["near", "far apart", "above 2", "above 2 and far apart"],
)
def test_experts_in_four_bit_floats(tmp_path: Path, powers: list[int], kind: type):
    """Kept as they are; with scales above 2 as fp8, or, with exponents too far apart within a row
    for that, in 16 bits."""
    model = tiny_model.save_model(
        tmp_path, "gpt_oss", num_local_experts=3, num_experts_per_tok=2, head_dim=32
    )
    path, draw = tmp_path / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith("experts.gate_up_proj") or "down_proj" in n]:
        if name.endswith("bias"):
            continue
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=draw, dtype=torch.uint8)
        for group, power in enumerate(powers):
            scales[0, 0, group], blocks[0, 0, group, 0] = power, 0x21
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data.copy_(four_bit_floats(blocks, scales).transpose(1, 2))
    save_file(tensors, path)
    tiny_model.edit_json(
        tmp_path / "config.json", quantization_config={"quant_method": "mxfp4"}, swiglu_limit=7.0
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        decoder = load(tmp_path)
    assert [w for w in told if "exponents of 4-bit floats" in str(w.message)] == told
    assert len(told) == (kind is DenseExperts)
    experts = decoder.layers[0].experts
    assert isinstance(experts.up, kind) and isinstance(experts.down, kind)
    if kind is Fp4ExpertLinear:  # half a byte a weight, and of each 32 an exponent
        up = experts.up.weight
        assert tensor_bytes([up]) == 3 * up.N * up.K * (0.5 + 1 / 32)
        wide = load(tmp_path, quantization="fp8")
        assert isinstance(wide.layers[0].experts.up, DenseExperts if powers else Fp8ExpertLinear)
        assert isinstance(wide.layers[0].qkv, DenseLinear)
        of_wide = logits_of(wide, PROMPT, torch.float32)
        torch.testing.assert_close(of_wide, logits_of(decoder, PROMPT, torch.float32))
        with pytest.raises(ValueError, match="must be None or 'fp8' .* got 'int4'"):
            load(tmp_path, quantization="int4")
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    actual = logits_of(decoder, PROMPT, torch.float32)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tokens", [1, 5, 70, 600])
def test_experts_of_weights_alone_take_inputs_as_they_are(tokens: int, device: str):
    """bfloat16 by fp8, of gpt-oss's 2880 columns: no input is rounded to 8 bits."""
    draw = torch.Generator().manual_seed(tokens)
    codes = torch.randn(4 * 96, 2880, generator=draw).to(torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-9, -5, (4 * 96,), generator=draw)
    weight = ScaledCodes(codes.to(device), scale.to(device), weight_only=True)
    bias = torch.randn(4 * 96, generator=draw).bfloat16().to(device)
    made, reason = make_experts(weight, bias, 4, torch.bfloat16, None)
    plain, _ = make_experts(weight.dequantize(torch.bfloat16), bias, 4, torch.bfloat16, None)
    assert isinstance(made, Fp8ExpertLinear) and isinstance(plain, DenseExperts) and not reason
    x = torch.randn(tokens, 2880, generator=draw).bfloat16().to(device)
    offsets = torch.tensor([0, tokens // 3, tokens // 3, tokens, tokens]).int().to(device)
    expected = plain(x, offsets, None, None).float()
    actual = made(x, offsets, None, None).float()
    assert (actual - expected).norm() < 4e-3 * expected.norm()  # rounded to fp8: 26e-3


def four_bit_floats(blocks: Tensor, scales: Tensor) -> Tensor:
    """``[experts, rows, columns]``, of the formats' definitions, code by code."""
    digits = torch.stack((blocks % 16, blocks // 16), -1).flatten(-2).tolist()
    values = torch.tensor([[[[e2m1(d) for d in g] for g in r] for r in e] for e in digits])
    return (values.double() * 2.0 ** (scales.double() - 127).unsqueeze(-1)).flatten(-2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("powers", "kept"),
    [((113, 127), True), ((34, 48), True), ((110, 125), False), ((8, 22), False)],
    ids=["14 apart", "small", "15 apart", "scales that float32 rounds"],
)
def test_four_bit_floats_are_read_exactly(powers: tuple[int, int], kept: bool, device: str):
    """Every code under both powers of a row; rows and groups of zeros, of any power."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(3, 2, 1).view(3, 8, 4, 16)
    scales = torch.tensor(powers, dtype=torch.uint8)[torch.arange(96).view(3, 8, 4) % 2]
    blocks[1, 2], blocks[2, 5, 1], scales[2, 5, 1] = 0, 0x80, 254
    tensors = {"m_blocks": blocks.to(device), "m_scales": scales.to(device)}
    stored = Mxfp4().read("m", 24, 128, {}, tensors.__getitem__)
    assert isinstance(stored, Fp4Codes)
    weight = stored.in_eight_bits()
    assert isinstance(weight, ScaledCodes if kept else Expanded)
    meant = four_bit_floats(blocks, scales).view(24, 128)
    for read in (stored, weight):
        assert torch.equal(read.dequantize(torch.float32).double().cpu(), meant)
    order = torch.arange(23, -1, -2, device=device)
    taken = stored.rows(order).dequantize(torch.float32).double().cpu()
    assert torch.equal(taken, meant[1::2].flip(0))
    if isinstance(weight, ScaledCodes):
        assert weight.weight_only and weight.codes.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("dtype", "rows", "kind"),
    [
        (torch.bfloat16, 32, Fp4ExpertLinear),
        (torch.float32, 32, Fp4ExpertLinear),
        (torch.float16, 32, Fp8ExpertLinear),  # which no product of 4-bit floats takes on CUDA
        (torch.bfloat16, 40, Fp8ExpertLinear),  # no whole strips
    ],
)
def test_experts_of_four_bit_floats_have_the_values_of_the_file(
    dtype: torch.dtype, rows: int, kind: type
):
    draw = torch.Generator().manual_seed(0)
    shape = (3 * rows, 3)
    blocks = torch.randint(0, 256, (*shape, 16), generator=draw, dtype=torch.uint8)
    weight = Fp4Codes(blocks, torch.randint(118, 124, shape, generator=draw, dtype=torch.uint8))
    bias = torch.randn(3 * rows, generator=draw).to(dtype)
    made, reason = make_experts(weight, bias, 3, dtype, None)
    assert type(made) is kind and reason is None
    assert (made.experts, made.unit) == (3, "bf16")
    plain, _ = make_experts(weight.dequantize(dtype), bias, 3, dtype, None)
    x, offsets = torch.randn(9, 96, generator=draw).to(dtype), torch.tensor([0, 4, 4, 9]).int()
    places = torch.tensor([8, 0, 0, 3, 5, 1, 1, 2, 7]).int()
    actual, expected = (linear(x, offsets, places, None) for linear in (made, plain))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("quantization, kind, bound", [
    ("fp8", Fp8ExpertLinear, 0.06), ("int4", Int4ExpertLinear, 0.2),
    ("w4a8", Int4ExpertLinear, 0.2),
])  # fmt: skip
def test_experts_are_quantised(tmp_path: Path, quantization: str, kind: type, bound: float):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 3}
    tiny_model.save_model(tmp_path, "mixtral", **sizes)
    config, options = ModelConfig.from_path(tmp_path), LoadOptions(CPU, torch.float32, 64)
    plain = load_decoder(config, tmp_path, options).layers[0].experts
    made = load_decoder(config, tmp_path, replace(options, quantization=quantization))
    experts = made.layers[0].experts
    assert isinstance(experts.up, kind) and isinstance(experts.down, kind)
    x, offsets = torch.randn(9, 128), torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    expected = plain.up(x, offsets, None, "silu_mul")
    actual = experts.up(x, offsets, None, "silu_mul")
    assert (actual - expected).norm() < bound * expected.norm()


def test_stored_experts_keep_their_codes():
    draw = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (3 * 64, 128), generator=draw).to(torch.uint8)
    zeros = torch.randint(0, 16, (4, 3 * 64), generator=draw).to(torch.uint8)
    int4 = GroupedCodes(q, torch.rand(4, 3 * 64, generator=draw), zeros)
    codes = torch.randn(3 * 64, 128, generator=draw).to(torch.float8_e4m3fn)
    fp8 = ScaledCodes(codes, torch.rand(3 * 64, generator=draw))
    x, offsets = torch.randn(9, 128, generator=draw), torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    for weight, kind in ((int4, Int4ExpertLinear), (fp8, Fp8ExpertLinear)):
        made, reason = make_experts(weight, None, 3, torch.float32, None)
        assert isinstance(made, kind) and reason is None
        dense = weight.dequantize(torch.float32).unflatten(0, (3, -1))
        inputs = x
        if kind is Fp8ExpertLinear:
            taken, scale = ops.quantize_fp8(x, "row")
            inputs = taken.float() * scale.reshape(-1, 1)
        expected = ops.grouped_linear(inputs, dense, offsets)
        torch.testing.assert_close(made(x, offsets, None, None), expected, rtol=1e-5, atol=1e-5)


def save_block_experts(folder: Path, plain: Path) -> None:
    """A tiny Qwen3-MoE whose experts are e4m3 with scales of blocks, and the values they mean."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 32, "num_experts": 5}
    tiny_model.save_model(plain, "qwen3_moe", num_experts_per_tok=2, **sizes)
    shutil.copytree(plain, folder)
    tensors, draw = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(1)
    stored, write = dict(tensors), quantized_files.fp8_blocks(128)
    names = [name for name in tensors if ".experts." in name]
    assert len(names) == 2 * 5 * 3
    for name in names:
        written, tensors[name] = write(*stored.pop(name).shape, draw)
        stored |= {f"{name.removesuffix('weight')}{end}": t for end, t in written.items()}
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, folder / "model.safetensors")
    config = quantized_files.BLOCKS | {"weight_block_size": [128, 128]}
    tiny_model.edit_json(folder / "config.json", quantization_config=config)


def test_experts_with_scales_of_blocks_stay_in_eight_bits(tmp_path: Path):
    save_block_experts(tmp_path / "blocks", tmp_path / "plain")
    decoder, plain = load(tmp_path / "blocks"), load(tmp_path / "plain")
    for layer, meant in zip(decoder.layers, plain.layers, strict=True):
        for made, dense in ((layer.experts.up, meant.experts.up),
                            (layer.experts.down, meant.experts.down)):  # fmt: skip
            assert isinstance(made, Fp8ExpertLinear) and made.unit == "fp8"
            N, K = made.weight.shape[1:]
            assert made.scale.shape == (5, N // 128, K // 128)
            scale = made.scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
            assert torch.equal(made.weight.float() * scale, dense.weight)
    few = PROMPT[:10]  # four rows an expert: inputs are not rounded to 8 bits
    expected, actual = (logits_of(made, few, torch.float32) for made in (plain, decoder))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
def test_the_gpu_multiplies_experts_with_scales_of_blocks(tmp_path: Path):
    save_block_experts(tmp_path / "blocks", tmp_path / "plain")
    made = load(tmp_path / "blocks", torch.bfloat16, "cuda").layers[0].experts
    plain = load(tmp_path / "plain", torch.bfloat16, "cuda").layers[0].experts
    for tokens in (1, 9, 100, 700):  # from 11 on inputs are rounded to 8 bits, too
        x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(tokens))
        x = x.to("cuda", torch.bfloat16)
        expected, actual = plain(x).float(), made(x).float()
        assert (actual - expected).norm() < (8e-3 if tokens < 11 else 6e-2) * expected.norm()


@pytest.mark.parametrize(("scales", "few"), [("row", 2), ("group", 4)])
def test_inputs_of_experts_are_quantised_where_rows_are_not_few(scales: str, few: int):
    codes = torch.randn(2 * 128, 256).to(torch.float8_e4m3fn)
    weight = (
        ScaledCodes(codes, torch.rand(2, 2), (128, 128))
        if scales == "group"
        else ScaledCodes(codes, torch.rand(256))
    )
    made, _ = make_experts(weight, None, 2, torch.float32, None)
    invariant, _ = make_experts(weight, None, 2, torch.float32, None, batch_invariant=True)
    assert isinstance(made, Fp8ExpertLinear)
    x = torch.randn(2 * few + 1, 256)
    values, x_scale = ops.quantize_fp8(x, scales)
    rounded = values.float() * x_scale.repeat_interleave(256 // x_scale.shape[-1], 1)

    def product(inputs: Tensor) -> Tensor:
        offsets = torch.tensor([0, 3, len(inputs)], dtype=torch.int32)
        return ops.grouped_fp8_linear(inputs, made.weight, made.scale, offsets)

    def same(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)

    for count, inputs in ((2 * few, x), (2 * few + 1, rounded)):
        offsets = torch.tensor([0, 3, count], dtype=torch.int32)
        same(made(x[:count], offsets, None, None), product(inputs[:count]))
        always = x if scales == "group" else rounded
        same(invariant(x[:count], offsets, None, None), product(always[:count]))
    rows = torch.arange(2 * few + 1, dtype=torch.int32) % 3  # it is rows of y that count
    same(made(x[:3], offsets, rows, None), product(rounded[rows.long()]))


def test_codes_go_from_one_product_of_experts_to_the_next(tmp_path: Path):
    """As the second would make them of the first's output, where rows are not few."""
    save_block_experts(tmp_path / "blocks", tmp_path / "plain")
    experts = load(tmp_path / "blocks").layers[0].experts
    up, down = experts.up, experts.down
    assert isinstance(up, Fp8ExpertLinear) and isinstance(down, Fp8ExpertLinear)
    for tokens in (10, 11):  # of which each has two rows, of five experts
        x = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(tokens))
        weights, offsets, rows, places = ops.route_experts(
            experts.router(x), 2, normalized=experts.normalized
        )
        codes = up.codes_for(down, x, offsets, rows, "silu_mul")
        assert (codes is None) == (tokens == 10)
        hidden = up(x, offsets, rows, "silu_mul")
        if codes is not None:
            values, scale = ops.quantize_fp8(hidden, "group")
            assert torch.equal(codes.values.view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(codes.scale, scale)
        expected = ops.combine_experts(down(hidden, offsets, None, None), places, weights)
        assert torch.equal(experts(x), expected)


def test_experts_that_end_within_a_block_are_expanded():
    weight = ScaledCodes(torch.randn(3 * 64, 128).to(torch.float8_e4m3fn), torch.rand(2, 1),
                         (128, 128))  # fmt: skip
    made, reason = make_experts(weight, None, 3, torch.float32, None)
    assert isinstance(made, DenseExperts)
    assert reason == "weight: expected rows divisible by 128, got 64 an expert"


def test_experts_that_cannot_be_quantised_are_kept_and_named(tmp_path: Path):
    tiny_model.save_model(tmp_path, "mixtral", hidden_size=128, num_local_experts=3)
    options = LoadOptions(torch.device("cpu"), torch.float32, 64, quantization="int8")
    with pytest.warns(UserWarning, match="4 matrices .*no product of experts with int8"):
        decoder = load_decoder(ModelConfig.from_path(tmp_path), tmp_path, options)
    assert isinstance(decoder.layers[0].experts.up, DenseExperts)


def test_symmetric_parts_join_others():
    q, scales = torch.full((2, 32), 9, dtype=torch.uint8), torch.ones(1, 2)
    plain, shifted = GroupedCodes(q, scales), GroupedCodes(q, scales, torch.full((1, 2), 5))
    joined = stack([plain, shifted], torch.float32)
    assert isinstance(joined, GroupedCodes)
    assert joined.dequantize(torch.float32)[:, 0].tolist() == [1, 1, 4, 4]


def four_bits(rows: int, groups: int, bits: int = 4, zeros: bool = False) -> GroupedCodes:
    q, at = torch.full((rows, 64), 9, dtype=torch.uint8), torch.arange(groups * rows)
    scales = 0.25 * (1 + at.view(groups, rows))
    shifted = torch.full_like(scales, 5, dtype=torch.uint8) if zeros else None
    return GroupedCodes(q, scales, shifted, bits=bits)


def fp4(rows: int, power: int, groups: int = 1) -> Fp4Codes:
    """Of each code twice."""
    blocks = torch.arange(16, dtype=torch.uint8).mul(17).expand(rows, groups, 16)
    return Fp4Codes(blocks, torch.full((rows, groups), power, dtype=torch.uint8))


def scaled(rows: int, kind: torch.dtype, block: tuple[int, int] | None = None) -> ScaledCodes:
    shape = (rows,) if block is None else (-(-rows // block[0]), -(-64 // block[1]))
    scale = 0.25 * (1 + torch.arange(torch.Size(shape).numel())).view(shape)
    return ScaledCodes(torch.full((rows, 64), 3.0).to(kind), scale, block)


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("parts", "joins"),
    [
        ((four_bits(2, 1), four_bits(3, 2)), False),
        ((four_bits(2, 2), four_bits(3, 2, bits=8)), False),
        ((four_bits(2, 2, bits=8), four_bits(3, 2, bits=8, zeros=True)), True),
        ((scaled(2, FP8), scaled(3, torch.int8)), False),
        ((scaled(4, FP8), scaled(4, FP8, (4, 32))), False),
        ((scaled(4, FP8, (4, 32)), scaled(4, FP8, (2, 32))), False),
        ((scaled(4, FP8, (4, 32)), scaled(6, FP8, (4, 32))), True),
        ((scaled(6, FP8, (4, 32)), scaled(4, FP8, (4, 32))), False),
        ((fp4(2, 120, groups=2), fp4(3, 130, groups=2)), True),
        ((fp4(2, 120, groups=2), scaled(3, FP8)), False),
        ((Expanded(torch.ones(2, 64), "one"), Expanded(torch.ones(3, 64), "one")), "one"),
        ((Expanded(torch.ones(2, 64), "one"), Expanded(torch.ones(3, 64), "two")), False),
    ],
    ids=[
        "other groups", "other bits", "8 bits without zero points", "other codes",
        "blocks and rows", "other blocks", "a last block that is short",
        "a first block that is short", "4-bit floats", "floats of 4 and 8 bits", "one reason",
        "two reasons",
    ],
)  # fmt: skip
def test_parts_keep_their_values_whether_they_join_or_not(parts, joins: bool | str):
    made = stack(parts, torch.float32)
    assert torch.equal(
        made.dequantize(torch.float32), torch.cat([p.dequantize(torch.float32) for p in parts])
    )
    if isinstance(made, Expanded):
        assert made.reason == (joins or "stacked from parts whose formats, groups or column "
                               "orders differ")  # fmt: skip
    else:
        assert joins is True and type(made) is type(parts[0])


def test_codes_and_scales_must_be_finite():
    nan = torch.full((2, 64), float("nan"))
    for weight in (four_bits(2, 1), scaled(2, FP8), scaled(2, torch.int8), fp4(2, 252)):
        assert is_finite(weight)
    assert not is_finite(fp4(2, 255))
    assert is_finite(replace(fp4(2, 255), blocks=torch.full((2, 1, 16), 0x80, dtype=torch.uint8)))
    assert not is_finite(ScaledCodes(nan.to(FP8), torch.ones(2)))
    assert not is_finite(replace(scaled(2, torch.int8), scale=nan[:, 0]))
    assert not is_finite(replace(four_bits(2, 1), scales=nan[:1, :2]))
    assert not is_finite(Expanded(nan, "why"))


@pytest.mark.parametrize("in_file", [True, False], ids=["g_idx", "no g_idx"])
def test_a_last_group_may_be_short(in_file: bool):
    draw = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (8, 192), generator=draw).to(torch.uint8)
    scales, group_of = torch.rand(2, 8, generator=draw), torch.arange(192) // 128
    zeros = torch.randint(1, 16, (2, 8), generator=draw)
    tensors = {
        "m.qweight": quantized_files.words(q, 4).t().contiguous(),
        "m.qzeros": quantized_files.words((zeros - 1).to(torch.uint8), 4),
        "m.scales": scales,
    }
    if in_file:
        tensors["m.g_idx"] = group_of.int()
    form = Gptq(4, 128, zero_offset=1)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert form.layout("m", 8, 192, tensors) == shapes
    weight = form.read("m", 8, 192, tensors, tensors.__getitem__)
    expected = (q - zeros[group_of].t().float()) * scales[group_of].t()
    torch.testing.assert_close(weight.dequantize(torch.float32), expected)


def test_packed_words_may_end_beyond_the_weight():
    """Rows of zero points and columns of codes that do not fill their last words."""
    N, K, draw = 5, 12, torch.Generator().manual_seed(0)
    q, zeros = (torch.randint(0, 16, shape, generator=draw) for shape in ((N, K), (1, N)))
    scales = torch.rand(1, N, generator=draw)
    tensors = {
        "m.weight_packed": quantized_files.words(F.pad(q, (0, 4), value=15), 4),
        "m.weight_scale": scales.t(),
        "m.weight_zero_point": quantized_files.words(F.pad(zeros, (0, 3), value=15), 4).t(),
    }
    form = CompressedTensors(bits=4, group=None, block=None)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert form.layout("m", N, K, tensors) == shapes
    weight = form.read("m", N, K, tensors, tensors.__getitem__)
    assert torch.equal(weight.dequantize(torch.float32), (q - zeros.t()) * scales.t())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (5,), (5, 1)])
def test_a_scale_of_a_tensor_or_row_may_have_any_of_its_shapes(shape: tuple[int, ...]):
    stored = {"m.weight": TensorInfo((5, 3), "I8"), "m.weight_scale": TensorInfo(shape, "F32")}
    layout = ScaledFormat("I8", "weight_scale").layout("m", 5, 3, stored)
    assert layout == {"m.weight": (5, 3), "m.weight_scale": shape}


def test_scales_of_blocks_become_float32_and_cover_what_is_left_of_a_block():
    form = ScaledFormat("F8_E4M3", "weight_scale_inv", (4, 2))
    tensors = {
        "m.weight": torch.randn(10, 3).to(torch.float8_e4m3fn),
        "m.weight_scale_inv": torch.rand(3, 2).bfloat16(),
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    stored = {"m.weight": TensorInfo((10, 3), "F8_E4M3")}
    assert form.layout("m", 10, 3, stored) == shapes
    weight = form.read("m", 10, 3, stored, tensors.__getitem__)
    assert isinstance(weight, ScaledCodes) and weight.scale.dtype == torch.float32


def test_four_bit_floats_without_dimensions_have_a_wrong_shape():
    """And not a division by the number of experts: it is told with all that does not fit."""
    layout = Mxfp4().layout("m", 6, 64, {"m_blocks": TensorInfo((), "U8")})
    assert layout == {"m_blocks": (1, 6, 2, 16), "m_scales": (1, 6, 2)}


def test_numbers_of_groups_may_have_64_bits():
    assert wrong_dtype("m.g_idx", "I64", {}) is None
    assert wrong_dtype("m.g_idx", "I16", {}) == "I32"


def test_groups_are_of_128_columns_where_the_file_does_not_say():
    assert format_of({"quant_method": "gptq", "bits": 4}).group == 128
