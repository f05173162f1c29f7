"""From a checkpoint in Hugging Face layout to a quantised one, one layer in memory at a time."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ridgeline._options import check_one_of
from ridgeline._quantize.calibration import windows_of
from ridgeline._quantize.files import ShardWriter, check_apart, copy_others, new_folder, write_json
from ridgeline._quantize.job import Job
from ridgeline._quantize.modules import names_of
from ridgeline._quantize.recipe import QuantizedCheckpoint, Recipe
from ridgeline._setup import dtype_name, path_of, pick_device, pick_dtype
from ridgeline.models.config import DTYPES, ModelConfig
from ridgeline.models.loader import LoadOptions
from ridgeline.progress import loading_callback
from ridgeline.tokenizer import Tokenizer


def quantize_checkpoint(
    model: str | Path,
    out: str | Path,
    *,
    scheme: str = "int4",
    method: str = "rtn",
    text: str | Path | None = None,
    group_size: int = 128,
    zero_point: bool = False,
    granularity: str = "row",
    act_order: str = "none",
    clip: bool = False,
    alpha: float = 0.5,
    damping: float = 0.01,
    samples: int = 128,
    window: int = 2048,
    skip: str | Sequence[str] = (),
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    shard_bytes: int = 4_000_000_000,
    overwrite: bool = False,
    progress: bool | Callable[[int, int], None] = False,
) -> QuantizedCheckpoint:
    """Writes a quantised checkpoint, in the layout of compressed-tensors.

    (With ``act_order="group"`` in that of GPTQ, version 2: the other one has no such order.)

    The layers' matrices are quantised; embedding, head, norms and routers keep their dtype. The
    folder is there whole or not at all: an interrupt leaves what was there before.

    Args:
        model: a folder in Hugging Face layout, not quantised yet. out: the folder to make.
        scheme: "int4" (weights alone), "w4a8" (the same, products with fp8 inputs), "fp8" or
            "int8" (products of codes: W8A8).
        method: "rtn" (round to nearest); of int4 and w4a8 "awq", "gptq", "awq+gptq"; of fp8
            "gptq"; of int8 "smoothquant", "gptq", "smoothquant+gptq".
        text: a file of text like that which the model will meet. All methods but rtn need it;
            with it the loss of windows that were held out is measured before and after.
        group_size: of int4: a multiple of 32, of w4a8 of 128, that divides all inputs' widths, or
            -1: all columns.
        zero_point: of int4: groups have one. granularity: of fp8: "tensor", "row" or "block"
            (128 x 128).
        act_order: of gptq: round columns with large inputs first; "static" keeps the groups of
            4 bits as the weight has them, "group" (of int4) makes them in that order, which the
            file records.
        clip: of int4 and w4a8: search for the part of each group's range that loses least.
        alpha: of smoothquant: see :func:`ridgeline.smooth_`. damping: of gptq: added to the
            moments' diagonal, as a share of its mean.
        samples, window: so many windows of so many tokens (at most what the model takes) are
            learned from, and an eighth as many measured. seed: of their choice.
        skip: a name of modules or a pattern, or several, to leave as they are: the whole name or
            its end.
        device, dtype: of the computation, as those of ``LLM``.
        shard_bytes: of a file of the result.
        overwrite: a checkpoint at ``out`` is replaced, if nothing else is in its folder.
        progress: True shows a bar on stderr; a function is called with the matrices done and
            their number in all.

    Memory, on the device: the dense tensors of one layer, twice that in float32; with a text also
    embedding and head, ``samples * window * hidden`` values (held-out windows on top), and for
    awq, gptq and clip ``K * K`` float32 for each input of the layer's products, of experts for
    each expert; on top the largest of three or four more ``K * K`` (gptq), three or four float32
    copies of a product's weight, and the logits of 256 tokens. On the host: a shard.

    Warns:
        The loss rose by more than 3%. The checkpoint is written nevertheless.

    Raises:
        ValueError: an option out of range or of another method, a name to skip that no module has,
            a model that does not fit its configuration or the scheme, values that are not finite,
            ``out`` taken, a text too short.
        FileNotFoundError: a folder or file that does not exist.

    Source: Frantar et al., "GPTQ", 2022; Lin et al., "AWQ", 2023; Xiao et al., "SmoothQuant", 2023.
    """
    folder, target = path_of("model", model), path_of("out", out)
    source = None if text is None else path_of("text", text)
    dtype = dtype_name(dtype)
    check_one_of("dtype", dtype, ("auto", *DTYPES))
    config = ModelConfig.from_path(folder)
    recipe = Recipe(
        scheme=scheme, method=method, group_size=group_size, zero_point=zero_point,
        granularity=granularity, act_order=act_order, clip=clip, alpha=alpha, damping=damping,
        samples=samples, window=window, skip=names_of(skip), seed=seed,
    )  # fmt: skip
    recipe = replace(recipe, window=min(window, config.max_position))
    if config.stored_format is not None:
        raise ValueError(f"model: expected a checkpoint that is not quantised yet, {folder} is")
    check_apart(target, model=folder, text=source)
    if source is None and recipe.needs_text:
        learns = "clip" if clip and method == "rtn" else method
        raise ValueError(f"text: {learns!r} learns from a text: expected a file, got none")
    windows = None
    if source is not None:
        tokenizer = Tokenizer(folder / "tokenizer.json")
        windows = windows_of(source, tokenizer, samples, recipe.window, seed)
    where = pick_device(device)
    options = LoadOptions(where, pick_dtype(dtype, config, where), recipe.window)
    callback = loading_callback(progress)
    with torch.no_grad(), new_folder(target, overwrite=overwrite) as made:
        writer = ShardWriter(made, shard_bytes)
        job = Job(config, folder, recipe, options, windows, writer)
        job.run(callback or (lambda done, total: None))
        result = job.result(target)
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        write_json(made / "config.json", values | {"quantization_config": job.config_of_result()})
        copy_others(folder, made)
        result.save(made, recipe)
    told = result.warning()
    if told is not None:
        warnings.warn(told, stacklevel=2)
    return result
