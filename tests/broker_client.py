"""A real broker with a real audit writer, and the smallest agent and supervisor that can talk to it. For tests only."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from lockgate.audit import reader, writer_argv
from lockgate.audit.rows import StoredRow
from lockgate.contract import frames, wire
from lockgate.contract.bounds import Bounds

WAIT = 20.0
SECRET = "sk-synthetic-broker-test-0001"
OPERATIONS = '''
import json, os, time
from pathlib import Path
from typing import Annotated
import lockgate as lg
from lockgate.broker.failures import BackendRefused, BackendUnreachable

HERE = Path(__file__).parent
ops = lg.Operations()

def ran(line):
    with open(HERE / "ran.log", "a") as log:
        log.write(line + "\\n")

class ByOrder(lg.Args):
    order_id: Annotated[str, lg.Id("ord")]

class Refund(lg.Args):
    order_id: Annotated[str, lg.Id("ord")]
    amount: lg.Cents

class Note(lg.Args):
    order_id: Annotated[str, lg.Id("ord")]
    amount: lg.Cents
    note: Annotated[str, lg.Text(100)] = ""

class Say(lg.Args):
    text: Annotated[str, lg.Text(300)]

class Nothing(lg.Args):
    pass

class Order(lg.Result):
    order_id: str
    tenant: str
    total: int

class Receipt(lg.Result):
    order_id: str
    amount: int
    key: str

class Said(lg.Result):
    text: str

class Nested(lg.Result):
    order: Order

@ops.operation(effect="read", timeout=5, max_result=4096)
def get_order(call: lg.Call, args: ByOrder) -> Order:
    """Look an order up."""
    return Order(order_id=args.order_id, tenant=call.principal.tenant, total=9900)

@ops.operation(effect="read", timeout=5, max_result=4096)
async def get_order_async(call: lg.Call, args: ByOrder) -> Order:
    """Look an order up, slowly."""
    import asyncio
    await asyncio.sleep(0.001)
    return Order(order_id=args.order_id, tenant=call.principal.tenant, total=9900)

@ops.operation(effect="write", idempotency=("order_id", "amount"), timeout=5, max_result=4096)
def refund(call: lg.Call, args: Refund) -> Receipt:
    """Pay money back."""
    ran(f"refund {call.principal.tenant} {args.order_id} {args.amount}")
    return Receipt(order_id=args.order_id, amount=args.amount, key=call.idempotency_key)

@ops.operation(effect="write", idempotency=("order_id", "amount"), timeout=5, max_result=4096)
def refund_note(call: lg.Call, args: Note) -> Receipt:
    ran(f"refund_note {args.order_id} {args.amount}")
    return Receipt(order_id=args.order_id, amount=args.amount, key=call.idempotency_key)

@ops.operation(effect="write", idempotency=None, why="each note is a new one", timeout=5, max_result=4096)
def add_note(call: lg.Call, args: Say) -> Said:
    ran("add_note")
    return Said(text=args.text)

@ops.operation(effect="write", idempotency=("order_id", "amount"), timeout=1, max_result=4096)
def pay(call: lg.Call, args: Refund) -> Receipt:
    """Pay through the backend."""
    call.backend("payments").post("refunds", json=args, scope=["refund:create"])
    return Receipt(order_id=args.order_id, amount=args.amount, key=call.idempotency_key)

@ops.operation(effect="write", idempotency=("order_id", "amount"), timeout=1, max_result=4096)
async def pay_async(call: lg.Call, args: Refund) -> Receipt:
    """Pay with a client of its own."""
    import httpx
    token = await call.mint("payments", scope=["refund:create"])
    async with httpx.AsyncClient(trust_env=False, timeout=call.remaining) as client:
        answer = await client.post(call.entry("payments").url + "/refunds", headers=token.header(), content=b"{}")
    if answer.status_code >= 400:
        raise BackendRefused(answer.status_code)
    return Receipt(order_id=args.order_id, amount=args.amount, key=call.idempotency_key)

@ops.operation(effect="read", timeout=1, max_result=4096)
def fetch(call: lg.Call, args: ByOrder) -> Said:
    """Read from the backend."""
    return Said(text=call.backend("payments").get("orders", args.order_id, scope=["order:read"]).body.decode())

@ops.operation(effect="read", timeout=0.3, max_result=4096)
def hang_read(call: lg.Call, args: ByOrder) -> Said:
    ran("hang_read")
    time.sleep(2)
    ran("hang_read came back")
    return Said(text="late")

@ops.operation(effect="write", idempotency=("order_id", "amount"), timeout=0.3, max_result=4096)
def hang_write(call: lg.Call, args: Refund) -> Receipt:
    ran("hang_write")
    time.sleep(2)
    ran("hang_write came back")
    return Receipt(order_id=args.order_id, amount=args.amount, key=call.idempotency_key)

@ops.operation(effect="read", timeout=0.3, max_result=4096)
async def hang_async(call: lg.Call, args: ByOrder) -> Said:
    import asyncio
    ran("hang_async")
    await asyncio.sleep(30)
    return Said(text="late")

@ops.operation(effect="read", timeout=5, max_result=4096)
def tell(call: lg.Call, args: Say) -> Said:
    """Misbehave in the way that is asked for."""
    how = args.text
    if how in ("raw", "base64", "hex"):
        import base64
        with call.mint("payments", scope=["order:read"]) as token:
            text = token.bearer()
        lease = call.mint_now("payments", ["order:read"])
        text = lease.bearer().partition(" ")[2]
        if how == "base64":
            text = base64.b64encode(("x" + text).encode()).decode()
        if how == "hex":
            text = text.encode().hex()
        return Said(text=text)
    if how == "big":
        return Said(text="x" * 5000)
    if how == "wrong":
        return {"text": "wrong"}
    if how == "raise":
        raise RuntimeError("SECRET at https://user:SECRET@host/?key=SECRET")
    if how == "exit":
        raise SystemExit("SECRET")
    if how == "refused":
        raise BackendRefused(403)
    if how == "unreachable":
        raise BackendUnreachable
    if how == "no backend":
        call.mint_now("absent", ["x"])
    if how == "thread":
        import threading
        def boom():
            raise RuntimeError("SECRET")
        thread = threading.Thread(target=boom)
        thread.start()
        thread.join()
    if how == "print":
        import sys
        sys.stdout.flush()
    if how == "fork":
        try:
            os.fork()
        except PermissionError as error:
            return Said(text=f"fork {error.errno}")
    if how == "exec":
        import subprocess
        try:
            subprocess.run(["/bin/true"])
        except PermissionError as error:
            return Said(text=f"exec {error.errno}")
    if how == "execve":
        try:
            os.execv("/bin/true", ["true"])
        except PermissionError as error:
            return Said(text=f"execve {error.errno}")
    if how == "listen":
        import socket
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            try:
                sock.listen()
            except PermissionError as error:
                return Said(text=f"listen {error.errno}")
    if how == "environment":
        return Said(text=json.dumps(dict(os.environ)))
    return Said(text=how)

@ops.operation(effect="read", timeout=5, max_result=4096)
def smuggle(call: lg.Call, args: ByOrder) -> Nested:
    """Put undeclared data where a declared struct belongs."""
    return Nested(order={"order_id": args.order_id, "tenant": "t", "total": 1, "card": "SECRET"})

@ops.operation(effect="write", idempotency=("text",), timeout=5, max_result=4096)
def write_badly(call: lg.Call, args: Say) -> Said:
    """A write that ends in the way that is asked for."""
    ran(f"write_badly {args.text}")
    if args.text == "refused":
        raise BackendRefused(402)
    if args.text == "raise":
        raise RuntimeError("SECRET")
    if args.text == "big":
        return Said(text="x" * 5000)
    if args.text == "no key":
        call.mint_now("broken", ["x"])
    return Said(text=args.text)
'''


class Refused(Exception):
    """The broker answered with a typed refusal."""

    def __init__(self, fault: wire.Fault) -> None:
        super().__init__(fault.code, fault.message)
        self.fault = fault


class Channel:
    """What the code inside a sandbox can do with its channel."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(WAIT)
        self._ids = itertools.count(1)

    def send_raw(self, body: bytes) -> None:
        self.sock.sendall(struct.pack(">I", len(body)) + body)

    def read(self) -> dict[str, Any] | None:
        """One reply, None at the end."""
        head = self._exactly(4)
        return None if head is None else msgspec.json.decode(self._exactly(struct.unpack(">I", head)[0]) or b"")

    def _exactly(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            try:
                part = self.sock.recv(count - len(data))
            except ConnectionResetError:
                part = b""
            if not part:
                return None
            data += part
        return data

    def call(self, op: str, **args: Any) -> dict[str, Any]:
        """Ask and return the whole reply."""
        self.send_raw(b'{"id":%d,"op":"%b","args":%b}' % (next(self._ids), op.encode(), msgspec.json.encode(args)))
        reply = self.read()
        assert reply is not None, "the channel was shut"
        return reply

    def reason(self, op: str, **args: Any) -> str:
        """Ask and return the reason of the refusal, "" when there is none."""
        return self.call(op, **args).get("error", {}).get("reason", "")


def start_process(argv: list[str], fds: list[int], log: int) -> subprocess.Popen[bytes]:
    """Start one process as a Gate does: no environment, these descriptors and no others."""
    return subprocess.Popen(argv, pass_fds=fds, env={}, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")


class Broker:
    """Starts the two processes in `base` and speaks for agent and supervisor."""

    def __init__(
        self,
        base: Path,
        *,
        operations: str = OPERATIONS,
        config: str = "",
        audit: str = "audit.db",
        spawn: Callable[..., Any] | None = None,
    ) -> None:
        spawn = spawn or start_process
        self.base = base
        self.audit_path = base / audit
        (base / "operations.py").write_text(operations)
        (base / "lockgate.toml").write_text(f'operations = "operations:ops"\naudit.path = "{audit}"\n{config}')
        self.pushed: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.closed: dict[str, wire.CodeClosed] = {}
        self.asked: list[wire.ApprovalAsked] = []
        self.on_asked: Callable[[wire.ApprovalAsked], None] | None = None
        self.killed: list[str] = []
        self._answers: dict[int, queue.SimpleQueue[Any]] = {}
        self._ids = itertools.count(1)
        self._turn = threading.Condition()
        self._sending = threading.Lock()
        self._flusher = ""
        self._attached: dict[str, queue.SimpleQueue[bool]] = {}
        self.agent, agent = socket.socketpair()
        self.supervisor, supervisor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        audit, writer = socket.socketpair()
        self.log = base / "broker.log"
        with self.log.open("wb") as log, contextlib.ExitStack() as theirs:
            for sock in (agent, supervisor, audit, writer):
                theirs.callback(sock.close)
            self.writer = spawn(writer_argv(writer.fileno(), str(self.audit_path)), [writer.fileno()], log.fileno())
            argv = [sys.executable, "-I", "-m", "lockgate.broker", "--config", str(base / "lockgate.toml")]
            argv += ["--agent-fd", str(agent.fileno()), "--supervisor-fd", str(supervisor.fileno())]
            argv += ["--audit-fd", str(audit.fileno())]
            fds = [agent.fileno(), supervisor.fileno(), audit.fileno()]
            self.process = spawn(argv, fds, log.fileno())
        self.agent.settimeout(None)
        self._threads = [
            threading.Thread(target=self._listen, daemon=True),
            threading.Thread(target=self._supervise, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self.ready = self.pushed.get(timeout=WAIT)

    # ---- agent ----------------------------------------------------------------------------------------------
    def _listen(self) -> None:
        decoder = frames.Decoder(cap=wire.LINK_BYTES)
        messages = msgspec.json.Decoder(wire.BrokerToAgent)
        while True:
            try:
                data = self.agent.recv(1 << 18)
            except OSError:
                data = b""
            if not data:
                self.pushed.put(None)
                for box in list(self._answers.values()):
                    box.put(None)
                return
            for body in decoder.feed(data):
                message = messages.decode(body)
                if isinstance(message, wire.CodeClosed):
                    with self._turn:
                        self.closed[message.ticket] = message
                        self._turn.notify_all()
                elif isinstance(message, wire.ApprovalAsked):
                    self.asked.append(message)
                    if self.on_asked is not None:
                        threading.Thread(target=self.on_asked, args=(message,), daemon=True).start()
                elif isinstance(message, wire.Ready | wire.Failed):
                    self.pushed.put(message)
                else:
                    self._answers[message.id].put(message)

    def start(self, message: Callable[[int], wire.Message]) -> queue.SimpleQueue[Any]:
        """Send a request and return where its answer will be."""
        ident = next(self._ids)
        box = self._answers[ident] = queue.SimpleQueue()
        with self._sending:
            self.agent.sendall(frames.encode(msgspec.json.encode(message(ident)), cap=wire.LINK_BYTES))
        return box

    def ask(self, message: Callable[[int], wire.Message]) -> Any:
        """Send a request and return its answer; None when the broker died."""
        answer = self.start(message).get(timeout=WAIT)
        if isinstance(answer, wire.Refused):
            raise Refused(answer.fault)
        return answer

    def open_run(self, allow: dict[str, Any], **more: Any) -> wire.RunOpened:
        scope = {"user": "u1", "agent": "support", "tenant": "t1", "expires": 600.0, "allow": allow, **more}
        return self.ask(lambda ident: wire.OpenRun(id=ident, scope=scope))

    def tool(self, run: str, op: str, /, raw: bytes | None = None, **args: Any) -> wire.CallReply:
        body = msgspec.json.encode(args) if raw is None else raw
        return self.ask(lambda ident: wire.ToolCall(id=ident, run=run, op=op, args=body))

    def decide(self, request: str, *, grant: bool, approver: str = "person-1") -> Any:
        return self.ask(lambda ident: wire.Decide(id=ident, request=request, grant=grant, approver=approver))

    def ticket(self, run: str, bounds: Bounds | None = None) -> str:
        return self.ask(lambda ident: wire.NewTicket(id=ident, run=run, bounds=bounds)).ticket

    # ---- supervisor -----------------------------------------------------------------------------------------
    def _supervise(self) -> None:
        orders = msgspec.json.Decoder(wire.BrokerToSupervisor)
        while True:
            try:
                packet = self.supervisor.recv(1 << 16)
            except OSError:
                return
            if not packet:
                return
            message = orders.decode(packet)
            if isinstance(message, wire.Attached):
                self._attached.setdefault(message.ticket, queue.SimpleQueue()).put(message.ok)
            else:
                with self._turn:
                    self.killed.append(message.ticket)
                    self._turn.notify_all()

    def attach_with(self, ticket: str, fds: list[int]) -> bool:
        """Send an Attach with these descriptors; returns the broker's verdict."""
        box = self._attached.setdefault(ticket, queue.SimpleQueue())
        attach = wire.Attach(
            ticket=ticket, rung="container", shared_kernel=True, memory_by="cgroup", code_sha256="0" * 64, code_bytes=3
        )
        socket.send_fds(self.supervisor, [msgspec.json.encode(attach)], fds)
        return box.get(timeout=WAIT)

    def attach(self, ticket: str) -> Channel:
        """Bind a fresh channel to the run of `ticket`."""
        ours, theirs = socket.socketpair()
        with theirs:
            assert self.attach_with(ticket, [theirs.fileno()])
        return Channel(ours)

    def detach(self, ticket: str, **more: Any) -> wire.CodeClosed:
        """End it as the supervisor does and return what the agent is told."""
        self.supervisor.send(msgspec.json.encode(wire.Detach(ticket=ticket, exit_code=0, **more)))
        return self.code_closed(ticket)

    def code_closed(self, ticket: str) -> wire.CodeClosed:
        with self._turn:
            assert self._turn.wait_for(lambda: ticket in self.closed, WAIT), "no CodeClosed"
            return self.closed[ticket]

    def wait_killed(self, ticket: str, seconds: float = WAIT) -> bool:
        with self._turn:
            return self._turn.wait_for(lambda: ticket in self.killed, seconds)

    # ---- evidence -------------------------------------------------------------------------------------------
    def rows(self, **wanted: Any) -> list[StoredRow]:
        """The rows that have these values, up to now: a denial of our own is durable only when all before it are."""
        if self.process.poll() is None:
            if not self._flusher:
                self._flusher = self.open_run({}, user="flusher").run
            assert self.tool(self._flusher, "flush").reason == "not_available"
        rows = list(reader.tail(str(self.audit_path), 1_000_000))
        return [r for r in rows if r.user != "flusher" and all(getattr(r, k) == v for k, v in wanted.items())]

    def ran(self) -> list[str]:
        """What functions noted when they ran."""
        path = self.base / "ran.log"
        return path.read_text().splitlines() if path.exists() else []

    def _hang_up(self) -> None:
        for sock in (self.agent, self.supervisor):
            with contextlib.suppress(OSError):  # closing alone would wait for the thread that reads
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def close(self) -> None:
        self._hang_up()
        for process in (self.process, self.writer):
            try:
                process.wait(WAIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        """SIGKILL to the broker alone; the writer sees the end of its link."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT)
        self._hang_up()
        self.writer.wait(WAIT)


@contextlib.contextmanager
def broker(base: Path, **more: Any) -> Iterator[Broker]:
    """A broker that ends with the block."""
    one = Broker(base, **more)
    try:
        assert isinstance(one.ready, wire.Ready), (one.ready, one.log.read_text())
        yield one
    finally:
        one.close()


class Backend:
    """A loopback HTTP service of one thread that answers, or behaves, as it is told."""

    def __init__(self) -> None:
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.status = 200
        self.body = b"{}"
        self.headers: dict[str, str] = {}
        self.mode = "answer"  # or "hang", "reset", "garbage"
        self.requests: list[bytes] = []
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        held: list[socket.socket] = []
        while True:
            ready, _, _ = select.select([self.sock, self._stop], [], [])
            if self._stop in ready:
                for sock in held:
                    sock.close()
                return
            sock, _ = self.sock.accept()
            sock.settimeout(5)
            data = b""
            with contextlib.suppress(OSError):
                while b"\r\n\r\n" not in data:
                    data += sock.recv(65536)
                head, _, body = data.partition(b"\r\n\r\n")
                length = next(
                    (
                        int(line.split(b":")[1])
                        for line in head.split(b"\r\n")
                        if line.lower().startswith(b"content-length:")
                    ),
                    0,
                )
                while len(body) < length:
                    body += sock.recv(65536)
                self.requests.append(head + b"\r\n\r\n" + body)
                if self.mode == "hang":
                    held.append(sock)
                    continue
                if self.mode == "reset":
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                elif self.mode == "garbage":
                    sock.sendall(b"SECRET is no HTTP\r\n\r\n")
                else:
                    more = "".join(f"{k}: {v}\r\n" for k, v in self.headers.items())
                    sock.sendall(
                        f"HTTP/1.1 {self.status} X\r\nContent-Length: {len(self.body)}\r\n{more}\r\n".encode()
                        + self.body
                    )
            sock.close()

    def close(self) -> None:
        os.write(self._stopped, b"x")
        self._thread.join(5)
        for fd in (self._stop, self._stopped):
            os.close(fd)
        self.sock.close()


def payments_config(base: Path, url: str) -> str:
    """Configuration of the backend `payments` with a real signing key, and of `broken`, whose key is not there."""
    from joserfc.jwk import OKPKey

    path = base / "secrets.toml"
    key = OKPKey.generate_key("Ed25519")
    path.write_text(f"key = '''\n{key.as_pem(private=True).decode()}'''\nplanted = \"{SECRET}\"\n")
    path.chmod(0o600)
    (base / "public.pem").write_bytes(key.as_pem(private=False))
    return f"""
[secrets.signing]
ref = "file://{path}#key"
[secrets.absent]
ref = "file://{path}#absent"
[backends.payments]
minter = "jwt"
key = "secret signing"
issuer = "https://lockgate.example"
audience = "payments"
ttl = 30
url = "{url}"
[backends.broken]
minter = "jwt"
key = "secret absent"
issuer = "https://lockgate.example"
audience = "broken"
"""
