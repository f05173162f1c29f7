"""The keys of a ``config.json``, read so that what nobody asked for can be named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Training, defaults of generation and bookkeeping: nothing here changes what a model computes.
_NEUTRAL = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled _from_model_config
    _name_or_path activation_dropout architectures attention_dropout attn_pdrop auto_map
    bos_token_id cache_implementation classifier_dropout do_sample dropout early_stopping
    embd_pdrop gradient_checkpointing hidden_dropout id2label init_std initializer_range
    is_decoder is_encoder_decoder label2id layerdrop length_penalty max_length max_new_tokens
    min_length n_ctx no_repeat_ngram_size num_beams num_return_sequences output_past pad_token_id
    prefix pretraining_tp problem_type repetition_penalty resid_pdrop sep_token_id
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params temperature tokenizer_class top_k top_p transformers_version
    unsloth_fixed use_cache use_return_dict
    """.split()
)


def positive(key: str, value: object) -> float:
    """ValueError for what is no positive number: a model would compute NaN with it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{key} must be a positive number, got {value!r}")
    return float(value)


class ConfigValues:
    """A configuration under the decoder's names, remembering which keys were read.

    Args:
        values: the keys of ``config.json``.
        names: the decoder's name of a value -> its key, where they differ.
        defaults: key -> the value of a key that is left out. A key that is here is one that the
            architecture has; :meth:`own` gives None for any other.
    """

    def __init__(
        self, values: Mapping[str, Any], names: Mapping[str, str], defaults: Mapping[str, Any]
    ) -> None:
        self._values = values
        self._names = names
        self._defaults = defaults
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        key = self._names.get(name, name)
        self._read.add(key)
        return self._values.get(key, self._defaults.get(key, default))

    def own(self, name: str) -> Any:
        """As :meth:`get` for a key that only some architectures have."""
        return self.get(name) if self._names.get(name, name) in self._defaults else None

    def skip(self, key: str) -> None:
        """Counts a key as read."""
        self._read.add(key)

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer; null counts as left out."""
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            key = self._names.get(name, name)
            raise ValueError(f"{key} must be a positive integer, got {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number; null counts as left out."""
        value = self.get(name)
        return positive(self._names.get(name, name), default if value is None else value)

    def flag(self, setting: bool | str) -> bool:
        """A fixed answer, or that of the key named."""
        return bool(self.get(setting, False)) if isinstance(setting, str) else setting

    def refuse_unread(self, model_type: str) -> None:
        """Raises for every key that was not read and may change what is computed.

        One that is null or false switches nothing on.
        """
        unknown = {
            key: value
            for key, value in self._values.items()
            if key not in self._read | _NEUTRAL and value is not None and value is not False
        }
        if unknown:
            raise ValueError(
                f"not understood for model_type {model_type!r}, and could change the results: "
                f"{', '.join(f'{key}={value!r}' for key, value in unknown.items())}; "
                f"understood are {', '.join(sorted(self._read))}"
            )
