"""ModelSpec: the transformer to train, its presets, and reading a Hugging Face config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from planner.errors import Contract, UserError, parse, read_yaml

Family = Literal["gpt3", "llama"]


class ModelSpec(Contract):
    """Shape of one decoder-only transformer.

    `gpt3`: learned positions, LayerNorm, GELU, biases everywhere, head tied to the token embedding.
    `llama`: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases.
    """

    name: str = Field(min_length=1)
    family: Family = "gpt3"
    layers: int = Field(ge=1, le=100_000)
    hidden_size: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(default=0, ge=0, description="key/value heads; 0 means as many as `heads`")
    ffn_hidden_size: int = Field(default=0, ge=0, description="0 means 4 x hidden_size")
    vocab_size: int = Field(ge=2)
    max_sequence_length: int = Field(ge=1, description="positions the model knows, in tokens")
    tied_embedding: bool = True
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    norm_epsilon: float = Field(default=1e-5, gt=0.0)
    rope_base: float = Field(default=10_000.0, gt=0.0, description="llama only")

    @model_validator(mode="before")
    @classmethod
    def _fill_derived(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        filled = dict(data)
        if not filled.get("kv_heads"):
            filled["kv_heads"] = filled.get("heads", 0)
        if not filled.get("ffn_hidden_size") and isinstance(filled.get("hidden_size"), int):
            filled["ffn_hidden_size"] = 4 * filled["hidden_size"]
        return filled

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} must be a multiple of heads = {self.heads}; change one"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}")
        return self

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.heads

    @property
    def has_biases(self) -> bool:
        """Whether linear layers and norms carry a bias."""
        return self.family == "gpt3"


def _gpt3(name: str, layers: int, hidden: int, heads: int) -> ModelSpec:
    return ModelSpec(
        name=name, layers=layers, hidden_size=hidden, heads=heads, vocab_size=50_257, max_sequence_length=2048
    )


def _llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> ModelSpec:
    return ModelSpec(
        name=name,
        family="llama",
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden_size=ffn,
        vocab_size=32_000,
        max_sequence_length=4096,
        tied_embedding=False,
    )


def _tiny(name: str, layers: int, hidden: int, heads: int, family: Family = "gpt3") -> ModelSpec:
    # 257 tokens: the bytes and an end-of-document mark, as the byte-level tokenizer makes them.
    return ModelSpec(
        name=name,
        family=family,
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        vocab_size=257,
        max_sequence_length=512,
        tied_embedding=family == "gpt3",
    )


# Layer counts and widths of the paper's Table 2; heads and feed-forward widths of the original models.
PRESETS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        _gpt3("gpt3-350m", 24, 1024, 16),
        _gpt3("gpt3-1.3b", 24, 2048, 16),
        _gpt3("gpt3-2.6b", 32, 2560, 32),
        _gpt3("gpt3-6.7b", 32, 4096, 32),
        _gpt3("gpt3-13b", 40, 5120, 40),
        _gpt3("gpt3-175b", 96, 12_288, 96),
        _llama("llama2-7b", 32, 4096, 32, 32, 11_008),
        _llama("llama2-13b", 40, 5120, 40, 40, 13_824),
        _llama("llama2-70b", 80, 8192, 64, 8, 28_672),
        _tiny("gpt3-nano", 2, 32, 4),
        _tiny("gpt3-tiny", 4, 64, 4),
        _tiny("gpt3-small-cpu", 8, 128, 4),
        _tiny("llama2-tiny", 4, 64, 4, "llama"),
    )
}


def resolve_model(value: object, *, base: Path | None = None) -> ModelSpec:
    """A ModelSpec from a preset's name, a JSON/YAML file (ours or Hugging Face's config.json) or a mapping.

    A relative file is looked up under `base`. Raises UserError that lists the presets.
    """
    if isinstance(value, ModelSpec):
        return value
    if isinstance(value, dict):
        return parse(ModelSpec, value, source="model")
    if not isinstance(value, str):
        raise UserError(f"model = {value!r}: give a preset's name, a file or a mapping")
    preset = PRESETS.get(value.strip().lower())
    if preset is not None:
        return preset
    path = (base or Path()) / value
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise UserError(
            f"model = {value!r} is neither a preset nor a file; presets: {', '.join(sorted(PRESETS))}"
        )
    data = read_yaml(path, what="model")
    if isinstance(data, dict) and "model_type" in data:
        return from_hugging_face(data, name=path.parent.name or path.stem)
    return parse(ModelSpec, data, source=str(path))


def from_hugging_face(config: dict[str, Any], *, name: str) -> ModelSpec:
    """The ModelSpec of a Hugging Face `config.json` of type `gpt2` or `llama`.

    Raises UserError for another `model_type` or a key that is missing.
    """
    kind = config.get("model_type")
    try:
        if kind == "gpt2":
            return parse(
                ModelSpec,
                {
                    "name": name,
                    "layers": config["n_layer"],
                    "hidden_size": config["n_embd"],
                    "heads": config["n_head"],
                    "ffn_hidden_size": config.get("n_inner") or 0,
                    "vocab_size": config["vocab_size"],
                    "max_sequence_length": config["n_positions"],
                    "tied_embedding": config.get("tie_word_embeddings", True),
                    "dropout": config.get("resid_pdrop", 0.0),
                    "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
                },
                source=f"{name}/config.json",
            )
        if kind == "llama":
            return parse(
                ModelSpec,
                {
                    "name": name,
                    "family": "llama",
                    "layers": config["num_hidden_layers"],
                    "hidden_size": config["hidden_size"],
                    "heads": config["num_attention_heads"],
                    "kv_heads": config.get("num_key_value_heads", 0),
                    "ffn_hidden_size": config["intermediate_size"],
                    "vocab_size": config["vocab_size"],
                    "max_sequence_length": config["max_position_embeddings"],
                    "tied_embedding": config.get("tie_word_embeddings", False),
                    "norm_epsilon": config.get("rms_norm_eps", 1e-6),
                    "rope_base": config.get("rope_theta", 10_000.0),
                },
                source=f"{name}/config.json",
            )
    except KeyError as error:
        raise UserError(
            f"{name}/config.json: key {error.args[0]!r} is missing for model_type {kind!r}"
        ) from None
    raise UserError(f"{name}/config.json: model_type = {json.dumps(kind)} is not known; use gpt2 or llama")
