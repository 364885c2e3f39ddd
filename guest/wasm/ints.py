"""numpy's default integer on this rung: 64 bits, as everywhere else people run it (ADR 0061).

A 32-bit guest's numpy makes 32-bit integers of Python's, and adds them up in 32 bits: `np.full(10, 2**30).sum()` is
negative, without a warning. What makes integers without naming a width, and what adds or multiplies them up, gives
64 bits here.

Rule 1: a width that the code names (np.int32, "int32", np.intc) stays: it wraps as it does on every machine.
Rule 2: only a call from the run's own code is answered so. numpy, pandas and whatever else is linked in call each
        other as they were compiled: their index arrays are 32 bits wide, and compiled code counts on it. The sums
        of an array are the exception: nothing points with them.
Rule 3: what cannot be put right is a list in the docs with a test for each entry, not a hope.
"""

import functools
import gc
import sys

_LINKED_IN = "/usr/local/lib/"  # where the code of everything but the run comes from
np = None  # numpy, once it was imported
_DEFAULT = {}  # what a dtype argument may say for "the default integer" -> what it means here
_plain = {}  # numpy's own functions, by name

# Functions with a dtype argument, and its place. They make arrays, or add up.
_WITH_DTYPE = {
    "arange": 3, "array": 1, "asanyarray": 1, "asarray": 1, "asarray_chkfinite": 1, "ascontiguousarray": 1,
    "asfortranarray": 1,
    "asmatrix": 1, "cumprod": 2, "cumsum": 2, "cumulative_prod": 2, "cumulative_sum": 2, "empty": 1,
    "empty_like": 1, "eye": 3, "frombuffer": 1, "fromfunction": 2, "fromiter": 1, "fromstring": 1, "full": 2,
    "full_like": 2, "genfromtxt": 1, "geomspace": 4, "identity": 1, "indices": 1, "linspace": 5, "loadtxt": 1,
    "logspace": 5, "mean": 2, "nancumprod": 2, "nancumsum": 2, "nanprod": 2, "nansum": 2, "ones": 1, "ones_like": 1,
    "prod": 2, "require": 1, "std": 2, "sum": 2, "trace": 4, "tri": 3, "var": 2, "zeros": 1, "zeros_like": 1,
}  # fmt: skip
# Functions that take values: a list of Python's integers among them means 64-bit integers.
_OF_VALUES = """append atleast_1d atleast_2d atleast_3d broadcast_arrays broadcast_to choose clip column_stack
compress concat concatenate convolve copy correlate cross cumprod cumsum cumulative_prod cumulative_sum delete diag
diagflat diagonal diff dot dstack ediff1d einsum expand_dims extract flip fliplr flipud full_like hsplit hstack inner
insert intersect1d kron matmul matvec max meshgrid min moveaxis nancumprod nancumsum nanmax nanmin nanprod nansum
outer pad partition permute_dims place polyadd polymul polysub polyval prod ptp ravel repeat reshape resize roll rot90
select setdiff1d setxor1d sort split squeeze stack sum swapaxes take tensordot tile trace transpose tril triu
trim_zeros union1d unique unique_values unstack vdot vecdot vecmat vsplit vstack where"""
# Functions whose result counts or points; numpy makes it 32 bits wide on this guest.
_COUNTS = """argmax argmin argpartition argsort argwhere bincount count_nonzero diag_indices digitize flatnonzero
fromfunction histogram histogram2d indices intersect1d lexsort mask_indices nanargmax nanargmin nonzero
ravel_multi_index searchsorted size tri tril_indices tril_indices_from triu_indices triu_indices_from unique
unique_all unique_counts unique_inverse unravel_index where"""
# Integer arithmetic as functions: their arguments may be Python's own integers.
_ARITHMETIC = """abs absolute add bitwise_and bitwise_left_shift bitwise_or bitwise_xor divmod floor_divide gcd lcm
left_shift maximum minimum mod multiply negative positive power pow remainder right_shift square subtract"""
_COUNT_METHODS = "argmax argmin argpartition argsort nonzero searchsorted"
_RANDOM = """binomial choice geometric hypergeometric integers logseries multinomial negative_binomial permutation
poisson randint random_integers tomaxint zipf"""


def _dtype(given):
    """Return the dtype that was meant."""
    try:
        return _DEFAULT.get(given, given)
    except TypeError:  # a description of fields
        return given


def _says_width(value):
    """Whether a value carries a width of its own."""
    return isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "dtype") or hasattr(value, "__array__")


def _is_bare(value):
    """Whether a value is Python's own integers, alone or in lists: what has no width yet."""
    while type(value) in (list, tuple) and value:
        value = value[0]
    return type(value) in (int, bool, range)


def _wide(value):
    """An argument as the array that it would become elsewhere; anything with a width stays as it is."""
    if type(value) in (list, tuple, range) and _is_bare(value):
        made = _plain["array"](value)
        if made.dtype == np.intp:
            return made.astype(np.int64)
    elif type(value) is list and value and not _says_width(value[0]) and type(value[0]) is list:
        return [_wide(one) for one in value]
    return value


def _wide_scalar(value):
    """The same for arithmetic, where a bare integer is a value too."""
    return np.int64(value) if type(value) is int and -(1 << 63) <= value < 1 << 63 else _wide(value)


def _widen(value):
    """A result that counts or points, 64 bits wide."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.astype(np.int64) if value.dtype == np.intp else value
    if isinstance(value, tuple):
        wide = [_widen(one) for one in value]
        return type(value)(*wide) if hasattr(value, "_fields") else tuple(wide)
    return value


def _sum_dtype(dtype):
    """What to add up in where nobody said: 64 bits; None where numpy's own choice is right."""
    if dtype.kind in "bi" and dtype.itemsize < 8:
        return np.int64
    return np.uint64 if dtype.kind == "u" and dtype.itemsize < 8 else None


def _named(adapted, plain):
    """Return what answers the run's own code with `adapted` and everybody else with `plain`."""
    look = sys._getframe

    def made(*args, **kwargs):
        if look(1).f_code.co_filename.startswith(_LINKED_IN):
            return plain(*args, **kwargs)
        return adapted(*args, **kwargs)

    made = functools.update_wrapper(made, plain, assigned=("__name__", "__doc__"), updated=())
    made.__qualname__, made.__module__ = made.__name__, "numpy"
    return made


# ---- functions of numpy --------------------------------------------------------------------------------------------
def _with_dtype(plain, place):
    def call(*args, **kwargs):
        if len(args) > place:
            args = (*args[:place], _dtype(args[place]), *args[place + 1 :])
        elif kwargs.get("dtype") is not None:
            kwargs["dtype"] = _dtype(kwargs["dtype"])
        return plain(*args, **kwargs)

    return call


def _from_values(plain):
    """array, asarray and their like, arange, full: integers without a width become 64 bits wide."""

    def call(*args, **kwargs):
        made = plain(*args, **kwargs)
        untold = kwargs.get("dtype") is None and (len(args) < 2 or args[1] is None)
        if untold and made.dtype == np.intp and args and not _holds_width(args[0]):
            return made.astype(np.int64)
        return made

    return call


def _holds_width(value):
    """Whether a value, or the first leaf of it, says its width."""
    while type(value) in (list, tuple) and value:
        value = value[0]
    return _says_width(value) or isinstance(value, (memoryview, bytes, bytearray))


def _filled(plain, place, values):
    """arange and full: the width comes from the numbers given."""

    def call(*args, **kwargs):
        made = plain(*args, **kwargs)
        untold = kwargs.get("dtype") is None and (len(args) <= place or args[place] is None)
        if untold and made.dtype == np.intp:
            given = [
                *args[values],
                *(kwargs[name] for name in ("start", "stop", "step", "fill_value") if name in kwargs),
            ]
            if not any(_holds_width(one) for one in given):
                return made.astype(np.int64)
        return made

    return call


def _of_values(plain):
    def call(*args, **kwargs):
        return plain(*[_wide(one) for one in args], **kwargs)

    return call


def _of_scalars(plain):
    def call(*args, **kwargs):
        if any(_says_width(one) for one in args):
            return plain(*[_wide(one) for one in args], **kwargs)
        return plain(*[_wide_scalar(one) for one in args], **kwargs)

    return call


def _counting(plain):
    def call(*args, **kwargs):
        return _widen(plain(*args, **kwargs))

    return call


def _adding(plain, place):
    """cumsum, trace and their like, as functions or methods: they add up in 64 bits unless told otherwise."""

    def call(values, *args, **kwargs):
        told = len(args) >= place and args[place - 1] is not None
        if not told and kwargs.get("dtype") is None and kwargs.get("out") is None and hasattr(values, "dtype"):
            wide = _sum_dtype(values.dtype) if isinstance(values, (np.ndarray, np.generic)) else None
            if wide is not None and len(args) < place:
                kwargs["dtype"] = wide
        return plain(values, *args, **kwargs)

    return call


def _pointing(plain):
    """repeat: its counts are cast to 32 bits, which 64-bit ones refuse to do by themselves."""

    def call(values, repeats, *args, **kwargs):
        repeats = _plain["asarray"](repeats)
        if repeats.dtype.kind in "iu":
            repeats = repeats.astype(np.intp)
        return plain(values, repeats, *args, **kwargs)

    return call


class _Arithmetic:
    """A ufunc with bare integers made 64 bits wide first; everything else of it is the ufunc's own."""

    def __init__(self, plain):
        self.__wrapped__ = plain
        self.__name__ = plain.__name__
        self.__doc__ = plain.__doc__

    @property
    def __class__(self):
        return np.ufunc  # for isinstance()

    def __call__(self, *args, **kwargs):
        if sys._getframe(1).f_code.co_filename.startswith(_LINKED_IN):
            return self.__wrapped__(*args, **kwargs)
        return _of_scalars(self.__wrapped__)(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.__wrapped__, name)

    def __repr__(self):
        return repr(self.__wrapped__)

    def outer(self, *args, **kwargs):
        return self.__wrapped__.outer(*[_wide_scalar(one) for one in args], **kwargs)

    def reduce(self, array, *args, **kwargs):
        return _adding(self.__wrapped__.reduce, 2)(_wide(array), *args, **kwargs)

    def accumulate(self, array, *args, **kwargs):
        return _adding(self.__wrapped__.accumulate, 2)(_wide(array), *args, **kwargs)


class _Grid:
    """mgrid, ogrid, r_ and c_: what they make of bare integers, 64 bits wide."""

    def __init__(self, plain):
        self.__wrapped__ = plain

    def __getitem__(self, key):
        made = self.__wrapped__[key]
        if any(_holds_width(one) for one in (key if type(key) is tuple else (key,))):
            return made
        return _widen(made)

    def __getattr__(self, name):
        return getattr(self.__wrapped__, name)


def _functions():
    made = {}
    for name in dir(np):
        value = getattr(np, name)
        if callable(value):
            _plain[name] = value

    def wrap(names, make):
        for name in names:
            if name in _plain:
                made[name] = make(made.get(name, _plain[name]))

    wrap(("repeat",), _pointing)
    for name in ("cumsum", "cumprod", "nancumsum", "nancumprod"):
        wrap((name,), lambda plain: _adding(plain, 2))
    wrap(("trace",), lambda plain: _adding(plain, 4))
    for name in (
        "array",
        "asanyarray",
        "asarray",
        "asarray_chkfinite",
        "ascontiguousarray",
        "asfortranarray",
        "asmatrix",
    ):
        wrap((name,), _from_values)
    wrap(("arange",), lambda plain: _filled(plain, 3, slice(0, 3)))
    wrap(("full",), lambda plain: _filled(plain, 2, slice(1, 2)))
    for name, place in _WITH_DTYPE.items():
        wrap((name,), lambda plain, place=place: _with_dtype(plain, place))
    wrap(_OF_VALUES.split(), _of_values)
    wrap(_COUNTS.split(), _counting)
    for name, function in made.items():
        setattr(np, name, _named(function, _plain[name]))
    for name in ("mgrid", "ogrid", "r_", "c_"):
        setattr(np, name, _Grid(getattr(np, name)))
    for name in _ARITHMETIC.split():
        if isinstance(getattr(np, name, None), np.ufunc):
            setattr(np, name, _Arithmetic(_plain[name]))


# ---- methods -------------------------------------------------------------------------------------------------------
def _type_dict(kind):
    """The dict behind a built-in type's read-only view."""
    return next(one for one in gc.get_referents(kind.__dict__) if isinstance(one, dict))


def _methods():
    for kind in (np.ndarray, np.generic):
        names = _type_dict(kind)

        def wrap(name, make, names=names):
            if name in names:
                names[name] = _named(make(names[name]), names[name])

        wrap("astype", lambda plain: _with_dtype(plain, 1))
        wrap("repeat", _pointing)
        for name, place in (("cumsum", 2), ("cumprod", 2), ("trace", 4)):
            wrap(name, lambda plain, place=place: _with_dtype(_adding(plain, place), place))
        for name in _COUNT_METHODS.split():
            wrap(name, _counting)


def _random():
    """The functions of numpy.random that give integers: 64 bits, like those of a Generator."""
    module = np.random
    for name in _RANDOM.split():
        plain = getattr(module, name, None)
        if plain is None:
            continue
        made = _counting(plain)
        if name == "randint":
            made = _randint(plain)
        setattr(module, name, _named(made, plain))


def _randint(plain):
    def randint(low, high=None, size=None, dtype=None):
        return plain(low, high, size, np.int64 if dtype is None else _dtype(dtype))

    return randint


def _pandas():
    """pandas turns a dtype argument into a dtype in one function; its users hold it by name."""
    from pandas.core.dtypes import common  # noqa: PLC0415 - the same

    plain = common.pandas_dtype

    def pandas_dtype(dtype):
        return plain(_dtype(dtype))

    functools.update_wrapper(pandas_dtype, plain)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "pandas" and getattr(module, "pandas_dtype", None) is plain:
            module.pandas_dtype = pandas_dtype


def begin():
    """Right after numpy was imported: ndarray.sum and .prod look two functions up at their first use, and keep them."""
    global np  # noqa: PLW0603 - the same
    import numpy  # noqa: ICN001, PLC0415 - it is in one image set only

    np = numpy
    module = np._core._methods

    def widened(plain):
        def reduce(a, axis=None, dtype=None, out=None, *rest, **named):
            if dtype is None and out is None:
                dtype = _sum_dtype(a.dtype)
            return plain(a, axis, _dtype(dtype), out, *rest, **named)

        return reduce

    module._sum, module._prod = widened(module._sum), widened(module._prod)


def settle():
    """Replace the names; once, when the image is made, after everything was imported."""
    _DEFAULT.update({int: np.int64, "int": np.int64, "int_": np.int64, "uint": np.uint64})
    _functions()
    _methods()
    _random()
    np.int_, np.uint = np.int64, np.uint64
    if "pandas" in sys.modules:
        _pandas()
    clear = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache
    clear()
