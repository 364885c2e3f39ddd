"""The broker process: from its argv to its last row.

Rule 1: it starts with an empty environment and exactly the descriptors its argv names; it has no children.
Rule 2: it is hardened before the operator's code is imported or a secret is read.
Rule 3: nothing it prints carries a value: unhandled errors are named by kind and place.
Rule 4: it ends when the agent's link does; calls in flight get a bounded time, and what is then open becomes `unknown`.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from typing import Any

from lockgate import config as configuration
from lockgate.audit.client import AuditClient
from lockgate.broker import backends, hash_key, hygiene, load, quiet
from lockgate.broker.agent_link import AgentLink, fault
from lockgate.broker.approvals import Approvals
from lockgate.broker.control import Broker
from lockgate.broker.edge import Edge
from lockgate.broker.threads import Threads
from lockgate.broker.watcher import Watcher
from lockgate.contract import wire
from lockgate.contract.errors import HostFault, LockgateError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the broker until its agent is gone; returns the exit status."""
    options = _options(argv)
    quiet.install()
    agent = AgentLink(socket.socket(fileno=options.agent_fd))
    try:
        broker, audit, facts = _start(options, agent)
    except LockgateError as error:
        agent.send(wire.Failed(fault=fault(error)))
        return 1
    except Exception as error:  # noqa: BLE001 - a start that failed must be told, and without its text
        failed = HostFault(f"the broker could not start ({quiet.place(error)})", next_step="report this")
        agent.send(wire.Failed(fault=fault(failed)))
        return 1
    agent.send(wire.Ready(pid=os.getpid(), facts=facts))
    broker.serve()
    audit.close()
    return 0


def _start(options: argparse.Namespace, agent: AgentLink) -> tuple[Broker, AuditClient, dict[str, Any]]:
    config = configuration.load(options.config)
    key = hash_key.load(config.audit.path)  # before the ids change: the audit directory is not that user's
    facts = hygiene.harden(user=config.broker.user)
    audit = AuditClient(socket.socket(fileno=options.audit_fd))
    operations = load.load(config.operations, config.base)
    found = backends.build(config)
    ready = audit.ready()
    threads = Threads()
    approvals = Approvals(agent.send, wait=config.broker.approval_wait)
    edge = Edge(
        audit=audit,
        approvals=approvals,
        threads=threads,
        backends=found,
        hash_key=key,
        watcher=Watcher(),
    )
    broker = Broker(
        agent,
        socket.socket(fileno=options.supervisor_fd),
        operations=operations,
        edge=edge,
        approvals=approvals,
        threads=threads,
        audit=audit,
        bounds=config.execution.bounds,
    )
    facts |= {
        "operations": len(operations.names()),
        "operations_digest": operations.digest,
        "backends": sorted(found),
        "audit_seq": ready.seq,
        "audit_unknown": ready.unknown,
    }
    return broker, audit, facts


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lockgate.broker", description="Started by a Gate; not for people.")
    for name in ("--agent-fd", "--supervisor-fd", "--audit-fd"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--config", required=True)
    return parser.parse_args(argv)
