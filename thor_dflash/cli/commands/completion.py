"""`thor-dflash completion`: prints the completion of a shell, which shtab makes of the parser."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import cast

import shtab

from thor_dflash.cli import parser
from thor_dflash.cli.arguments import PATHS
from thor_dflash.config.tree import Config
from thor_dflash.core.progress import Progress

FOLDERS = ("DIR", "PKG")
"""Metavars of directories; the other paths are files."""


def run(args: argparse.Namespace, config: Config, progress: Progress) -> None:
    """Print it."""
    whole = parser.parser()
    _complete_paths(whole)
    print(shtab.complete(whole, shell=args.shell).rstrip())


def _complete_paths(one: argparse.ArgumentParser) -> None:
    """Let options of paths complete paths, in the commands as well."""
    for action in one._actions:  # noqa: SLF001 (argparse has no public list of them)
        choices: object = action.choices
        if isinstance(choices, Mapping):  # the commands
            for command in cast("Mapping[str, argparse.ArgumentParser]", choices).values():
                _complete_paths(command)
        elif action.metavar in PATHS:
            kind = shtab.DIRECTORY if action.metavar in FOLDERS else shtab.FILE
            vars(action)["complete"] = kind  # where shtab looks for it
