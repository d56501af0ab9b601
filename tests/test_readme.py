"""The two READMEs say the same, and the commands they show exist."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from glm5q.cli import main

ROOT = Path(__file__).parents[1]
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"\d[\d.,]*\d|\d")


def commands(text: str) -> list[str]:
    inline = re.findall(r"`(glm5q [^`]+)`", text)
    blocks = re.findall(r"^    (?:glm5q|make) .*$", text, re.M)
    return sorted([*inline, *(line.strip() for line in blocks)])


def tables(text: str) -> list[list[list[str]]]:
    """Numbers of each cell, by table and row; prose in cells may be translated, numbers not."""
    found = []
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, re.M):
        rows = [line.strip("|").split("|") for line in block.strip().split("\n")]
        found.append([[" ".join(sorted(NUMBER.findall(cell))) for cell in row] for row in rows])
    return found


def test_same_commands() -> None:
    assert len(commands(ENGLISH)) > 10
    assert commands(ENGLISH) == commands(CHINESE)


def test_same_tables() -> None:
    assert len(tables(ENGLISH)) >= 6
    assert tables(ENGLISH) == tables(CHINESE)


def test_same_headings() -> None:
    assert len(re.findall(r"^## ", ENGLISH, re.M)) == len(re.findall(r"^## ", CHINESE, re.M))


def test_a_difference_shows() -> None:
    assert tables(ENGLISH) != tables(CHINESE.replace("0.0278", "0.0279", 1))
    assert commands(ENGLISH) != commands(CHINESE.replace("--recipe R", "--recipe Q", 1))


@pytest.mark.parametrize("command", sorted(set(commands(ENGLISH))))
def test_commands_exist_with_their_options(command: str) -> None:
    words = command.split()
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
        return
    found: click.Command = main
    for word in words[1:]:
        if isinstance(found, click.Group):
            assert word in found.commands, command
            found = found.commands[word]
    known = {option for one in found.params for option in (*one.opts, *one.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known


def test_every_command_is_shown() -> None:
    shown = {command.split()[1] for command in commands(ENGLISH) if command.startswith("glm5q")}
    assert shown >= set(main.commands)
