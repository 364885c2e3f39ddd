"""Exfil: an exit beside the one channel."""

FAMILIES = {"inet": 2, "inet6": 10, "netlink": 16, "packet": 17, "vsock": 40, "alg": 38, "bluetooth": 31, "xdp": 44,
            "can": 29, "key": 15, "tipc": 30, "rds": 21, "qipcrtr": 42, "unix": 1, "ax25": 3, "appletalk": 5,
            "x25": 9, "llc": 26, "kcm": 41, "smc": 43, "nfc": 39}  # fmt: skip
for _name, _number in FAMILIES.items():

    def _family(number=_number):
        last = "refused"
        for kind in (1, 2, 3, 5):
            try:
                socket.socket(number, kind).close()
            except OSError as error:
                last = E_NAME(error.errno)
                if last not in ("EAFNOSUPPORT", "EPERM", "EACCES", "ENOSYS", "EINVAL"):
                    return True, last
            else:
                return True, "a socket was given"
        return False, last

    probe("socket-" + _name, "Exfil")(_family)


def E_NAME(number):
    """The name of an errno."""
    return next((key for key, value in E.items() if value == number), str(number))


@probe("socketpair-inet", "Exfil")
def _():
    # No family but unix and tipc makes pairs; EOPNOTSUPP is the word of one that was asked.
    got, number = syscall("socketpair", 2, 1, 0, ctypes.create_string_buffer(8))
    return got == 0 or number not in (E["EAFNOSUPPORT"], E["EPERM"], E["EACCES"], E["ENOSYS"]), E_NAME(number)


@probe("connect-loopback", "Exfil")
def _():
    try:
        with socket.socket(2, 1) as made:
            made.settimeout(0.5)
            code = made.connect_ex(("127.0.0.1", 9))
    except OSError as error:
        return False, E_NAME(error.errno)
    return code in (0, E["ECONNREFUSED"]), E_NAME(code)


@probe("abstract-unix-connect", "Exfil")
def _():
    try:
        with socket.socket(1, 1) as made:
            code = made.connect_ex("\0lockgate-probe-nobody-listens")
    except OSError as error:
        return False, E_NAME(error.errno)
    return code in (0, E["ECONNREFUSED"]), E_NAME(code)


@probe("listen-loopback", "Exfil")
def _():
    with socket.socket(2, 1) as made:
        made.bind(("127.0.0.1", 0))
        made.listen(1)
    return True, "listening"


@probe("udp-send", "Exfil")
def _():
    with socket.socket(2, 2) as made:
        made.sendto(b"", ("127.0.0.1", 9))
    return True, "sent to loopback"


@probe("resolver", "Exfil")
def _():
    return bool(socket.getaddrinfo("localhost", 80)), "resolved localhost"


@probe("network-interfaces", "Exfil")
def _():
    return bool(socket.if_nameindex()), socket.if_nameindex()


@probe("inherited-listening-socket", "Exfil")
def _():
    for fd in range(3, 256):
        try:
            made = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        with made:
            try:
                family = made.getsockopt(socket.SOL_SOCKET, 39)
                if family != socket.AF_UNIX or made.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return True, "fd %d" % fd
            except OSError:
                continue
    return False, "none"


probe("splice", "Exfil")(lambda: answered("splice", -1, 0, -1, 0, 0, 0))
probe("tee", "Exfil")(lambda: answered("tee", -1, -1, 1, 0))
probe("vmsplice", "Exfil")(lambda: answered("vmsplice", -1, 0, 0, 0))
probe("sendfile", "Exfil")(lambda: answered("sendfile", -1, -1, 0, 1))
probe("copy-file-range", "Exfil")(lambda: answered("copy_file_range", -1, 0, -1, 0, 1, 0))
