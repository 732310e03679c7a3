"""The command line's surface: a change of it has to change this table too."""

from __future__ import annotations

import argparse
import importlib.metadata

import pytest

from raywl.cli.app import build_parser

COMMON = {"--help", "--json", "--quiet", "--debug"}
SOURCE = {
    "REF",
    "--revision",
    "--subfolder",
    "--cache-dir",
    "--offline",
    "--allow-pattern",
    "--storage-option",
}
GROUP = {"--tp", "--pp", "--dp", "--ep"}
WEIGHTS = {"--model", "--tp-plan"}

OPTIONS = {
    "demo": COMMON | {"--report"},
    "inspect": COMMON | SOURCE | {"--tensors"},
    "verify": COMMON | SOURCE | {"--deep"},
    "plan": COMMON | SOURCE | GROUP | WEIGHTS | {"--save", "--show"},
    "load": COMMON
    | SOURCE
    | GROUP
    | WEIGHTS
    | {"--strategy", "--stage-mode", "--address", "--report", "--trace", "--release-page-cache"},
    "stage": COMMON | SOURCE | {"--address", "--node", "--mode", "--no-prefetch", "--timeout", "--report"},
    "status": COMMON | {"--address", "--cache-dir"},
    "prune": COMMON | {"--address", "--cache-dir", "--older-than", "--max-size", "--dry-run"},
    "convert": COMMON | SOURCE | {"OUT", "--max-shard-size"},
    "bench load": COMMON
    | SOURCE
    | {"--repeat", "--cold", "--warm", "--tp", "--tp-plan", "--peers", "--strategy"},
    "bench make": COMMON | {"FOLDER", "--layout", "--size"},
    "bench cluster": COMMON | {"--size", "--hosts", "--situation", "--rate", "--repeat", "--plot"},
    "bench coordinator": COMMON | {"--nodes", "--files", "--deaths"},
    "bench reload": COMMON | SOURCE | {"--repeat", "--cold", "--warm", "--tp", "--tp-plan"},
    "bench table": COMMON | {"--repeat", "--batch", "--row-bytes", "--size"},
    "bench iterate": COMMON | SOURCE | {"--repeat", "--cold", "--warm", "--max-workers", "--pause-ms"},
}


def commands(parser: argparse.ArgumentParser, prefix: str = "") -> dict[str, set[str]]:
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                found |= commands(child, f"{prefix} {name}".strip())
    if found:
        return found
    return {
        prefix: {
            max(action.option_strings, key=len) if action.option_strings else str(action.metavar)
            for action in parser._actions
        }
    }


def test_the_options_are_these():
    assert commands(build_parser()) == OPTIONS


@pytest.mark.parametrize("command", ["", *OPTIONS])
def test_help_is_printed_and_ends_well(raywl, command):
    done = raywl(*command.split(), "--help")
    assert done.code == 0
    assert done.stdout.startswith(f"usage: raywl {command}".rstrip())
    assert done.stderr == ""


def test_the_version_is_the_installed_one(raywl):
    assert raywl("--version").stdout == f"raywl {importlib.metadata.version('raywl')}\n"


def test_the_installed_command_is_this_one():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="raywl")
    assert script.value == "raywl.cli:main"
