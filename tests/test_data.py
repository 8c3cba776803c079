import hashlib
import re
import runpy
from pathlib import Path

import pytest

DATA = Path(__file__).parent.parent / "data"
main = runpy.run_path(str(DATA / "prepare.py"))["main"]


def prepare(folder, content):
    """Run prepare.py on a file of these bytes; give its status and the path of the list."""
    source, output = folder / "yob.txt", folder / "names.txt"
    source.write_bytes(content)
    return main([str(source), str(output)]), output


def test_names_are_the_pinned_list():
    content = (DATA / "names.txt").read_bytes()
    assert hashlib.sha256(content).hexdigest() == (
        "a311634f5113663f131a60cd0c76afb8420199991dbd9045773b8a2949ada835")


def test_names_counts_and_characters():
    text = (DATA / "names.txt").read_bytes().decode()
    assert re.fullmatch(r"([a-z]{2,15}\n)+", text)
    names = text.splitlines()
    assert len(names) == 32178
    assert len(set(names)) == 29619


@pytest.mark.parametrize("newline", [b"\r\n", b"\n", b"\r"])
@pytest.mark.parametrize("last", [True, False])
def test_prepare_orders_by_sex_then_count_then_name(tmp_path, newline, last):
    lines = [b"Noah,M,9", b"Zoe,F,9", b"Ada,F,9", b"Eve,F,10", b"Noah,F,5", b"Liam,M,100"]
    status, output = prepare(tmp_path, newline.join(lines) + newline * last)
    assert status == 0
    assert output.read_bytes() == b"eve\nada\nzoe\nnoah\nliam\nnoah\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["names.txt", "yob.txt"]


def test_prepare_replaces_an_older_list(tmp_path):
    (tmp_path / "names.txt").write_text("a much longer older list\n")
    status, output = prepare(tmp_path, b"Ada,F,9\r\n")
    assert status == 0
    assert output.read_bytes() == b"ada\n"


@pytest.mark.parametrize("line", [
    b"Zoe,F", b"Zoe,F,9,1", b"Zoe,X,9", b"Zoe,F,nine", b"Zoe,F,-9", b",F,9", b"Zo e,F,9",
    b"Zo\xc3\xab,F,9", b"Zo\xff,F,9", b"Zoe,F," + b"9" * 5000, b""])
def test_prepare_names_a_malformed_line(tmp_path, capsys, line):
    status, output = prepare(tmp_path, b"Ada,F,9\r\n" + line + b"\r\nEve,F,9\r\n")
    assert status == 2
    assert [path.name for path in tmp_path.iterdir()] == ["yob.txt"]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{tmp_path / 'yob.txt'}, line 2: expected Name,Sex,Count, found ")
    assert err.count("\n") == 1 and err.endswith(".\n")


def test_prepare_keeps_the_older_list_on_a_malformed_line(tmp_path):
    (tmp_path / "names.txt").write_text("older\n")
    status, output = prepare(tmp_path, b"Ada,F,9\r\nZoe\r\n")
    assert status == 2
    assert output.read_text() == "older\n"


def test_prepare_refuses_an_empty_file(tmp_path, capsys):
    status, output = prepare(tmp_path, b"")
    assert status == 2
    assert not output.exists()
    assert capsys.readouterr().err == f"{tmp_path / 'yob.txt'} has no names in it.\n"


def test_prepare_says_that_the_input_is_missing(tmp_path, capsys):
    missing = tmp_path / "yob.txt"
    assert main([str(missing), str(tmp_path / "names.txt")]) == 2
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == f"Cannot read {missing}: No such file or directory.\n"


@pytest.mark.parametrize("output, reason", [
    ("nowhere/names.txt", "No such file or directory"),
    ("yob.txt/names.txt", "Not a directory"),
    (".", "it is not a regular file")])
def test_prepare_says_that_the_output_is_unwritable(tmp_path, capsys, output, reason):
    source = tmp_path / "yob.txt"
    source.write_bytes(b"Ada,F,9\r\n")
    # Joined as text, because a Path would drop the dot.
    target = f"{tmp_path}/{output}"
    assert main([str(source), target]) == 2
    assert list(tmp_path.iterdir()) == [source]
    assert capsys.readouterr().err == f"Cannot write {target}: {reason}.\n"
