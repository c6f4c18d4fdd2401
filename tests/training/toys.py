"""Tiny networks and data that break every symmetry a fault could hide behind."""

from __future__ import annotations

import numpy as np
import torch

from isoform.config import ModelConfig, presets
from isoform.data.batching import Batch, LabelledBatch
from isoform.data.batching_config import TokenBudget
from isoform.data.buckets import Bucketed
from isoform.data.encode import EncodedLabels, EncodedPairs
from isoform.data.fit import Fit
from isoform.data.labelling import class_batches
from isoform.data.ragged import Ragged
from isoform.data.sequences import pair_batches
from isoform.nn import Transformer, build

PAD, BOS, EOS, VOCABULARY = 0, 1, 2, 23


def pair_config(*, dropout: float = 0.0, layers: int = 1) -> ModelConfig:
    return presets.pre_ln(
        VOCABULARY,
        d_model=12,
        n_heads=3,
        ffn_width=20,
        n_encoder_layers=layers,
        n_decoder_layers=layers,
        dropout=dropout,
    )


def pair_model(*, dropout: float = 0.0, seed: int = 3, dtype: torch.dtype = torch.float32) -> Transformer:
    return build(pair_config(dropout=dropout), seed=seed).to(dtype)


def rows(count: int, seed: int, longest: int = 8) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [
        [*generator.integers(3, VOCABULARY, size=generator.integers(1, longest)).tolist(), EOS]
        for _ in range(count)
    ]


def pairs(
    count: int = 40, *, seed: int = 0, max_tokens: int = 60, shuffle: int | None = 5
) -> Bucketed[Batch]:
    source = rows(count, seed)
    # The target says the source backwards, so that there is something to learn.
    target = [[*reversed(row[:-1]), EOS] for row in source]
    encoded = EncodedPairs(Ragged.from_lists(source), Ragged.from_lists(target), Fit(np.arange(count), 0, 0))
    return pair_batches(
        encoded,
        start_id=BOS,
        source_pad=PAD,
        target_pad=PAD,
        budget=TokenBudget(max_tokens=max_tokens, pool=64),
        seed=shuffle,
        where=lambda row: f"toy.tsv, line {row + 1}",
    )


def classes(count: int = 24, *, seed: int = 0) -> Bucketed[LabelledBatch]:
    texts = rows(count, seed)
    labels = np.array([len(text) % 3 for text in texts])
    return class_batches(
        EncodedLabels(Ragged.from_lists(texts), labels, Fit(np.arange(count), 0, 0)),
        pad=PAD,
        budget=TokenBudget(max_tokens=40),
        seed=1,
        where=lambda row: f"toy.tsv, line {row + 1}",
    )
