"""Small models with random weights whose output depends on the KV cache.

Weights need enough scale: a model loaded with ``load_format="dummy"`` gives the same tokens whatever its KV cache
holds, and so proves nothing. Run as a script to make one: ``python tests/vllm/tiny_models.py llama DIR --tokenizer``.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 1000
COMPLETE = ".complete"
"""Written last, so that a directory left behind half-made is made again."""

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<s> ' + m['role'] + ' : ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant : ' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a Llama model."""

    hidden: int = 256
    intermediate: int = 512
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = VOCAB_SIZE
    max_positions: int = 4096


def make_llama(directory: Path, shape: Shape | None = None, tokenizer: bool = False) -> Path:
    """A Llama model: one group of full attention. ``tokenizer`` adds one, with a chat template, for text over HTTP."""

    def write() -> None:
        s = shape or Shape()
        _write(directory, _llama_config(s, "LlamaForCausalLM", "llama"), _llama_weights(s))
        if tokenizer:
            _write_tokenizer(directory, s.vocab)

    return _once(directory, write)


def make_gemma2(directory: Path) -> Path:
    """A Gemma-2-like model: a group with a sliding window of 256 tokens, and one of full attention."""

    def write() -> None:
        s = Shape()
        config = _config(s, "Gemma2ForCausalLM", "gemma2") | {
            "rms_norm_eps": 1e-5,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "sliding_window": 256,
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["sliding_attention", "full_attention"] * (s.layers // 2),
        }
        # The layer multiplies by (1 + w), and scales embeddings by sqrt(hidden): smaller branches would not show.
        norms = {
            "input_layernorm": 0.0,
            "pre_feedforward_layernorm": 0.0,
            "post_attention_layernorm": 20.0,
            "post_feedforward_layernorm": 20.0,
        }
        _write(directory, config, _decoder_weights(s, norms, final_norm=0.0))

    return _once(directory, write)


def make_llama_windows(directory: Path) -> Path:
    """A Llama model with groups of a sliding window of 256 tokens and of full attention, for the draft `make_mtp`."""

    def write() -> None:
        s = Shape()
        config = _llama_config(s, "LlamaForCausalLM", "llama") | {
            "sliding_window": 256,
            "layer_types": ["sliding_attention", "full_attention"] * (s.layers // 2),
            "num_nextn_predict_layers": 1,
        }
        _write(directory, config, _llama_weights(s))

    return _once(directory, write)


def make_eagle(directory: Path, shape: Shape | None = None) -> Path:
    """An EAGLE draft of one layer for a Llama model. Hardly any of its drafts is right."""

    def write() -> None:
        s = shape or Shape(layers=1)
        weights = _llama_weights(s).items()
        tensors = {name.removeprefix("model."): one for name, one in weights if name.startswith("model.layers.")}
        # The first layer of such a draft has none.
        del tensors["layers.0.input_layernorm.weight"]
        tensors["fc.weight"] = torch.randn(s.hidden, 2 * s.hidden) / math.sqrt(2 * s.hidden)
        _write(directory, _llama_config(s, "LlamaForCausalLM", "llama"), tensors)

    return _once(directory, write)


def make_mtp(directory: Path, shape: Shape | None = None) -> Path:
    """An MTP draft of one layer, as MiMo has it, for a Llama model. Hardly any of its drafts is right."""

    def write() -> None:
        s = shape or Shape(layers=1)
        layer = "model.mtp_layers.0"
        tensors = {name.replace("model.layers.0", layer): one for name, one in _llama_weights(s).items()}
        del tensors["model.norm.weight"]
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.ones(s.hidden)
        for name, heads in (("q_proj", s.heads), ("k_proj", s.kv_heads), ("v_proj", s.kv_heads)):
            tensors[f"{layer}.self_attn.{name}.bias"] = torch.zeros(heads * s.head_dim)
        tensors[f"{layer}.input_proj.weight"] = torch.randn(s.hidden, 2 * s.hidden) / math.sqrt(2 * s.hidden)
        config = _llama_config(s, "MiMoForCausalLM", "qwen2") | {"num_nextn_predict_layers": 1}
        _write(directory, config, tensors)

    return _once(directory, write)


def make_qwen3_next(directory: Path, shape: Shape | None = None) -> Path:
    """A Qwen3-Next model: a group of linear attention (one state) and one of full attention. Run it in bfloat16."""

    def write() -> None:
        from transformers import AutoModelForCausalLM, Qwen3NextConfig

        s = shape or Shape()
        config = _config(s, "Qwen3NextForCausalLM", "qwen3_next") | {
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "full_attention_interval": 2,
            "layer_types": ["linear_attention", "full_attention"] * (s.layers // 2),
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "partial_rotary_factor": 0.25,
            "torch_dtype": "float32",
        }
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3NextConfig(**config))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(_qwen3_next_weight(name, weight))
        model.to(torch.bfloat16).save_pretrained(directory)
        (directory / "config.json").write_text(json.dumps(config))

    return _once(directory, write)


def make_deepseek(directory: Path) -> Path:
    """A DeepSeek-like model without experts: latent attention (MLA)."""

    def write() -> None:
        s = Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=4, head_dim=96)
        rank, rope, nope, values = 256, 64, 32, 32
        config = _llama_config(s, "DeepseekV2ForCausalLM", "deepseek_v2") | {
            "head_dim": rope,
            "q_lora_rank": None,
            "kv_lora_rank": rank,
            "qk_rope_head_dim": rope,
            "qk_nope_head_dim": nope,
            "v_head_dim": values,
            "first_k_dense_replace": s.layers,
        }
        tensors = _llama_weights(s)
        sizes = {
            "kv_a_proj_with_mqa": (rank + rope, s.hidden),
            "kv_b_proj": (s.heads * (nope + values), rank),
            "o_proj": (s.hidden, s.heads * values),
        }
        for prefix in (f"model.layers.{layer}.self_attn" for layer in range(s.layers)):
            del tensors[f"{prefix}.k_proj.weight"], tensors[f"{prefix}.v_proj.weight"]
            tensors[f"{prefix}.kv_a_layernorm.weight"] = torch.ones(rank)
            for name, (rows, columns) in sizes.items():
                tensors[f"{prefix}.{name}.weight"] = torch.randn(rows, columns) * 2.0 / math.sqrt(columns)
        _write(directory, config, tensors)

    return _once(directory, write)


def make_mixtral(directory: Path) -> Path:
    """A Mixtral model with a tokenizer: each token goes to two of four experts in each layer."""

    def write() -> None:
        s = Shape()
        experts, inner = 4, 128
        config = _llama_config(s, "MixtralForCausalLM", "mixtral") | {
            "intermediate_size": inner,
            "num_local_experts": experts,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        }
        tensors = {name: one for name, one in _llama_weights(s).items() if ".mlp." not in name}
        for prefix in (f"model.layers.{layer}.block_sparse_moe" for layer in range(s.layers)):
            sizes = {"gate": (experts, s.hidden)}
            for expert in range(experts):
                sizes |= {f"experts.{expert}.{name}": (inner, s.hidden) for name in ("w1", "w3")}
                sizes[f"experts.{expert}.w2"] = (s.hidden, inner)
            for name, (rows, columns) in sizes.items():
                tensors[f"{prefix}.{name}.weight"] = torch.randn(rows, columns) / math.sqrt(columns)
        _write(directory, config, tensors)
        _write_tokenizer(directory, s.vocab)

    return _once(directory, write)


def make_lfm2(directory: Path, shape: Shape | None = None) -> Path:
    """An LFM2 model: a group of short convolutions (one state, of two tokens) and one of full attention."""

    def write() -> None:
        s = shape or Shape()
        types = ["conv", "full_attention"] * (s.layers // 2)
        config = _config(s, "Lfm2ForCausalLM", "lfm2") | {
            "norm_eps": 1e-5,
            "layer_types": types,
            "conv_dim": s.hidden,
            "block_dim": s.hidden,
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        }
        tensors = {
            _lfm2_name(name): one
            for name, one in _decoder_weights(s, {"operator_norm": 1.0, "ffn_norm": 1.0}, final_norm=0.2).items()
        }
        for layer, kind in enumerate(types):
            prefix = f"model.layers.{layer}"
            if kind == "conv":
                for name in [name for name in tensors if name.startswith(f"{prefix}.self_attn")]:
                    del tensors[name]
                tensors[f"{prefix}.conv.conv.weight"] = torch.randn(s.hidden, 1, 3)
                for name, rows in (("in_proj", 3 * s.hidden), ("out_proj", s.hidden)):
                    tensors[f"{prefix}.conv.{name}.weight"] = torch.randn(rows, s.hidden) * 1.5 / math.sqrt(s.hidden)
            else:
                for name in ("q_layernorm", "k_layernorm"):
                    tensors[f"{prefix}.self_attn.{name}.weight"] = torch.full((s.head_dim,), 2.0)
        _write(directory, config, tensors)

    return _once(directory, write)


def make_phi3(directory: Path) -> Path:
    """A Phi-3-like model: it has other rotary factors for a max_model_len of more than 1,024 tokens."""

    def write() -> None:
        s = Shape()
        tensors = _llama_weights(s)
        for layer in range(s.layers):
            prefix = f"model.layers.{layer}"
            for joined, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
                kind = joined.split(".")[0]
                names = [f"{prefix}.{kind}.{part}_proj.weight" for part in parts]
                tensors[f"{prefix}.{joined}.weight"] = torch.cat([tensors.pop(name) for name in names])
        config = _llama_config(s, "Phi3ForCausalLM", "phi3") | {
            "pad_token_id": 0,
            "original_max_position_embeddings": 1024,
            "sliding_window": None,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * (s.head_dim // 2),
                "long_factor": [1.0 + i / 4 for i in range(s.head_dim // 2)],
            },
        }
        _write(directory, config, tensors)

    return _once(directory, write)


def make_llama4(directory: Path) -> Path:
    """A Llama-4-like model without experts: a group with chunks of 512 tokens, and one of full attention."""

    def write() -> None:
        s = Shape()
        config = _llama_config(s, "Llama4ForCausalLM", "llama4_text") | {
            "intermediate_size_mlp": s.intermediate,
            "attention_chunk_size": 512,
            "no_rope_layers": [1, 0] * (s.layers // 2),
            "use_qk_norm": False,
            "interleave_moe_layer_step": 0,
            "moe_layers": [],
            "num_local_experts": 1,
        }
        tensors = {name.replace(".mlp.", ".feed_forward."): one for name, one in _llama_weights(s).items()}
        _write(directory, config, tensors)

    return _once(directory, write)


LLAVA_IMAGE = VOCAB_SIZE
"""The token that stands for an image in a prompt of `make_llava`."""


def make_llava(directory: Path) -> Path:
    """A Llava model: an image of 32 x 32 pixels takes 64 tokens. Its answers depend on the images."""

    def write() -> None:
        from safetensors.torch import load_file
        from transformers import (
            AutoTokenizer,
            CLIPVisionConfig,
            LlamaConfig,
            LlavaConfig,
            LlavaForConditionalGeneration,
            LlavaProcessor,
        )
        from transformers.models.clip.image_processing_clip import CLIPImageProcessor

        s = Shape(hidden=128, intermediate=256, layers=2, heads=2, kv_heads=1)
        _write_tokenizer(directory, s.vocab)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        tokenizer.pad_token = "<unk>"
        assert tokenizer.convert_tokens_to_ids("<image>") == LLAVA_IMAGE
        text = _llama_config(s, "LlamaForCausalLM", "llama") | {"vocab_size": s.vocab + 24}
        vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = LlavaConfig(
            vision_config=CLIPVisionConfig(**vision, image_size=32, patch_size=4),
            text_config=LlamaConfig(**text),
            image_token_index=LLAVA_IMAGE,
            vision_feature_layer=-1,
            vision_feature_select_strategy="default",
            tie_word_embeddings=False,
        )
        config.architectures = ["LlavaForConditionalGeneration"]
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim >= 2:
                    weight.copy_(torch.randn_like(weight) * _llava_scale(name, weight[0].numel()))
        model.save_pretrained(directory)
        # vLLM knows the vision tower by its older names.
        file, old = directory / "model.safetensors", "vision_tower.vision_model."
        tensors = {
            name if old in name else name.replace("vision_tower.", old): one for name, one in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
        image = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
        LlavaProcessor(
            image_processor=image,
            tokenizer=tokenizer,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ).save_pretrained(directory)

    return _once(directory, write)


MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": make_llama,
    "gemma2": make_gemma2,
    "llama4": make_llama4,
    "deepseek": make_deepseek,
    "phi3": make_phi3,
    "llama_windows": make_llama_windows,
    "eagle": make_eagle,
    "mtp": make_mtp,
    "qwen3_next": make_qwen3_next,
    "mixtral": make_mixtral,
    "lfm2": make_lfm2,
    "llava": make_llava,
}


def _once(directory: Path, write: Callable[[], None]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / COMPLETE).exists():
            write()
            (directory / COMPLETE).touch()
    return directory


def _config(s: Shape, architecture: str, model_type: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": s.hidden,
        "intermediate_size": s.intermediate,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "vocab_size": s.vocab,
        "max_position_embeddings": s.max_positions,
        "rope_theta": 10000,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _llama_config(s: Shape, architecture: str, model_type: str) -> dict[str, Any]:
    return _config(s, architecture, model_type) | {
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def _llama_weights(s: Shape) -> dict[str, torch.Tensor]:
    norms = {"input_layernorm": 1.0, "post_attention_layernorm": 1.0}
    tensors = _decoder_weights(s, norms, final_norm=1.0)
    tensors["lm_head.weight"] = torch.randn(s.vocab, s.hidden) * 0.2
    return tensors


def _decoder_weights(s: Shape, norms: dict[str, float], final_norm: float) -> dict[str, torch.Tensor]:
    """Embedding and layers of a Llama-like decoder. ``norms``: name of each layer's norms and their constant weight."""
    torch.manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(s.vocab, s.hidden),
        "model.norm.weight": torch.full((s.hidden,), final_norm),
    }
    query, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    projections = {
        "self_attn.q_proj": (query, s.hidden, 2.0),
        "self_attn.k_proj": (kv, s.hidden, 2.0),
        "self_attn.v_proj": (kv, s.hidden, 2.0),
        "self_attn.o_proj": (s.hidden, query, 2.0),
        "mlp.gate_proj": (s.intermediate, s.hidden, 1.0),
        "mlp.up_proj": (s.intermediate, s.hidden, 1.0),
        "mlp.down_proj": (s.hidden, s.intermediate, 1.0),
    }
    for layer in range(s.layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns, scale) in projections.items():
            tensors[f"{prefix}.{name}.weight"] = torch.randn(rows, columns) * scale / math.sqrt(columns)
        for name, weight in norms.items():
            tensors[f"{prefix}.{name}.weight"] = torch.full((s.hidden,), weight)
    return tensors


def _lfm2_name(name: str) -> str:
    """The name of a weight of a Llama-like decoder in LFM2."""
    others = {"model.norm": "model.embedding_norm", "o_proj": "out_proj", "mlp.gate_proj": "feed_forward.w1"}
    others |= {"mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"}
    for old, new in others.items():
        name = name.replace(old, new)
    return name


def _llava_scale(name: str, inputs: int) -> float:
    if "embed_tokens" in name:
        return 1.0
    return 0.2 if "lm_head" in name else (2.0 if "attn" in name else 1.5) / math.sqrt(inputs)


def _qwen3_next_weight(name: str, weight: torch.Tensor) -> torch.Tensor:
    if weight.ndim < 2 or "conv1d" in name:
        return weight
    if "embed_tokens" in name:
        scale = 1.0
    elif "lm_head" in name:
        scale = 0.2
    else:
        scale = (2.0 if "attn" in name else 1.0) / math.sqrt(weight.shape[-1])
    return torch.randn_like(weight) * scale


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    save_file(
        {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()},
        str(directory / "model.safetensors"),
        metadata={"format": "pt"},
    )
    (directory / "config.json").write_text(json.dumps(config))


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level tokenizer: any text is encoded and decoded without loss; ids past the bytes are made-up words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    specials = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*specials, *alphabet])}
    merges: list[tuple[str, str]] = []
    letters = "etaoinshrdlucmfwypvbgk"
    for pair in ((a, b) for a in ["\u0120", *letters] for b in letters):
        if len(vocab) >= vocab_size:
            break
        merges.append(pair)
        vocab["".join(pair)] = len(vocab)
    for i in range(len(vocab), vocab_size):
        vocab[f"\u0120word{i}"] = i
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 1 << 20,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> None:
    """Command line: make one model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--tokenizer",
        action="store_true",
        help="add a tokenizer with a chat template (llama only)",
    )
    arguments = parser.parse_args()
    if arguments.tokenizer and arguments.model != "llama":
        parser.error("--tokenizer: only the llama model can have one")
    if arguments.tokenizer:
        made = make_llama(arguments.directory, tokenizer=True)
    else:
        made = MODELS[arguments.model](arguments.directory)
    print(made)


if __name__ == "__main__":
    main()
