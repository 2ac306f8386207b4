"""Tokenizers: a token a byte, or those of a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from actors.data_settings import BYTE
from planner.errors import UserError

BYTE_END = 256
BYTE_VOCABULARY = 257
# What the tokenizers of known models end a document with.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<end_of_text>")

Ids = npt.NDArray[np.uint32]


class Tokenizer(Protocol):
    """Makes token ids of text. `identity` names it and what ends a document; ids are below `vocabulary`."""

    @property
    def identity(self) -> str: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def end_of_document(self) -> int: ...

    def encode(self, pieces: Sequence[bytes]) -> list[Ids]:
        """The ids of each piece. UnicodeDecodeError where a piece is no text to it."""
        ...


class ByteTokenizer:
    """Bytes are tokens: no encoding can be wrong."""

    identity = BYTE
    vocabulary = BYTE_VOCABULARY
    end_of_document = BYTE_END

    def encode(self, pieces: Sequence[bytes]) -> list[Ids]:
        return [np.frombuffer(piece, dtype=np.uint8).astype(np.uint32) for piece in pieces]


class FileTokenizer:
    """A `tokenizer.json`. No special token is added but the one that ends a document, which is found by its usual
    names or chosen (the token or its id). UserError names what is wrong."""

    def __init__(self, path: Path, end_of_document: str | int | None = None) -> None:
        from tokenizers import Tokenizer as Loaded

        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"data.tokenizer = {str(path)!r} cannot be read: {error.strerror}; give a tokenizer.json, or byte"
            ) from None
        try:
            self._loaded = Loaded.from_buffer(content)
        except Exception as error:
            # The library raises a bare Exception for any content that it does not understand.
            reason = " ".join(str(error).split())
            raise UserError(
                f"data.tokenizer = {str(path)!r} is no tokenizer.json of Hugging Face ({reason}); give another"
            ) from None
        # What it was saved with would cut texts, or fill them up.
        self._loaded.no_truncation()
        self._loaded.no_padding()
        self.vocabulary = max(self._loaded.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.end_of_document = self._end(path, end_of_document)
        self.identity = f"{hashlib.sha256(content).hexdigest()[:16]}, end of document {self.end_of_document}"

    def _end(self, path: Path, chosen: str | int | None) -> int:
        if isinstance(chosen, int):
            if not 0 <= chosen < self.vocabulary:
                raise UserError(
                    f"data.end_of_document = {chosen} is no id of {path}: they are 0 to {self.vocabulary - 1}; choose"
                    " one of these"
                )
            return chosen
        for name in _ENDS if chosen is None else (chosen,):
            found = self._loaded.token_to_id(name)
            if found is not None:
                return int(found)
        if chosen is None:
            raise UserError(
                f"data.tokenizer = {str(path)!r} has none of the usual tokens that end a document ({', '.join(_ENDS)});"
                " name its own in data.end_of_document"
            )
        raise UserError(f"data.end_of_document = {chosen!r} is no token of {path}; name one that it has")

    def encode(self, pieces: Sequence[bytes]) -> list[Ids]:
        texts = [piece.decode() for piece in pieces]
        found = self._loaded.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in found]


def load_tokenizer(tokenizer: str | Path, end_of_document: str | int | None) -> Tokenizer:
    """The tokenizer that a job names: `byte` or the path of a tokenizer.json (or of the folder that holds it)."""
    if tokenizer == BYTE:
        if end_of_document not in (None, BYTE_END):
            raise UserError(
                f"data.end_of_document = {end_of_document!r}, but the byte tokenizer ends documents with {BYTE_END};"
                " remove it, or name a tokenizer.json in data.tokenizer"
            )
        return ByteTokenizer()
    path = Path(tokenizer)
    return FileTokenizer(path / "tokenizer.json" if path.is_dir() else path, end_of_document)
