"""Small models with random weights whose attention is sharp, one for each thing that can differ."""

import torch
import transformers as tf

VOCABULARY = 512
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}


def llama(rope=PLAIN, **more):
    return tf.LlamaConfig(**{**COMMON, "rope_parameters": dict(rope), **more})


CONFIGS = {
    "llama": llama,
    "llama3-rope": lambda: llama(
        {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    ),
    "linear-rope": lambda: llama({"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}),
    "yarn-rope": lambda: llama(
        {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    ),
    "mistral": lambda: tf.MistralConfig(**COMMON, sliding_window=None, rope_parameters=dict(PLAIN)),
    "qwen2": lambda: tf.Qwen2Config(
        **{k: v for k, v in COMMON.items() if k != "head_dim"}, rope_parameters=dict(PLAIN)
    ),
    "qwen3": lambda: tf.Qwen3Config(**COMMON, rope_parameters=dict(PLAIN)),
    "stablelm": lambda: tf.StableLmConfig(
        **{k: v for k, v in COMMON.items() if k != "head_dim"},
        rope_parameters={**PLAIN, "partial_rotary_factor": 0.25},
    ),
    # Layers with a sliding window have a different rotary embedding from layers without one.
    "gemma3": lambda: tf.Gemma3TextConfig(
        **{**COMMON, "num_hidden_layers": 4},
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=96,
        query_pre_attn_scalar=32,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 2.0},
        },
    ),
    "bloom": lambda: tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=128, n_layer=2, n_head=4),
    "dynamic-rope": lambda: llama({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    "phi3": lambda: tf.Phi3Config(
        **{k: v for k, v in COMMON.items() if k != "head_dim"},
        pad_token_id=0,
        rope_parameters=dict(PLAIN),
    ),
}
"""The configurations, by the names that tests use."""


def save(name, folder):
    """Make a model and save it."""
    torch.manual_seed(hash_name(name))
    config = CONFIGS[name]()
    model = tf.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "q_proj.weight" in key or "k_proj.weight" in key:
                weight.mul_(6)  # sharp attention, so that a wrong key moves the logits
            elif "proj.weight" in key or "embed" in key:
                weight.mul_(3)
            elif "norm" in key and weight.dim() == 1:
                weight.add_(0.2 * torch.randn_like(weight))
            elif key.endswith("bias"):
                weight.copy_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    save_tokenizer(folder)


def hash_name(name):
    return sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 2**31


def random_tokens(count, seed=0):
    """Return random token ids that are not special tokens."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=made).tolist()


def save_tokenizer(folder):
    """Save a tokenizer with a word for each token id. Servers need one."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", bos_token="w1", eos_token="w2"
    ).save_pretrained(folder)
