"""How many outputs to give an engine: enough that it stays busy, not so many that others wait.

Pure policy. While much is left, each engine holds the same part of it, and as much again stays for
whoever is first to need more: a faster engine does more. Near the end it holds what keeps it full
for a while, and never more than an even part of what is left. What it gets comes in large pieces,
since rows that are neighbours in the input often begin alike.
"""

from __future__ import annotations

from jobs.messages import WINDOW_OUTPUTS

ROUNDS_HELD = 2  # of the rows that an engine has on board at once


def outputs_to_give(*, left: int, held: int, most_on_board: int, num_engines: int) -> int:
    """For one of the engines that share a job, now.

    left: outputs of the job that are not finished
    held: of these, given to this engine
    most_on_board: most of them that it has had on board at once
    """
    fair = -(-left // num_engines)
    wanted = max(1, left // (2 * num_engines - 1), ROUNDS_HELD * most_on_board)
    enough = min(WINDOW_OUTPUTS // num_engines, fair, wanted)
    return enough - held if 3 * held <= 2 * enough else 0
