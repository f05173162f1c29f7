"""The demo models: a Llama-style decoder in plain PyTorch, saved in Hugging Face's layout.

Module names are those of `transformers.LlamaForCausalLM`, so a state dict is a checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
# Llama 3's pattern without English contractions: a sign sticks to the word after it (`.append`,
# `_name`), line ends to the sign before them (`:\n`), and indentation is one piece.
WORDS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder; field names are those of `config.json`."""

    vocab_size: int = 4096
    hidden_size: int = 384
    intermediate_size: int = 768
    num_hidden_layers: int = 5
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, H, T, D] over the pairs (i, i + D/2); cos, sin [T, D/2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        kv_size = c.num_key_value_heads * c.head_dim
        q_size = c.num_attention_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            project(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)
        self.dropout = dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + F.dropout(attended, self.dropout, self.training)
        return x + F.dropout(
            self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training
        )


class Trunk(nn.Module):
    def __init__(self, c: ModelConfig, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, dropout) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.dropout = dropout


class Decoder(nn.Module):
    """Token ids [B, T] to logits [B, T, vocabulary]; input and output embeddings are tied."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config, dropout)
        half = config.head_dim // 2
        frequency = config.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(config.max_position_embeddings).double(), frequency)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                shrink = math.sqrt(2 * config.num_hidden_layers) if into_residual else 1.0
                nn.init.normal_(weight, std=0.02 / shrink)

    def forward(self, tokens: Tensor) -> Tensor:
        trunk = self.model
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = F.dropout(trunk.embed_tokens(tokens), trunk.dropout, self.training)
        for layer in trunk.layers:
            x = layer(x, cos, sin)
        return F.linear(trunk.norm(x), trunk.embed_tokens.weight)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: any bytes encode, and decoding gives them back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size: the corpus is too small for {vocab_size} tokens, "
            f"it gives {tokenizer.get_vocab_size()}"
        )
    return tokenizer


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def save_model(folder: Path, model: Decoder, tokenizer: Tokenizer) -> None:
    """Write weights (bf16), configuration and tokenizer in Hugging Face's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    c = model.config
    end, pad = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(PADDING)
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": pad}
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    fixed = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    write_json(folder / "config.json", {**fixed, **asdict(c), **special})
    sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
    write_json(folder / "generation_config.json", {**special, **sampling})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "pad_token": PADDING,
            "model_max_length": c.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
        },
    )


def load_model(folder: Path) -> Decoder:
    """Read a model that `save_model` wrote, as fp32 parameters holding the bf16 values."""
    stored = json.loads((folder / "config.json").read_text())
    config = ModelConfig(**{name: stored[name] for name in asdict(ModelConfig())})
    model = Decoder(config)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    return model
