"""The command line: `raywl --help`. One module for each subcommand."""

from raywl.cli.app import main

__all__ = ["main"]
