"""The payments service: a program of its own, which trusts nobody but a public key.

It stands for a service that another team runs. It has a ledger, the public half of one key, and no other secret.

Rule 1: no call without a token that was minted for exactly this operation, this order and this amount.
Rule 2: a token is spent once. Its `jti` goes into the ledger in the same transaction as the refund.
Rule 3: an idempotency key is bound to its refund: a repeat gets the stored answer, a changed one gets 409.
Rule 4: it listens on loopback, answers one small request a connection, and ends when its standard input closes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sqlite3
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from lockgate.verify import Claims, TokenRefused, Verifier

BODY_BYTES = 4096
SECONDS = 5.0  # for a whole request
SCOPE = "refund:create"
KEY = re.compile(r"\A[0-9a-f]{16,64}\Z")
SCHEMA = """
PRAGMA journal_mode=WAL;
CREATE TABLE IF NOT EXISTS refunds(
  id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, order_id TEXT NOT NULL, amount INTEGER NOT NULL,
  user TEXT NOT NULL, agent TEXT NOT NULL, run TEXT NOT NULL, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS spent(jti TEXT PRIMARY KEY, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS refused(id INTEGER PRIMARY KEY, why TEXT NOT NULL, at REAL NOT NULL);
"""


class Conflict(Exception):
    """The key was used for another refund."""


class Replayed(Exception):
    """The token was spent before."""


class Ledger:
    """Refunds, spent tokens and refusals in one SQLite file. One connection a thread is enough here: one lock."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.executescript(SCHEMA)
        self._lock = threading.Lock()

    def refund(self, key: str, order_id: str, amount: int, claims: Claims) -> tuple[int, bool]:
        """Spend the token and book the refund, both or neither. Return its number and whether it was there before."""
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.execute("INSERT INTO spent VALUES (?,?)", (claims.jti, time.time()))
            except sqlite3.IntegrityError:
                raise Replayed from None
            row = self._db.execute("SELECT id, order_id, amount FROM refunds WHERE key=?", (key,)).fetchone()
            if row is not None:
                if row[1:] != (order_id, amount):
                    raise Conflict
                return row[0], True
            done = self._db.execute(
                "INSERT INTO refunds(key, order_id, amount, user, agent, run, at) VALUES (?,?,?,?,?,?,?)",
                (key, order_id, amount, claims.sub, claims.act.sub, claims.act.run, time.time()),
            )
            return done.lastrowid or 0, False

    def refuse(self, why: str) -> None:
        """Remember a refusal by its kind."""
        with self._lock:
            self._db.execute("INSERT INTO refused(why, at) VALUES (?,?)", (why, time.time()))


class Handler(BaseHTTPRequestHandler):
    """POST /v1/refunds {"order_id", "amount"} with a bearer token and an Idempotency-Key."""

    ledger: ClassVar[Ledger]
    verifier: ClassVar[Verifier]
    timeout = SECONDS
    server_version = "payments"
    sys_version = ""

    def do_POST(self) -> None:
        """Create a refund."""
        body = self._body()
        if self.path != "/v1/refunds" or body is None:
            return self._answer(400, {"error": "bad_request"})
        order_id, amount, key = body
        claims = self._claims("refund", {"order_id": order_id, "amount": amount})
        if claims is None:
            return None
        try:
            number, again = self.ledger.refund(key, order_id, amount, claims)
        except Replayed:
            return self._refuse("replayed")
        except Conflict:
            return self._answer(409, {"error": "conflict"})
        # `trace_token` is the kind of field that services return and nobody should forward: the operation's result
        # type has no place for it, so it ends in the broker.
        answer = {"id": f"rf_{number}", "order_id": order_id, "amount": amount, "repeated": again}
        return self._answer(200 if again else 201, {**answer, "trace_token": "sk-synthetic-payments-trace-000"})

    def _body(self) -> tuple[str, int, str] | None:
        """Return (order, amount, key) of a well-formed request."""
        length = self.headers.get("Content-Length", "")
        key = self.headers.get("Idempotency-Key", "")
        if not re.fullmatch(r"[0-9]{1,4}", length) or int(length) > BODY_BYTES or not KEY.match(key):
            return None
        try:
            data = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            return None
        if not isinstance(data, dict) or set(data) != {"order_id", "amount"}:
            return None
        order_id, amount = data["order_id"], data["amount"]
        if not isinstance(order_id, str) or type(amount) is not int or amount <= 0:
            return None
        return order_id, amount, key

    def _claims(self, operation: str, identifiers: dict[str, str | int]) -> Claims | None:
        """Return the claims of a token for exactly this call; else answer 401 and return None."""
        header = self.headers.get("Authorization")
        try:
            return self.verifier.check_header(header, operation=operation, scope=SCOPE, identifiers=identifiers)
        except TokenRefused as refused:
            self._refuse(refused.code)
            return None

    def _refuse(self, why: str) -> None:
        self.ledger.refuse(why)
        self._answer(401, {"error": "unauthorized"})  # the caller learns no more than that; the ledger knows the kind

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(raw)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Log nothing: the ledger holds what matters, and a request line may hold what must not be logged."""


class Server(ThreadingHTTPServer):
    """Quiet about clients that go away."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A broken connection is the client's affair."""


def main(argv: list[str] | None = None) -> int:
    """Serve until standard input closes. The first line of output is the port."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--public-key", type=Path, required=True, help="a public JWK; the only key this program has")
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--issuer", default="atlas-broker")
    parser.add_argument("--audience", default="payments")
    options = parser.parse_args(argv)
    key = json.loads(options.public_key.read_text())
    with Server(("127.0.0.1", 0), Handler) as server:
        Handler.ledger = Ledger(options.ledger)
        # one_use is the ledger's affair here: it remembers spent tokens across restarts, too.
        Handler.verifier = Verifier(issuer=options.issuer, audience=options.audience, key=key, one_use=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        while os.read(0, 4096):  # whoever started us holds the other end; when they go, so do we
            pass
        server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
