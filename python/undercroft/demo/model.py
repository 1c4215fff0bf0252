"""Makes a small Llama with random weights and a byte tokenizer, so that the demonstration needs no download.

The weights have enough scale that the output depends on the KV cache: a wrong block changes the tokens.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# Large enough that computing a 2,000-token prompt on a CPU takes well over the time of loading its KV cache.
LAYERS = 8
HIDDEN = 768
INTERMEDIATE = 2048
HEADS = 12
KV_HEADS = 4
HEAD_DIM = HIDDEN // HEADS
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
VOCABULARY = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make(directory: Path) -> Path:
    """Write the model into the directory unless it is there already."""
    done = directory / "complete"
    if not done.exists():
        directory.mkdir(parents=True, exist_ok=True)
        _write_config(directory)
        _write_tokenizer(directory)
        save_file(_weights(), directory / "model.safetensors", metadata={"format": "pt"})
        done.touch()
    return directory


def _write_config(directory: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _write_tokenizer(directory: Path) -> None:
    """One token for each byte: any text can be encoded, and nothing has to be trained."""
    names = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": 8192,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)

    def matrix(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns) * (scale / math.sqrt(columns))

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": torch.randn(VOCABULARY, HIDDEN) * 0.2,
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, 2),
            prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 2),
            prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 2),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, 2),
            prefix + "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN, 1),
            prefix + "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN, 1),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE, 1),
            prefix + "input_layernorm.weight": torch.ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    return weights
