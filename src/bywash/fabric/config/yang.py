"""Validation of a config_db with SONiC's own YANG models, through libyang (https://github.com/CESNET/libyang).

libyang takes namespace-qualified trees; config_db is flat, its keys joined with `|`, all values strings. The
translation is generic: where a table is, which lists it has and of what type each leaf is, the models themselves say.
Models are the user's (`--yang-dir`): SONiC's are not shipped here. libyang is optional (extra `yang`).

Knows nothing of what a table means; that is `checks` and `audit`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bywash.errors import ConfigError

_JSON_NUMBERS = ("INT8", "INT16", "INT32", "UINT8", "UINT16", "UINT32")
"""RFC 7951: integers up to 32 bits are JSON numbers, wider ones and decimals are strings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YangFinding:
    """One thing that the models refuse: where (a table and key, or a path), and in libyang's words why."""

    where: str
    why: str


class YangModels:
    """The models of a directory, loaded once (a third of a second) and used for many documents.

    Raises:
        ConfigError: libyang is not installed, or the directory has no SONiC model, or one does not load.
    """

    def __init__(self, directory: str | Path) -> None:
        self._libyang = _import_libyang()
        names = sorted(path.name.split("@")[0].removesuffix(".yang") for path in Path(directory).glob("sonic-*.yang"))
        if not names:
            raise ConfigError(f"--yang-dir {directory}: no sonic-*.yang there; give SONiC's directory of YANG models")
        self._context = self._libyang.Context(str(directory))
        try:
            modules = [self._context.load_module(name) for name in names]
        except self._libyang.LibyangError as error:
            raise ConfigError(f"--yang-dir {directory}: a model does not load: {_short(str(error))}") from error
        self._tables = {table.name(): table for module in modules for table in _tables(module)}

    def validate(self, config: Mapping[str, Any]) -> list[YangFinding]:
        """Everything that the models refuse in one config_db; tables that they do not know are findings as well."""
        findings: list[YangFinding] = []
        tree: dict[str, Any] = {}
        for table, rows in config.items():
            try:
                self._add_table(tree, table, rows)
            except _Untranslatable as error:
                findings.append(YangFinding(where=error.where, why=error.why))
        if findings:
            return findings
        try:
            node = self._context.parse_data_mem(
                json.dumps(tree), "json", strict=True, no_state=True, validate_present=True
            )
        except self._libyang.LibyangError as error:
            return [YangFinding(where=_place(str(error)), why=_short(str(error)))]
        if node is not None:
            node.free()
        return []

    def _add_table(self, tree: dict[str, Any], table: str, rows: Any) -> None:
        schema = self._tables.get(table)
        if schema is None:
            raise _Untranslatable(table, "no YANG model has this table")
        if not isinstance(rows, Mapping):
            raise _Untranslatable(table, "must hold keys, each with fields")
        module = schema.module().name()
        container = tree.setdefault(f"{module}:{module}", {}).setdefault(table, {})
        children = list(schema.children())
        lists = [child for child in children if child.nodetype() == child.LIST]
        for key, fields in rows.items():
            where = f"{table}|{key}"
            if not isinstance(fields, Mapping):
                raise _Untranslatable(where, "must hold fields")
            single = next(
                (child for child in children if child.name() == key and child.nodetype() == child.CONTAINER), None
            )
            if single is not None:
                container[key] = self._fields(single, fields, where)
                continue
            parts = key.split("|")
            fitting = [one for one in lists if len(list(one.keys())) == len(parts)]
            if not fitting:
                raise _Untranslatable(where, f"no list of this table has a key of {len(parts)} parts")
            chosen = fitting[0]
            row = {leaf.name(): self._value(leaf.type(), part, where) for leaf, part in zip(chosen.keys(), parts)}
            container.setdefault(chosen.name(), []).append(row | self._fields(chosen, fields, where))

    def _fields(self, schema: Any, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Leaves by name; where the list holds an inner list, fields are its rows (key -> value)."""
        children = {child.name(): child for child in schema.children()}
        inner = next((child for child in children.values() if child.nodetype() == child.LIST), None)
        out: dict[str, Any] = {}
        for name, value in fields.items():
            leaf = children.get(name)
            if leaf is not None and leaf.nodetype() in (leaf.LEAF, leaf.LEAFLIST):
                many = leaf.nodetype() == leaf.LEAFLIST
                values = value if isinstance(value, list) else str(value).split(",") if many else [value]
                filled = [self._value(leaf.type(), one, f"{where}.{name}") for one in values]
                out[name] = filled if many else filled[0]
            elif inner is not None:
                out.setdefault(inner.name(), []).append(self._inner_row(inner, name, value, f"{where}.{name}"))
            else:
                raise _Untranslatable(f"{where}.{name}", "the YANG model has no such field")
        return out

    def _inner_row(self, inner: Any, name: str, value: Any, where: str) -> dict[str, Any]:
        key, *rest = inner.keys()
        other = [leaf for leaf in inner.children() if leaf.name() != key.name()]
        if rest or len(other) != 1:
            raise _Untranslatable(where, f"list {inner.name()} is no map of one field to another")
        return {
            key.name(): self._value(key.type(), name, where),
            other[0].name(): self._value(other[0].type(), value, where),
        }

    def _value(self, kind: Any, value: Any, where: str) -> Any:
        """A string of config_db as the JSON that its type wants; what does not convert is libyang's to refuse."""
        text = value if isinstance(value, str) else str(value)
        base = kind.basename().upper() if kind.base() != self._libyang.Type.UNION else "UNION"
        if base == "LEAFREF":
            return self._value(kind.leafref_type(), text, where)
        if base == "UNION":
            members = [self._value(member, text, where) for member in kind.union_types()]
            numbers = [member for member in members if isinstance(member, int) and not isinstance(member, bool)]
            return numbers[0] if numbers and len(numbers) == len(members) else text
        if base in _JSON_NUMBERS:
            return int(text) if text.lstrip("-").isdigit() else text
        if base == "BOOLEAN":
            return {"true": True, "false": False}.get(text, text)
        return text


class _Untranslatable(Exception):
    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}")
        self.where, self.why = where, why


def _tables(module: Any) -> Iterator[Any]:
    """The containers below a module's own container: one per table."""
    for top in module.children():
        if top.nodetype() == top.CONTAINER and top.name() == module.name():
            yield from (child for child in top.children() if child.nodetype() == child.CONTAINER)


def libyang_missing() -> str:
    """Why libyang cannot be used, or an empty string."""
    try:
        _import_libyang()
    except ConfigError as error:
        return str(error)
    return ""


def _import_libyang() -> Any:
    try:
        import libyang
    except ImportError as error:
        raise ConfigError(
            f"YANG validation needs libyang ({error}): run `make yang`, or apt-get install libyang2-dev and then "
            "pip install 'bywash[yang]'"
        ) from error
    return libyang


def _place(message: str) -> str:
    """The data path of a message of libyang's, shortened to table and key."""
    for mark in ('path "', "path: ", 'Data location "', "(path: "):
        if mark in message:
            path = message.split(mark, 1)[1].split('"')[0].rstrip(")")
            return path.split(":")[-1] if "/" not in path else path
    return "config_db"


def _short(message: str) -> str:
    return " ".join(message.split())
