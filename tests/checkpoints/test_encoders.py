"""Encoders and their heads agree with transformers."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))
parity = importlib.import_module("parity")

BERT = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 3, "max_position_embeddings": 40, "pad_token_id": 0, "type_vocab_size": 3,
}  # fmt: skip
DISTIL = {"vocab_size": 61, "dim": 24, "hidden_dim": 20, "n_layers": 2, "n_heads": 3,
          "max_position_embeddings": 40, "pad_token_id": 0}  # fmt: skip
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "ForMaskedLM", {**BERT, "layer_norm_eps": 1e-3, "hidden_act": "gelu_new"}),
    "bert-untied": ("Bert", "ForMaskedLM", {**BERT, "tie_word_embeddings": False}),
    "bert-model": ("Bert", "Model", BERT),
    "bert-sequence": ("Bert", "ForSequenceClassification", {**BERT, "num_labels": 5}),
    "bert-tokens": ("Bert", "ForTokenClassification", {**BERT, "num_labels": 4, "classifier_dropout": 0.3}),
    "roberta": ("Roberta", "ForMaskedLM", {**BERT, "pad_token_id": 1}),
    "roberta-sequence": (
        "Roberta", "ForSequenceClassification", {**BERT, "pad_token_id": 1, "num_labels": 3},
    ),
    "xlm-roberta": ("XLMRoberta", "ForTokenClassification", {**BERT, "pad_token_id": 1, "num_labels": 3}),
    "distilbert": ("DistilBert", "ForMaskedLM", DISTIL),
    "distilbert-model": ("DistilBert", "Model", {**DISTIL, "activation": "relu"}),
    "distilbert-sequence": ("DistilBert", "ForSequenceClassification", {**DISTIL, "num_labels": 3}),
    "albert": ("Albert", "ForMaskedLM", {**BERT, "embedding_size": 10}),
    "albert-groups": (
        "Albert", "Model", {**BERT, "embedding_size": 24, "num_hidden_groups": 2, "num_hidden_layers": 4},
    ),
    "albert-sequence": (
        "Albert", "ForSequenceClassification", {**BERT, "embedding_size": 10, "num_labels": 3},
    ),
    "electra": ("Electra", "ForMaskedLM", {**BERT, "embedding_size": 10}),
    "electra-replaced": ("Electra", "ForPreTraining", {**BERT, "embedding_size": 10, "hidden_act": "relu"}),
    "electra-wide": ("Electra", "ForSequenceClassification", {**BERT, "embedding_size": 24, "num_labels": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_agrees(name: str, tmp_path: Path) -> None:
    family, suffix, settings = CASES[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    config._attn_implementation = "eager"
    cls = getattr(transformers, f"{family}{suffix}")
    torch.manual_seed(0)
    hf = parity.perturb(cls(config))
    case = parity.imported(hf, tmp_path / "in")
    offset = family in ("Roberta", "XLMRoberta")
    tokens = parity.ragged(61, (17, 9, 3), "right")
    if offset:  # padding is recognised by its id there
        tokens = dataclasses.replace(tokens, ids=tokens.ids.masked_fill(~tokens.real_or_ones(), 1))
    theirs = parity.their_inputs(tokens, positions=False)
    if case.bundle.config.embedding.n_token_types and not offset:
        types = (torch.arange(17) % 3).expand(3, -1).contiguous()
        tokens = dataclasses.replace(tokens, token_types=types)
        theirs["token_type_ids"] = types
    name_of = "last_hidden_state" if suffix == "Model" else "logits"
    if suffix == "ForPreTraining":
        case.hf = OneColumn(hf)
    parity.compare_outputs(case, tokens, theirs, name=name_of)
    if suffix == "Model" and case.bundle.config.head is not None:
        parity.compare_outputs(case, tokens, theirs, name="pooler_output")
    case.hf = hf
    parity.round_trip(case, tmp_path / "out", cls)


class OneColumn(torch.nn.Module):
    """The discriminator's scores with the axis of labels that it drops."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: torch.Tensor) -> Any:
        output = self.inner(**inputs)
        output.logits = output.logits[..., None]
        return output

    def named_parameters(self, **options: Any) -> Any:
        return self.inner.named_parameters(**options)


def test_left_padding_changes_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = parity.imported(
        parity.perturb(transformers.BertModel(transformers.BertConfig(**BERT))), tmp_path / "in"
    )
    right = parity.ragged(61, (17, 9, 3), "right")
    with torch.no_grad():
        a, b = case.bundle.model(right), case.bundle.model(right.padded("left"))
    parity.close(b.pooled, a.pooled, "pooled", 1e-12)


def test_names_from_before(tmp_path: Path) -> None:
    """Gains and biases called gamma and beta, position ids as a buffer, heads that are not asked for."""
    from safetensors.torch import load_file, save_file

    from isoform.checkpoints import load
    from isoform.errors import ArtifactError

    torch.manual_seed(0)
    hf = parity.perturb(transformers.BertForPreTraining(transformers.BertConfig(**BERT)))
    parity.saved(hf, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    earlier = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for name, tensor in tensors.items():
        for new, before in earlier.items():
            name = name.replace(new, before)
        old[name] = tensor.clone()
    old["bert.embeddings.position_ids"] = torch.arange(40)[None]
    save_file(old, path)
    bundle = load(tmp_path)
    tokens = parity.ragged(61, (5,), "right")
    with torch.no_grad():
        expected = hf(tokens.ids).prediction_logits
        parity.close(bundle.model(tokens).logits, expected, "logits")
    old["bert.embeddings.position_ids"] = torch.arange(40)[None] + 1
    save_file(old, path)
    with pytest.raises(ArtifactError, match="position_ids: not 0, 1, 2"):
        load(tmp_path)


def bert(folder: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    return parity.imported(
        parity.perturb(transformers.BertModel(transformers.BertConfig(**BERT), **options)), folder
    )


def test_without_its_pooler(tmp_path: Path) -> None:
    case = bert(tmp_path / "in", add_pooling_layer=False)
    assert case.bundle.config.head is None
    tokens = parity.ragged(61, (9, 4), "right")
    theirs = parity.their_inputs(tokens, positions=False)
    parity.compare_outputs(case, tokens, theirs, name="last_hidden_state", gradients=False)


def test_sentence_embedding(tmp_path: Path) -> None:
    """A folder of sentence-transformers says how its states become one vector: here the mean, made unit."""
    import json

    from isoform.checkpoints import load

    case = bert(tmp_path / "in")
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"},
               {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
               {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]  # fmt: skip
    (tmp_path / "in" / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (tmp_path / "in" / "1_Pooling").mkdir()
    settings = {
        "word_embedding_dimension": 24,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_cls_token": False,
    }
    pooling = tmp_path / "in" / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps(settings), encoding="utf-8")
    model = load(tmp_path / "in").model
    for side in ("right", "left"):
        tokens = parity.ragged(61, (9, 4, 1), side)
        right = tokens.padded("right")
        real = right.real_or_ones()
        with torch.no_grad():
            states = case.hf(right.ids, attention_mask=real.long()).last_hidden_state
            expected = torch.stack([s[r].mean(0) for s, r in zip(states, real, strict=True)])
            found = model(tokens).pooled
        parity.close(found, torch.nn.functional.normalize(expected, dim=-1), side)
    from isoform.checkpoints import export

    again = load(export(load(tmp_path / "in"), tmp_path / "out"))
    assert again.config == load(tmp_path / "in").config
    kept = json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
    assert [name for name, on in kept.items() if on is True] == ["pooling_mode_mean_tokens"]
    with torch.no_grad():
        parity.close(again.model(tokens).pooled, found, "written and read", 1e-12)
    pooling.write_text(json.dumps({"pooling_mode_max_tokens": True}), encoding="utf-8")
    from isoform.errors import ArtifactError

    with pytest.raises(ArtifactError, match="pooling pooling_mode_max_tokens is not supported"):
        load(tmp_path / "in")
