"""Each preset, made tiny, has as many parameters as the family's own class in `transformers`.

A bias, norm, table or tie too many or too few shows here; the values of the functions are compared elsewhere.
"""

from __future__ import annotations

import pytest

from isoform.config import presets

transformers = pytest.importorskip("transformers")

V, D, H, F, N = 50, 16, 4, 24, 2
HF = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": N,
    "num_attention_heads": H,
    "intermediate_size": F,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
}
SEQ = {
    "vocab_size": V,
    "d_model": D,
    "encoder_layers": N,
    "decoder_layers": N,
    "encoder_attention_heads": H,
    "decoder_attention_heads": H,
    "encoder_ffn_dim": F,
    "decoder_ffn_dim": F,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "decoder_start_token_id": 1,
}
OURS = {"d_model": D, "n_heads": H, "ffn_width": F, "n_layers": N}
GQA = {"n_kv_heads": 2}
WIDE = {**GQA, "head_width": 6}
HF_GQA = {**HF, "num_key_value_heads": 2}
HF_WIDE = {**HF_GQA, "head_dim": 6}
BERT = {**OURS, "max_positions": 32}
T5 = {"vocab_size": V, "d_model": D, "d_kv": 6, "d_ff": F, "num_layers": N, "num_heads": H}
OPT = {k: v for k, v in HF.items() if k != "intermediate_size"} | {"ffn_dim": F}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
ALIBI = {"alibi": True, "parallel_attn": False, "bias": True, "multi_query": False}
NARROW = {"do_layer_norm_before": False, "word_embed_proj_dim": 8}
GPT2 = {"vocab_size": V, "n_embd": D, "n_layer": N, "n_head": H, "n_inner": F, "n_positions": 32}
DISTIL = {
    "vocab_size": V,
    "dim": D,
    "n_layers": N,
    "n_heads": H,
    "hidden_dim": F,
    "max_position_embeddings": 32,
}

CASES = [
    ("bert", BERT, "BertForMaskedLM", HF),
    ("roberta", BERT, "RobertaForMaskedLM", {**HF, "max_position_embeddings": 34, "type_vocab_size": 1}),
    ("distilbert", BERT, "DistilBertForMaskedLM", DISTIL),
    ("albert", {**BERT, "embedding_width": 8}, "AlbertForMaskedLM", {**HF, "embedding_size": 8}),
    ("albert", {**BERT, "embedding_width": D}, "AlbertForMaskedLM", {**HF, "embedding_size": D}),
    (
        "albert",
        {**BERT, "embedding_width": 8, "n_groups": 2},
        "AlbertForMaskedLM",
        {**HF, "embedding_size": 8, "num_hidden_groups": 2},
    ),
    ("electra", {**BERT, "embedding_width": 8}, "ElectraForPreTraining", {**HF, "embedding_size": 8}),
    (
        "electra",
        {**BERT, "embedding_width": None, "head": "masked_token"},
        "ElectraForMaskedLM",
        {**HF, "embedding_size": D},
    ),
    ("gpt2", BERT, "GPT2LMHeadModel", GPT2),
    ("gpt_neox", {**OURS, "rotary_share": 0.5}, "GPTNeoXForCausalLM", HF),
    ("opt", BERT, "OPTForCausalLM", {**OPT, "word_embed_proj_dim": D}),
    ("opt", {**BERT, "embedding_width": 8, "placement": "post"}, "OPTForCausalLM", {**OPT, **NARROW}),
    (
        "bloom",
        {"d_model": D, "n_heads": H, "n_layers": N},
        "BloomForCausalLM",
        {"vocab_size": V, "hidden_size": D, "n_layer": N, "n_head": H},
    ),
    ("falcon", OURS, "FalconForCausalLM", {**HF, "ffn_hidden_size": F}),
    (
        "falcon",
        {**OURS, **GQA, "residual": "parallel"},
        "FalconForCausalLM",
        {**HF, "ffn_hidden_size": F, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    (
        "falcon",
        {**OURS, "n_kv_heads": H, "residual": "sequential", "alibi": True, "bias": True},
        "FalconForCausalLM",
        {**HF, "ffn_hidden_size": F, **ALIBI},
    ),
    ("phi", OURS, "PhiForCausalLM", HF),
    ("phi", {**OURS, "qk_norm": True}, "PhiForCausalLM", {**HF, "qk_layernorm": True}),
    ("starcoder2", {**OURS, **GQA}, "Starcoder2ForCausalLM", {**HF_GQA, "tie_word_embeddings": True}),
    ("llama", OURS, "LlamaForCausalLM", HF),
    ("llama3", {**OURS, **GQA}, "LlamaForCausalLM", HF_GQA),
    ("mistral", {**OURS, **GQA}, "MistralForCausalLM", HF_GQA),
    (
        "mixtral",
        {**OURS, **GQA, "n_experts": 4},
        "MixtralForCausalLM",
        {**HF_GQA, "num_local_experts": 4},
    ),
    ("qwen2", {**OURS, **GQA}, "Qwen2ForCausalLM", {**HF_GQA, "tie_word_embeddings": True}),
    ("qwen3", {**OURS, **WIDE}, "Qwen3ForCausalLM", {**HF_WIDE, "tie_word_embeddings": True}),
    (
        "qwen3_moe",
        {"d_model": D, "n_heads": H, "n_layers": N, **WIDE, "n_experts": 4, "top_k": 2, "expert_width": 10},
        "Qwen3MoeForCausalLM",
        {**HF_WIDE, **MOE},
    ),
    ("gemma", {**OURS, **WIDE}, "GemmaForCausalLM", HF_WIDE),
    ("gemma2", {**OURS, **WIDE}, "Gemma2ForCausalLM", HF_WIDE),
    ("gemma3", {**OURS, **WIDE}, "Gemma3ForCausalLM", HF_WIDE),
    ("olmo2", {**OURS, **GQA}, "Olmo2ForCausalLM", HF_GQA),
    ("t5", {**OURS, "head_width": 6}, "T5ForConditionalGeneration", T5),
    (
        "t5",
        {**OURS, "head_width": 6, "gated_activation": "gelu_tanh", "tied": False},
        "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    ("bart", BERT, "BartForConditionalGeneration", SEQ),
    ("mbart", BERT, "MBartForConditionalGeneration", SEQ),
    ("pegasus", OURS, "PegasusForConditionalGeneration", SEQ),
    ("m2m100", OURS, "M2M100ForConditionalGeneration", SEQ),
    ("marian", OURS, "MarianMTModel", SEQ),
]


@pytest.mark.parametrize(
    ("preset", "ours", "model", "theirs"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)]
)
def test_parameters(preset, ours, model, theirs):
    from isoform.nn import build

    built = build(presets.PRESETS[preset](V, **ours))
    reference_class = getattr(transformers, model)
    config_class = reference_class.config_class
    reference = reference_class(config_class(**theirs))
    expected = sum(p.numel() for p in reference.parameters() if p.requires_grad)
    # theirs is a buffer where ours is a parameter
    expected += sum(b.numel() for name, b in reference.named_buffers() if name == "final_logits_bias")
    assert sum(p.numel() for p in built.parameters()) == expected
