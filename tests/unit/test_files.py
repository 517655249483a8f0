"""Files that are whole or as they were before."""

import errno
import os
import resource
import threading

import pytest

from fp4engine.doctor import certificate
from fp4engine.files import write_atomically


def test_what_does_not_fit_leaves_what_was_there(tmp_path):
    path = tmp_path / "certificate.json"
    certificate.write(path, {"small": 1})
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # no file of more bytes, for the reason of a full disk
    try:
        with pytest.raises(OSError, match=r"certificate\.json") as caught:
            certificate.write(path, {"large": "x" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


def test_links_stay_and_pipes_are_written_to(tmp_path):
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "file")
    write_atomically(link, "über")
    assert link.is_symlink() and (tmp_path / "file").read_text(encoding="utf-8") == "über"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_atomically(pipe, b"12")
    reader.join()
    assert read == [b"12"]


def test_a_folder_that_may_not_be_read_is_written_into(tmp_path, monkeypatch):
    """The file was there, and then its folder, which root alone may open, raised a PermissionError."""
    opened = os.open

    def refused(path, *arguments):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", refused)
    write_atomically(tmp_path / "file", b"12")
    assert (tmp_path / "file").read_bytes() == b"12" and os.listdir(tmp_path) == ["file"]
