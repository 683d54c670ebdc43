"""The schema of audits is the code's, complete, and what the documentation holds."""

import json
from pathlib import Path

import jsonschema
import pytest

from fedipw.audit.schema import MEANINGS, audit_schema, schema_markdown
from fedipw.audit.values import ADAPTER
from fedipw.audit.verdict import judged
from pages.audit_example import example
from pages.audit_variants import bare, hostile, totals_only, without_rounds

from .handmade import BIASED

STATIC = Path(__file__).parents[2] / "docs" / "_static"


def test_every_field_of_every_object_has_a_meaning_and_no_other_has() -> None:
    made = ADAPTER.json_schema(mode="serialization")
    shapes = {"Audit": made, **made["$defs"]}
    objects = {
        name: {*shape["properties"]} for name, shape in shapes.items() if "enum" not in shape
    }
    assert {name: {*meanings} for name, meanings in MEANINGS.items()} == objects


def test_the_files_of_the_documentation_are_the_codes() -> None:
    """Building the documentation writes them anew."""
    assert json.loads((STATIC / "audit-schema.json").read_text()) == audit_schema()
    assert (STATIC / "audit-fields.md").read_text() == schema_markdown()


def test_audits_of_all_kinds_are_valid() -> None:
    check = jsonschema.Draft202012Validator(audit_schema())
    for audit in (example(), bare(), hostile(), totals_only(), without_rounds(), judged(BIASED)):
        check.validate(audit.to_json())


@pytest.mark.parametrize("place", ["sizes", "stages", "verdict"])
def test_a_field_that_is_gone_is_not_valid(place: str) -> None:
    made = example().to_json()
    part = made[place][0] if isinstance(made[place], list) else made[place]
    part.pop(next(iter(part)))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(audit_schema()).validate(made)
