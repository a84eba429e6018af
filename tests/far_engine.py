"""A driver whose engine brings rows down, as if it were on another machine.

`python -m tests.far_engine --fd N --temp-dir DIR` is a driver like tests.faulty_engine.
"""

from __future__ import annotations

import jobs.engine_actor
from jobs.driver import main

if __name__ == "__main__":
    from tests.faulty_engine import load_faulty_engine

    jobs.engine_actor.machine_id = lambda: "another"
    main(load_faulty_engine)
