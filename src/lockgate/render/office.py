"""Office files (docx, pptx, xlsx, odt and kin) are inspected, never mended: one that reaches out is refused.

Rule 1: the file is a ZIP; bounded in entries, bytes and ratio before a byte is inflated; a part is judged by what it
        holds and not by its name, since the directory of content types can call any name anything.
Rule 2: every part of markup is read by an XML parser, so that references, CDATA and prefixes cannot spell what a
        search for bytes would miss. One that does not parse refuses the file.
Rule 3: refused: an external relationship, a template or OLE object or altChunk, an external link, a field or formula
        that fetches, an action, a macro, a document type, an encrypted or oddly compressed or encoded part.
Sources: ECMA-376 parts 1 and 2 (relationships, TargetMode, fields), ODF 1.3 (xlink:href, table:formula).
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from typing import Final
from xml.parsers import expat

MAX_ENTRIES: Final = 2000
MAX_INFLATED: Final = 64 * 1024 * 1024
MAX_PART: Final = 16 * 1024 * 1024

_REL_TYPES: Final = frozenset(
    """
    attachedtemplate oleobject afchunk externallink externallinkpath frame subdocument activexcontrol control vbaproject
    package webextension customxmlremote connections querytable
    """.split()  # noqa: SIM905
)
_REMOTE: Final = re.compile(r"(?i)\s*(?:[a-z][a-z0-9+.-]*:|[/\\]{2}|\.\.[/\\])")
_FIELDS: Final = re.compile(
    r"(?i)\b(?:INCLUDEPICTURE|INCLUDETEXT|INCLUDE|LINK|DDEAUTO|DDE|IMPORT|DATABASE|RD|MACROBUTTON|HYPERLINK|AUTOTEXT)\b"
)
_STRING: Final = re.compile(r'"(?:[^"]++|"")*+"')
# Functions that fetch or run; another file in brackets before a sheet; a DDE channel; a file in ODF's notation.
_FETCHING: Final = re.compile(
    r"(?i)\b(?:WEBSERVICE|IMAGE|HYPERLINK|IMPORT\w+|RTD|CALL|REGISTER(?:\.ID)?|DDE|FILTERXML|EXEC|SQL\.REQUEST)\s*\("
    r"|'[^']*\[[^\[\]']*\][^']*'!|\[[^\[\]]*\][\w.$]*!|\w\|[^|!]*!|(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,31}:/|\\\\"
)
_FORMULAS: Final = frozenset(
    {"f", "formula", "formula1", "formula2", "definedName", "calculatedColumnFormula", "totalsRowFormula"}
)
_WORDS: Final = frozenset({"instrText", "delInstrText"})
_ACTIVE: Final = frozenset(
    """
    DataMashup altChunk dataSource dde-connection-decl dde-source ddeLink event-listener mailMerge oleLink script
    """.split()  # noqa: SIM905
)
_ACTION: Final = re.compile(r"(?i)ppaction://(?:program|macro|ole|hlinkfile|hlinkpres)")
_CONTENT: Final = re.compile(
    r"(?i)vbaproject|macroenabled|activex|oleobject|externallink|webextension|connections\+xml"
)
_PARTS: Final = re.compile(
    r"(?i)(?:vbaProject\.bin|activeX/|embeddings/|externalLinks/|\.bin\Z|macrosheets/|customUI|webextensions/|Scripts/|Basic/|"
    r"Object |connections\.xml|queryTables/|afchunk|\.mht|\.html?\Z|\.svg\Z|\.emf\Z|\.wmf\Z)"
)
_XML: Final = re.compile(r"(?i)\.(?:xml|rels|rdf|vml)\Z")
# Files inside the file that bring their own way out: ZIP, OLE, PE, RTF, a mail.
_INNER: Final = (b"PK", b"\xd0\xcf\x11\xe0", b"MZ", b"{\\rt", b"MIME-", b"From ", b"%PDF")
_MARKS: Final = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_ENCODINGS: Final = frozenset({"utf-8", "us-ascii", "utf-16"})


class _ReachesOutError(Exception):
    def __init__(self, reason: str, where: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.where = where[:300].encode("utf-8", "replace")


def refuse(data: bytes) -> tuple[str, bytes] | None:
    """Say why an office file may not leave and show where, or return None when nothing in it reaches out."""
    try:
        return _inspect(zipfile.ZipFile(io.BytesIO(data)))
    except _ReachesOutError as found:
        return (found.reason, found.where)
    except (
        expat.ExpatError,
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
        RuntimeError,
        LookupError,
        ValueError,
        EOFError,
        OSError,
    ):
        return ("office_unreadable", b"")


def _inspect(archive: zipfile.ZipFile) -> tuple[str, bytes] | None:
    entries = archive.infolist()
    if len(entries) > MAX_ENTRIES or sum(entry.file_size for entry in entries) > MAX_INFLATED:
        return ("office_too_large", b"")
    if len({entry.filename.casefold() for entry in entries}) != len(entries):
        return ("office_duplicate_part", b"")
    for entry in entries:
        name = entry.filename
        if entry.flag_bits & 1 or entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            return ("office_unreadable", b"")
        if ".." in name or name.startswith("/") or "\\" in name or "\0" in name:
            return ("office_bad_name", b"")
        if _PARTS.search(name):
            return ("office_active_part", name.encode("utf-8", "replace"))
        with archive.open(entry) as part:
            body = part.read(MAX_PART + 1)
        if body.startswith(_INNER):
            return ("office_active_part", name.encode("utf-8", "replace"))
        if not _XML.search(name) and not _is_markup(body):
            continue
        if len(body) > MAX_PART:
            return ("office_too_large", b"")
        if body.strip():
            _Part(rels=name.lower().endswith(".rels")).read(body)
    return None


def _is_markup(body: bytes) -> bool:
    return body.startswith(_MARKS) or body[:256].lstrip(b"\0 \t\r\n")[:1] == b"<"


class _Part:
    """One pass over one part; raises at the first thing that reaches out."""

    def __init__(self, *, rels: bool) -> None:
        self.rels = rels
        self.open: list[str] = []
        self.held: list[str] = []  # the words of the open formula or field
        self.fields: list[str] = []  # an instruction may be split over runs

    def read(self, body: bytes) -> None:
        parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        parser.XmlDeclHandler = self._declaration
        parser.StartDoctypeDeclHandler = self._doctype
        parser.ProcessingInstructionHandler = self._instruction
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._data
        parser.Parse(body, True)
        instruction = "".join(self.fields)
        if _FIELDS.search(instruction):
            raise _ReachesOutError("office_field", instruction)

    def _declaration(self, version: str, encoding: str | None, standalone: int) -> None:
        del version, standalone
        if encoding is not None and encoding.lower() not in _ENCODINGS:
            raise _ReachesOutError("office_unreadable", "")

    def _doctype(self, name: str, system: str | None, public: str | None, internal: object) -> None:
        del name, public, internal
        raise _ReachesOutError("office_doctype", system or "")

    def _instruction(self, target: str, data: str) -> None:
        if target not in {"mso-application", "mso-contentType"}:
            raise _ReachesOutError("office_doctype", data)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        local = tag.rpartition(":")[2]
        self.open.append(local)
        if local in _ACTIVE:
            raise _ReachesOutError("office_active_part", " ".join(attributes.values()))
        for name, value in attributes.items():
            if name != "xmlns" and not name.startswith("xmlns:"):
                self._attribute(local, name.rpartition(":")[2], value)
        if local in _FORMULAS or local in _WORDS:
            self.held.clear()

    def _attribute(self, local: str, name: str, value: str) -> None:
        remote = _REMOTE.match(value) is not None
        if self.rels:
            if (
                (name == "TargetMode" and value.strip().lower() == "external")
                or (name == "Target" and remote and not value.startswith("../"))
                or (name == "Type" and value.rpartition("/")[2].lower() in _REL_TYPES)
            ):
                raise _ReachesOutError("office_external", value)
        elif name in {"href", "src"} and remote:
            raise _ReachesOutError("office_external", value)
        elif name in {"schemaLocation", "noNamespaceSchemaLocation"}:
            raise _ReachesOutError("office_doctype", value)
        elif (name == "action" and _ACTION.match(value)) or (name == "ContentType" and _CONTENT.search(value)):
            raise _ReachesOutError("office_active_part", value)
        elif name == "instr" and _FIELDS.search(value):
            raise _ReachesOutError("office_field", value)
        elif name == "formula" or (local == "definedName" and name == "refersTo"):
            _formula(value)

    def _end(self, tag: str) -> None:
        local = self.open.pop()
        del tag
        if local in _WORDS:
            words = "".join(self.held)
            self.fields.append(words)
            if _FIELDS.search(words):
                raise _ReachesOutError("office_field", words)
        elif local in _FORMULAS:
            _formula("".join(self.held))

    def _data(self, data: str) -> None:
        if self.open and (self.open[-1] in _FORMULAS or self.open[-1] in _WORDS):
            self.held.append(data)


def _formula(text: str) -> None:
    if _FETCHING.search(_STRING.sub('""', text)):
        raise _ReachesOutError("office_formula", text)
