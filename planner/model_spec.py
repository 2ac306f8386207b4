"""ModelSpec: the transformer to train, its presets, and reading a Hugging Face config.json."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from planner.errors import Contract, TextFile, UserError, did_you_mean, parse, read_yaml
from planner.hugging_face import model_fields

Family = Literal["gpt3", "llama"]


class RopeScaling(Contract):
    """How rotary positions reach beyond the length that a model was first trained on.

    `linear` slows every rotation by `factor`. `llama3` slows those pairs of a head that turn less than
    `low_turns` times over `original_sequence_length`, leaves those that turn more than `high_turns` times,
    and mixes between.
    """

    type: Literal["linear", "llama3"]
    factor: float = Field(ge=1.0)
    low_turns: float = Field(default=1.0, gt=0.0, description="llama3 only")
    high_turns: float = Field(default=4.0, gt=0.0, description="llama3 only")
    original_sequence_length: int = Field(default=8192, ge=1, description="tokens; llama3 only")

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        if self.high_turns <= self.low_turns:
            raise ValueError(
                f"high_turns = {self.high_turns} must be more than low_turns = {self.low_turns}; raise it"
            )
        return self


class ModelSpec(Contract):
    """Shape of one decoder-only transformer.

    `gpt3`: learned positions, LayerNorm, GELU, biases everywhere, head tied to the token embedding.
    `llama`: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases.
    """

    name: str = Field(min_length=1)
    family: Family = "gpt3"
    # Ten times what the largest models have; what is beyond that is a slip of the pen.
    layers: int = Field(ge=1, le=1_000)
    hidden_size: int = Field(ge=1, le=2**18)
    heads: int = Field(ge=1, le=2**12)
    kv_heads: int = Field(default=0, ge=0, description="key/value heads; 0 means as many as `heads`")
    ffn_hidden_size: int = Field(default=0, ge=0, le=2**20, description="0 means 4 x hidden_size")
    vocab_size: int = Field(ge=2, le=2**24)
    max_sequence_length: int = Field(ge=1, le=2**24, description="positions the model knows, in tokens")
    tied_embedding: bool = True
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    norm_epsilon: float = Field(default=1e-5, gt=0.0)
    rope_base: float = Field(default=10_000.0, gt=0.0, description="llama only")
    rope_scaling: RopeScaling | None = Field(default=None, description="llama only; null means none")

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
        if self.family == "llama" and self.head_size % 2:
            raise ValueError(
                f"heads = {self.heads} of hidden_size = {self.hidden_size} are {self.head_size} wide, but rotary"
                " positions turn pairs; choose fewer heads or a larger hidden_size"
            )
        if self.family != "llama" and self.rope_scaling is not None:
            raise ValueError("rope_scaling is of family llama only; leave it out")
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


def _llama3(name: str, layers: int, hidden: int, heads: int, ffn: int) -> ModelSpec:
    return ModelSpec(
        name=name,
        family="llama",
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=8,
        ffn_hidden_size=ffn,
        vocab_size=128_256,
        max_sequence_length=8192,
        tied_embedding=False,
        rope_base=500_000.0,
    )


def _tiny(
    name: str, layers: int, hidden: int, heads: int, family: Family = "gpt3", kv_heads: int = 0
) -> ModelSpec:
    # 257 tokens: the bytes and an end-of-document mark, as the byte-level tokenizer makes them.
    return ModelSpec(
        name=name,
        family=family,
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
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
        _llama3("llama3-8b", 32, 4096, 32, 14_336),
        _llama3("llama3-70b", 80, 8192, 64, 28_672),
        _tiny("gpt3-nano", 2, 32, 4),
        _tiny("gpt3-tiny", 4, 64, 4),
        _tiny("gpt3-small-cpu", 8, 128, 4),
        _tiny("llama2-tiny", 4, 64, 4, "llama"),
        _tiny("llama3-tiny", 4, 64, 4, "llama", kv_heads=2),
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
    if os.path.isdir(path):
        path = path / "config.json"
    if not os.path.exists(path):
        raise UserError(
            f"model = {value!r} is neither a preset nor a file; presets: {', '.join(sorted(PRESETS))}"
            f"{did_you_mean(value, PRESETS)}"
        )
    return read_model(path, name=path.parent.name or path.stem)


def read_model(file: TextFile, *, name: str) -> ModelSpec:
    """The ModelSpec in a file, ours or a Hugging Face `config.json`, whose model is then called `name`."""
    data = read_yaml(file, what="model")
    if isinstance(data, dict) and "model_type" in data:
        return from_hugging_face(data, name=name)
    return parse(ModelSpec, data, source=str(file))


def from_hugging_face(config: dict[str, Any], *, name: str) -> ModelSpec:
    """The ModelSpec of a Hugging Face `config.json` of type `gpt2` or `llama`.

    Raises UserError for another `model_type`, a key that is missing, or a value that no ModelSpec can say.
    """
    return parse(ModelSpec, model_fields(config, name=name), source=f"{name}/config.json")
