"""What a benchmark reports: samples, medians and spread, and the machine they come from."""

from __future__ import annotations

import datetime
import platform
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from engine.machine import usable_cores


def machine_facts() -> dict[str, Any]:
    """Processor, cores, memory, load, date: what a figure needs beside it."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": usable_cores(),
        "memory_nbytes": psutil.virtual_memory().total,
        "load_1min": round(psutil.getloadavg()[0], 2),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


@dataclass(slots=True)
class Report:
    """Named series of samples, and facts about the run."""

    title: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def table(self) -> str:
        """Median, minimum and maximum of each series, under the machine's line."""
        facts = machine_facts()
        lines = [
            self.title,
            f"{facts['processor']}, {facts['cores']} cores, load {facts['load_1min']}, "
            f"{facts['date']}",
            *(f"{name}: {value}" for name, value in self.facts.items()),
            f"{'figure':<44}{'median':>10}{'min':>10}{'max':>10}",
        ]
        for name, values in self.samples.items():
            numbers = (statistics.median(values), min(values), max(values))
            lines.append(f"{name:<44}" + "".join(f"{number:>10.3f}" for number in numbers))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        medians = {name: self.median(name) for name in self.samples}
        return {
            "title": self.title,
            "facts": self.facts,
            "samples": self.samples,
            "medians": medians,
        }
