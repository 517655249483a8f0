"""Certificates: what the reference computes is recorded, what differs is named, and order shows in the probes."""

import json
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

from fp4engine import ops, reference
from fp4engine.cli import main
from fp4engine.doctor import certificate, order
from fp4engine.kernels import gemm_native
from fp4engine.ops import sum_model
from fp4engine.ops.sum_model import VARIANTS

CPU = torch.device("cpu")
FOLDER = Path(__file__).parents[2] / "certificates"


@pytest.fixture(scope="module")
def made() -> dict:
    return certificate.certify("cpu")


def test_the_recorded_digests_are_those_of_this_machine(made) -> None:
    assert certificate.digests_of(made) == certificate.reference_digests()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_the_certificates_of_the_repository_have_the_digests_of_the_reference(path: Path) -> None:
    assert certificate.differences(certificate.read(path)) == []


def test_the_table_of_the_page_is_that_of_the_certificates() -> None:
    page = (FOLDER.parent / "docs" / "numerics.md").read_text(encoding="utf-8")
    begin, end = "<!-- table: fp4engine certificates certificates -->\n", "\n<!-- end of table -->"
    assert page.partition(begin)[2].partition(end)[0] == certificate.table(certificate.in_folder(FOLDER))


def test_a_certificate_is_small_plain_json(made, tmp_path: Path) -> None:
    certificate.write(tmp_path / "a.json", made)
    assert certificate.read(tmp_path / "a.json") == json.loads(json.dumps(made))
    assert (tmp_path / "a.json").stat().st_size < 40_000
    assert set(made["sums"]) == {"fp32", "blackwell"}
    answers = made["sums"]["blackwell"]
    assert len(answers["permutations"]["bits"].split()) == 256 == answers["permutations"]["agreeing"]["the model"]
    assert answers["differing"]["the model"] == 0 < answers["differing"]["groups added to nearest"]


def test_what_differs_is_named(made, tmp_path: Path, capsys) -> None:
    certificate.write(tmp_path / "good.json", made)
    assert main(["certificates", str(tmp_path)]) == 0
    broken = json.loads(json.dumps(made))
    broken["casts"]["mxfp4"] = broken["rotations"] = broken["sums"]["blackwell"]["digest"] = "0" * 64
    broken["sums"]["native scaled_mm"] = {"refused": "raised RuntimeError: no"}
    same = made["sums"]["blackwell"]
    broken["sums"]["native dot_scaled"] = {**same, "differing": {**same["differing"], "the model": 5}}
    certificate.write(tmp_path / "other.json", broken)
    capsys.readouterr()
    assert main(["certificates", str(tmp_path)]) == 1
    *_, good, other = capsys.readouterr().out.splitlines()
    total = len(certificate.reference_digests())
    assert f"| {total} of {total} the reference's | no FP4 tensor cores |" in good
    assert f"{total - 3} of {total} the reference's; not casts of mxfp4, rotations, blackwell products" in other
    assert "dot_scaled: the model's in 69627 of 69632 cells, in 256 of 256 orders" in other
    assert "scaled_mm: raised RuntimeError: no" in other


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no certificate"),
        ("[]", "is no certificate"),
        ('{"certificate": 2}', "of format 2"),
        (None, "must hold"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | None, said: str, capsys) -> None:
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    with pytest.raises(SystemExit):
        main(["certificates", str(tmp_path)])
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("part", ["machine", "casts", "rotations", "exact products", "sums"])
def test_a_certificate_that_lacks_a_part_is_none(part: str, made, tmp_path: Path) -> None:
    certificate.write(tmp_path / "a.json", {name: value for name, value in made.items() if name != part})
    with pytest.raises(ValueError, match=r"a\.json is no certificate"):
        certificate.read(tmp_path / "a.json")


def test_the_command_writes_one_devices_certificate(made, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(certificate, "certify", lambda device, jobs: made | {"asked": [device, jobs]})
    file = tmp_path / "mine.json"
    assert main(["doctor", "--certify", str(file), "--device", "cpu", "--jobs", "1"]) == 0
    assert certificate.read(file)["asked"] == ["cpu", 1]
    assert "the reference's" in capsys.readouterr().out
    for target, wrong in ((file, ["--device", "cpu", "cpu"]), (tmp_path / "nowhere" / "a.json", []), (tmp_path, [])):
        with pytest.raises(SystemExit):
            main(["doctor", "--certify", str(target), *wrong])
        assert "--certify " in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", VARIANTS)
def test_each_rule_shows(name: str) -> None:
    """Sums under one variant are that variant's in every probe, and not the model's in all of them."""

    def multiply(left, right):
        return reference.sum_by_groups(sum_model.values(left), sum_model.values(right), VARIANTS[name])

    left, right = sum_model.probe(1, CPU), sum_model.probe(2, CPU)
    found = sum_model.compare(multiply(left, right), sum_model.values(left), sum_model.values(right))
    assert found.differing[name] == 0 and found.nearest == name
    assert (found.differing["the model"] == 0) == (name == "the model")
    answers = order.ask(multiply, CPU)
    for answer in answers.values():
        assert answer.agreeing[name] == len(answer.bits.split())
    assert (answers["permutations"].agreeing["the model"] == 256) == (name == "the model")


def test_thresholds_tell_rounding_and_the_length_of_a_group() -> None:
    left, right = order.thresholds(CPU)
    sums = partial(reference.sums_of_pairs, sum_model.values(left), sum_model.values(right))
    model = (sums() - 2.0**24).view(2, order.LATER - 1, order.QUARTERS)
    assert model[0, 0].tolist() == [0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 4, 4, 4, 4, 4], "one group: to nearest even"
    assert model[0, 3].tolist() == [0] * 7 + [2] * 8 + [4], "another group: toward zero"
    assert model[1, 3].tolist() == [-1, -1, -1, -1, -2, -2, -2, -2, -3, -3, -3, -3, -4, -4, -4, -4]


def test_probes_are_the_same_on_every_machine() -> None:
    left, right = order.permutations(CPU)
    assert order._order(0).tolist() == list(range(384)) and sorted(order._order(7).tolist()) == list(range(384))
    assert torch.equal(left.data[0].view(384, 8)[order._order(9)].flatten(), left.data[9])
    assert len({tuple(order._order(row).tolist()) for row in range(order.ORDERS)}) == order.ORDERS
    exact = (sum_model.values(left).double() * sum_model.values(right).double()).sum(1)
    assert (exact == exact[0]).all(), "the exact sum does not depend on the order"


@pytest.mark.parametrize(("rule", "level"), [("the model", "INFO"), ("groups added to nearest", "WARNING")])
def test_the_first_native_product_of_a_path_is_compared_and_the_answer_kept(rule, level, monkeypatch, logged) -> None:
    calls = []

    def tensor_cores(left, right, numerator, *, path, out_dtype):
        calls.append(path)
        assert numerator == 2688.0**2 and out_dtype == torch.float32
        operands = [sum_model.probe(seed, CPU) for seed in (1, 2)]
        assert torch.equal(operands[0].data, left.codes) and torch.equal(operands[1].data, right.codes)
        return reference.sum_by_groups(*map(sum_model.values, operands), VARIANTS[rule])

    monkeypatch.setattr(gemm_native, "gemm", tensor_cores)
    sum_model.native_comparison.cache_clear()
    first, again = (sum_model.native_comparison("scaled_mm", CPU) for _ in range(2))
    sum_model.native_comparison.cache_clear()
    assert first is again and calls == ["scaled_mm"] and first.nearest == rule
    (record,) = [record for record in logged if "scaled_mm" in record.getMessage()]
    assert record.levelname == level and f"of {first.cells} cells" in record.getMessage()


def test_products_on_fp4_tensor_cores_ask_for_the_comparison(monkeypatch) -> None:
    products = import_module("fp4engine.ops.gemm")  # which the function's name hides
    asked, left = [], sum_model.probe(1, CPU)
    monkeypatch.setattr(products, "product_path", lambda *_: ("native", "", 1.0, False))
    monkeypatch.setattr(products, "native_comparison", lambda *question: asked.append(question))
    monkeypatch.setattr(gemm_native, "gemm", lambda *_, **options: torch.zeros(64, 64, dtype=options["out_dtype"]))
    for accumulation in ("fp32", "blackwell"):
        ops.gemm(left, left, out_dtype=torch.float32, accumulation=accumulation)
    assert asked == [("dot_scaled", CPU)]
