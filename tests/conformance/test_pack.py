"""The conformance pack: its files are what its script makes, this project reads them, and the judge names faults."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("compressed_tensors", reason="needs the extra `export`")

from fp4engine.export import ServedCheckpoint
from fp4engine.export.readers import read_by_vllm

sys.path.insert(0, str(Path(__file__).parent))
judge, make = importlib.import_module("judge"), importlib.import_module("make")
CASES = sorted(path.name for path in judge.CASES.iterdir())


def test_the_files_are_those_that_the_script_makes_and_small(capsys) -> None:
    assert make.main(["--check"]) == 0, capsys.readouterr().out
    assert {case.rpartition("-")[0].removesuffix("-compressed") for case in CASES} == set(make.CASES)
    sizes = [path.stat().st_size for path in judge.CASES.rglob("*") if path.is_file()]
    assert max(sizes) < 40_000 and sum(sizes) < 700_000


def test_this_project_reads_every_case(capsys) -> None:
    assert judge.main(["fp4engine"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{len(CASES)} passes"


@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_what_the_export_says_it_reads(capsys) -> None:
    assert judge.main(["transformers"]) == 1
    verdicts = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines()[:-1])
    wrong = {case for case, verdict in verdicts.items() if verdict.startswith("WRONG")}
    assert wrong == {"experts-compressed-tensors"}
    assert {case for case, verdict in verdicts.items() if verdict == "cannot"} == {c for c in CASES if "modelopt" in c}


@pytest.mark.parametrize("case", CASES)
def test_rules_of_vllm_find_nothing_amiss(case) -> None:
    checkpoint = ServedCheckpoint(judge.CASES / case)
    assert read_by_vllm(checkpoint, [name for name in checkpoint.ignored if name]).verdict == "agrees"


@pytest.mark.parametrize(
    ("fault", "case", "words"),
    [
        ("nibbles", "plain-modelopt", "the two codes of each byte are swapped"),
        ("blocks", "experts-compressed-tensors", "block scales are left out"),
        ("outer", "odd-shapes-modelopt", "the outer scale is left out"),
        ("direction", "plain-compressed-tensors", "the outer scale divides where it should multiply"),
    ],
)
def test_the_judge_says_what_a_loader_does_wrong(tmp_path, capsys, fault, case, words) -> None:
    (tmp_path / "loader.py").write_text(
        "import judge\n"
        "def weights(directory):\n"
        "    tensors = judge.read(directory / 'model.safetensors')\n"
        "    layers = [n.rpartition('.')[0] for n in tensors if n.endswith('.weight_scale')]\n"
        f"    return {{f'{{layer}}.weight': judge.decode(tensors, layer, {fault!r}) for layer in layers}}\n"
    )
    assert judge.main([str(tmp_path / "loader.py"), "--cases", case]) == 1
    assert words in capsys.readouterr().out
    text = (tmp_path / "loader.py").read_text().replace(repr(fault), "''")
    (tmp_path / "loader.py").write_text(text)
    assert judge.main([str(tmp_path / "loader.py"), "--cases", case]) == 0


def test_other_faults_and_words(tmp_path, capsys) -> None:
    loader = tmp_path / "loader.py"
    for body, said, code in (
        ("def weights(directory):\n    return {}\n", "is missing", 1),
        ("def weights(directory):\n    raise OSError('no\\nsuch')\n", "cannot load: OSError: no such", 0),
        ("def logits(directory, tokens):\n    return tokens\n", "logits [2, 7] differ by inf", 1),
        ("def logits(directory, tokens):\n    return [float('nan')] * 3\n", "differ by", 1),
    ):
        loader.write_text(body)
        assert judge.main([str(loader), "--cases", "plain-modelopt"]) == code
        assert said in capsys.readouterr().out
    loader.write_text("")
    for words in ([str(loader)], ["gone.py"], ["fp4engine", "--cases", "nothing"]):
        with pytest.raises(SystemExit):
            judge.main(words)
    assert judge.main(["--list"]) == 0 and "minus zero" in capsys.readouterr().out


def test_the_decoder_of_the_pack_knows_every_e4m3_number() -> None:
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    wanted = torch.tensor(codes).view(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(judge.numbers(("F8_E4M3", codes)), wanted, equal_nan=True)
