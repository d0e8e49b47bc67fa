"""Templates a person can read: YAML trees and lines of text with `{port.name}` in them, repeated as their names say.

A key or line that names a list (`{port.name}` where `port` is a list of ports) stands once for each of its entries, one
that names two lists once for each pair. What names no list stands once. Knows nothing of switches.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

Scope = Mapping[str, Any]
Lists = Mapping[str, Sequence[Any]]
_TEMPLATES = Path(__file__).parent / "templates"


def template_text(name: str) -> str:
    """A template that ships with the package."""
    return (_TEMPLATES / name).read_text()


def template_tree(name: str) -> dict[str, Any]:
    """A YAML template that ships with the package."""
    tree: dict[str, Any] = yaml.safe_load(template_text(name))
    return tree


def expand_tree(tree: Mapping[str, Any], scope: Scope, lists: Lists) -> dict[str, Any]:
    """A template tree with every key repeated and every value filled in; values become strings, empty tables go."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        for inner in _repeats(str(key), scope, lists):
            here = lists if inner is scope else {name: many for name, many in lists.items() if name not in inner}
            filled = expand_tree(value, inner, here) if isinstance(value, Mapping) else str(value).format_map(inner)
            if filled != {}:
                out[str(key).format_map(inner)] = filled
    return out


def expand_lines(text: str, scope: Scope, lists: Lists) -> str:
    """Template text with every line repeated and filled in. Lines that start with `##` are the template's own."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("##"):
            lines += [line.format_map(inner) for inner in _repeats(line, scope, lists)]
    return "\n".join(lines) + "\n"


def _repeats(text: str, scope: Scope, lists: Lists) -> Iterator[Scope]:
    """One scope for each combination of entries of the lists that `text` names."""
    named = [name for name in dict.fromkeys(_roots(text)) if name in lists]
    if not named:
        yield scope
        return
    for entries in product(*(lists[name] for name in named)):
        yield {**scope, **dict(zip(named, entries))}


def _roots(text: str) -> Iterator[str]:
    for _, field, _, _ in Formatter().parse(text):
        if field:
            yield field.split(".")[0].split("[")[0]
