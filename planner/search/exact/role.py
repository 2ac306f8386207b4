"""Which ends of the model a stage of a pipeline holds besides its layers."""

from __future__ import annotations

from enum import IntEnum


class Role(IntEnum):
    """The place of a stage in its pipeline."""

    SINGLE = 0
    FIRST = 1
    MIDDLE = 2
    LAST = 3

    @property
    def embedding(self) -> bool:
        return self in (Role.SINGLE, Role.FIRST)

    @property
    def head(self) -> bool:
        return self in (Role.SINGLE, Role.LAST)

    @property
    def sides(self) -> int:
        """Neighbours that the stage receives from."""
        return {Role.SINGLE: 0, Role.FIRST: 1, Role.MIDDLE: 2, Role.LAST: 1}[self]


def role_of(*, position: int, stages: int) -> Role:
    """Role of the stage at `position` counted from the end, from 1."""
    if stages == 1:
        return Role.SINGLE
    if position == 1:
        return Role.LAST
    return Role.FIRST if position == stages else Role.MIDDLE
