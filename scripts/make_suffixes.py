"""Write src/lockgate/policy/suffix_data.py from the Public Suffix List of the `publicsuffixlist` distribution.

Run it after an upgrade of that development dependency; `--check` says whether the module is what it would write now.
"""

from __future__ import annotations

import sys
import textwrap
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import idna

TARGET = Path(__file__).parent.parent / "src/lockgate/policy/suffix_data.py"
HEAD = '''"""The Public Suffix List, both sections, as A-labels. Written by scripts/make_suffixes.py; do not edit.

The list is subject to the Mozilla Public License, version 2.0 (https://mozilla.org/MPL/2.0/).
{version}
A rule is `suffix`, `*.suffix` or `!name`; rules are separated by white space.
"""

from __future__ import annotations

from typing import Final

'''


def main() -> int:
    """Write or check the module."""
    text = (files("publicsuffixlist") / "public_suffix_list.dat").read_text("utf-8")
    sections: dict[str, list[str]] = {"ICANN": [], "PRIVATE": []}
    section, dated = "", ""
    for line in text.splitlines():
        if line.startswith("// VERSION"):
            dated = line.removeprefix("// ")
        if line.startswith("// ===BEGIN"):
            section = "ICANN" if "ICANN" in line else "PRIVATE"
        rule = line.split()[0] if line.strip() and not line.startswith("//") else ""
        if rule:
            sections[section].append(ascii_rule(rule))
    made = HEAD.format(version=f"Source: publicsuffix.org, {dated}, by publicsuffixlist {version('publicsuffixlist')}.")
    for name, rules in sections.items():
        body = textwrap.fill(" ".join(sorted(rules)), 118, break_long_words=False, break_on_hyphens=False)
        made += f'{name}: Final = """\n{body}\n"""\n'
    if "--check" in sys.argv:
        return 0 if TARGET.read_text("utf-8") == made else 1
    TARGET.write_text(made, "utf-8")
    return 0


def ascii_rule(rule: str) -> str:
    """Return a rule with every label as an A-label."""
    mark = "!" if rule.startswith("!") else ""
    labels = rule.removeprefix("!").split(".")
    return mark + ".".join(one if one.isascii() else idna.alabel(one).decode() for one in labels)


if __name__ == "__main__":
    sys.exit(main())
