"""The decoder: embedding, layers of attention and gated MLP, norm, head. Calls the ops only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import embedding

from ridgeline import ops
from ridgeline.kv_cache import KVCache
from ridgeline.models.config import ModelConfig
from ridgeline.models.linear import Linear


@dataclass(frozen=True)
class StepInputs:
    """What one step computes, on the model's device; all int32.

    Attributes:
        input_ids, positions, slots: ``[tokens]``.
        seq_lens: ``[seqs]``, with the new tokens. cu_q: ``[seqs + 1]``, first token of each.
        block_tables: ``[seqs, max_blocks]``.
        max_q: the most tokens of one sequence.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    seq_lens: Tensor
    cu_q: Tensor
    block_tables: Tensor
    max_q: int


@dataclass(frozen=True)
class Layer:
    """The weights of one layer; ``qkv`` and ``gate_up`` are fused."""

    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Decoder:
    """A model's weights and the order of its ops.

    Attributes:
        embedding: ``[vocab, hidden]``.
        cos_sin: ``[max_model_len, head_dim]`` float32.
        batch_invariant: results do not depend on how a prompt is cut into steps.
    """

    config: ModelConfig
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear
    cos_sin: Tensor
    batch_invariant: bool = False

    def hidden_states(self, inputs: StepInputs, cache: KVCache) -> Tensor:
        """Runs the layers and writes the cache; the normed output ``[tokens, hidden]``."""
        eps = self.config.norm_eps
        residual = embedding(inputs.input_ids, self.embedding)
        x = ops.rmsnorm(residual, self.layers[0].attention_norm, eps, weights_ready=True)
        following = [layer.attention_norm for layer in self.layers[1:]] + [self.norm]
        for index, layer in enumerate(self.layers):
            x = layer.output(self._attention(layer.qkv(x), inputs, cache, index))
            x = ops.add_rmsnorm(x, residual, layer.mlp_norm, eps, weights_ready=True)
            x = layer.down(layer.gate_up(x, activation="silu_mul"))
            x = ops.add_rmsnorm(x, residual, following[index], eps, weights_ready=True)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` to ``[rows, vocab]``."""
        return self.head(hidden)

    def _attention(self, qkv: Tensor, inputs: StepInputs, cache: KVCache, layer: int) -> Tensor:
        config, tokens = self.config, qkv.shape[0]
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        q, k, v = qkv.view(tokens, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), 1)
        ops.rope_write_kv(
            q,
            k,
            v,
            inputs.positions,
            self.cos_sin,
            cache.k[layer],
            cache.v[layer],
            inputs.slots,
            k_scale=cache.k_scale[layer],
            v_scale=cache.v_scale[layer],
        )
        out = ops.paged_attention(
            q,
            cache.k[layer],
            cache.v[layer],
            inputs.block_tables,
            inputs.seq_lens,
            inputs.cu_q,
            max_q=inputs.max_q,
            batch_invariant=self.batch_invariant,
            k_scale=cache.k_scale[layer],
            v_scale=cache.v_scale[layer],
        )
        assert isinstance(out, Tensor)
        return out.view(tokens, heads * dim)
