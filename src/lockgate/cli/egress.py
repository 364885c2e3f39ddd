"""`lockgate egress`: the gateway, and commands that have no other way out."""

from __future__ import annotations

import typer

from lockgate.cli import egress_policy, egress_run, egress_serve

app = typer.Typer(help="Default-deny egress for processes that need hosts.", no_args_is_help=True)
app.command("run", context_settings={"allow_interspersed_args": False})(egress_run.run_command)
app.command("serve")(egress_serve.serve)
app.command("explain")(egress_policy.explain)
app.command("learn")(egress_policy.learn)
