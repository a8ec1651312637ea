"""Glob patterns over object keys, the same for folders and buckets. Pure."""

from __future__ import annotations

import re

_GLOB = re.compile(r"[*?\[{]")
_BRACES = re.compile(r"\{([^{}]*)\}")


def split_glob(uri: str) -> tuple[str, str]:
    """Root and pattern of a URI: the root ends before the first folder or file name with a wildcard.

    The pattern is empty if there is no wildcard. `s3://b/a/x-*/*.parquet` -> (`s3://b/a`, `x-*/*.parquet`).
    """
    scheme, separator, rest = uri.rpartition("://")
    parts = rest.split("/")
    first = next((i for i, part in enumerate(parts) if _GLOB.search(part)), len(parts))
    root = "/".join(parts[:first]) or ("/" if rest.startswith("/") else "")
    return scheme + separator + root, "/".join(parts[first:])


def compile_glob(pattern: str) -> re.Pattern[str]:
    """A matcher (`fullmatch`) for keys.

    `*` and `?` stay inside one name, `**` crosses folders (and matches none), `[a-z]`, `[!a]`, `{a,b}`. As in a shell,
    a wildcard at the start of a name does not match a leading dot.
    """
    return re.compile("|".join(f"(?:{_translate(one)})" for one in _expand(pattern)), re.DOTALL)


def _expand(pattern: str) -> list[str]:
    match = _BRACES.search(pattern)
    if not match:
        return [pattern]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [expanded for choice in match[1].split(",") for expanded in _expand(head + choice + tail)]


def _translate(pattern: str) -> str:
    parts = pattern.split("/")
    out = ""
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if part == "**":
            out += r"(?:(?!\.)[^/]+/)*" + (r"(?!\.)[^/]+" if last else "")
        else:
            out += (r"(?!\.)" if part[:1] in ("*", "?", "[") else "") + _translate_name(part) + ("" if last else "/")
    return out


def _translate_name(name: str) -> str:
    out, i = "", 0
    while i < len(name):
        char = name[i]
        end = name.find("]", i + 2) if char == "[" else -1
        if end > 0:
            inner = name[i + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            out += f"[^/{inner[1:]}]" if inner[0] == "!" else f"[{inner}]"
            i = end
        elif char == "*":
            out += "[^/]*"
        else:
            out += "[^/]" if char == "?" else re.escape(char)
        i += 1
    return out
