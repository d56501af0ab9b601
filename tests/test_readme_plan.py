"""The plans shown in the READMEs are what the command prints today."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from tests.commands import run
from tests.test_readme import CHINESE, ENGLISH, NUMBER

COMMAND = re.compile(r"^    glm5q (plan .*--markdown.*)$", re.M)
PARTS = 3  # of a plan's Markdown: what is planned, the layouts' table, the speed


def shown(text: str) -> dict[str, list[str]]:
    """Command -> the paragraphs after it, each on one line a table row or else on one."""
    found = {}
    for match in COMMAND.finditer(text):
        paragraphs = re.split(r"\n\s*\n", text[match.end() :].strip())[:PARTS]
        found[match[1].strip()] = [joined(paragraph) for paragraph in paragraphs]
    return found


def joined(paragraph: str) -> str:
    lines = [" ".join(line.split()) for line in paragraph.strip().splitlines()]
    return ("\n" if lines[0].startswith("|") else " ").join(lines)


def printed(command: str) -> list[str]:
    result = run(*shlex.split(command))
    assert result.exit_code == 0, result.output
    return [joined(paragraph) for paragraph in result.stdout.strip().split("\n\n")]


def numbers(paragraph: str) -> list[str]:
    return sorted(NUMBER.findall(paragraph))


def test_both_examples_are_there() -> None:
    for text in (ENGLISH, CHINESE):
        commands = " ".join(shown(text))
        assert "glm-5 --recipe atlas-800t-a3 --context 200k" in commands
        assert "glm-5 --recipe h200 --count 4 --context 200k" in commands
    assert set(shown(ENGLISH)) == set(shown(CHINESE))


@pytest.mark.parametrize("command", sorted(shown(ENGLISH)))
def test_english_is_what_is_printed(command: str) -> None:
    assert shown(ENGLISH)[command] == printed(command)


@pytest.mark.parametrize("command", sorted(shown(CHINESE)))
def test_chinese_has_the_same_numbers(command: str) -> None:
    ours = [numbers(paragraph) for paragraph in shown(CHINESE)[command]]
    assert ours == [numbers(paragraph) for paragraph in printed(command)]


def test_the_published_deployment_is_planned_as_the_text_says() -> None:
    """vLLM-Kunlun's tutorial: W8A8, 8 cards, --max-model-len 32768, 0.97 of memory, no MTP."""
    command = "plan glm-5 --recipe kunlunxin-p800 --no-mtp --reserve 0.03 --context 32768"
    found = json.loads(run(*shlex.split(command), "--json").stdout)
    assert found["count"] == 8
    longest = max(row.get("max_context") or 0 for row in found["layouts"])
    assert 0.95 * 32_768 < longest < 32_768
    for text, verdict in ((ENGLISH, "narrowly does not fit"), (CHINESE, "差一点放不下")):
        (paragraph,) = [one for one in text.split("\n\n") if f"`glm5q {command}`" in one]
        assert f"{longest:,}" in paragraph
        assert verdict in paragraph
