"""How refusals are worded."""

from typing import Any

from wan_ds.errors import ConfigError


def require(holds: bool, key: str, value: Any, rule: str) -> None:
    """ConfigError unless the rule holds, with the key, the value and the rule."""
    if not holds:
        raise ConfigError(f"{key}={shown(value)}: must be {rule}")


def is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def one_of(numbers: list[int]) -> str:
    shown = [str(number) for number in numbers]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: list[str]) -> str:
    return f"[{', '.join(names)}]"


def shown(value: Any) -> str:
    return "null" if value is None else str(value)
