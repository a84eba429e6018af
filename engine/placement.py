"""Which layers stay in memory: spread evenly, so that reads and computing overlap all the way."""

from __future__ import annotations


def spread(num_resident: int, num_layers: int) -> tuple[bool, ...]:
    """Flags of `num_resident` resident layers among `num_layers`, as evenly as can be.

    Layer i is resident where the running share of resident layers passes a whole number, as
    Bresenham's line passes a row: (i + 1)·r // n > i·r // n.
    """
    assert 0 <= num_resident <= num_layers, (num_resident, num_layers)
    return tuple(
        (layer + 1) * num_resident // num_layers > layer * num_resident // num_layers
        for layer in range(num_layers)
    )
