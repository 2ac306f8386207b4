"""Several texts in one, by weights: which of them gives each sample, found without those before it."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from pydantic import Field

from actors.engine.tokens import Indices, TokenFile
from actors.whole_file import whole_file
from planner.errors import Contract, UserError, parse, read_yaml

SUFFIX = ".mixture.json"
# Shares are fractions of this: a sample's number times one must fit 63 bits.
_SHARE_BITS = 30
_HALF = 1 << (_SHARE_BITS - 1)


class MixtureSource(Contract):
    """One text of a mixture: its token file, which lies beside the mixture's or has a whole path."""

    tokens: str
    weight: float = Field(gt=0)


class MixtureHeader(Contract):
    """What a mixture consists of."""

    version: int = Field(default=1, ge=1, le=1)
    sources: tuple[MixtureSource, ...] = Field(min_length=2)


@dataclass(frozen=True)
class Mixture:
    """The texts behind a mixture's file (`HASH.mixture.json`), named by a hash of the texts and their weights."""

    path: Path

    @cached_property
    def header(self) -> MixtureHeader:
        """What the file says. UserError if it cannot be read."""
        return parse(MixtureHeader, read_yaml(self.path, what="mixture"), source=str(self.path))

    @cached_property
    def sources(self) -> tuple[TokenFile, ...]:
        return tuple(TokenFile(self.path.parent / source.tokens) for source in self.header.sources)

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(source.weight for source in self.header.sources)

    @property
    def count(self) -> int:
        """Tokens of all texts together."""
        return sum(source.count for source in self.sources)

    @property
    def tokenizer(self) -> str:
        """What made the tokens of every text; `none` if all came as they are."""
        return next((name for source in self.sources if (name := source.tokenizer) != "none"), "none")


Tokens = TokenFile | Mixture


def open_tokens(path: Path) -> Tokens:
    """The text or the mixture in a file."""
    return Mixture(path) if path.name.endswith(SUFFIX) else TokenFile(path)


def sources_of(tokens: Tokens) -> tuple[TokenFile, ...]:
    """The texts of a mixture, or the one text."""
    return tokens.sources if isinstance(tokens, Mixture) else (tokens,)


def write_mixture(sources: Sequence[tuple[TokenFile, float]], folder: Path) -> Mixture:
    """The mixture of texts and their weights, in `folder`. UserError if they are of several tokenizers."""
    made_by = {tokens.tokenizer: tokens for tokens, _ in sources if tokens.tokenizer != "none"}
    if len(made_by) > 1:
        raise UserError(
            f"data.mixture holds tokens of several tokenizers ({', '.join(made_by)}); prepare all its sources with one,"
            " which data.tokenizer names"
        )
    header = MixtureHeader(
        sources=tuple(
            MixtureSource(tokens=str(tokens.path.resolve()), weight=weight) for tokens, weight in sources
        )
    )
    # Token files are named by their content: the folder they lie in has no part in a mixture's name.
    content = json.dumps([[tokens.path.stem, weight] for tokens, weight in sources])
    name = hashlib.sha256(content.encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{SUFFIX}"
    with whole_file(path) as partial:
        partial.write_text(header.model_dump_json() + "\n", encoding="utf-8")
    return Mixture(path)


@dataclass(frozen=True)
class _Node:
    """Gives `share` of its turns, of 2 ** _SHARE_BITS, to one side and the rest to the other."""

    share: int
    one: _Node | int
    other: _Node | int


class Turns:
    """Whose turn every sample is, by weights: of the first n samples each source has its part of n.

    Sources form a binary tree, the lightest lowest (Huffman's). Of the first n turns of a node, one side has
    `(n * share + half) >> bits`: the nearest whole number. So the turn of a sample, and how many its source had
    before, follow from the sample's number in one step a level, and every source has, after any number of samples, its
    share of them to within a sample a level.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._sources = len(weights)
        heap: list[tuple[float, int, _Node | int]] = [(weight, i, i) for i, weight in enumerate(weights)]
        heapq.heapify(heap)
        made = len(heap)
        while len(heap) > 1:
            light, heavy = heapq.heappop(heap), heapq.heappop(heap)
            total = light[0] + heavy[0]
            node = _Node(round(light[0] / total * (1 << _SHARE_BITS)), light[2], heavy[2])
            heapq.heappush(heap, (total, made, node))
            made += 1
        self._root = heap[0][2]

    def turns(self, samples: Indices) -> tuple[Indices, Indices]:
        """Of samples (counted from 0): which source has each, and how many samples that had before."""
        assert not len(samples) or int(samples.max()) < 1 << (62 - _SHARE_BITS), "products must fit 63 bits"
        owners, before = np.zeros_like(samples), samples.copy()
        waiting: list[tuple[_Node | int, Indices]] = [(self._root, np.arange(len(samples)))]
        while waiting:
            node, rows = waiting.pop()
            if isinstance(node, int):
                owners[rows] = node
                continue
            turns = before[rows]
            ones = (turns * node.share + _HALF) >> _SHARE_BITS
            mine = ((turns + 1) * node.share + _HALF) >> _SHARE_BITS > ones
            before[rows] = np.where(mine, ones, turns - ones)
            waiting += [(node.one, rows[mine]), (node.other, rows[~mine])]
        return owners, before
