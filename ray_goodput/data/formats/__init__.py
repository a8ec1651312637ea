"""File formats that data shards can have, by name and by file extension."""

from __future__ import annotations

from ray_goodput.data.formats.base import ShardFacts, ShardFormat
from ray_goodput.data.formats.parquet import ParquetFormat
from ray_goodput.errors import ConfigError

__all__ = ["ParquetFormat", "ShardFacts", "ShardFormat", "format_by_extension", "get_format", "register_format"]

_FORMATS: dict[str, ShardFormat] = {}


def register_format(fmt: ShardFormat) -> None:
    """`ShardedDataset(format=fmt.name)` and files with its extensions mean `fmt` from now on, in this process.

    Processes that fetch receive the format object itself, so its class must be importable there.
    """
    _FORMATS[fmt.name] = fmt


def get_format(name: str) -> ShardFormat:
    """The registered format `name`. Raises ConfigError that lists the known ones."""
    try:
        return _FORMATS[name]
    except KeyError:
        raise ConfigError(f'There is no data format {name!r}: give one of {sorted(_FORMATS)} or "auto".') from None


def format_by_extension(name: str) -> ShardFormat | None:
    """The format whose extension ends `name` (a file name or a pattern), None if there is none."""
    lower = name.lower()
    for fmt in _FORMATS.values():
        if lower.endswith(fmt.extensions):
            return fmt
    return None


register_format(ParquetFormat())
