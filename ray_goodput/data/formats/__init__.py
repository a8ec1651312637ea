"""File formats that data shards can have, by name and by file extension."""

from __future__ import annotations

from ray_goodput.data.formats.base import (
    GroupingFormat,
    GuessingFormat,
    ShardFacts,
    ShardFormat,
    damaged,
    identity_of,
    title_of,
)
from ray_goodput.data.formats.csv import CsvFormat
from ray_goodput.data.formats.jsonl import JsonlFormat
from ray_goodput.data.formats.parquet import ParquetFormat
from ray_goodput.data.formats.raw_files import RawFilesFormat
from ray_goodput.data.formats.tokens import TokenFormat
from ray_goodput.data.formats.webdataset import WebDatasetFormat
from ray_goodput.errors import ConfigError

__all__ = [
    "CsvFormat",
    "GroupingFormat",
    "GuessingFormat",
    "JsonlFormat",
    "ParquetFormat",
    "RawFilesFormat",
    "ShardFacts",
    "ShardFormat",
    "TokenFormat",
    "WebDatasetFormat",
    "damaged",
    "format_by_extension",
    "get_format",
    "identity_of",
    "register_format",
    "title_of",
]

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
    for fmt in reversed(_FORMATS.values()):  # what a user registered goes first
        if fmt.extensions and lower.endswith(fmt.extensions):
            return fmt
    return None


for _format in (ParquetFormat(), WebDatasetFormat(), JsonlFormat(), CsvFormat(), TokenFormat(), RawFilesFormat()):
    register_format(_format)
