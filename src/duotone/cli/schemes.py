"""`duotone schemes`: the list of schemes."""

from typing import Any

from .common import JsonOption, print_json, user_errors


def _rows() -> dict[str, dict[str, Any]]:
    import duotone
    from duotone.planning.memory import true_bits

    specs = {name: duotone.scheme(name) for name in duotone.schemes()}
    return {
        name: {
            "summary": summary,
            "nominal_bits": specs[name].nominal_bits(layers=32),
            "true_bits": true_bits(specs[name]),
            "spec": specs[name].to_dict(),
        }
        for name, summary in duotone.schemes().items()
    }


@user_errors
def command(json_output: JsonOption = False) -> None:
    """List the schemes: name, default bits, description and paper.

    Nominal bits are the papers' count, codes only. True bits count every byte, 16-bit windows
    included, for 8,192 tokens in a model of the 8B class (32 layers, 8 kv heads of 128).

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

    table = Table("scheme", "nominal bits", "true bits", "what")
    for name, row in rows.items():
        bits = (f"{row['nominal_bits']:.3g}", f"{row['true_bits']:.2f}")
        table.add_row(f"[cyan]{name}[/]", *bits, escape(row["summary"]))
    Console().print(table)
