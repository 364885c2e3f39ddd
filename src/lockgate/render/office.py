"""Office files (docx, pptx, xlsx, odt and kin) are inspected, never mended: one that reaches out is refused.

Rule 1: the file is a ZIP whose directory and local headers agree in the names this rule looks at; bounded in entries,
        bytes and ratio before a byte is inflated.
Rule 2: refused: an external relationship, a template or OLE object or altChunk, an external link, a field or formula
        that fetches, a macro, a document type, an encrypted or oddly compressed part.
Sources: ECMA-376 parts 1 and 2 (relationships, TargetMode), ODF 1.3 (xlink:href).
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from typing import Final

MAX_ENTRIES: Final = 2000
MAX_INFLATED: Final = 64 * 1024 * 1024
MAX_PART: Final = 16 * 1024 * 1024

_EXTERNAL: Final = re.compile(rb"(?i)TargetMode\s*=\s*[\"']\s*External")
_REL_TYPES: Final = re.compile(
    rb"(?i)(?:attachedTemplate|oleObject|aFChunk|externalLink|frame|subDocument|activeXControl|control|vbaProject|"
    rb"externalLinkPath|package|webExtension|customXmlRemote|connections|queryTable)[\"']"
)
_REMOTE_TARGET: Final = re.compile(rb"(?i)\bTarget\s*=\s*[\"']\s*(?:[a-z][a-z0-9+.-]*:|//|\\\\|/\\|&#)")
_ODF_REMOTE: Final = re.compile(rb"(?i)xlink:href\s*=\s*[\"']\s*(?:[a-z][a-z0-9+.-]*:|//|\\\\|\.\./|&#)")
_DOCTYPE: Final = re.compile(rb"<!\s*(?:DOCTYPE|ENTITY)|<\?xml-stylesheet|schemaLocation\s*=", re.IGNORECASE)
_FIELDS: Final = re.compile(
    rb"(?i)\b(?:INCLUDEPICTURE|INCLUDETEXT|INCLUDE|LINK|DDEAUTO|DDE|IMPORT|DATABASE|RD|MACROBUTTON|HYPERLINK|AUTOTEXT)\b"
)
_FIELD_TEXT: Final = re.compile(rb"(?is)<w:instrText[^>]*>(.*?)</w:instrText>|w:instr\s*=\s*[\"']([^\"']*)")
_FORMULA: Final = re.compile(rb"(?is)<(?:\w+:)?f(?:\s[^>]*)?>(.*?)</(?:\w+:)?f>|table:formula\s*=\s*\"([^\"]*)\"")
_FETCHING: Final = re.compile(
    rb"(?i)\b(?:WEBSERVICE|IMAGE|HYPERLINK|IMPORT\w+|RTD|CALL|REGISTER(?:\.ID)?|DDE|FILTERXML|EXEC|SQL\.REQUEST)\s*\(|\|[^|]*!|\[[^\]]*\]"
)
_PARTS: Final = re.compile(
    r"(?i)(?:vbaProject\.bin|activeX/|embeddings/|externalLinks/|\.bin\Z|macrosheets/|customUI|webextensions/|Scripts/|Basic/|"
    r"Object |connections\.xml|queryTables/|afchunk|\.mht|\.html?\Z|\.svg\Z|\.emf\Z|\.wmf\Z)"
)
_XML: Final = re.compile(r"(?i)\.(?:xml|rels|rdf|vml)\Z")


def refuse(data: bytes) -> tuple[str, bytes] | None:
    """Say why an office file may not leave and show where, or return None when nothing in it reaches out."""
    try:
        return _inspect(zipfile.ZipFile(io.BytesIO(data)))
    except (
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
        RuntimeError,
        ValueError,
        EOFError,
        OSError,
        UnicodeError,
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
        if not _XML.search(name):
            continue
        if entry.file_size > MAX_PART:
            return ("office_too_large", b"")
        with archive.open(entry) as part:
            body = part.read(MAX_PART + 1)
        found = _part(name, body)
        if found is not None:
            return found
    return None


def _part(name: str, raw: bytes) -> tuple[str, bytes] | None:
    body = _utf8(raw)
    if body is None:
        return ("office_unreadable", b"")
    if match := _DOCTYPE.search(body):
        return ("office_doctype", body[match.start() : match.start() + 200])
    if name.lower().endswith(".rels"):
        # Character references could spell External: none belongs in a relationship's attributes but the five named.
        if re.search(rb"&(?!(?:amp|lt|gt|quot|apos);)", body):
            return ("office_external", b"")
        for pattern in (_EXTERNAL, _REL_TYPES, _REMOTE_TARGET):
            if match := pattern.search(body):
                return ("office_external", _element(body, match.start()))
        return None
    if match := _ODF_REMOTE.search(body):
        return ("office_external", body[match.start() : match.start() + 300])
    for found in _FIELD_TEXT.finditer(body):
        if _FIELDS.search(found[1] or found[2] or b""):
            return ("office_field", (found[1] or found[2])[:300])
    # A field's instruction may be split over runs.
    joined = b"".join(found[1] or b"" for found in _FIELD_TEXT.finditer(body))
    if _FIELDS.search(joined):
        return ("office_field", joined[:300])
    for found in _FORMULA.finditer(body):
        if _FETCHING.search(found[1] or found[2] or b""):
            return ("office_formula", (found[1] or found[2])[:300])
    return None


def _utf8(raw: bytes) -> bytes | None:
    if raw[:2] in {b"\xff\xfe", b"\xfe\xff"}:
        return raw.decode("utf-16").encode()
    if b"\0" in raw:
        return None
    head = re.match(rb"(?:\xef\xbb\xbf)?\s*<\?xml[^>]*encoding\s*=\s*[\"']([A-Za-z0-9._-]+)", raw)
    if head and head[1].lower() not in {b"utf-8", b"us-ascii"}:
        return None
    return raw


def _element(body: bytes, at: int) -> bytes:
    start = body.rfind(b"<", 0, at)
    end = body.find(b">", at)
    return body[max(start, 0) : end + 1][:400]
