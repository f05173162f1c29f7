"""Model folders that are incomplete, broken or not safe are refused, naming all that is wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend

import tiny_model
from ridgeline import LLM, SamplingParams
from ridgeline.models.config import ModelConfig
from ridgeline.models.weights import parameters
from tiny_model import one_thread  # noqa: F401

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model.save_llama(tmp_path / "model")
    tiny_model.save_tokenizer(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tiny_model.save_llama(tmp_path / "model", max_shard_size="100KB")
    assert (tmp_path / "model" / INDEX).exists()
    return tmp_path / "model"


def open_llm(folder: Path, **options) -> LLM:
    return LLM(folder, device="cpu", num_blocks=4, max_num_seqs=2, **options)


def test_shards_load_as_one_file_does(folder: Path, sharded: Path):
    prompt, params = tiny_model.prompt_of(9), SamplingParams(temperature=0, max_tokens=5)
    with open_llm(sharded) as llm:
        (from_shards,) = llm.generate(prompt, params)
    model = tiny_model.save_llama(folder)
    assert from_shards.outputs[0].token_ids == tiny_model.greedy(model, prompt, 5)


def test_progress_counts_every_tensor(folder: Path):
    seen: list[tuple[int, int]] = []
    open_llm(folder, progress=lambda done, total: seen.append((done, total))).close()
    total = seen[0][1]
    assert seen == [(i + 1, total) for i in range(total)]


def test_a_bar_shows_what_is_read(folder: Path, capsys: pytest.CaptureFixture[str]):
    open_llm(folder, progress=True).close()
    drawn = capsys.readouterr().err
    total = len(list(parameters(ModelConfig.from_path(folder))))
    assert f"\r[{'#' * 24}] {total}/{total} tensors, " in drawn and drawn.endswith(" s\n")


def test_missing_files_are_named(tmp_path: Path, folder: Path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_llm(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no weights"):
        open_llm(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json does not exist"):
        open_llm(folder)


def test_without_a_tokenizer_only_text_is_refused(folder: Path):
    (folder / "tokenizer.json").unlink()
    with open_llm(folder) as llm:
        (output,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=2))
        assert len(output.outputs[0].token_ids) == 2 and output.outputs[0].text == ""
        with pytest.raises(ValueError, match=r"no tokenizer: .*tokenizer.json does not exist"):
            llm.generate("text")
        with pytest.raises(ValueError, match="stop strings need a tokenizer"):
            llm.generate([5], SamplingParams(stop="x"))
        with pytest.raises(ValueError, match="bad_words need a tokenizer"):
            llm.generate([5], SamplingParams(bad_words="x"))


def test_a_config_that_is_no_json_is_named(folder: Path):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        open_llm(folder)


def test_an_unknown_architecture_lists_the_supported_ones(folder: Path):
    tiny_model.edit_json(folder / "config.json", model_type="mystery")
    with pytest.raises(ValueError, match=r"config\.json: .*\(llama.*\), got 'mystery'"):
        open_llm(folder)


def test_all_tensors_that_do_not_fit_are_listed_together(folder: Path):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(7, 5)
    tensors["lm_head.weight"] = torch.zeros(3)
    tensors["model.layers.0.extra"] = torch.zeros(1)
    save_file(tensors, path)
    with pytest.raises(ValueError) as caught:
        open_llm(folder)
    for line in (
        "missing: model.norm.weight [64]",
        "missing: model.layers.1.self_attn.k_proj.weight [32, 64]",
        "wrong shape: model.layers.0.mlp.up_proj.weight: expected [160, 64], got [7, 5]",
        "wrong shape: lm_head.weight: expected [384, 64], got [3]",
        "not part of the architecture: model.layers.0.extra",
    ):
        assert line in str(caught.value)


@pytest.mark.parametrize("change", ["none", "a value", "fewer rows"])
def test_a_head_of_its_own_beside_a_tie_is_refused(folder: Path, change: str):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].clone()
    if change == "a value":
        head[-1, -1] += 1
    tensors["lm_head.weight"] = head[:9].clone() if change == "fewer rows" else head
    save_file(tensors, path)
    tiny_model.edit_json(folder / "config.json", tie_word_embeddings=True)
    if change == "none":
        open_llm(folder).close()
        return
    with pytest.raises(
        ValueError, match=r"not tied: lm_head\.weight differs from model\.embed_tok"
    ):
        open_llm(folder)


@pytest.mark.parametrize("size", [0, 4, 100, -8])
def test_a_truncated_file_is_named(folder: Path, size: int):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not"):
        open_llm(folder)


def safetensors(header: dict[str, Any] | bytes, data: bytes, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def floats(*offsets: int, shape: tuple[int, ...] = (2,)) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "contents",
    [
        pytest.param(safetensors({"a": floats(0, 8), "b": floats(4, 12)}, bytes(12)), id="overlap"),
        pytest.param(safetensors({"a": floats(0, 8), "b": floats(0, 8)}, bytes(8)), id="the same"),
        pytest.param(safetensors({"a": floats(4, 12)}, bytes(12)), id="a gap"),
        pytest.param(safetensors({"a": floats(0, 8)}, bytes(400)), id="bytes of no tensor"),
        pytest.param(safetensors({"a": floats(8, 0)}, bytes(8)), id="an end before its start"),
        pytest.param(safetensors({"a": floats(0, 8, shape=(3,))}, bytes(8)), id="shape, not bytes"),
        pytest.param(safetensors({"a": floats(0, 2**63, shape=(2**61,))}, b""), id="no such data"),
        pytest.param(
            safetensors({"a": floats(0, 8, shape=(2**62, 2**62))}, bytes(8)), id="size overflows"
        ),
        pytest.param(safetensors(b"{}", b"", size=2**62), id="a header of exabytes"),
        pytest.param(safetensors(b"{}", b"", size=200_000_000), id="a header past the end"),
        pytest.param(safetensors(b"[" * 100_000, b""), id="a header of brackets"),
        pytest.param(safetensors(b"\xff\xfe", b""), id="a header that is no text"),
        pytest.param(b"PK\x03\x04" + bytes(400), id="a pickle under another name"),
    ],
)
def test_a_file_whose_header_lies_is_refused(folder: Path, contents: bytes):
    (folder / "model.safetensors").write_bytes(contents)
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not"):
        open_llm(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_if_asked(folder: Path, value: float):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    names = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"]
    for name in names:
        tensors[name].view(-1)[-1] = value
    save_file(tensors, path)
    open_llm(folder).close()
    with pytest.raises(ValueError, match="not all values are finite in: " + ", ".join(names)):
        open_llm(folder, check_weights=True)


def test_code_of_the_checkpoint_is_not_run_and_that_is_said(folder: Path):
    tiny_model.edit_json(folder / "config.json", auto_map={"AutoModel": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit")
    with pytest.warns(UserWarning, match=r"code of its own \(auto_map\): it is not run"):
        open_llm(folder).close()


def test_tokens_beyond_the_embedding_are_refused_with_the_prompt(folder: Path):
    path = folder / "tokenizer.json"
    tokenizer = Backend.from_file(str(path))
    room = tiny_model.VOCAB - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<extra {i}>" for i in range(room + 1)])
    tokenizer.save(str(path))
    with pytest.warns(UserWarning, match="tokenizer has 385 tokens, the embedding 384 rows"):
        llm = open_llm(folder)
    with llm:
        llm.generate("the <extra 0>", SamplingParams(max_tokens=1))
        with pytest.raises(ValueError, match="384"):
            llm.generate(f"the <extra {room}>", SamplingParams(max_tokens=1))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "model.ckpt"])
def test_pickle_files_are_refused(folder: Path, name: str):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ValueError, match=rf"pickle files \({name}\).*refused"):
        open_llm(folder)


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/model.safetensors", "a/../../b.safetensors",
     "C:\\model.safetensors", "..\\model.safetensors", "\\\\host\\model.safetensors"],
)  # fmt: skip
def test_an_index_may_not_leave_its_folder(sharded: Path, name: str):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names a file outside its folder"):
        open_llm(sharded)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("[", "is not a safetensors index"),
        ("{}", "is not a safetensors index"),
        ('{"weight_map": {"a": "model.bin"}}', "not safetensors: 'model.bin'"),
        ('{"weight_map": {"a": 5}}', "is not a safetensors index"),
    ],
)
def test_a_broken_index_is_named(sharded: Path, contents: str, message: str):
    (sharded / INDEX).write_text(contents)
    with pytest.raises(ValueError, match=message):
        open_llm(sharded)


def test_missing_shards_are_all_named(sharded: Path):
    shards = sorted(sharded.glob("model-*.safetensors"))
    for path in shards[:2]:
        path.unlink()
    with pytest.raises(FileNotFoundError, match=f"{shards[0].name}, {shards[1].name}"):
        open_llm(sharded)


@pytest.mark.parametrize("quantization", ["int4", "w4a8"])
def test_a_shape_that_cannot_be_quantised_names_the_matrix(tmp_path: Path, quantization: str):
    tiny_model.save_llama(tmp_path, intermediate_size=80)
    where = rf"'{quantization}' of layers\.0\.down: .*group 32, got K = 80"
    with pytest.raises(ValueError, match=where):
        open_llm(tmp_path, quantization=quantization)


def test_random_weights_need_a_shape_only(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    with LLM.from_config(config, device="cpu", num_blocks=4, max_num_seqs=2) as llm:
        first = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
    (folder / "model.safetensors").unlink()
    with open_llm(folder, load_format="random") as llm:
        again = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
    assert first[0].outputs[0].token_ids == again[0].outputs[0].token_ids
    with pytest.raises(ValueError, match='load_format must be "random"'):
        LLM.from_config(config, load_format="auto")
