"""Fields of published `config.json` files, from the pages of these models on huggingface.co."""

from typing import Any

# answerdotai/ModernBERT-base and -large (Warner et al. 2024)
MODERN: dict[str, Any] = {
    "architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False, "cls_token_id": 50281,
    "decoder_bias": True, "embedding_dropout": 0.0, "eos_token_id": 50282, "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0, "hidden_activation": "gelu", "hidden_size": 768, "initializer_range": 0.02,
    "intermediate_size": 1152, "local_attention": 128, "local_rope_theta": 10000.0, "max_position_embeddings": 8192,
    "mlp_bias": False, "mlp_dropout": 0.0, "model_type": "modernbert", "norm_bias": False, "norm_eps": 1e-05,
    "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283, "sep_token_id": 50282,
    "vocab_size": 50368,
}  # fmt: skip
# FacebookAI/roberta-base (Liu et al. 2019)
ROBERTA: dict[str, Any] = {
    "architectures": ["RobertaForMaskedLM"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0, "eos_token_id": 2,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 514, "model_type": "roberta",
    "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1, "type_vocab_size": 1, "vocab_size": 50265,
}  # fmt: skip
# EuroBERT/EuroBERT-610m (Boizard et al. 2025)
EURO: dict[str, Any] = {
    "architectures": ["EuroBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 4096, "mask_token_id": 128002, "max_position_embeddings": 8192,
    "mlp_bias": False, "model_type": "eurobert", "num_attention_heads": 18, "num_hidden_layers": 26,
    "num_key_value_heads": 6, "pad_token_id": 128001, "rms_norm_eps": 1e-05, "rope_theta": 250000,
    "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
# nomic-ai/nomic-embed-text-v1.5 (Nussbaum et al. 2024), as in the defaults of transformers' NomicBertConfig
NOMIC: dict[str, Any] = {
    "architectures": ["NomicBertForMaskedLM"], "attention_probs_dropout_prob": 0.0, "hidden_act": "silu",
    "hidden_dropout_prob": 0.0, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
    "layer_norm_eps": 1e-12, "max_position_embeddings": 2048, "model_type": "nomic_bert", "num_attention_heads": 12,
    "num_hidden_layers": 12, "pad_token_id": 0, "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
    "type_vocab_size": 2, "vocab_size": 30528,
}  # fmt: skip
CONFIGS = {
    "modernbert-base": MODERN,
    "modernbert-large": MODERN
    | {"hidden_size": 1024, "intermediate_size": 2624, "num_attention_heads": 16, "num_hidden_layers": 28},
    "roberta-base": ROBERTA,
    # FacebookAI/xlm-roberta-base (Conneau et al. 2020), almanach/camembert-base (Martin et al. 2020)
    "xlm-roberta-base": ROBERTA
    | {"architectures": ["XLMRobertaForMaskedLM"], "model_type": "xlm-roberta", "vocab_size": 250002},
    "camembert-base": ROBERTA
    | {"architectures": ["CamembertForMaskedLM"], "bos_token_id": 5, "eos_token_id": 6}
    | {"model_type": "camembert", "vocab_size": 32005},
    "eurobert-210m": EURO
    | {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12}
    | {"num_key_value_heads": 12},
    "eurobert-610m": EURO,
    "nomic-embed-text": NOMIC,
}
# The same architectures, small: 4 layers, where there is a window both kinds of layers and rows longer than it.
SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_hidden_layers": 4,
    "max_position_embeddings": 66, "initializer_range": 0.1,
}  # fmt: skip


def shrunk(name: str) -> dict[str, Any]:
    """A published config with the sizes of SMALL; what has none of a field gets none."""
    changes = SMALL | {"local_attention": 16, "num_key_value_heads": 2, "vocab_size": 150}
    changes |= {"bos_token_id": 7, "eos_token_id": 8, "cls_token_id": 7, "sep_token_id": 8, "mask_token_id": 9}
    changes |= {"pad_token_id": min(CONFIGS[name]["pad_token_id"], 2)}
    return CONFIGS[name] | {field: value for field, value in changes.items() if field in CONFIGS[name]}
