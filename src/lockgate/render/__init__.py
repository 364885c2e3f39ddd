"""The render guard: what a person is shown is an exit too (E5). Pure: no clock, no I/O."""

from lockgate.render.guard import Guard
from lockgate.render.headers import headers
from lockgate.render.policy import Denial, Provenance, Rendered, RenderPolicy
from lockgate.render.stream import Stream

__all__ = ["Denial", "Guard", "Provenance", "RenderPolicy", "Rendered", "Stream", "headers"]
