"""A checkpoint's own ``config.json``, read key by key; what is left over is refused, never skipped."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from pydantic import ValidationError

from isoform.config import ActivationName
from isoform.errors import ArtifactError, ConfigError, IsoformError

# What the names mean in the library that wrote them (transformers, ACT2FN).
ACTIVATIONS: dict[str, ActivationName] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "leaky_relu": "leaky_relu",
    "linear": "identity",
    "mish": "mish",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
NAMES: dict[ActivationName, str] = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu_squared": "relu2",
    "leaky_relu": "leaky_relu",
    "identity": "linear",
    "mish": "mish",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "tanh": "tanh",
}

# Keys of every configuration that do not touch the function: bookkeeping, memory, training, other outputs,
# token ids and generation settings (those are read for the protocol).
_IRRELEVANT = """
_name_or_path _attn_implementation _attn_implementation_internal _from_model_config architectures auto_map
model_type transformers_version torch_dtype dtype use_cache id2label label2id num_labels problem_type
finetuning_task task_specific_params output_attentions output_hidden_states output_past output_scores
return_dict return_dict_in_generate torchscript use_bfloat16 tf_legacy_loss tokenizer_class prefix
gradient_checkpointing chunk_size_feed_forward initializer_range init_std initializer_factor
bos_token_id eos_token_id eos_token_ids pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id
decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens
max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
bad_words_ids num_return_sequences remove_invalid_values exponential_decay_length_penalty is_encoder_decoder
pretraining_tp max_new_tokens language model_revision _commit_hash add_bos_token add_eos_token
_num_labels _attn_implementation_autoset custom_pipelines transformers.js_config xla_device unsloth_fixed
unsloth_version
"""
IRRELEVANT = frozenset(_IRRELEVANT.split())
MUST_BE: Mapping[str, tuple[Any, ...]] = {
    "pruned_heads": ({}, None),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "sparse_attention": (None,),
}
_REQUIRED = object()


class Keys:
    """Takes keys one after the other and remembers which were understood.

    Args:
        data: the table.
        where: what to call it in messages.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = dict(data)
        self.where = where
        self._left = {name for name in data if name not in IRRELEVANT}

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value of a key; the default is the one of the class that wrote the file.

        Raises:
            ArtifactError: the key is missing and the class has no default for it.
        """
        self._left.discard(name)
        if name in self.data:
            return self.data[name]
        if default is _REQUIRED:
            raise ArtifactError(f"{self.where}: {name} is missing")
        return default

    def integer(self, name: str, default: Any = _REQUIRED) -> int:
        """A whole number."""
        value = self.take(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ArtifactError(f"{self.where}: {name} is {value!r}, expected a whole number")
        return value

    def real(self, name: str, default: Any = _REQUIRED) -> float:
        """A number."""
        value = self.take(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ArtifactError(f"{self.where}: {name} is {value!r}, expected a number")
        return float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """True or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise ArtifactError(f"{self.where}: {name} is {value!r}, expected true or false")
        return value

    def activation(self, name: str, default: Any = _REQUIRED) -> ActivationName:
        """An activation by the name of the library that wrote it."""
        value = self.take(name, default)
        if value not in ACTIVATIONS:
            raise ArtifactError(
                f"{self.where}: {name} {value!r} is not supported; known: {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[value]

    def must(self, name: str, *accepted: Any) -> None:
        """A key of which only some values leave the function as it is understood here.

        Raises:
            ArtifactError: it has another one.
        """
        self._left.discard(name)
        if name in self.data and self.data[name] not in accepted:
            wanted = " or ".join(repr(value) for value in accepted)
            raise ArtifactError(
                f"{self.where}: {name} is {self.data[name]!r}, which is not supported (expected {wanted})"
            )

    def skip(self, *names: str) -> None:
        """Keys of this family that do not touch the function."""
        self._left.difference_update(names)

    def n_labels(self) -> int:
        """How many labels a classifier has."""
        if "id2label" in self.data:
            return len(cast("dict[str, str]", self.data["id2label"]))
        return int(self.data.get("num_labels", 2))

    def done(self) -> None:
        """Refuse what nobody asked for.

        Raises:
            ArtifactError: keys that are not understood, by name.
        """
        for name, accepted in MUST_BE.items():
            self.must(name, *accepted)
        if self._left:
            names = sorted(self._left)
            shown = ", ".join(f"{name} = {self.data[name]!r}" for name in names[:5])
            raise ArtifactError(
                f"{self.where}: not understood, and possibly a change of the function: {shown}"
                + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            )


@contextmanager
def understood(where: str) -> Generator[None]:
    """Whatever a foreign configuration makes go wrong inside is one line that names its file.

    Raises:
        ArtifactError: values that contradict each other, are missing, or of another type.
    """
    try:
        yield
    except ConfigError as error:
        raise ArtifactError(f"{where}: {error}") from None
    except IsoformError:
        raise
    except ValidationError as error:
        faults = [fault["msg"].removeprefix("Value error, ") for fault in error.errors(include_url=False)]
        raise ArtifactError(f"{where}: {error.title}: {'; '.join(dict.fromkeys(faults))}") from None
    except KeyError as error:
        raise ArtifactError(f"{where}: {error.args[0]} is missing") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise ArtifactError(f"{where}: cannot be understood: {' '.join(str(error).split())}") from None
