"""Closed lists of names, as tables of words."""

from __future__ import annotations

from typing import Final

# ruff: noqa: SIM905 -- a table of words reads better than hundreds of quoted ones

# TeX commands that only print: a formula of others is shown as words.
COMMANDS: Final = frozenset(
    """
Delta Gamma Im Lambda Leftarrow Omega Phi Pi Psi Re Rightarrow Sigma Theta Upsilon Xi alpha angle approx ast bar
beta binom bmod cap cdot cdots chi circ cos cot csc cup ddot delta det dfrac displaystyle div dot dots ell emptyset
epsilon equiv eta exists exp forall frac gamma gcd ge geq hat hbar iff implies in inf infty int iota kappa lambda
land langle lceil ldots le left leftarrow leq lfloor lim limits ln lnot log lor mathbb mathbf mathcal mathit mathrm
max mid min mod mp mu nabla ne neg neq notin nu oint omega operatorname overline parallel partial perp phi pi pm
pmod prime prod propto psi qquad quad rangle rceil rfloor rho right rightarrow sec setminus sigma sim simeq sin sqrt
star subset subseteq sum sup tan tau tfrac theta tilde times to underline upsilon varepsilon varphi vec xi zeta
""".split()
)

# Info strings of code that some client draws or runs; shown as plain text.
DIAGRAMS: Final = frozenset(
    """
abc adoc latex tex asciimath blockdiag bpmn bytefield c4plantuml chart
chartjs d2 dbml ditaa dot echarts embed erd excalidraw
flow flowchart geojson graphviz gv htm html iframe katex markdown markmap math mathjax md mdx mermaid nomnoml nwdiag
pikchr plantuml plotly puml rst seq sequence smiles stl structurizr svg svgbob tikz topojson uml vega vega-lite
vegalite wavedrom xhtml
""".split()
)

# Attributes of a rebuilt SVG; the value is checked too.
SVG_ATTRIBUTES: Final = frozenset(
    """
aria-label clip-path clip-rule cx cy d dominant-baseline dx dy fill fill-opacity fill-rule font-family font-size
font-style font-weight fx fy gradientTransform gradientUnits height href id marker-end marker-mid marker-start
markerHeight markerWidth mask offset opacity orient patternTransform patternUnits points preserveAspectRatio r refX
refY role rotate rx ry spreadMethod stop-color stop-opacity stroke stroke-dasharray stroke-linecap stroke-linejoin
stroke-opacity stroke-width text-anchor transform version viewBox width x x1 x2 y y1 y2
""".split()
)

# Elements of a rebuilt SVG.
SVG_TAGS: Final = frozenset(
    """
circle clipPath defs desc ellipse g line linearGradient marker mask path pattern polygon polyline radialGradient
rect stop svg symbol text title tspan use
""".split()
)

# Top-level domains that are file endings first: `setup.py` is a fine label.
ENDINGS: Final = frozenset(
    """
as bz cab cc cpp cs cv db do gd gz hs java js kt la lua md mk ml mm mo mov mp ms nc pl pm ps py rs sc sh so st sv tf
ts vi vm zip
""".split()
)

# Top-level domains that are fields and methods first where programs are shown: `user.name`, `df.map(...)`.
FIELDS: Final = frozenset(
    """
all at build call cat click data date direct do domains download email events exchange fail foo global graphics group
id in info int is it jobs like link live map media menu mobile name network new news now one open page parts pay phone
photos pid pin place play plus post press property pub read report rest review room run safe save search secure
security select services show site space store stream style support systems tab team test to tools top total trade
video vote watch work zone
""".split()
)

# HTML elements with a place in the tree.
OTHER: Final = frozenset(
    """
blockquote caption col colgroup h1 h2 h3 h4 h5 h6 hr li ol pre table tbody td tfoot th thead tr ul
""".split()
)

# HTML elements of which, at most, the words stay or a span is made.
INLINES: Final = frozenset(
    """
a abbr acronym area b base bdi bdo big blink br button cite code data del dfn em font frame i image img input ins
isindex kbd keygen label link mark marquee meta meter nobr optgroup option output param picture plaintext progress q
rb rp rt rtc ruby s samp slot small source span strike strong sub sup time track tt u var wbr
""".split()
)

# HTML elements that hold blocks and mean nothing more here.
BLOCKS: Final = frozenset(
    """
address article aside body center dd details dialog div dl dt fieldset figcaption figure footer form header hgroup
html legend main menu nav p search section summary
""".split()
)

# HTML elements that go with their content.
DROPPED: Final = frozenset(
    """
applet audio canvas datalist embed frameset head iframe map math noembed noframes noscript object portal script
select style svg template textarea title video xmp
""".split()
)

# Tags of emitted HTML, for the second sanitiser.
OUTPUT_TAGS: Final = frozenset(
    """
a blockquote br code del em h1 h2 h3 h4 h5 h6 hr img li ol p pre strong table tbody td th thead tr ul
""".split()
)
