"""What the parts of a model take, known from its header alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A layer, the head or the embedding.

    stored_nbytes: as the file has it
    slot_nbytes: of its place in the ring, alignment included
    values: number of weights by type name
    """

    stored_nbytes: int
    slot_nbytes: int
    values: Mapping[str, int]

    @property
    def num_values(self) -> int:
        return sum(self.values.values())

    @property
    def expanded_nbytes(self) -> int:
        return 4 * self.num_values


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What a model takes. head: None where it is the embedding.

    page_nbytes: a KV page; row_nbytes: what a row takes of the KV cache beside its pages
    """

    embedding: Part
    layers: tuple[Part, ...]
    head: Part | None
    vectors_nbytes: int
    page_nbytes: int
    row_nbytes: int = 0

    @property
    def stored_nbytes(self) -> int:
        parts = [self.embedding, *self.layers, *([self.head] if self.head else [])]
        return self.vectors_nbytes + sum(part.stored_nbytes for part in parts)

    @property
    def expanded_nbytes(self) -> int:
        """Layers and head as float32; a separate embedding stays as it is."""
        products = [*self.layers, self.head or self.embedding]
        separate = self.embedding.stored_nbytes if self.head else 0
        return self.vectors_nbytes + separate + sum(part.expanded_nbytes for part in products)
