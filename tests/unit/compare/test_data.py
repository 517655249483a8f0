"""Text becomes the same tokens wherever it is from, and none of it is both trained on and held out."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from fp4engine.compare import InputError
from fp4engine.compare.data import Tokens, prepare
from fp4engine.compare.task import encode_bytes, source_of

TEXTS = [f"document {number}: " + "the quick brown fox; " * (number % 7 + 3) for number in range(60)]
LENGTH = 17


def as_files(folder: Path) -> Path:
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_text(text)
    (folder / "picture.bin").write_bytes(b"\0\1\2")
    (folder / ".hidden").write_text("hidden")
    return folder


def as_json_lines(folder: Path) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n\n" for text in TEXTS))
    return path


def as_parquet(folder: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS}), folder / "texts.parquet")
    return folder / "texts.parquet"


def as_data_set(folder: Path) -> Path:
    import datasets

    made = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})})
    made.save_to_disk(str(folder / "saved"))
    return folder / "saved"


def read(path: Path, out: Path, wanted: int = 10**6) -> Tokens:
    return prepare([path], encode_bytes(0), "bytes", wanted, LENGTH, "text", out)


def streams(tokens: Tokens) -> tuple[bytes, bytes]:
    training, validation = (np.load(tokens.folder / f"{part}.npy") for part in ("training", "validation"))
    return bytes(training.astype(np.uint8)), bytes(validation.astype(np.uint8))


@pytest.mark.parametrize("made", [as_files, as_json_lines, as_parquet, as_data_set])
def test_all_kinds_of_files_give_the_same_tokens(made, tmp_path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tokens = read(made(source), tmp_path / "out")
    training, validation = streams(tokens)
    documents = {
        part: set(filter(None, stream.decode().split("\0"))) for part, stream in (("t", training), ("v", validation))
    }
    assert documents["t"] | documents["v"] == set(TEXTS) and not documents["t"] & documents["v"]
    assert 0.04 < tokens.validation / (tokens.training + tokens.validation) < 0.12
    before = (tokens.folder / "training.npy").stat().st_mtime_ns
    assert read(source if made is as_files else next(source.iterdir()), tmp_path / "out") == tokens
    assert (tokens.folder / "training.npy").stat().st_mtime_ns == before


def test_a_data_set_that_was_saved_again_is_other_text(tmp_path) -> None:
    """The folder itself looks as before, since ``datasets`` writes into the files that are there."""
    folder = as_data_set(tmp_path)
    before = read(folder, tmp_path / "out")
    (shard,) = folder.rglob("*.arrow")
    shard.write_bytes(shard.read_bytes().replace(b"quick brown", b"brown quick"))
    assert read(folder, tmp_path / "out").digest != before.digest


def test_pictures_beside_the_text_of_a_data_set_are_not_looked_at(tmp_path) -> None:
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "picture": datasets.Image()})
    broken = [{"bytes": b"none", "path": None}] * len(TEXTS)
    datasets.Dataset.from_dict({"text": TEXTS, "picture": broken}, features).save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved", tmp_path / "out").training > 1000


def test_a_disk_that_fills_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text("number " * 100)

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match=r"No space left on device: .*training.npy"):
            prepare([tmp_path / "a.txt"], encode_bytes(0), "bytes", 100, 9, "text", tmp_path / "out")
    assert prepare([tmp_path / "a.txt"], encode_bytes(0), "bytes", 100, 9, "text", tmp_path / "out").training


def test_folders_that_are_links_are_read_once(tmp_path) -> None:
    for place in ("own", "linked"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "text.txt").write_text(f"{place} " * 100)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "text.txt").write_text("what a command has written ")
    for link, target in (("again", "linked"), ("other", "linked"), ("back", "own"), ("written", "out")):
        (tmp_path / "own" / link).symlink_to(tmp_path / target)
    tokens = read(tmp_path / "own", tmp_path / "out")
    assert tokens.training + tokens.validation == len("own " * 100 + "linked " * 100) + 2


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, monkeypatch) -> None:
    """One that is hidden is."""
    (tmp_path / ".hidden_shut").mkdir()
    (tmp_path / "text.txt").write_text("number " * 100)
    scan = os.scandir

    def scandir(folder: str) -> Any:  # root may read whatever it likes
        if str(folder).endswith("shut"):
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    assert read(tmp_path, tmp_path / "out").training
    (tmp_path / "shut").mkdir()
    with pytest.raises(InputError, match=r"--data: .*shut cannot be read \(Permission denied\)"):
        read(tmp_path, tmp_path / "out")


def test_no_more_is_read_than_a_run_needs(tmp_path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} " * 100}) + "\n" for number in range(2000)))
    assert read(path, tmp_path / "out", wanted=50_000).training < 200_000


def test_a_single_document_is_held_out_by_its_end(tmp_path) -> None:
    (tmp_path / "one.txt").write_text("a" * 900 + "b" * 100)
    training, validation = streams(read(tmp_path / "one.txt", tmp_path / "out"))
    assert set(training) == {97, 98} and set(validation) == {98, 0} and len(validation) == 50


def test_every_window_comes_once_before_one_comes_again(tmp_path) -> None:
    (tmp_path / "one.txt").write_bytes(bytes(range(1, 251)) * 4)
    tokens = read(tmp_path / "one.txt", tmp_path / "out")
    windows = tokens.windows(LENGTH)
    first = torch.cat([tokens.batch(0, step, 2, LENGTH) for step in range(windows // 2)])
    assert len({tuple(row.tolist()) for row in first}) == windows // 2 * 2
    assert torch.equal(tokens.batch(0, 3, 2, LENGTH), first[6:8])
    assert not torch.equal(tokens.batch(1, 3, 2, LENGTH), first[6:8])
    held_out = tokens.held_out(100, LENGTH)
    assert held_out.shape[1] == LENGTH and held_out.dtype == torch.int64


def test_what_a_command_writes_is_no_text_of_its_next_run(tmp_path) -> None:
    folder = as_files(tmp_path)
    first = read(folder, folder / "out")
    (folder / "out" / "table.md").write_text("a table")
    assert read(folder, folder / "out") == first


def test_texts_of_several_bytes_a_character_are_read_alike(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("schön " * 100)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "schön " * 100}))
    assert read(tmp_path / "a.txt", tmp_path).digest == read(tmp_path / "a.jsonl", tmp_path).digest


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "nowhere", "there is no file or folder"),
        (lambda folder: folder, "has no files"),
        (lambda folder: _written(folder / "a.txt", "short"), "leaves .* for training, and a window needs 17"),
        (lambda folder: _written(folder / "a.jsonl", "{"), "line 1 of .*a.jsonl is not JSON"),
        (lambda folder: _written(folder / "a.jsonl", '{"body": "x"}'), r"no text in 'text' \(it has body\); say which"),
        (
            lambda folder: _written(folder / "a.jsonl", '{"text": null}'),
            "'text' of a record of .* must be text, and is None",
        ),
        (lambda folder: _written(folder / "a.jsonl", "[1]"), r"no text in 'text' \(it has list\)"),
        (lambda folder: _written(folder / "a.parquet", "nothing"), "is no Parquet file"),
        (lambda folder: _written(folder / "a.txt", "\0"), "there is no text in"),
    ],
)
def test_data_that_cannot_be_used_is_named(make, said, tmp_path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    with pytest.raises(InputError, match=said) as refused:
        read(make(folder), tmp_path / "out")
    assert "\n" not in str(refused.value)


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_that_is_nearly_all_text_is_trained_on(tmp_path) -> None:
    """It was held out, since the others did not make a twentieth; what was trained on were the others."""
    for number in range(25):
        (tmp_path / f"note{number:02}.md").write_text(f"note {number}; " * 10)
    (tmp_path / "book.txt").write_text("".join(f"line {number} of the book\n" for number in range(2000)))
    tokens = read(tmp_path, tmp_path / "out")
    assert 15 * tokens.validation < tokens.training


def folder_with_words(folder: Path, vocabulary: int) -> Path:
    """A model whose tokenizer is one file, as BERT's was before there were others."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    transformers.BertConfig(vocab_size=vocabulary, is_decoder=True, **sizes).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc"]) + "\n")
    return folder


def test_a_vocabulary_in_one_file_is_a_tokenizer(tmp_path) -> None:
    """Text was read as bytes beside it."""
    name, encode = source_of(str(folder_with_words(tmp_path, 300))).encoding()
    assert name.startswith("tokenizer ") and [ids.tolist() for ids in encode(["a c", "b?"])] == [[5, 7], [6, 1]]


def test_half_a_pair_of_surrogates_is_no_fault(tmp_path) -> None:
    """JSON may hold one, and no tokenizer takes it: that was a traceback."""
    _, encode = source_of(str(folder_with_words(tmp_path / "model", 300))).encoding()
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"a \ud83d b {'c ' * number}"}) + "\n" for number in range(30)))
    tokens = prepare([text], encode, "words", 10**6, 9, "text", tmp_path / "out")
    assert tokens.training + tokens.validation == sum(2 + number for number in range(30))


def test_a_tokenizer_with_gaps_is_refused_where_the_model_has_no_row(tmp_path) -> None:
    folder = folder_with_words(tmp_path, 9)
    (folder / "vocab.txt").unlink()
    words = {"[UNK]": 1, "a": 2, "b": 11}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    _, encode = source_of(str(folder)).encoding()
    assert encode(["a"])[0].tolist() == [2]
    with pytest.raises(InputError, match=r"the tokenizer gives token id 11, and the model's vocabulary is 9"):
        encode(["a", "b"])
