"""The command `hibachi`: one file a subcommand."""

from hibachi.cli.main import main as main
