"""Exported text files that programs fetch from while they open them: SVG, XML, JSON, YAML, notebooks.

Rule 1: SVG is rebuilt from shapes and words; the only reference is to an id inside the file.
Rule 2: XML keeps elements and words, never a DOCTYPE, entity, processing instruction, include or schema location.
Rule 3: JSON and YAML keep their data and lose what an editor fetches for them (`$schema`, a remote `$ref`).
Rule 4: a notebook keeps text and PNG outputs; Markdown cells go through markdown().
Input that is not what it should be becomes words (the caller falls back to text()).
"""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Callable
from typing import Any, Final
from xml.parsers import expat

from lockgate.render.bounds import MAX_DEPTH, TooComplex
from lockgate.render.tables import SVG_ATTRIBUTES, SVG_TAGS
from lockgate.render.visible import clean, defang

Report = Callable[[str, str], None]  # (what, the value that held a destination)

_MAX_USES: Final = 16  # copies of copies multiply: sixteen make a few hundred shapes at most
_SVG_NS: Final = "http://www.w3.org/2000/svg"
_LOCAL_URL: Final = re.compile(r"url\(#[A-Za-z][\w.-]{0,63}\)\Z")
_LOCAL_REF: Final = re.compile(r"#[A-Za-z][\w.-]{0,63}\Z")
_ATTRIBUTE: Final = re.compile(r"[\w .,#%()+\-]*\Z")
_NAME: Final = re.compile(r"[A-Za-z_][\w.-]{0,127}\Z")
_FETCHES: Final = re.compile(r"(?i)(?:[a-z][a-z0-9+.-]*:|//|\\\\|url\s*\(|@import)")
_CHARS: Final = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;", ord('"'): "&quot;", ord("\r"): "&#13;"}
_BAD_XML: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_SCHEMA_KEYS: Final = frozenset(
    {"$schema", "$id", "$dynamicref", "$recursiveref", "$include", "$import", "@context", "externaldocs"}
)
_VALUE: Final = r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s,}\]]+)"
# Whole lines that an editor or a parser reads: a comment that names a schema, a directive, a key of the block style.
_YAML_FETCH: Final = re.compile(
    r"(?im)^[ \t]*(?:#.*(?:yaml-language-server|\$?schema[ \t]*[:=]).*|%TAG.*|"
    r"[\"']?\$(?:schema|id)[\"']?[ \t]*:[ \t]*\S.*)$"
)
_YAML_KEY: Final = re.compile(rf"(?i)[\"']?\$(?:schema|id)[\"']?[ \t]*:[ \t]+{_VALUE}[ \t]*,?")
_YAML_REF: Final = re.compile(rf"(?i)([\"']?\$ref[\"']?[ \t]*:[ \t]+)(?![\"']?#){_VALUE}")
_YAML_TAG: Final = re.compile(r"(?m)(^|[\s\[{,:-])!(?:<[^>\s]*>|[\w!/.:%+-]+)")
# What is left of these is spelt in a way that only a YAML parser understands: over lines, escaped, as a complex key.
_YAML_LEFT: Final = re.compile(
    r"(?i)\$(?:schema|id)\b[\"']?[ \t]*(?::|$)|\$ref\b[\"']?[ \t]*(?!:[ \t]+[\"']?#)|\\(?:x|u00|U000000)24",
    re.MULTILINE,
)


def svg(text: str, report: Report) -> str:
    """Rebuild an SVG image.

    Raises:
        ValueError: it is no well-formed XML, or declares a document type.

    """
    return _Xml(report, svg=True).rebuild(text)


def xml(text: str, report: Report) -> str:
    """Rebuild an XML document without anything that a parser would fetch.

    Raises:
        ValueError: it is not well-formed.

    """
    return _Xml(report, svg=False).rebuild(text)


class _Xml:
    """A SAX pass by expat, which resolves nothing external; entities are not even declared."""

    def __init__(self, report: Report, *, svg: bool) -> None:
        self.report = report
        self.svg = svg
        self.out: list[str] = []
        self.depth = 0
        self.skip = 0
        self.open: list[str] = []
        self.uses = 0

    def rebuild(self, text: str) -> str:
        parser = expat.ParserCreate()
        parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        parser.StartDoctypeDeclHandler = self._doctype
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._data
        parser.ProcessingInstructionHandler = self._instruction
        parser.EntityDeclHandler = self._entity
        parser.buffer_text = True
        try:
            parser.Parse(text.encode("utf-8", "replace"), True)
        except expat.ExpatError as error:
            raise ValueError(f"not well-formed: {expat.errors.messages[error.code]}") from None
        return "".join(self.out) + "\n"

    def _doctype(self, name: str, system: str | None, public: str | None, internal: Any) -> None:
        del name, public, internal
        self.report("xml_doctype", system or "")
        raise ValueError("it declares a document type")

    def _entity(self, *args: Any) -> None:
        del args
        raise ValueError("it declares an entity")

    def _instruction(self, target: str, data: str) -> None:
        self.report("xml_instruction", f"{target} {data}")

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH * 2:
            raise TooComplex
        local = tag.rpartition(":")[2]
        wanted = (
            local in SVG_TAGS if self.svg else (_NAME.match(local) is not None and local not in {"include", "fallback"})
        )
        if self.svg and local == "use":
            self.uses += 1
            wanted = self.uses <= _MAX_USES
        if self.skip or not wanted:
            if not self.skip:
                self._report(tag, attributes)
            self.skip += 1
            return
        parts = [local if self.svg else tag.replace(":", "_")]
        if self.svg and local == "svg" and not self.open:
            parts.append(f'xmlns="{_SVG_NS}"')
        for name, value in attributes.items():
            if name == "xmlns" or name.startswith("xmlns:"):
                continue
            kept = self._attribute(name, value)
            if kept is None:
                if _FETCHES.search(value) or name.startswith("on"):
                    self.report(f"{local}[{name}]", value)
                continue
            parts.append(f'{kept}="{_escape(value)}"')
        self.open.append(parts[0])
        self.out.append(f"<{' '.join(parts)}>")

    def _attribute(self, name: str, value: str) -> str | None:
        local = name.rpartition(":")[2]
        if not self.svg:
            fetches = local in {
                "schemaLocation",
                "noNamespaceSchemaLocation",
                "base",
                "href",
                "src",
                "location",
                "source",
                "url",
                "uri",
            }
            return None if _NAME.match(local) is None or fetches or _FETCHES.search(value) else name.replace(":", "_")
        if local not in SVG_ATTRIBUTES:
            return None
        if local == "href":
            return "href" if _LOCAL_REF.match(value) else None
        if local in {"aria-label", "font-family"}:
            return local if _ATTRIBUTE.match(value) and "(" not in value else None
        if "url" in value.lower() or "(" in value:
            plain_call = re.fullmatch(
                r"(?:\s*(?:translate|rotate|scale|skewX|skewY|matrix|rgb|rgba|hsl|hsla)\([0-9eE.,%\s+-]*\)\s*,?)+",
                value,
            )
            return local if _LOCAL_URL.match(value) or plain_call else None
        return local if _ATTRIBUTE.match(value) else None

    def _report(self, tag: str, attributes: dict[str, str]) -> None:
        values = [value for value in attributes.values() if _FETCHES.search(value)]
        for value in values or [""]:
            self.report(tag, value)

    def _end(self, tag: str) -> None:
        del tag
        self.depth -= 1
        if self.skip:
            self.skip -= 1
        else:
            self.out.append(f"</{self.open.pop()}>")

    def _data(self, data: str) -> None:
        if self.skip:
            return
        if self.svg and self.open and self.open[-1] not in {"text", "tspan", "title", "desc"}:
            data = "".join(c for c in data if c.isspace())
        self.out.append(_escape(clean(data)[0]))


def _escape(text: str) -> str:
    return _BAD_XML.sub("\ufffd", text).translate(_CHARS)


def json_file(text: str, report: Report) -> str:
    """Return a JSON document without `$schema` and remote references.

    Raises:
        ValueError: it is no JSON (RFC 8259 has no NaN), or nests too deep.

    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    return json.dumps(_json(data, report, 0), ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def _json(node: Any, report: Report, depth: int) -> Any:
    if depth > MAX_DEPTH * 4:
        raise ValueError("it nests too deep")
    if isinstance(node, list):
        return [_json(one, report, depth + 1) for one in node]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(node, dict):
        out: dict[str, Any] = {}
        for key, value in node.items():  # pyright: ignore[reportUnknownVariableType]
            name = str(key)  # pyright: ignore[reportUnknownArgumentType]
            remote = name.lower() == "$ref" and not (isinstance(value, str) and value.startswith("#"))
            fetched = name.lower() == "extends" and isinstance(value, str) and _FETCHES.match(value)
            if name.lower() in _SCHEMA_KEYS or remote or fetched:
                report(name, str(value))  # pyright: ignore[reportUnknownArgumentType]
                continue
            out[clean(name)[0]] = _json(value, report, depth + 1)
        return out
    return clean(node)[0] if isinstance(node, str) else node


def yaml_file(text: str, report: Report) -> str:
    """Return YAML text without schema comments, schema keys, remote references and tags.

    Raises:
        ValueError: one of them is written in a way that cannot be taken out by the line.

    """
    text = clean(text.replace("\r\n", "\n"))[0]
    for pattern, what, instead in (
        (_YAML_FETCH, "yaml_schema", ""),
        (_YAML_KEY, "yaml_schema", ""),
        (_YAML_REF, "$ref", r"\1'#'"),
        (_YAML_TAG, "yaml_tag", r"\1"),
    ):
        for match in pattern.finditer(text):
            report(what, match[0])
        text = pattern.sub(instead, text)
    if _YAML_LEFT.search(text):
        raise ValueError("a schema or a reference is written in a way that only a YAML parser understands")
    return text


def notebook(text: str, report: Report, markdown: Callable[[str], str]) -> str:
    """Return a Jupyter notebook (nbformat 4) with text and PNG outputs only.

    Raises:
        ValueError: it is no notebook.

    """
    data = json.loads(text)
    if not isinstance(data, dict) or not isinstance(data.get("cells"), list):  # pyright: ignore[reportUnknownMemberType]
        raise ValueError("it has no cells")  # noqa: TRY004 -- the file is wrong, not the caller
    cells = [_cell(cell, report, markdown) for cell in data["cells"] if isinstance(cell, dict)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    made: dict[str, Any] = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}
    return json.dumps(made, ensure_ascii=False, indent=1) + "\n"


def _cell(cell: dict[str, Any], report: Report, markdown: Callable[[str], str]) -> dict[str, Any]:
    kind = cell.get("cell_type")
    source = _joined(cell.get("source"))
    if cell.get("attachments"):
        report("attachments", "")
    if kind == "markdown":
        return {"cell_type": "markdown", "metadata": {}, "source": markdown(source)}
    if kind != "code":
        # Exporters copy a raw cell into the page as it is; a fence is longer than any run of backticks in it.
        ticks = "`" * max(3, max(map(len, re.findall("`+", source)), default=0) + 1)
        return {"cell_type": "markdown", "metadata": {}, "source": f"{ticks}\n{clean(source)[0]}\n{ticks}\n"}
    outputs = [made for one in cell.get("outputs") or [] if isinstance(one, dict) and (made := _output(one, report))]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return {
        "cell_type": "code",
        "metadata": {},
        "execution_count": None,
        "source": clean(source)[0],
        "outputs": outputs,
    }


def _output(output: dict[str, Any], report: Report) -> dict[str, Any] | None:
    kind = output.get("output_type")
    if kind == "stream":
        return {"output_type": "stream", "name": "stdout", "text": _shown(_joined(output.get("text")))}
    if kind == "error":
        return {
            "output_type": "stream",
            "name": "stderr",
            "text": _shown(f"{output.get('ename')}: {output.get('evalue')}\n"),
        }
    data: dict[str, Any] = output.get("data") or {}
    kept: dict[str, Any] = {}
    for mime, value in data.items():
        body = _joined(value)
        if mime == "text/plain":
            kept[mime] = _shown(body)
        elif mime == "image/png" and _is_png(body):
            kept[mime] = body
        else:
            report(mime, body)
    return {"output_type": "display_data", "metadata": {}, "data": kept} if kept else None


def _shown(text: str) -> str:
    """Words of an output: a notebook's page makes links of what looks like one."""
    return defang(clean(text)[0])


def _joined(value: Any) -> str:
    if isinstance(value, list):
        return "".join(str(part) for part in value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return str(value) if value is not None else ""


def _is_png(body: str) -> bool:
    try:
        return binascii.a2b_base64(body.encode("ascii", "replace"), strict_mode=False).startswith(b"\x89PNG\r\n\x1a\n")
    except binascii.Error:
        return False
