"""Commands as a shell runs them, and what they say of a user's error."""

from typer.testing import CliRunner, Result

from duotone.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def error_of(*arguments: object) -> str:
    """The message of a command that must fail as a user error: exit 2, one line, no traceback."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line
