"""Model cards, read back as a hub reads them, and every number of theirs as the record's."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from glm5q.config import parse_config
from glm5q.formats import hub, readme
from glm5q.types import Role
from recipes import files
from reports.card import model_card
from reports.record import RunRecord, read_record
from tests.formats.test_compressed_tensors import FULL_SIZE
from tests.reports.made_up import record

V1 = Path(__file__).parent / "data" / "record-v1.json"


@pytest.fixture(scope="module")
def made() -> RunRecord:
    return record(layers=5, experts=8, windows=8)


def read(card: str) -> object:
    """The front matter by the hub's own client."""
    client = pytest.importorskip("huggingface_hub", reason="not run: no hub client here")
    return client.ModelCard(card, ignore_metadata_errors=False).data


def from_source(made: RunRecord, **fields: str | None) -> RunRecord:
    assert made.source is not None
    return made.model_copy(update={"source": made.source.model_copy(update=fields)})


def rows(card: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    section = card.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_front_matter_is_what_a_hub_reads(made: RunRecord) -> None:
    licensed = from_source(made, license="mit", base_model="zai-org/GLM-5.1")
    found = read(model_card(licensed))
    assert (found.license, found.license_name) == ("mit", None)  # type: ignore[attr-defined]
    assert found.base_model == "zai-org/GLM-5.1"  # type: ignore[attr-defined]
    assert found.library_name == "vllm"  # type: ignore[attr-defined]
    assert found.pipeline_tag == "text-generation"  # type: ignore[attr-defined]
    assert found.tags == [  # type: ignore[attr-defined]
        "glm5q", "quantized", "compressed-tensors", "int4", "int8", "fp8", "4-bit", "8-bit",
    ]  # fmt: skip
    assert found.to_dict()["base_model_relation"] == "quantized"  # type: ignore[attr-defined]


def test_a_licence_not_known_is_other_and_refers_to_the_base(made: RunRecord) -> None:
    found = read(model_card(made))
    assert (found.license, found.license_name) == ("other", "see-base-model")  # type: ignore[attr-defined]
    assert found.license_link == "https://huggingface.co/zai-org/GLM-5"  # type: ignore[attr-defined]
    unnamed = read(model_card(from_source(made, path="models/mine")))
    assert (unnamed.license, unnamed.base_model) == ("other", None)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("place", "config", "expected"),
    [
        ("hub/models--zai-org--GLM-5.2/snapshots/0abc", {}, "zai-org/GLM-5.2"),
        ("mine", {"_name_or_path": "some-one/GLM-5-tuned"}, "some-one/GLM-5-tuned"),
        ("GLM-5.1-FP8", {}, "zai-org/GLM-5.1-FP8"),
        ("mine", {"_name_or_path": "/data/models/x"}, None),
        ("mine", {"_name_or_path": 5}, None),
    ],
)
def test_origin_of_a_source(
    tmp_path: Path, place: str, config: dict[str, object], expected: str | None
) -> None:
    folder = tmp_path / place
    folder.mkdir(parents=True)
    assert hub.origin(folder, config) == hub.Origin(base_model=expected)
    (folder / "README.md").write_text("---\nlicense: mit\nlicense_name: [no]\n---\n# x\n")
    assert hub.origin(folder, config) == hub.Origin(base_model=expected, license="mit")


@pytest.mark.parametrize(
    "readme_text", ["", "# none", "---\nlicense: mit\n", "---\n: [\n---\n", "---\n- a\n---\n"]
)
def test_a_readme_without_front_matter_says_nothing(tmp_path: Path, readme_text: str) -> None:
    (tmp_path / "README.md").write_text(readme_text)
    assert hub.origin(tmp_path, {}) == hub.Origin()


def test_one_line_a_role_and_scheme() -> None:
    made = record(layers=2, experts=4, windows=8)
    first = made.layers[2].matrices[-1]
    widths = [(4.125, "gptq+rtn", 4), (4.0625, "rtn+gptq", 8), (4.25, "gptq", 16)]
    odd = [
        first.model_copy(update={"bits": bits, "method": method, "matrices": count})
        for bits, method, count in widths
    ]
    layer = made.layers[2].model_copy(update={"matrices": odd})
    card = model_card(made.model_copy(update={"layers": [layer]}))
    assert rows(card, "Quantization") == [
        ["`routed_expert`", "int4 g128 + fp8", "gptq, rtn", "4.062 to 4.25", "28"]
    ]


def test_numbers_are_the_records(made: RunRecord) -> None:
    card = model_card(made)
    table = dict(rows(card, "What was lost and won"))
    accuracy, size = made.accuracy, made.size
    assert accuracy is not None
    assert size is not None
    kl, low, high = map(float, re.findall(r"\d\.\d+", table["KL"]))
    for told, exact in ((kl, accuracy.kl_mean), (low, accuracy.kl_low), (high, accuracy.kl_high)):
        assert told == pytest.approx(exact, rel=5e-4)
    assert float(table["top-1"].split()[0]) == pytest.approx(
        100 * accuracy.top1_agreement, abs=5e-3
    )
    before, after = map(float, re.findall(r"\d+\.\d+", table["perplexity"]))
    assert before == pytest.approx(accuracy.perplexity_source, rel=5e-4)
    assert after == pytest.approx(accuracy.perplexity_quantized, rel=5e-4)
    tera, giga, times = map(float, re.findall(r"\d+\.\d+", table["size"]))
    assert tera * 1e12 == pytest.approx(size.source_bytes, rel=5e-4)
    assert giga * 1e9 == pytest.approx(size.quantized_bytes, rel=5e-4)
    assert times == pytest.approx(size.source_bytes / size.quantized_bytes, rel=5e-3)
    matrices = Counter[str]()
    for layer in made.layers:
        for matrix in layer.matrices:
            matrices[f"`{matrix.role}`"] += matrix.matrices
    assert {r[0]: int(r[4]) for r in rows(card, "Quantization")} == dict(matrices)
    actions = Counter(fallback.action for fallback in made.fallbacks)
    assert {r[0]: int(r[1]) for r in rows(card, "Fallbacks")} == dict(actions)


def test_verification_and_fallbacks_stand_once(made: RunRecord) -> None:
    card = model_card(made)
    assert made.recipe is not None
    words = made.recipe.verification
    assert card.count(words[1:]) == 1
    assert card.lower().count("fallbacks") == 1
    layers = [layer.model_copy(update={"fallbacks": []}) for layer in made.layers]
    assert "None: everything went as the recipe asked." in model_card(
        made.model_copy(update={"layers": layers})
    )
    assert made.command in card
    assert "\\<made up\\>" in card


@pytest.mark.parametrize("name", ["h200", "h200-sglang", "cpu", "atlas-800t-a3"])
def test_serving_commands_are_those_beside_the_weights(name: str, made: RunRecord) -> None:
    """The card knows schemes by their labels only; the README of an output by the recipe."""
    recipe, config = files.load(name), parse_config(FULL_SIZE)
    assignments = [recipe.assignment(n, config) for n in range(config.num_layers)]
    beside = readme.servings(recipe.format, assignments, config, recipe.options())
    assert made.recipe is not None
    info = made.recipe.model_copy(update={"format": recipe.format, "engine": recipe.engine})
    plans = {role.value: plan.scheme() for role, plan in recipe.weights.items()}
    layers = [
        layer.model_copy(
            update={
                "matrices": [
                    m.model_copy(
                        update={
                            "scheme": plans[m.role].label(),
                            "method": recipe.weights[Role(m.role)].method,
                        }
                    )
                    for m in layer.matrices
                ]
            }
        )
        for layer in made.layers
    ]
    card = model_card(made.model_copy(update={"recipe": info, "layers": layers}))
    commands = re.findall(r"```\n(.*?)\n```", card.split("## Serving")[1].split("## What")[0], re.S)
    mtp = ' --speculative-config \'{"method": "mtp", "num_speculative_tokens": 1}\''
    assert commands == [serving.command.replace("{mtp}", mtp) for serving in beside]
    assert read(card).library_name == recipe.engine.removesuffix("-ascend")  # type: ignore[attr-defined]


def test_declared_and_edited_say_so(made: RunRecord) -> None:
    declared = model_card(record(layers=3, experts=4, windows=8, recipe="atlas-800t-a3"))
    assert "> **declared; never run on an NPU.** Nothing here was run on this target." in declared
    assert made.recipe is not None
    edited = made.recipe.model_copy(update={"verification": "edited from h200; not verified"})
    assert "> **edited from h200; not verified.**" in model_card(
        made.model_copy(update={"recipe": edited})
    )


def test_card_of_an_old_record() -> None:
    card = model_card(read_record(V1))
    assert "not measured | memory plan" in card
    assert read(card).base_model == "zai-org/GLM-5"  # type: ignore[attr-defined]


def test_no_command_leaves_its_block() -> None:
    command = "glm5q calibrate ```` ~~~~\n# out"
    made = record(layers=3, experts=4, windows=4).model_copy(update={"command": command})
    lines = model_card(made).split("\n")
    start = lines.index("`````sh")
    assert lines[start + 1 : start + 3] == command.split("\n")
    assert lines[start + 3] == "`````"
