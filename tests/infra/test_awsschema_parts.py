"""The parts of the stand-in provider that need no Terraform: bindings, values, policies, the package."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from tests.infra.awsschema import bindings, data_sources, extract, package, resources, values
from tests.infra.needs import lacking

BINDING = """
function thingRuleToHclTerraform(struct) {
    const attrs = {
        days: {
            value: cdktn.numberToHclTerraform(struct.days),
            isBlock: false,
            type: "simple",
            storageClassType: "number",
        },
    };
}
class ThingRuleOutputReference extends cdktn.ComplexObject {
    // days - computed: false, optional: false, required: true
    get days() {
        return this.getNumberAttribute('days');
    }
}
class ThingRuleList extends cdktn.ComplexList {
}
class Thing extends cdktn.TerraformResource {
    // arn - computed: true, optional: false, required: false
    get arn() {
        return this.getStringAttribute('arn');
    }
    // secret_wo - computed: false, optional: true, required: false
    get secretWo() {
        return this.getStringAttribute('secret_wo');
    }
    // zones - computed: true, optional: false, required: false
    get zones() {
        return cdktn.Fn.tolist(this.getListAttribute('zones'));
    }
    // rule - computed: false, optional: false, required: true
    _rule = new ThingRuleList(this, "rule", true);
    // tags_all - computed: true, optional: true, required: false
    _tagsAll = new cdktn.StringMap(this, "tags_all");
    synthesizeHclAttributes() {
        const attrs = {
            secret_wo: {
                value: this.markWriteOnlyAttribute(cdktn.stringToHclTerraform(this._secretWo)),
                isBlock: false,
                type: "simple",
                storageClassType: "string",
            },
        };
    }
}
"""
THING = {
    "attributes": {
        "arn": {"type": "string", "computed": True},
        "secret_wo": {"type": "string", "optional": True, "write_only": True},
        "zones": {"type": ["set", "string"], "computed": True},
        "tags_all": {"type": ["map", "string"], "computed": True, "optional": True},
    },
    "block_types": {
        "rule": {
            "nesting_mode": "set",
            "min_items": 1,
            "block": {"attributes": {"days": {"type": "number", "required": True}}, "block_types": {}},
        }
    },
}


def test_a_binding_is_read() -> None:
    assert bindings.block_of(BINDING, "aws_thing") == THING


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("getNumberAttribute", "getOtherAttribute", "days: getOtherAttribute"),
        ("StringMap(", "TokenMap(", "tags_all: cdktn.TokenMap"),
        ("class ThingRuleOutputReference", "class Renamed", "no class ThingRuleOutputReference"),
        ("cdktn.TerraformResource", "cdktn.Other", "0 main classes"),
    ],
)
def test_a_binding_of_another_shape_is_refused(old: str, new: str, words: str) -> None:
    with pytest.raises(bindings.UnknownShape, match=words):
        bindings.block_of(BINDING.replace(old, new), "aws_thing")


def test_types_are_found_and_unknown_ones_named(tmp_path: Path) -> None:
    (tmp_path / "main.tf").write_text(
        'resource "aws_thing" "a" {}\ndata "aws_region" "b" {}\nresource "terraform_data" "c" {}\n'
        'ephemeral "aws_kms_secrets" "d" {}\n'
    )
    assert extract.types_used(tmp_path) == {"aws_thing", "data.aws_region", "ephemeral.aws_kms_secrets"}
    source = tmp_path / "package.tgz"
    with tarfile.open(source, "w:gz") as archive:
        for folder in ("thing", "data-aws-region"):
            info = tarfile.TarInfo(f"package/lib/{folder}/index.js")
            info.size = len(BINDING)
            archive.addfile(info, io.BytesIO(BINDING.encode()))
    with pytest.raises(extract.UnknownType, match="has no aws_other, provider"):
        extract.schema(["aws_thing", "data.aws_region", "aws_other"], source)


def test_a_file_that_is_not_hcl_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.tf").write_text("resource {{{\n")
    with pytest.raises(extract.BadHcl, match=r"bad\.tf"):
        extract.types_used(tmp_path)


def test_a_changed_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(folder: Path) -> Path:
        (folder / "other.tgz").write_bytes(b"not the package")
        return folder / "other.tgz"

    monkeypatch.setattr(package, "_fetch", fetch)
    with pytest.raises(package.PackageChanged, match="has integrity sha512-"):
        package.package_file(tmp_path)
    good = package.integrity_of(fetch(tmp_path))
    assert package.package_file(tmp_path / "cache", good).read_bytes() == b"not the package"


def test_without_npm_the_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(package.PackageMissing, match="npm pack"):
        package.package_file(tmp_path)
    assert lacking("npm") == "missing: program `npm`. To get it: apt-get install npm"


def test_plan_and_apply() -> None:
    world = resources.Resources(values.Place("eu-west-1"), {"project": "samovar"})
    proposed = {"arn": None, "secret_wo": "s", "zones": None, "tags_all": None, "rule": [{"days": 7}]}
    planned = world.plan(THING, None, proposed)
    assert planned is not None
    assert planned["secret_wo"] is None
    assert planned["tags_all"] == {"project": "samovar"}
    assert resources.is_unknown(planned["arn"])
    state = world.apply("aws_thing", THING, planned)
    assert state is not None
    assert state["arn"].startswith("arn:aws:thing:eu-west-1:123456789012:thing/")
    assert state["rule"] == [{"days": 7}]
    assert world.plan(THING, state, {**state, "secret_wo": "s"}) == state, "nothing to change"
    assert world.plan(THING, state, None) is None
    assert resources.unconfigurable(THING, {"arn": "x", "rule": [{"days": 7}]}) == ["arn"]
    assert resources.decode(resources.encode(planned)) == planned


def test_policy_documents_are_rendered_and_merged() -> None:
    base = data_sources.policy_document(
        {"statement": [{"sid": "A", "actions": ["s3:PutObject", "s3:GetObject"], "resources": ["*"]}]}
    )
    (one,) = base["Statement"]
    assert one == {"Effect": "Allow", "Sid": "A", "Action": ["s3:GetObject", "s3:PutObject"], "Resource": "*"}
    text = str(base).replace("'", '"')
    principal = [{"type": "*", "identifiers": ["*"]}]
    deny = {"sid": "A", "effect": "Deny", "actions": ["s3:*"], "resources": ["*"], "principals": principal}
    merged = data_sources.policy_document({"source_policy_documents": [text], "statement": [deny]})
    assert [(found["Effect"], found["Principal"]) for found in merged["Statement"]] == [("Deny", "*")]
