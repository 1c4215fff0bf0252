"""The prose checker sees each habit, reads the texts that people read, and fails where a limit is exceeded."""

from __future__ import annotations

from types import ModuleType

import pytest

from test_reference import tool


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    return tool("prose")


BROKEN = {
    "what": "The engine drops what the disk refuses.",
    "metaphor": "The disk owes three blocks.",
    "fronted of": "It starts. Of two servers one listens.",
    "too": "The disk is checked, too.",
    "semicolon": "One thing; another thing.",
    "long": " ".join(["word"] * 41) + ".",
}
FINE = (
    "What is a hit?",
    "A block is pending. The disk refuses three blocks: they are retried.",
    "`what` is code, and so is `owes; too`.",
    "This is too late, as well as too long.",
)


@pytest.mark.parametrize("name", BROKEN)
def test_each_rule_sees_its_habit(prose: ModuleType, name: str) -> None:
    assert {rule.name for rule in prose.RULES} == set(BROKEN)
    assert {rule.name for rule in prose.RULES if prose.places(rule, BROKEN[name])} == {name}


@pytest.mark.parametrize("text", FINE)
def test_plain_sentences_pass(prose: ModuleType, text: str) -> None:
    assert not [rule.name for rule in prose.RULES if prose.places(rule, text)]


def test_python_comments_and_messages_are_separated(prose: ModuleType) -> None:
    source = '"""A docstring."""\nname = "word"\nraise Error(f"no room for {name} here")  # a comment\n# goes on\n'
    found = [(text.kind, text.words) for text in prose.of_python("x.py", source)]
    assert ("comments", "A docstring.") in found
    assert ("messages", "no room for X here") in found
    assert ("comments", "a comment goes on") in found
    assert len(found) == 3, "a single word is no message"


def test_texts_of_rust_end_where_its_tests_begin(prose: ModuleType) -> None:
    source = '/// A type\n/// of two lines.\nf("no room for this");\n#[cfg(test)]\nmod tests { /* */ }\n// what\n'
    found = [(text.kind, text.words) for text in prose.of_rust("x.rs", source)]
    assert found == [("messages", "no room for this"), ("comments", "A type of two lines.")]


def test_tests_in_a_file_of_their_own_do_not_end_the_texts_of_rust(prose: ModuleType) -> None:
    source = "//! A part.\n#[cfg(test)]\nmod tests;\nmod part;\n\n/// A type.\nstruct Type;\n"
    assert [(text.line, text.words) for text in prose.of_rust("x.rs", source)] == [(1, "A part."), (6, "A type.")]


def test_strings_of_rust_are_read_whole(prose: ModuleType) -> None:
    source = 'f("no room \\\n    for \\"this\\"", \'"\', r#"nor "for" that"#); // a note\n"// no comment here"\n'
    assert [(text.line, text.kind, text.words) for text in prose.of_rust("x.rs", source)] == [
        (1, "messages", 'no room for \\"this\\"'),
        (2, "messages", 'nor "for" that'),
        (3, "messages", "// no comment here"),
        (2, "comments", "a note"),
    ]


def test_code_in_documents_is_not_read(prose: ModuleType) -> None:
    source = "A line\nof text.\n\n```\nwhat\n```\n\n| a cell | another |\n- an item\n"
    assert [text.words for text in prose.paragraphs("x.md", source)] == [
        "A line of text.",
        "a cell",
        "another",
        "an item",
    ]


def test_a_limit_that_is_exceeded_fails(
    prose: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prose, "texts", lambda: iter([prose.Text("x.md", 7, "documents", BROKEN["metaphor"])]))
    assert prose.main([]) == 1
    assert "x.md:7: metaphor x1" in capsys.readouterr().out
    monkeypatch.setattr(prose, "texts", lambda: iter([prose.Text("x.md", 7, "documents", FINE[1])]))
    assert prose.main([]) == 0
