"""``LLM``: a model, its cache and its loop, behind ``generate`` and ``stream``."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ridgeline._C import FairLock
from ridgeline._options import EngineOptions
from ridgeline._prompts import Prompt, chat_prompts, one_each, params_list, prompt_list, tokenize
from ridgeline._setup import Parts, build, dtype_name, path_of
from ridgeline.chat import Messages
from ridgeline.core import Core
from ridgeline.memory import MemoryLine
from ridgeline.metrics import stats
from ridgeline.outputs import RequestOutput, Stats, StreamOutput
from ridgeline.progress import ProgressBar, check_progress, loading_callback
from ridgeline.request import Request
from ridgeline.sampling_params import SamplingParams


class LLM:
    """A language model ready to generate.

    Args:
        model: a folder in Hugging Face layout (``config.json``, ``*.safetensors``) or a GGUF file,
            with a ``tokenizer.json`` for text: without it prompts and outputs are token ids.
        dtype: "auto", "float32", "float16", "bfloat16" or a torch.dtype. auto: on the CPU float32;
            on a GPU the checkpoint's own, bfloat16 for float32 ones. float32 runs on the CPU only.
        device: "cpu", "cuda" or "cuda:N"; None: CUDA if it can be used.
        block_size: tokens of a cache block, a multiple of 16 from 16 to 256.
        max_model_len: the most tokens of a prompt and its output; None: what model and cache allow.
        gpu_memory_utilization: the share of the GPU's memory, in (0, 1], that weights, cache and
            activations may take. Everything that fits becomes cache.
        num_blocks: the size of the cache in blocks instead, the unused block 0 included.
        max_num_seqs: the most sequences computed at a time.
        max_num_batched_tokens: the most tokens of one step; longer prompts are computed in chunks.
        enable_prefix_caching: keep the blocks of finished requests for prompts that begin alike.
        seed: of the requests without one of their own, of random weights, of the prefix hash.
        quantization: None, "int4", "w4a8" (int4 by fp8), "fp8" or "int8": the layers' matrices,
            while loading, and but for int4 their inputs, by token; of MXFP4 "fp8".
        kv_cache_dtype: "auto" (that of the model), "fp8" or "int8".
        batch_invariant: a request's tokens do not depend on what runs beside it, bit for bit.
        enforce_eager: no CUDA graphs.
        load_format: "auto" and "safetensors" read the checkpoint; "random" needs none.
        check_weights: refuse a checkpoint with NaN or infinity in it, naming the tensors.
        trace: a file for all that the scheduler is told and decides, and the time of steps
            beside their roofline prediction, one JSON object a line; ``ridgeline replay`` reads it.
        latency_target: seconds that a step should take at most while requests decode: chunks of
            prompts are cut to what is predicted to fit. None: as large as the token budget.
        swap_space: GiB of pinned host memory where preempted requests wait, if predicted faster.
        progress: True shows a bar while loading; a function gets the tensors loaded and all.

    Raises:
        ValueError, TypeError: an argument is out of range, or the model folder does not fit.
        FileNotFoundError: the folder or a file of it does not exist.

    The memory is given back by :meth:`close`, by leaving a ``with`` block, or with the object.
    Methods may be called from several threads; each then drives the steps of all.
    """

    def __init__(
        self,
        model: str | Path | Mapping[str, Any],
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        block_size: int = 64,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.9,
        num_blocks: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        batch_invariant: bool = False,
        enforce_eager: bool = False,
        load_format: str = "auto",
        check_weights: bool = False,
        trace: str | Path | None = None,
        latency_target: float | None = None,
        swap_space: float = 0.0,
        progress: bool | Callable[[int, int], None] = False,
    ) -> None:
        self._parts: Parts | None = None
        self._lock = FairLock()
        options = EngineOptions(
            dtype=dtype_name(dtype), device=device, block_size=block_size,
            max_model_len=max_model_len, gpu_memory_utilization=gpu_memory_utilization,
            num_blocks=num_blocks, max_num_seqs=max_num_seqs, quantization=quantization,
            max_num_batched_tokens=max_num_batched_tokens, seed=seed, load_format=load_format,
            enable_prefix_caching=enable_prefix_caching, kv_cache_dtype=kv_cache_dtype,
            batch_invariant=batch_invariant, enforce_eager=enforce_eager,
            check_weights=check_weights, trace=None if trace is None else path_of("trace", trace),
            latency_target=latency_target, swap_space=swap_space,
        )  # fmt: skip
        self._parts = build(model, options, loading_callback(progress))

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, load_format: str = "random", **options: Any
    ) -> LLM:
        """A model of this shape with random weights, made on the device; no tokenizer.

        Args:
            config: the keys of a Hugging Face ``config.json``.
            load_format: "random", the only one that needs no files.
            options: those of the constructor.
        """
        return cls(config, load_format=load_format, **options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        deadline: float | Sequence[float | None] | None = None,
        progress: bool | Callable[[StreamOutput], None] = False,
    ) -> list[RequestOutput]:
        """Completes every prompt; the results are in the order of the prompts.

        Args:
            prompts: one or many; text or token ids.
            params: one for all, or one each; None: ``SamplingParams()``.
            priority: one for all, or one each. A smaller one is served earlier: as if it had
                arrived ten seconds earlier for each unit. From -6 on, nobody waits for ever.
            deadline: seconds from now, after which a request ends with what it has and
                ``finish_reason`` "deadline"; near ones are served earlier. None: none.
            progress: True shows a bar on stderr; a function is called with each piece of output.
                If it raises, that request ends with ``finish_reason`` "error" and the exception
                in ``error``, and a warning is given; the others go on.

        Raises:
            ValueError, TypeError: a prompt or its parameters cannot be served; nothing was run.
        """
        check_progress(progress)
        updates, requests = self._submit(
            prompts, params, priority, deadline, streams=progress is not False
        )
        by_id = {request.output.request_id: request for request in requests}
        bar = ProgressBar(len(requests)) if progress is True else None
        callback = bar.update if bar is not None else progress
        try:
            for update in self._drive(updates, len(requests)):
                if callable(callback):
                    self._call(callback, update, by_id[update.request_id])
        finally:
            self._abandon(requests)
            if bar is not None:
                bar.close()
        return [request.output for request in requests]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
        deadline: float | Sequence[float | None] | None = None,
        progress: bool | Callable[[StreamOutput], None] = False,
    ) -> list[RequestOutput]:
        """Answers conversations as :meth:`generate` completes prompts, with the same options.

        Args:
            messages: one conversation or many: lists of ``{"role": ..., "content": ...}``.
            tools: schemas of functions, for templates that know tools.
            chat_template: jinja2 source instead of the model's.
            add_generation_prompt: the text ends with what begins an answer.
            template_variables: others that the template reads (``enable_thinking=False``).

        The template runs in jinja2's immutable sandbox, and no longer than two seconds. A special
        token that a message spells stays text.

        Raises:
            ValueError: no template or none that ends well; otherwise as :meth:`generate`.
        """
        parts = self._open_parts()
        prompts = chat_prompts(
            messages, parts.tokenizer, parts.no_tokenizer, tools=tools, template=chat_template,
            add_generation_prompt=add_generation_prompt, variables=template_variables,
        )  # fmt: skip
        return self.generate(
            prompts, params, priority=priority, deadline=deadline, progress=progress
        )

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        deadline: float | Sequence[float | None] | None = None,
    ) -> Iterator[StreamOutput]:
        """Like :meth:`generate`, but yields each piece of output as it comes.

        The prompts are checked and queued by the call itself. Closing the iterator, or leaving
        its loop, aborts what still runs.
        """
        updates, requests = self._submit(prompts, params, priority, deadline, streams=True)
        pieces = self._stream(updates, requests)
        next(pieces)  # begun, it aborts them even if nobody asks for a piece
        return pieces

    def abort(self, request_id: str) -> bool:
        """Ends a request now, with ``finish_reason`` "abort"; False if it does not run any more."""
        with self._lock:
            return self._core().abort(request_id)

    def stats(self) -> Stats:
        """Blocks and sequences now; since the start prefix hits and preemptions, latencies, rates
        and shares of the machine's peaks."""
        with self._lock:
            core, runner = self._core(), self._open_parts().runner
            return stats(core.scheduler.stats(), core.meter, runner.graph_counts)

    @property
    def memory(self) -> tuple[MemoryLine, ...]:
        """What the memory was planned for, line by line, beside what was taken at the start."""
        return self._open_parts().memory

    @property
    def max_model_len(self) -> int:
        return self._open_parts().max_model_len

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, the unused block 0 included."""
        return self._open_parts().num_blocks

    def close(self) -> None:
        """Ends all requests and gives the memory back; a second call does nothing."""
        with self._lock:
            parts, self._parts = self._parts, None
            if parts is not None:
                parts.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError("an LLM can be neither copied nor pickled: make one in each process")

    def __del__(self) -> None:
        # A failed constructor leaves no parts; the end of the process frees everything itself.
        if getattr(self, "_parts", None) is not None and not sys.is_finalizing():
            self.close()

    def _open_parts(self) -> Parts:
        if self._parts is None:
            raise RuntimeError("this LLM is closed")
        return self._parts

    def _core(self) -> Core:
        return self._open_parts().core

    def _submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        deadline: float | Sequence[float | None] | None,
        *,
        streams: bool,
    ) -> tuple[deque[StreamOutput], list[Request]]:
        """Queues all prompts, or none if one cannot be served."""
        parts = self._open_parts()
        items = prompt_list(prompts)
        each = params_list(params, len(items))
        token_ids = tokenize(items, parts.tokenizer, parts.no_tokenizer)
        priorities = one_each("priority", priority, len(items))
        deadlines = one_each("deadline", deadline, len(items))
        updates: deque[StreamOutput] = deque()
        requests: list[Request] = []
        with self._lock:
            try:
                for i, (item, ids, one) in enumerate(zip(items, token_ids, each, strict=True)):
                    text = item if isinstance(item, str) else None
                    request = self._core().add(
                        text, ids, one, updates, i, streams=streams, priority=priorities[i],
                        deadline=deadlines[i],
                    )  # fmt: skip
                    requests.append(request)
            except BaseException as error:
                self._abandon(requests)
                if not isinstance(error, (ValueError, TypeError)):
                    raise
                where = f"prompt {len(requests)}: " if len(items) > 1 else ""
                raise type(error)(f"{where}{error}") from error
        return updates, requests

    def _drive(self, updates: deque[StreamOutput], unfinished: int) -> Iterator[StreamOutput]:
        """Runs steps until every request has ended; the pieces as they come."""
        while unfinished:
            while updates:
                update = updates.popleft()
                unfinished -= update.request is not None
                yield update
            if unfinished:
                with self._lock:
                    if not updates and not self._core().step():
                        raise RuntimeError(
                            f"{unfinished} requests wait, but no step can be scheduled: "
                            f"{self._core().scheduler.decisions()[-1:]}"
                        )

    def _stream(self, updates: deque[StreamOutput], requests: list[Request]) -> Iterator[Any]:
        try:
            yield None
            yield from self._drive(updates, len(requests))
        finally:
            self._abandon(requests)

    def _call(
        self, callback: Callable[[StreamOutput], None], update: StreamOutput, request: Request
    ) -> None:
        if request.output.error is not None:
            return
        try:
            callback(update)
        except Exception as error:
            with self._lock:
                if not self._core().abort(update.request_id, "error", error):
                    request.output.error = error
            warnings.warn(
                f"the callback raised {error!r}; request {update.request_id} ends there",
                RuntimeWarning,
                stacklevel=3,
            )

    def _abandon(self, requests: Sequence[Request]) -> None:
        with self._lock:
            for request in requests if self._parts is not None else ():
                if not request.finished:
                    self._core().abort(request.output.request_id)
