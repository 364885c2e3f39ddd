"""numpy's default integer on a 32-bit guest: the hazard, and that the run's own code does not meet it (ADR 0061)."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

pytest.importorskip("wasmtime", reason="the wasm extra is not installed")

from wasm_expressions import EXPRESSIONS, RESIDUE
from wasm_guest_fixtures import GuestRun

BATTERY = """
import io, warnings
import numpy as np
warnings.simplefilter("ignore")

def show(value):
    if isinstance(value, (tuple, list)):
        return [show(one) for one in value]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, np.generic):
        return [str(value.dtype), value.item()]
    return repr(value)

seen = {}
for line in EXPRESSIONS:
    try:
        seen[line] = show(eval(line))
    except Exception as error:
        seen[line] = type(error).__name__
"""


def natively(lines: list[str]) -> dict[str, Any]:
    names: dict[str, Any] = {"EXPRESSIONS": lines}
    with warnings.catch_warnings():
        exec(BATTERY, names)
    return json.loads(json.dumps(names["seen"]))  # type: ignore[no-any-return]


def in_the_guest(run: GuestRun, lines: list[str]) -> dict[str, Any]:
    seen = run(f"EXPRESSIONS = {lines!r}\n{BATTERY}\nseen", cap=1 << 20)
    assert seen.error is None, seen.error
    return dict(seen.value)


def test_every_expression_gives_what_it_gives_natively(wasm_numbers: GuestRun) -> None:
    """170 ways to make, add up, multiply and cut integers: value and type, beside a native numpy in this process."""
    lines = EXPRESSIONS.strip().splitlines()
    want, got = natively(lines), in_the_guest(wasm_numbers, lines)
    assert len(lines) > 160
    differ = {line: (want[line], got[line]) for line in lines if got[line] != want[line]}
    assert differ == {}


def test_the_hazard_is_real(wasm_numbers: GuestRun) -> None:
    """Negative control: the guest's numpy as it was compiled, which code of other packages still calls, wraps."""
    source = (
        "import numpy as np\n"
        "[int(np.full.__wrapped__(10, 2**30).dtype.itemsize), int((np.array.__wrapped__([2**30]) * 4)[0])]"
    )
    assert wasm_numbers(source).value == [4, 0]
    assert natively(["np.array([2**30]) * 4"]) == {"np.array([2**30]) * 4": ["int64", [1 << 32]]}


def test_what_is_not_put_right_is_the_list_in_the_docs(wasm_numbers: GuestRun) -> None:
    got = in_the_guest(wasm_numbers, list(RESIDUE))
    narrow = {line: value for line, value in got.items() if "int32" in json.dumps(value) or value == "2147483647"}
    assert narrow.keys() == RESIDUE.keys(), got


def test_a_width_that_the_code_names_is_kept(wasm_numbers: GuestRun) -> None:
    source = (
        "import numpy as np\n"
        "[str(np.array([1], dtype=d).dtype)"
        " for d in ('int8', np.int16, np.int32, 'i4', np.uint8, 'uint32', np.float32)]"
    )
    assert wasm_numbers(source).value == ["int8", "int16", "int32", "int32", "uint8", "uint32", "float32"]


def test_pandas_counts_in_64_bits(wasm_numbers: GuestRun) -> None:
    source = """
import numpy as np, pandas as pd
df = pd.DataFrame({'k': [1, 2, 2], 'v': [2**30] * 3})
[int(df.v.sum()), df.v.cumsum().tolist(), (df.v * 4).tolist(), (df.v.astype(int) * 4).tolist(),
 str(df.v.astype('int').dtype),
 df.groupby('k').v.sum().tolist(), int((df.v.to_numpy() * 4).sum()), int(pd.Series(np.full(10, 2**30)).sum()),
 (pd.Series([2**30], dtype=int) * 4).tolist(),
 int(df.v.dot(np.array([4, 4, 4])))]
"""
    big = 2**30
    assert wasm_numbers(source).value == [
        3 * big, [big, 2 * big, 3 * big], [4 * big] * 3, [4 * big] * 3, "int64",
        [big, 2 * big], 12 * big, 10 * big, [4 * big], 12 * big,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "source",
    [
        "df.sort_values('c').a.tolist()",
        "df.merge(df, on='a').shape",
        "df.pivot_table(index='a', values='b', aggfunc='sum').b.tolist()",
        "df.describe().shape",
        "df.a.value_counts().to_dict()",
        "df.rank(numeric_only=True).a.tolist()",
        "pd.get_dummies(df.c).shape",
        "df.drop_duplicates('a').index.tolist()",
        "df.set_index('c').loc['y'].tolist()",
        "df[['a', 'b']].apply(np.abs).b.tolist()",
        "df[['a', 'b']].apply(np.sum).tolist()",
        "df.a.apply(np.square).tolist()",
        "pd.cut(df.a, 2).cat.codes.tolist()",
        "df.a.rolling(2).sum().tolist()[1:]",
        "pd.date_range('2024-01-01', periods=3).strftime('%d').tolist()",
        "df.melt().shape",
        "df.groupby('a').b.agg(['min', 'max']).shape",
        "pd.crosstab(df.a, df.c).to_numpy().tolist()",
        "df.sample(2, random_state=1).shape",
        "df.reindex([2, 0]).a.tolist()",
        "df.iloc[np.argsort([3, 1, 2])].a.tolist()",
        "df.iloc[np.array([0, 2])].a.tolist()",
        "df[np.array([True, False, True])].a.tolist()",
        "df.a.searchsorted(2)",
        "np.linalg.lstsq(np.array([[1, 1], [1, 2]]), np.array([1, 2]), rcond=None)[0].round(6).tolist()",
        "np.fft.fft([1, 2, 3]).real.round(6).tolist()",
        "df.to_json()",
        "pd.read_csv(io.StringIO(df.to_csv(index=False))).equals(df)",
    ],
)
def test_what_is_linked_in_still_works_with_it(wasm_numbers: GuestRun, source: str) -> None:
    """Rule 2 of guest/wasm/ints.py: compiled code gets the index arrays that it was compiled for."""
    frame = "df = pd.DataFrame({'a': [1, 2, 2], 'b': [3, 4, 5], 'c': list('xyz')})"
    seen = wasm_numbers(f"import io, numpy as np, pandas as pd\n{frame}\n{source}")
    assert seen.error is None, seen.error
    assert seen.text
