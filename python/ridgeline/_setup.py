"""From the arguments of ``LLM`` to its parts: checks, model, cache, scheduler, loop."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ridgeline._loader import CUDA
from ridgeline._options import EngineOptions
from ridgeline._quantize.recipe import QuantizedCheckpoint
from ridgeline._start import Starter
from ridgeline.core import Core
from ridgeline.memory import MemoryLine, stored_bytes
from ridgeline.models.config import DTYPES, ModelConfig
from ridgeline.models.gguf import GgufFile, gguf_file
from ridgeline.models.loader import LoadOptions, load_decoder, random_decoder
from ridgeline.runner import Runner
from ridgeline.tokenizer import Tokenizer
from ridgeline.trace import Recorder, make_scheduler

Progress = Callable[[int, int], None]


@dataclass
class Parts:
    """What an open ``LLM`` consists of."""

    core: Core
    runner: Runner
    tokenizer: Tokenizer | None
    no_tokenizer: str
    max_model_len: int
    num_blocks: int
    device: torch.device
    recorder: Recorder | None
    memory: tuple[MemoryLine, ...]

    def close(self) -> None:
        """Lets go of everything and returns the GPU's memory to the driver."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.runner.close()
        if self.recorder is not None:
            self.recorder.close()
        device = self.device
        self.__dict__.clear()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def build(
    model: str | Path | Mapping[str, Any], options: EngineOptions, progress: Progress | None
) -> Parts:
    """Checks everything that can be checked before it loads anything."""
    device = pick_device(options.device)
    folder = gguf = None
    if isinstance(model, Mapping):
        if options.load_format != "random":
            raise ValueError(
                f'a configuration has no weights: load_format must be "random", '
                f"got {options.load_format!r}"
            )
        config = ModelConfig.from_dict(model)
    else:
        folder = path_of("model", model)
        path = gguf_file(folder)
        gguf = None if path is None else GgufFile(path)
        folder = folder if path is None else path.parent
        config = ModelConfig.from_path(folder) if gguf is None else gguf.config()
    if any(token >= config.vocab_size for token in config.eos_token_ids):
        raise ValueError(
            f"eos_token_id must be below the vocab_size ({config.vocab_size}), "
            f"got {list(config.eos_token_ids)}"
        )
    dtype = pick_dtype(options.dtype, config, device)
    max_model_len = options.context(config)
    made = None if folder is None or gguf is not None else QuantizedCheckpoint.of_folder(folder)
    told = None if made is None else made.warning()
    if told is not None:
        warnings.warn(told, stacklevel=3)
    tokenizer, no_tokenizer = _tokenizer(folder)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        warnings.warn(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding {config.vocab_size} "
            "rows: prompts with a token beyond them are refused",
            stacklevel=3,
        )
    stored = 0
    if gguf is not None:
        stored = gguf.kept_bytes(dtype)
    elif folder is not None:
        stored = stored_bytes(config, folder, dtype, options.quantization)
    starter = Starter(config, options, device, dtype, max_model_len, stored)
    load = LoadOptions(
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        quantization=options.quantization,
        batch_invariant=options.batch_invariant,
        check_weights=options.check_weights,
    )
    with torch.no_grad(), torch.device("cpu"):  # whatever the caller's default is
        if folder is None or options.load_format == "random":
            decoder = random_decoder(config, load, options.seed, progress)
        else:
            decoder = load_decoder(config, gguf or folder, load, progress)
        started = starter.start(decoder)
    scheduler, settings = make_scheduler(started.settings), started.settings
    recorder = None
    if options.trace is not None:
        recorder = Recorder(scheduler, settings, options.trace, started.machine)
    core = Core(
        scheduler,
        started.runner,
        tokenizer,
        vocab_size=config.vocab_size,
        max_model_len=settings["max_model_len"],
        eos_token_ids=config.eos_token_ids,
        seed=options.seed,
        recorder=recorder,
        keeps_latency=options.latency_target is not None,
    )
    return Parts(
        core=core,
        runner=started.runner,
        tokenizer=tokenizer,
        no_tokenizer=no_tokenizer,
        max_model_len=settings["max_model_len"],
        num_blocks=settings["num_blocks"],
        device=device,
        recorder=recorder,
        memory=started.memory,
    )


def path_of(name: str, value: Any) -> Path:
    """The argument as a path; TypeError if it is none."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, got {value!r}")
    return Path(value)


def dtype_name(dtype: str | torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def pick_device(name: str | torch.device | None) -> torch.device:
    if name is None:
        name = "cuda" if CUDA.loaded else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'device must be "cpu", "cuda" or "cuda:N", got {name!r}') from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f'device must be "cpu", "cuda" or "cuda:N", got {name!r}')
    if device.type == "cuda" and not CUDA.loaded:
        raise ValueError(f"device {name!r} cannot be used: {CUDA.reason}")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= count:
            raise ValueError(f"device {name!r} cannot be used: this machine has {count} GPUs")
        return torch.device("cuda", index)
    return torch.device("cpu")  # "cpu:0", which safetensors does not know, is the same


def pick_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if config.dtype == torch.float32 else config.dtype
    if name == "float32" and device.type == "cuda":
        raise ValueError(
            'dtype "float32" runs on the CPU only: on CUDA it must be "bfloat16" or "float16"'
        )
    return DTYPES[name]


def _tokenizer(folder: Path | None) -> tuple[Tokenizer | None, str]:
    """The tokenizer, or the reason why there is none."""
    if folder is None:
        return None, "it was made from a configuration"
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None, f"{path} does not exist"
    return Tokenizer(path), ""
