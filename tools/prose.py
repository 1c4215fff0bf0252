"""Counts habits of prose that make readers stop: `python tools/prose.py`, with `--all` to list each place.

Each rule has a limit for each kind of text, in places per 1,000 words. Exit code 1 if a limit is exceeded.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("documents", "messages", "comments")
"""Markdown; texts that commands, options, metrics, errors and log lines show; docstrings and comments."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A habit, the advice against it, and how often each of `KINDS` may have it."""

    name: str
    advice: str
    pattern: str
    limits: tuple[float, float, float]


WORDS_MAX = 40
METAPHORS = (
    r"owe[sd]?|owing|nobody(?:'s)?|somebody|hopelessly|of before|stands? on|stood on|let(?:s|ting)? go of"
    r"|g[ai]ve[ns]? back|giv(?:es|ing) back|ha(?:s|ve) gone under|for want of|at last|all that stands"
)
RULES = (
    Rule("what", 'name the thing instead of "what"', r"(?<!so )\bwhat\b(?![^.?!:]*\?)", (0.5, 0.3, 0.5)),
    Rule(
        "metaphor",
        "use a verb of the field: pending, evicted, depends on, fails",
        rf"\b(?:{METAPHORS})\b",
        (0.3, 0.2, 0.3),
    ),
    Rule("fronted of", 'begin with the subject, not with "Of"', r"(?:(?<=[.!?:] )|^)Of (?!course)", (0.1, 0.1, 0.1)),
    Rule(
        "too",
        '"too", "also" and "as well" at most once a page',
        r"\b(?:also|too(?! \w)|as well(?! as))\b",
        (1.5, 0.4, 1.2),
    ),
    Rule("semicolon", "a semicolon is a full stop", r";(?: |$)", (11, 13, 9)),
    Rule("long", "one idea a sentence: at most 40 words", "", (0.3, 0.3, 0.3)),
)


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph, a message or a comment, and where it begins."""

    path: str
    line: int
    kind: str
    words: str


def paragraphs(path: str, source: str) -> Iterator[Text]:
    """The paragraphs, list items and table cells of a document, without code."""
    lines: list[str] = []
    start, code = 1, False

    def end() -> Iterator[Text]:
        if lines:
            yield Text(path, start, "documents", " ".join(lines))
            lines.clear()

    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
            yield from end()
        elif code or line.startswith("<!--"):
            continue
        elif line.lstrip().startswith("|"):
            yield from end()
            for cell in line.strip().strip("|").split("|"):
                yield Text(path, number, "documents", cell.strip())
        elif not line.strip() or line.startswith("#"):
            yield from end()
        else:
            if re.match(r"\s*(?:[-*]|\d+\.) ", line):
                yield from end()
            if not lines:
                start = number
            lines.append(re.sub(r"^\s*(?:[-*]|\d+\.|>) ", "", line).strip())
    yield from end()


def of_python(path: str, source: str) -> Iterator[Text]:
    """Docstrings and comments, and the texts of three words and more that are no docstrings."""
    tree = ast.parse(source)
    statements = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    in_formatted = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part != node
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in in_formatted:
            kind = "comments" if id(node) in statements else "messages"
            if kind == "comments" or _is_message(node.value):
                yield Text(path, node.lineno, kind, node.value)
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            if _is_message(text):
                yield Text(path, node.lineno, "messages", text)
    lines = (
        (token.start[0], token.string[1:].strip())
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    )
    yield from _joined(path, lines)


RUST_TOKENS = re.compile(
    r"""//[/!]?[ ]?(?P<comment>[^\n]*)|/\*.*?\*/|r(?P<hashes>\#*)"(?P<raw>.*?)"(?P=hashes)"""
    r"""|"(?P<text>(?:[^"\\]|\\.)*)"|'(?:\\[^\n]|[^'\\\n])'""",
    re.DOTALL,
)


def of_rust(path: str, source: str) -> Iterator[Text]:
    """Comments, and strings of three words and more; without the tests of the file."""
    source = re.split(r"(?m)^#\[cfg\(test\)\]\nmod \w+ \{", source, maxsplit=1)[0]
    comments = []
    for token in RUST_TOKENS.finditer(source):
        number = source.count("\n", 0, token.start()) + 1
        if (comment := token["comment"]) is not None:
            comments.append((number, comment))
            continue
        text = re.sub(r"\\\n\s*", "", token["text"] or token["raw"] or "")
        if _is_message(text):
            yield Text(path, number, "messages", text)
    yield from _joined(path, iter(comments))


def _is_message(text: str) -> bool:
    return len(re.findall(r"[A-Za-z]{2,}", text)) >= 3 and " " in text.strip()


def _joined(path: str, lines: Iterator[tuple[int, str]]) -> Iterator[Text]:
    """Comments of consecutive lines as one text; an empty line ends it."""
    start, last, words = 0, -1, []
    for number, text in lines:
        if words and (number != last + 1 or not text):
            yield Text(path, start, "comments", " ".join(words))
            words = []
        if text:
            start = start if words else number
            words.append(text)
        last = number
    if words:
        yield Text(path, start, "comments", " ".join(words))


READERS: dict[str, Callable[[str, str], Iterator[Text]]] = {".md": paragraphs, ".py": of_python, ".rs": of_rust}
PLACES = ("*.md", "docs", "deploy/README.md", "benches/RESULTS.md", "python", "rust", "examples")
# Written for the day, or by a tool from texts that are counted where they are written.
LEFT_OUT = re.compile(
    r"^benches/DIARY|^python/README|^docs/reference/(?:cli|metrics|options)\.md$|/tests?/|/tests?\.rs$|/benches/|^rust/(?:sim|bench)/"
)


def texts() -> Iterator[Text]:
    """Everything that a person reads of this tree."""
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", *PLACES],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listing.stdout.splitlines():
        path = ROOT / name
        if path.suffix in READERS and path.is_file() and not LEFT_OUT.search(name):
            yield from READERS[path.suffix](name, path.read_text(encoding="utf-8"))


def plain(text: str) -> str:
    """The words as they are read: code, links' targets and emphasis left out."""
    text = re.sub(r"``?[^`]*``?", "X", text)
    text = re.sub(r"\]\([^)]*\)|[*\[\]]", "", text)
    return " ".join(text.split())


def places(rule: Rule, text: str) -> int:
    """How often a text breaks a rule."""
    if rule.name == "long":
        return sum(len(part.split()) > WORDS_MAX for part in re.split(r"[.!?:;](?: |$)", plain(text)))
    return len(re.findall(rule.pattern, plain(text), 0 if rule.name == "fronted of" else re.IGNORECASE))


def main(argv: list[str]) -> int:
    """Print a table of rates, then each place of the rules that exceed their limit."""
    words: dict[str, int] = defaultdict(int)
    found: dict[tuple[str, str], list[tuple[Text, int]]] = defaultdict(list)
    for text in texts():
        words[text.kind] += len(plain(text.words).split())
        for rule in RULES:
            if count := places(rule, text.words):
                found[rule.name, text.kind].append((text, count))
    failed = False
    print(f"{'per 1,000 words':16}" + "".join(f"{kind:>20}" for kind in KINDS))
    for rule in RULES:
        row = f"{rule.name:16}"
        for kind, limit in zip(KINDS, rule.limits, strict=True):
            rate = 1000 * sum(count for _, count in found[rule.name, kind]) / max(1, words[kind])
            row += f"{rate:>10.2f} of {limit:<6g}"
            if rate > limit:
                failed = True
                row += "!"
            if rate > limit or "--all" in argv:
                for text, count in found[rule.name, kind]:
                    print(f"{text.path}:{text.line}: {rule.name} x{count}: {plain(text.words)[:160]}")
        print(row)
    if failed:
        print("error: prose exceeds a limit. " + " ".join(f"{rule.name}: {rule.advice}." for rule in RULES))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
