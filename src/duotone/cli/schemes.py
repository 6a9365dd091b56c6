"""`duotone schemes`: what there is to choose from."""

from typing import Any

from .common import JsonOption, print_json, user_errors


def _rows() -> dict[str, dict[str, Any]]:
    import duotone

    specs = {name: duotone.scheme(name) for name in duotone.schemes()}
    return {
        name: {
            "summary": summary,
            "nominal_bits": specs[name].nominal_bits(layers=32),
            "spec": specs[name].to_dict(),
        }
        for name, summary in duotone.schemes().items()
    }


@user_errors
def command(json_output: JsonOption = False) -> None:
    """List the schemes: name, nominal bits by default, what it is and which paper it is from.

    [bold]Examples[/bold]

      duotone schemes

      duotone schemes --json | jq .duotone.spec
    """
    rows = _rows()
    if json_output:
        print_json(rows)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("scheme", "bits", "what")
    for name, row in rows.items():
        table.add_row(f"[cyan]{name}[/]", f"{row['nominal_bits']:g}", escape(row["summary"]))
    Console().print(table)
