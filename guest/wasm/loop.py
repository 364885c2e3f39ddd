"""An event loop without descriptors, so that asyncio.run works for coroutines that wait for time and each other.

Rule 1: what needs a socket, a thread, a signal or a process says that it is not here, and what to use instead.
Rule 2: a loop that waits for what can never come says so; it does not sleep for ever.
"""

import asyncio
import asyncio.base_events
import time

absent = absent  # type: ignore[name-defined]  # noqa: F821, PLW0127 - placed here by the loader


class _Clock:
    """Stands where a selector would: the only thing that can be waited for is time."""

    def select(self, timeout):
        if timeout is None:
            raise RuntimeError(
                "every task waits and nothing can wake one: on the wasm rung only time and other tasks can,"
                " since there are no sockets, threads, signals or processes"
            )
        if timeout > 0:
            time.sleep(timeout)
        return ()

    def close(self):
        pass


def _no(kind, why):
    async def refuse(*_args, **_kwargs):
        raise kind(why)

    def refuse_now(*_args, **_kwargs):
        raise kind(why)

    return refuse, refuse_now


_no_network, _no_network_now = _no(OSError, absent.NO_NETWORK)
_no_process, _ = _no(OSError, absent.NO_PROCESS)
_, _no_thread_now = _no(RuntimeError, absent.NO_THREAD)
_, _no_signal_now = _no(RuntimeError, absent.NO_SIGNAL)


class Loop(asyncio.base_events.BaseEventLoop):
    """The event loop of this rung."""

    def __init__(self):
        super().__init__()
        self._selector = _Clock()

    def _process_events(self, event_list):
        pass

    def _write_to_self(self):
        pass

    create_connection = create_server = create_datagram_endpoint = create_unix_connection = _no_network
    create_unix_server = connect_accepted_socket = getaddrinfo = getnameinfo = start_tls = _no_network
    sock_recv = sock_recv_into = sock_sendall = sock_connect = sock_accept = sendfile = _no_network
    connect_read_pipe = connect_write_pipe = _no_network
    add_reader = remove_reader = add_writer = remove_writer = _no_network_now
    subprocess_exec = subprocess_shell = _no_process
    run_in_executor = _no_thread_now
    add_signal_handler = remove_signal_handler = _no_signal_now

    async def shutdown_default_executor(self, timeout=None):  # noqa: ASYNC109 - the loop's own interface
        """There is none."""


def settle():
    """Make it the loop that asyncio makes; once, when the image is made."""
    policy = type(asyncio.events._get_event_loop_policy())
    policy._loop_factory = Loop
    asyncio.SelectorEventLoop = asyncio.EventLoop = Loop
