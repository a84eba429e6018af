"""Numbers, sizes and times as a page shows them."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal

THIN_SPACE = "\u202f"  # narrow, and no line breaks there
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def count(value: float) -> str:
    """A whole number in groups of three: 12 345 678, its separators thin."""
    return f"{round(value):,}".replace(",", THIN_SPACE)


def number(value: float, digits: int = 3) -> str:
    """A number of so many digits, without an exponent: 0.0123, 1.23, 12.3, 12 345."""
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return count(value)
    return format(Decimal(f"{value:.{digits}g}"), "f")


def share(part: float, whole: float) -> str:
    """A share in per cent, never rounded to none or to all."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return f"< 0.1{THIN_SPACE}%"
    if 99.9 < percent < 100:
        return f"> 99.9{THIN_SPACE}%"
    return f"{percent:.1f}".removesuffix(".0") + f"{THIN_SPACE}%"


def size(nbytes: float) -> str:
    """Bytes in powers of 1024: 512 B, 1.5 KiB, 8 GiB."""
    value, unit = float(nbytes), _SIZES[0]
    for unit in _SIZES:
        if value < 1024 or unit == _SIZES[-1]:
            break
        value /= 1024
    return f"{value:.1f}".removesuffix(".0") + f"{THIN_SPACE}{unit}"


def duration(seconds: float) -> str:
    """67.9 ms, 12.3 s, 4 min 05 s, 3 h 07 min, 2 d 04 h."""
    gap = THIN_SPACE
    if seconds < 0.9995:
        return f"{number(1000 * seconds)}{gap}ms"
    if seconds < 60:
        return f"{number(seconds)}{gap}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}{gap}min {whole % 60:02}{gap}s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60}{gap}h {minutes % 60:02}{gap}min"
    hours = round(seconds / 3600)
    return f"{hours // 24}{gap}d {hours % 24:02}{gap}h"


def moment(unix_s: float) -> str:
    """A time in the zone of this machine, which it names: 2026-11-30 18:02:11 CET."""
    return datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def energy(kwh: float) -> str:
    """Energy in kWh, or in Wh where that is a small number."""
    if kwh < 1:
        return f"{number(1000 * kwh)}{THIN_SPACE}Wh"
    return f"{number(kwh)}{THIN_SPACE}kWh"


def price(value: float, currency: str) -> str:
    """An amount of money in hundredths, or in as many digits as a small one needs."""
    text = f"{value:.2f}" if 0.1 <= value < 1000 else number(value)
    return f"{text}{THIN_SPACE}{currency}"
