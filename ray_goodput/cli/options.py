"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ray_goodput.config import parse_duration_s
from ray_goodput.errors import ConfigError

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else there.")
]
StorageOptions = Annotated[
    str | None, typer.Option(help='JSON for the storage, for example {"key": ..., "secret": ..., "endpoint_url": ...}.')
]


def parse_options(text: str | None) -> dict[str, Any]:
    """The mapping behind `--storage-options`.

    Raises:
        ConfigError: not a JSON object. The text is not repeated: it may hold a secret.
    """
    if text is None:
        return {}
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--storage-options is not JSON ({error}).") from None
    if not isinstance(options, dict):
        raise ConfigError(f'--storage-options must be a JSON object like {{"endpoint_url": ...}}, not {type(options)}.')
    return options


def seconds(option: str, text: str) -> float:
    """Seconds in an option's text: a plain number, or a duration such as "10min".

    Raises:
        ConfigError: neither.
    """
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return parse_duration_s(text)
    except ConfigError:
        raise ConfigError(
            f'{option} {text!r} is no duration: give seconds as a number, or write "90s", "10min" or "1.5h".'
        ) from None
