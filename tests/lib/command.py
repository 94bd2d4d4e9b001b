"""The command line of hibachi, called in this process."""

from typing import Any

from hibachi.cli import main


def called(capsys: Any, *args: object) -> tuple[Any, str, str]:
    """Exit status, standard output and standard error."""
    try:
        status = main(list(map(str, args)))
    except SystemExit as e:
        status = e.code
    return status, *capsys.readouterr()
