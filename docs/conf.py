"""Settings of the documentation."""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from importlib.metadata import version as version_of
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert

from fedipw.audit.schema import audit_schema, schema_markdown

project = "fedipw"
author = "The fedipw developers"
copyright = "The fedipw developers"  # Sphinx reads this name
version = release = version_of("fedipw")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "_static"]

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3

napoleon_google_docstring = False
napoleon_numpy_docstring = True

autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "member-order": "bysource",
    # written by scikit-learn's metadata routing, not by us
    "exclude-members": "set_fit_request, set_score_request",
}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True

html_math_renderer = "mathml"
html_theme = "furo"  # with search, and a light and a dark face
copybutton_prompt_text = "$ "  # commands are copied without prompt and without what they print
copybutton_exclude = ".linenos, .gp, .go"
html_static_path = ["_static"]
html_title = f"fedipw {release}"

# Equations have a number on the notation page; docstrings that cite one link to it.
_NOTATION = (Path(__file__).parent / "notation.md").read_text(encoding="utf-8")
_NUMBERED = frozenset(re.findall(r"^\(eq-([a-z]\d+)\)=$", _NOTATION, flags=re.MULTILINE))
_CITATION = re.compile(r"(?<!\\qquad )\(([SWCPDOLATEMN]\d{1,2})\)")
_FIELD = re.compile(r"^    (\w+): .*?  # (?!noqa|type:)(.+)$", flags=re.MULTILINE)


def _linked(found: re.Match[str]) -> str:
    number = found[1]
    known = number.lower() in _NUMBERED
    return f":ref:`({number}) <eq-{number.lower()}>`" if known else found[0]


def _field_comment(name: str) -> str | None:
    """Return the comment beside a dataclass field, where shapes are written."""
    owner, _, field = name.rpartition(".")
    module, _, cls = owner.rpartition(".")
    try:
        found = getattr(import_module(module), cls)
        source = inspect.getsource(found)
    except (ImportError, AttributeError, TypeError, OSError):
        return None
    if not hasattr(found, "__dataclass_fields__"):
        return None
    return dict(_FIELD.findall(source)).get(field)


def _on_docstring(_app, what, name, _obj, _options, lines):
    lines[:] = [_CITATION.sub(_linked, line) for line in lines]
    if what in {"attribute", "property", "data"} and any(lines):
        lines.insert(0, "")  # else napoleon takes words before a colon for a type
    if what == "attribute" and not any(lines):
        comment = _field_comment(name)
        if comment:
            lines[:] = ["", _escaped(comment), ""]


def _escaped(text: str) -> str:
    """Return plain text as reStructuredText says it."""
    return re.sub(r"([*`|_\\])", r"\\\1", text)


def _mathml(latex: str, display: str) -> str:
    """Return a formula as MathML: every browser draws it, without a network."""
    latex = re.sub(r"\\(begin|end)\{aligned\}", "", latex)
    if "&" in latex:
        latex = rf"\begin{{align*}}{latex}\end{{align*}}"
    return convert(latex, display=display)


def _inline_math(self, node):
    self.body.append(_mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def _block_math(self, node):
    self.body.append(f'<div class="math">{_mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def _write_audit_format():
    """Write the schema of audits and its table of fields, where they are not up to date."""
    texts = {
        "audit-schema.json": json.dumps(audit_schema(), indent=1) + "\n",
        "audit-fields.md": schema_markdown(),
    }
    for name, text in texts.items():
        path = Path(__file__).parent / "_static" / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app):
    _write_audit_format()
    app.add_html_math_renderer("mathml", (_inline_math, None), (_block_math, None))
    app.connect("autodoc-process-docstring", _on_docstring, priority=400)  # before napoleon
