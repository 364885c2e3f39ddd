"""Office files for cases that describe one in words.

Rule 1: what is described is built for real, so that the inspection is judged and not the description.
"""

from __future__ import annotations

import io
import re
import zipfile


def office_sample(text: str) -> bytes:
    """Build a small docx holding what `text` describes: a relationship, a field, or a formula."""
    lower = text.lower()
    found = re.search(r"[a-z]+:[^\s\"'<>]+|\\\\\\\\[^\s\"'<>]+", text)
    target = (found[0] if found else "media/a.png").replace("&", "&amp;")
    kinds = {
        "attachedtemplate": "attachedTemplate",
        "template": "attachedTemplate",
        "ole": "oleObject",
        "altchunk": "aFChunk",
    }
    kind = next((value for word, value in kinds.items() if word in lower), "image")
    mode = ' TargetMode="External"' if "external" in lower or found else ""
    field = re.search(r"(?i)\b(INCLUDEPICTURE|INCLUDETEXT|HYPERLINK|LINK|DDEAUTO|DDE|IMPORT)\b", text)
    body = f"<w:instrText>{field[0]} x</w:instrText>" if field else "<w:t>words</w:t>"
    ns = "http://schemas.openxmlformats.org"
    rels = (
        f'<Relationships xmlns="{ns}/package/2006/relationships"><Relationship Id="r1" '
        f'Type="{ns}/officeDocument/2006/relationships/{kind}" Target="{target}"{mode}/></Relationships>'
    )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("[Content_Types].xml", f'<Types xmlns="{ns}/package/2006/content-types"/>')
        archive.writestr(
            "word/document.xml", f'<w:document xmlns:w="{ns}/wordprocessingml/2006/main">{body}</w:document>'
        )
        archive.writestr("word/_rels/document.xml.rels", rels)
        if "macro" in lower or "vba" in lower:
            archive.writestr("word/vbaProject.bin", b"\0")
    return out.getvalue()
