"""The corpus of the tiny MoE: prose, code and tables out of a plain CPython installation.

Everything here is CPython's own text under the PSF licence, so any machine may build and pass on the corpus;
nothing is downloaded. With `--docs DIR` (the `_sources` folder of CPython's documentation, as Debian's
`python3.11-doc` installs it) the prose is the documentation; without, the language reference inside `pydoc`.

    python examples/corpus.py --out .corpus --docs /usr/share/doc/python3.11/html/_sources

writes `{train,validation,test}.{prose,code,tables}.txt` (UTF-8, a NUL byte between documents) and
`corpus.json` with sizes and digests. A document's split depends on its source alone: all files of one module
share a split, with their docstrings, their inventory and their page of documentation.

Knows nothing of models. `train_tiny_moe.py` reads what this writes.
"""

import argparse
import ast
import calendar
import csv
import errno
import hashlib
import html.entities
import http
import io
import json
import locale
import math
import mimetypes
import opcode
import platform
import re
import signal
import sysconfig
import unicodedata
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from encodings import aliases
from pathlib import Path

TOPICS = ("prose", "code", "tables")
SPLITS = ("train", "validation", "test")
NOT_CODE = {
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "pydoc_data",
    "encodings",
    "site-packages",
    "dist-packages",
}
SCRIPTS_LEFT_OUT = "CJK|HANGUL|TANGUT|NUSHU|KHITAN|CUNEIFORM|EGYPTIAN|ANATOLIAN|BAMUM|SIGNWRITING|YI SYLLABLE|VAI"
ROWS_PER_TABLE = 40


@dataclass(frozen=True, slots=True)
class Document:
    """One text of one topic; `source` is what decides its split."""

    topic: str
    source: str
    text: str

    @property
    def split(self) -> str:
        """By digest of the source's name; 19 leaves validation and test over 100 kB of each topic."""
        return {0: "validation", 1: "test"}.get(zlib.crc32(self.source.encode()) % 19, "train")


# -- prose -----------------------------------------------------------------------------------------


def plain(block: str) -> str:
    """One paragraph of reStructuredText on one line, its roles replaced by what a reader sees."""
    text = " ".join(block.split())
    text = re.sub(r"^([*\-•]|#\.|\(?[0-9]+[.)]) ", "", text)
    text = re.sub(r":[a-z:+-]+:`[~!.]?([^`<]*?)\s*(<[^`>]*>)?`", r"\1", text)
    text = re.sub(r"`+([^`<]+?)\s*(<[^`>]*>)?`+_{0,2}", r"\1", text)
    text = re.sub(r"\*\*?([^* ][^*]*)\*\*?", r"\1", text)
    return re.sub(r"\\(.)|(\|[a-z]+\|_?)", r"\1", text).replace("::", ":")


def is_prose(text: str) -> bool:
    """Whether a paragraph is sentences rather than a signature, a directive, a listing or a table row."""
    if len(text) < 50 or text[-1] not in ".!?:)" or not (text[0].isalnum() or text[0] in "\"'("):
        return False
    return sum(c.isalpha() or c in " ,." for c in text) / len(text) > 0.9


def heading(block: str) -> str | None:
    """The title of a block that is a title and its underline, or None."""
    lines = [line for line in block.strip().splitlines() if not re.fullmatch(r"([=\-*~^\"#+])\1{2,}", line.strip())]
    if len(lines) != 1 or len(block.strip().splitlines()) < 2:
        return None
    title = plain(lines[0]).replace(" --- ", ": ")
    return title if 3 < len(title) < 80 else None


def prose(text: str) -> str:
    """The headings and paragraphs of a document, a blank line between them; bare headings are dropped."""
    kept: list[str] = []
    title = None
    for block in re.split(r"\n\s*\n", text):
        found = heading(block)
        paragraph = plain(block)
        if found is not None:
            title = found
        elif is_prose(paragraph):
            kept += [title, paragraph] if title else [paragraph]
            title = None
    return "\n\n".join(kept)


def module_of(path: Path) -> str:
    """What a file of the library belongs to: its top package or module (`asyncio/tasks.py` -> `asyncio`)."""
    return re.split(r"[./-]", path.as_posix().lstrip("_"))[0]


def documentation(docs: Path) -> Iterator[Document]:
    """Prose and tables of the documentation's sources, one document a page each."""
    for path in sorted(docs.rglob("*.txt")):
        page = path.relative_to(docs)
        source = module_of(Path(page.name)) if page.parts[0] == "library" else page.as_posix()
        text = path.read_text(encoding="utf-8")
        yield Document("prose", source, prose(text))
        for table in re.findall(r"(?:^ *[+|].*\n){4,}|^ *==+ +=[= ]+\n(?:.*\S.*\n)+", text, re.MULTILINE):
            yield Document("tables", source, plain_table(table))


def plain_table(table: str) -> str:
    """A reStructuredText table without the table's indent and without role markup."""
    lines = table.rstrip().splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join(re.sub(r":[a-z:]+:`([^`]*)`", r"`\1`", line[indent:]) for line in lines)


def reference() -> Iterator[Document]:
    """Prose of the language reference that `pydoc` carries, for a corpus without the documentation."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield Document("prose", f"topic {name}", prose(text))


# -- code ------------------------------------------------------------------------------------------


def library() -> Iterator[tuple[Path, str]]:
    """(path inside the library, text) of each module of the standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        machine_made = inside.name.startswith("_sysconfigdata") or inside.parts[0].startswith("config-")
        if machine_made or NOT_CODE & set(inside.parts):
            continue
        yield inside, path.read_text(encoding="utf-8", errors="replace")


def parsed(text: str) -> list[ast.AST]:
    """All nodes of a module in order, or none if it does not parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return list(ast.walk(ast.parse(text)))
        except SyntaxError:
            return []


def modules() -> Iterator[Document]:
    """Per module: its source (code), its docstrings (prose) and its inventory of functions (tables)."""
    for path, text in library():
        source = module_of(path)
        yield Document("code", source, text)
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = [node for node in parsed(text) if isinstance(node, documented)]
        docstrings = [ast.get_docstring(node) or "" for node in nodes]
        yield Document("prose", source, prose("\n\n".join(docstrings)))
        rows = [inventory_row(node) for node in nodes if not isinstance(node, ast.Module)]
        yield from tables(source, f"{path.as_posix()}", ("line", "kind", "name", "arguments", "summary"), rows)


def inventory_row(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """(line, kind, name, arguments, first line of the docstring) of a class or function."""
    doc = (ast.get_docstring(node) or "").partition("\n")[0][:60]
    if isinstance(node, ast.ClassDef):
        return str(node.lineno), "class", node.name, " ".join(ast.unparse(b) for b in node.bases)[:40], doc
    arguments = " ".join(a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
    return str(node.lineno), "function", node.name, arguments[:40], doc


# -- tables ----------------------------------------------------------------------------------------


def render(style: int, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The rows as CSV (0), a Markdown table (1), aligned columns (2) or tab-separated values (3)."""
    if style == 0:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([header, *rows])
        return out.getvalue().rstrip()
    if style == 1:
        lines = [header, ["---"] * len(header), *rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    if style == 3:
        return "\n".join("\t".join(line) for line in [header, *rows])
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines)


def tables(source: str, name: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[Document]:
    """The rows in tables of at most `ROWS_PER_TABLE`, each in a style drawn from its name's digest."""
    text_rows = [[str(cell) for cell in row] for row in rows]
    for start in range(0, len(text_rows), ROWS_PER_TABLE):
        style = zlib.crc32(f"{name} {start}".encode()) % 4
        yield Document("tables", source, render(style, header, text_rows[start : start + ROWS_PER_TABLE]))


def unicode_tables() -> Iterator[Document]:
    """The Unicode character database by blocks of 256 code points, without the largest scripts."""
    for block in (*range(0x100), *range(0x1F3, 0x1FB)):
        rows = []
        for point in range(block * 256, block * 256 + 256):
            name = unicodedata.name(chr(point), "")
            if name and not re.match(SCRIPTS_LEFT_OUT, name):
                rows.append((f"U+{point:04X}", chr(point), unicodedata.category(chr(point)), name))
        yield from tables(f"unicode {block:x}", f"unicode {block:x}", ("code", "char", "category", "name"), rows)


def named_numbers() -> Iterator[Document]:
    """Small tables the library carries: errors, signals, opcodes, media types, entities, locales."""
    sources: dict[str, tuple[Sequence[str], list[Sequence[object]]]] = {
        "errno": (("number", "name"), sorted(errno.errorcode.items())),
        "signal": (("number", "name"), [(int(s), s.name) for s in signal.Signals]),
        "opcode": (("opcode", "name"), sorted((code, name) for name, code in opcode.opmap.items())),
        "http": (("code", "phrase", "meaning"), [(int(s), s.phrase, s.description) for s in http.HTTPStatus]),
        "mimetypes": (("extension", "media type"), sorted(mimetypes.types_map.items())),
        "aliases": (("alias", "codec"), sorted(aliases.aliases.items())),
        "locale": (("name", "locale"), sorted(locale.locale_alias.items())),
        "windows locale": (
            ("number", "locale"),
            [(hex(n), v) for n, v in sorted(locale.windows_locale.items())],
        ),
    }
    for name, (header, rows) in sources.items():
        yield from tables(name, name, header, rows)
    entities = sorted(html.entities.html5.items())
    rows = [(f"&{k}", v, " ".join(f"U+{ord(c):04X}" for c in v)) for k, v in entities if k.endswith(";")]
    for letter in sorted({row[0][1].lower() for row in rows}):
        named = [row for row in rows if row[0][1].lower() == letter]
        yield from tables(f"entity {letter}", f"entity {letter}", ("entity", "char", "code"), named)


def number_tables() -> Iterator[Document]:
    """Function tables of `math` and calendars of sixty years."""
    header = ("n", "square", "cube", "sqrt", "log", "sin")
    for start in range(1, 8001, ROWS_PER_TABLE):
        rows = [
            (n, n**2, n**3, f"{math.sqrt(n):.4f}", f"{math.log(n):.4f}", f"{math.sin(n):+.4f}")
            for n in range(start, start + ROWS_PER_TABLE)
        ]
        yield from tables(f"math {start}", f"math {start}", header, rows)
    for year in range(1980, 2040):
        yield Document("tables", f"year {year}", calendar.TextCalendar().formatyear(year).rstrip())


# -- the whole -------------------------------------------------------------------------------------


def documents(docs: Path | None) -> Iterator[Document]:
    """Every document, in a fixed order."""
    yield from documentation(docs) if docs else reference()
    yield from modules()
    yield from unicode_tables()
    yield from named_numbers()
    yield from number_tables()


def build(out: Path, docs: Path | None) -> dict[str, object]:
    """Write the corpus into `out` and return what `corpus.json` holds."""
    files: dict[str, list[str]] = {f"{split}.{topic}.txt": [] for split in SPLITS for topic in TOPICS}
    seen = set()
    for document in documents(docs):
        text = document.text.replace("\0", "").strip()
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) >= 40 and digest not in seen:
            seen.add(digest)
            files[f"{document.split}.{document.topic}.txt"].append(text + "\n")
    out.mkdir(parents=True, exist_ok=True)
    (out / ".gitignore").write_text("*\n")
    listing = {}
    for name, texts in files.items():
        data = "\0".join(texts).encode()
        (out / name).write_bytes(data)
        listing[name] = {
            "bytes": len(data),
            "documents": len(texts),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    about = {"python": platform.python_version(), "documentation": docs is not None, "files": listing}
    (out / "corpus.json").write_text(json.dumps(about, indent=1) + "\n")
    return about


def main() -> None:
    """Build the corpus and print its sizes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(".corpus"), help="folder to write (default: .corpus)")
    parser.add_argument("--docs", type=Path, help="the `_sources` folder of CPython's documentation, if at hand")
    arguments = parser.parse_args()
    if arguments.docs and not any(arguments.docs.rglob("*.txt")):
        parser.error(f"--docs {arguments.docs} holds no *.txt: it should be the documentation's `_sources` folder")
    about = build(arguments.out, arguments.docs)
    for name, facts in about["files"].items():
        print(f"{name:24} {facts['bytes']:>10,} bytes {facts['documents']:>6,} documents")


if __name__ == "__main__":
    main()
