"""One run: hidden states between two layers, each layer's codes, and what was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ridgeline._quantize.calibration import Layerwise, Windows
from ridgeline._quantize.files import ShardWriter
from ridgeline._quantize.folding import Fold, LayerWeights, folds_of
from ridgeline._quantize.gptq import Factor, gptq
from ridgeline._quantize.modules import is_named
from ridgeline._quantize.moments import Moments, watch
from ridgeline._quantize.recipe import QuantizedCheckpoint, Recipe
from ridgeline._quantize.scaling import awq_factors
from ridgeline._quantize.schemes import Scheme
from ridgeline._quantize.smooth import smoothing_factors
from ridgeline.models.config import ModelConfig
from ridgeline.models.decoder import Decoder
from ridgeline.models.loader import LoadOptions, assemble, build_decoder
from ridgeline.models.weights import Checkpoint, Parameter, Part, parameters
from ridgeline.quant.compressed_tensors import written, written_config
from ridgeline.quant.formats import gptq_written, gptq_written_config
from ridgeline.quant.stored import GroupedCodes, ScaledCodes, Weight, stack

_KINDS = ("qkv", "output", "up", "down", "expert_up", "expert_down")


class Job:
    """The state of one run: the hidden states between two layers, and what was written."""

    def __init__(
        self,
        config: ModelConfig,
        folder: Path,
        recipe: Recipe,
        options: LoadOptions,
        windows: Windows | None,
        writer: ShardWriter,
    ) -> None:
        self._config, self._recipe, self._options = config, recipe, options
        self._writer, self._windows = writer, windows
        self._checkpoint = Checkpoint(folder, options.device, config)
        self._checkpoint.check()
        fp8_inputs = recipe.scheme == "w4a8"
        self._scheme = Scheme(
            "int4" if fp8_inputs else recipe.scheme,
            *(recipe.group_size, recipe.zero_point, recipe.granularity, config.dtype, fp8_inputs),
        )
        self._tables: list[dict[str, Parameter]] = [{} for _ in range(config.num_layers)]
        for parameter in parameters(config):
            if parameter.name.startswith("layers."):
                _, i, kind = parameter.name.split(".", 2)
                self._tables[int(i)][kind] = parameter
        self._parts = {
            part.name: part for table in self._tables for part in self._to_quantise(table)
        }
        head = config.spec.weights["head"][0]
        modules = {head, *(name.rpartition(".")[0] for name in self._checkpoint.names())}
        modules |= {part.module for parameter in parameters(config) for part in parameter.parts}
        for pattern in recipe.skip:
            if not any(is_named(module, (pattern,)) for module in modules):
                raise ValueError(f"skip: expected names of modules, {pattern!r} is that of none")
        if not self._parts:
            raise ValueError("skip: expected to leave something to quantise")
        self._copied: list[str] = []  # with two dimensions or more
        self._bytes = [0, 0]
        self._losses: list[float | None] = [None, None]
        if windows is not None:
            ends = build_decoder(
                replace(config, num_layers=0, layers=()),
                options,
                lambda p: assemble(p, self._checkpoint.read, options, plain=True),
            )
            self._layerwise = Layerwise(ends, recipe.window)
            self._hidden = self._layerwise.embed(windows.seen) if recipe.needs_text else None
            self._before = self._layerwise.embed(windows.held_out)
            self._after = self._before.clone()

    def run(self, progress: Callable[[int, int], None]) -> None:
        """Layer by layer, then what belongs to none."""
        written_names: set[str] = set()
        for i, table in enumerate(self._tables):
            weights = LayerWeights(self._config, table, self._checkpoint, frozenset(self._parts))
            rounded = self._layer(i, table, weights)
            for parameter in table.values():
                for part in parameter.parts:
                    self._write(part, weights, rounded.get(part.name))
                    written_names.add(part.name)
            done = sum(name in self._parts for name in written_names)
            progress(done, len(self._parts))
        for name in self._checkpoint.names():
            if name not in written_names:
                tensor = self._checkpoint.tensor(name)
                self._writer.add(self._checkpoint.stored_name(name), tensor)
                if tensor.dim() > 1:
                    self._copied.append(name)
        self._writer.close()
        if self._windows is not None:
            for i, hidden in enumerate((self._before, self._after)):
                self._losses[i] = self._layerwise.loss(hidden, self._windows.held_out)

    def result(self, folder: Path) -> QuantizedCheckpoint:
        held_out = self._windows.held_out if self._windows is not None else torch.empty(0, 1)
        return QuantizedCheckpoint(
            folder=folder,
            scheme=self._recipe.scheme,
            method=self._recipe.method,
            matrices=len(self._parts),
            bytes_before=self._bytes[0],
            bytes_after=self._bytes[1],
            loss_before=self._losses[0],
            loss_after=self._losses[1],
            held_out=held_out[:, 1:].numel(),
        )

    def config_of_result(self) -> dict[str, Any]:
        recipe = self._recipe
        if recipe.act_order == "group":
            return gptq_written_config(
                recipe.group_size, zero_point=recipe.zero_point, ignore=self._left()
            )
        return written_config(
            recipe.scheme,
            group_size=recipe.group_size,
            zero_point=recipe.zero_point,
            granularity=recipe.granularity,
            ignore=self._left(),
        )

    def _left(self) -> list[str]:
        """The modules with weights as they were, and patterns of those outside the decoder.

        Readers may have longer names for the latter, and for the head its last part alone.
        """
        head, ignored = self._config.spec.weights["head"][0], self._config.spec.ignored
        left = [head, head.rpartition(".")[2]]
        for parameter in parameters(self._config):
            left += [p.module for p in parameter.parts if p.columns and not self._is_ours(p)]
        for prefix in ignored:
            if any(name.startswith(prefix) for name in self._copied):
                left.append(f"re:.*{prefix.strip('.')}.*")
        return list(dict.fromkeys(left))

    def _is_ours(self, part: Part) -> bool:
        return part.name in self._parts

    def _to_quantise(self, table: dict[str, Parameter]) -> list[Part]:
        """The parts of the products that are not skipped, if the scheme can have them."""
        found = []
        for kind in _KINDS:
            parameter = table.get(f"{kind}.weight")
            if parameter is None or (kind.startswith("expert") and not self._scheme.of_experts):
                continue
            parts = [p for p in parameter.parts if not is_named(p.module, self._recipe.skip)]
            if parts and len(parts) < len(parameter.parts):
                names = ", ".join(p.module for p in parameter.parts[:4])
                raise ValueError(f"skip: expected all of one product or none of {names}")
            for part in parts:
                self._scheme.check(part.module, part.rows, part.columns, last=part is parts[-1])
            if self._recipe.act_order == "group":
                if parts and kind.startswith("expert"):
                    raise ValueError('act_order: experts share an order of columns: not "group"')
                if any(part.rows % 8 for part in parts):
                    raise ValueError('act_order: "group" needs rows divisible by 8')
            found += parts
        return found

    def _layer(
        self, i: int, table: dict[str, Parameter], weights: LayerWeights
    ) -> dict[str, GroupedCodes | ScaledCodes]:
        """Codes by the names of parts, after the windows have passed through both layers."""
        seen: dict[str, list[Moments]] = {}
        if self._windows is not None:
            dense = self._one_layer(i, table, weights, {})
            if self._hidden is not None:
                columns = {
                    k: table[f"{k}.weight"].shape[1] for k in _KINDS if f"{k}.weight" in table
                }
                layer, seen = watch(
                    dense.layers[0],
                    columns,
                    self._options.device,
                    product=self._recipe.reads_products,
                )
                self._layerwise.run(replace(dense, layers=(layer,)), self._hidden, advance=False)
            self._layerwise.run(dense, self._before, advance=True)
        for fold in folds_of(self._config) if self._recipe.scales else ():
            if self._is_ours(table[f"{fold.reader}.weight"].parts[0]):
                self._fold(fold, weights, seen)
        rounded: dict[str, GroupedCodes | ScaledCodes] = {}
        for kind in _KINDS:
            parameter = table.get(f"{kind}.weight")
            if parameter is not None and self._is_ours(parameter.parts[0]):
                rounded |= self._rounded(kind, parameter, weights, seen.get(kind))
        if self._windows is not None:
            made = self._one_layer(i, table, weights, rounded)
            if self._hidden is not None:
                self._layerwise.run(made, self._hidden, advance=True)
            self._layerwise.run(made, self._after, advance=True)
        return rounded

    def _one_layer(
        self,
        i: int,
        table: dict[str, Parameter],
        weights: LayerWeights,
        rounded: dict[str, GroupedCodes | ScaledCodes],
    ) -> Decoder:
        """The layer as the loader makes it, in a decoder whose ends are empty."""

        def read(part: Part) -> Weight:
            return rounded.get(part.name, weights[part])

        def get(parameter: Parameter) -> Weight:
            kind = parameter.name.removeprefix("layers.0.")
            if kind == parameter.name:
                return torch.empty(0, device=self._options.device)
            own = table[kind]
            plain = not any(part.name in rounded for part in own.parts)
            return assemble(own, read, self._options, plain=plain)

        one = replace(self._config, num_layers=1, layers=(self._config.layers[i],))
        return build_decoder(one, self._options, get)

    def _fold(self, fold: Fold, weights: LayerWeights, seen: dict[str, list[Moments]]) -> None:
        moments, kind = seen[fold.reader], fold.reader
        experts: Sequence[int | None] = (fold.expert,)
        if fold.expert is None and kind.startswith("expert"):
            experts = range(len(moments))
        readers = [
            (weights.rows(kind, *weights.of_expert(kind, e)), moments[e or 0]) for e in experts
        ]
        if "smoothquant" in self._recipe.method:
            if fold.norm is None:
                return
            of_x = torch.stack([m.largest for _, m in readers]).amax(0)
            of_weights = torch.stack([w.abs().amax(0) for w, _ in readers]).amax(0)
            factors = smoothing_factors(of_x, of_weights, self._recipe.alpha)
        else:
            repeats = fold.repeats or (1, 1, readers[0][0].shape[1])
            factors = awq_factors(readers, self._scheme, repeats=repeats)
        weights.fold(fold, factors)
        for _, own in readers:
            own.divide(factors)

    def _rounded(
        self, kind: str, parameter: Parameter, weights: LayerWeights, seen: list[Moments] | None
    ) -> dict[str, GroupedCodes | ScaledCodes]:
        """The codes of each part; each expert's rows by what it saw."""
        recipe, result, row = self._recipe, {}, 0
        experts = self._config.num_experts if kind.startswith("expert") else 1
        of_expert = parameter.shape[0] // experts
        factors: dict[int, Factor] = {}
        clip = recipe.clip and kind != "qkv"  # scores are products of what q and k lose
        for part in parameter.parts:
            pieces: list[Weight] = []
            for j, piece in enumerate(weights[part].float().chunk(max(part.experts, 1))):
                own = None if seen is None else seen[row // of_expert + j]
                if "gptq" in recipe.method:
                    assert own is not None
                    key = row // of_expert + j
                    if key not in factors:
                        factors = {
                            key: Factor.of(own, damping=recipe.damping, act_order=recipe.act_order)
                        }
                    made = gptq(piece, factors[key], self._scheme, clip=clip)
                else:
                    clipped = own.product if own is not None and clip else None
                    made = self._scheme.nearest(piece.contiguous(), clipped)
                pieces.append(made)
            joined = stack(pieces, torch.float32)
            assert isinstance(joined, (GroupedCodes, ScaledCodes))
            result[part.name] = joined
            row += part.rows
        return result

    def _write(
        self, part: Part, weights: LayerWeights, made: GroupedCodes | ScaledCodes | None
    ) -> None:
        name = self._checkpoint.stored_name
        if made is not None:
            if isinstance(made, GroupedCodes) and made.group_index is not None:
                ends = gptq_written(made)
            else:
                ends = written(made)
            tensors = {f"{name(part.base)}.{end}": t for end, t in ends.items()}
            self._bytes[0] += self._checkpoint.tensor(part.name).nbytes
            self._bytes[1] += sum(t.nbytes for t in tensors.values())
        elif part.name in weights.changed:
            tensors = {name(part.name): part.stored(weights[part])}
        else:
            tensors = {name(part.name): self._checkpoint.tensor(part.name)}
        for key, tensor in tensors.items():
            self._writer.add(key, tensor)
