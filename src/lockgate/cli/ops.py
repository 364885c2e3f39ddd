"""`lockgate ops`: the registry, as the broker has it."""

from __future__ import annotations

from lockgate.cli.common import ConfigPath, gate_of, load_config
from lockgate.cli.output import Json, print_json, table


def ops(config: ConfigPath = None, as_json: Json = False) -> None:
    """List the operations: what code and model may ask for by name."""
    settings = load_config(config, required=True)
    with gate_of(settings, pool=0, accept=False, quiet=as_json) as gate:
        found = gate.operations()
    if as_json:
        print_json(found)
        return
    table(
        "operations",
        ("name", "effect", "arguments", "timeout", "description"),
        [
            (
                one["name"],
                one["effect"],
                ", ".join(one["args"].get("properties", {})),
                f"{one['timeout']:g} s",
                one["doc"],
            )
            for one in found
        ],
    )
