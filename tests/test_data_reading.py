import contextlib
import gzip
import io
import json
import os
import random
import re
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sample
import train
from conftest import (
    NAMES, ROOT, SIZES, arrays_of, best_of, both_models, call, finish, losses_of, process, split_of,
    without_times, write_words)

CLEAN = ["anna", "bob", "Zoë", "ella", "李小龙", "ned", "bob", "lea", "mia", "kim", "lou", "max"]


def all_but_the_sum(path):
    """All that a checkpoint holds, but for the sha256 of the data."""
    arrays = {name: array.tobytes() for name, array in arrays_of(path).items() if name != "config"}
    config = train.load(path).config
    assert len(config.pop("sha256")) == 64
    return arrays, config


# ---- Bytes to words

@both_models
@pytest.mark.parametrize("content", [
    pytest.param("\ufeff" + "\n".join(CLEAN) + "\n", id="BOM"),
    pytest.param("\ufeff" + "\n\ufeff".join(CLEAN) + "\n\ufeff\n", id="BOM in every line"),
    pytest.param("\r\n".join(CLEAN) + "\r\n", id="CRLF"),
    pytest.param("\r".join(CLEAN) + "\r", id="lone CR"),
    pytest.param("\n".join(CLEAN), id="no final newline"),
    pytest.param("\n\n" + "\n \n\t\n\n".join(CLEAN) + "\n\n", id="blank lines"),
    pytest.param("\n".join(f"  {word}\t " for word in CLEAN) + "\n", id="spaces at the edges"),
    pytest.param("\ufeff \r\n\t" + " \r\n\r \ufeff".join(CLEAN), id="all of it"),
    pytest.param(unicodedata.normalize("NFD", "\n".join(CLEAN)) + "\n", id="NFD"),
])
def test_the_same_words_however_the_file_was_saved(learn, run, kind, content):
    results = []
    for raw in ("\n".join(CLEAN) + "\n", content):
        Path("w.txt").write_bytes(raw.encode())
        trained = learn(kind, "--steps", 4, "--eval-every", 2, "--out", "x.npz")
        sampled = run(sample, "x.npz", "-n", 5, "--seed", 0)
        assert (trained.status, sampled.status) == (0, 0)
        results.append((without_times(trained.out), sampled.out, all_but_the_sum("x.npz")))
        os.remove("x.npz")
    assert results[0] == results[1]


def test_read_lines_gives_words_in_nfc_without_edges(here):
    Path("w.txt").write_bytes(
        "\ufeff anna\r\n\tZoe\u0308 \r\ufeff\ufeffbob\n\ufeff\n \ufeff a\ufeffb\nlast".encode())
    assert train.read_lines("w.txt")[0] == ["anna", "Zoë", "bob", "", "a\ufeffb", "last"]


def test_lists_that_were_joined_by_cat_have_no_marks_within(learn):
    """An editor had put a byte-order mark in front of each."""
    Path("w.txt").write_bytes(b"".join(
        ("\ufeff" + "\n".join(words) + "\n").encode() for words in (NAMES[:12], NAMES[12:])))
    result = learn("mlp", "--steps", 1)
    assert "w.txt: 24 words, 24 of them distinct, longest 4, 17 characters" in result.err
    assert best_of("out/mlp.npz").vocabulary == "\0" + "".join(sorted(set("".join(NAMES))))
    assert "warning: some" not in result.err


@pytest.mark.parametrize("separator", "\v\f\x1c\x1d\x1e\x85\u2028\u2029")
def test_exotic_separators_are_ordinary_characters(learn, separator):
    write_words([f"an{separator}na", f"{separator}bob", f"ned{separator}", separator])
    assert "w.txt: 4 words, 4 of them distinct" in learn("mlp", "--steps", 1).err
    assert best_of("out/mlp.npz").vocabulary == "".join(sorted("\0abdeno" + separator))


@both_models
def test_anything_printable_is_data(learn, run, kind):
    words = ["an na", "a.n.", "a--", "-a", "<s>", "%s", "%", "{0}", "\\n", "'\"", "$(a)", "#a",
             "a,", ";", "0", "é", "ß", "李", "🙂", "𝔸", "\u200b", "\u00a0", "\x7f", "\x1b[31m",
             "\ufffd", "a\ufeffb"]
    write_words(words)
    result = learn(kind, "--steps", 2)
    assert result.status == 0 and "26 words, 26 of them distinct, " in result.err
    assert best_of(f"out/{kind}.npz").vocabulary == "\0" + "".join(sorted(set("".join(words))))
    for word in words:
        scored = run(sample, f"out/{kind}.npz", f"--score={word}", "--json")
        assert json.loads(scored.out)["word"] == word


def test_case_is_never_changed(learn):
    write_words(["Anna", "aNNa", "ÄÖ", "äö"] * 3)
    assert "12 words, 4 of them distinct" in learn("mlp", "--steps", 1).err
    assert best_of("out/mlp.npz").vocabulary == "\0ANanÄÖäö"


def test_composed_characters_are_one_and_prefixes_too(learn, run):
    write_words([unicodedata.normalize("NFD", word) for word in ("Zoë", "André", "Åsa", "각")] * 3)
    assert learn("mlp", "--steps", 1).status == 0
    assert best_of("out/mlp.npz").vocabulary == "\0AZadnorsÅéë각"
    sampled = run(sample, "out/mlp.npz", "-n", 3, "--prefix", "Zoe\u0308")
    assert sampled.status == 0
    assert all(name.startswith("Zoë") for name in sampled.out.splitlines())
    assert len(sampled.out.splitlines()) == 3
    scored = run(sample, "out/mlp.npz", "--score", unicodedata.normalize("NFD", "각Å"))
    assert scored.status == 0 and scored.out.startswith("각Å\t")


# ---- Files that are refused

CP1252, OTHER = "WINDOWS-1252, probably", "its encoding, e.g. WINDOWS-1251 if it is Russian"


@pytest.mark.parametrize("raw, offset, byte, advice", [
    ("anna\nd’arc\nrené\n".encode("cp1252"), 6, "0x92", CP1252),
    ("…\nrené".encode("cp1252"), 0, "0x85", CP1252), (b"a\n\x80", 2, "0x80", CP1252),
    (b"a\n\x9f", 2, "0x9f", CP1252), (b"a\n\xa0", 2, "0xa0", OTHER),
    ("anna\nZoë\n".encode("latin-1"), 7, "0xeb", OTHER),
    ("андрей\nольга\n".encode("cp1251"), 0, "0xe0", OTHER), (b"\xff", 0, "0xff", OTHER),
    (b"anna\nbob\xc3", 8, "0xc3", OTHER), (b"\xef\xbb\xbfanna\xe9", 7, "0xe9", OTHER),
    (b"a\xed\xa0\x80", 1, "0xed", OTHER), (b"\xc0\x80", 0, "0xc0", OTHER)])
def test_not_utf8_names_file_and_offset_and_how_to_convert(refused, raw, offset, byte, advice):
    Path("w.txt").write_bytes(raw)
    text = refused(train, "--data", "w.txt")
    assert "w.txt is not UTF-8" in text and f"byte {offset} is {byte}" in text
    assert text.endswith(f"convert it from {advice}: iconv -f ENCODING -t UTF-8 FILE > NEW")


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_recognised_by_its_mark_and_named(refused, codec):
    mark = "" if codec == "utf-16" else "\ufeff"
    Path("w.txt").write_bytes((mark + "anna\nbob\n").encode(codec))
    text = refused(train, "--data", "w.txt")
    assert "w.txt is not UTF-8" in text and "convert it from UTF-16: iconv" in text


def zipped():
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("list.txt", "anna\nbob\n")
    return archive.getvalue()


@pytest.mark.parametrize("raw, named", [
    (gzip.compress(b"anna\nbob\n"), "is compressed.*gunzip"),
    (zipped(), "is a zip archive or a spreadsheet"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99), "is a spreadsheet or a document"),
    (b"%PDF-1.7\n%\xe2\xe3\n", "is a PDF"), (b"%PDF-1.4\nplain\n", "is a PDF"),
    (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is a picture"),
    (b"\xff\xd8\xff\xe0\0\x10JFIF", "is a picture"), (b"GIF89a\x10\0", "is a picture"),
    (b"GIF87a\n", "is a picture")])
def test_what_is_no_text_is_known_by_its_first_bytes(refused, raw, named):
    """Elsewhere in a file these bytes are characters, or not UTF-8."""
    Path("w.txt").write_bytes(raw)
    assert re.search(f"w.txt {named}", refused(train, "--data", "w.txt"))
    Path("w.txt").write_bytes(b"anna\n" + raw)
    try:
        train.read_lines("w.txt")
    except train.UserError as error:
        assert "is not UTF-8" in str(error) or "NUL" in str(error)


@pytest.mark.parametrize("raw", [b"anna\nbo\0b\n", b"\0", "anna\nbob\n".encode("utf-16-le")])
def test_a_nul_byte_means_that_the_file_is_not_text(refused, raw):
    Path("w.txt").write_bytes(raw)
    text = refused(train, "--data", "w.txt")
    assert "w.txt is not a text file" in text and "NUL" in text


@pytest.mark.parametrize("raw", [b"", b"\n", b"\r\n \r\n\t\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n "])
def test_a_file_without_words_is_refused(refused, raw):
    Path("w.txt").write_bytes(raw)
    assert "w.txt has no word " in refused(train, "--data", "w.txt")


@pytest.mark.parametrize("path, reason", [
    ("nowhere.txt", "No such file or directory"), ("no/where.txt", "No such file or directory"),
    (".", "Is a directory"), ("plain/w.txt", "Not a directory"),
    ("n" * 300, "File name too long")])
def test_a_file_that_cannot_be_read_is_named_with_the_reason(refused, path, reason):
    Path("plain").write_text("anna\n")
    text = refused(train, "--data", path)
    assert path in text and reason in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(refused):
    Path("w.txt").write_text("anna\n")
    os.chmod("w.txt", 0)
    text = refused(train, "--data", "w.txt")
    assert "w.txt" in text and "Permission denied" in text


# ---- Lists of any size

@both_models
@pytest.mark.parametrize("words", [
    ["a"], ["anna"], ["anna"] * 5, ["anna"] * 30, ["anna", "bob"], NAMES[:3], NAMES[:8], NAMES[:9],
    NAMES[:10], ["ab" * 50]], ids=lambda words: f"{len(words)} words")
def test_tiny_lists_train_and_every_loss_is_finite(learn, steps_taken, kind, words):
    write_words(words)
    result = learn(kind, "--steps", 5, "--eval-every", 1)
    assert result.status == 0
    assert len(steps_taken) == 5 and np.isfinite(steps_taken).all()
    assert np.isfinite(losses_of(result.out)).all()
    history = np.array(train.load(f"out/{kind}.npz").history)
    assert history.shape == (5, 3) and np.isfinite(history).all()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 10, 11, 20, 99])
def test_split_is_80_10_10_in_a_fixed_order_and_no_part_is_empty(count):
    words = [f"w{i}" for i in range(count)]
    for part, expected in zip(train.split(words), split_of(words)):
        assert part == expected or not expected and sorted(part) == sorted(words)
    assert words == [f"w{i}" for i in range(count)]


@both_models
def test_a_line_far_longer_than_the_rest_is_skipped_and_counted(learn, kind):
    write_words([*NAMES, "q" * 1_000_000, "w" * 101, "y" * 100])
    result = learn(kind, "--steps", 2)
    assert result.status == 0
    assert re.search(r"skipped 2 words .*100 characters", result.err)
    stored = train.load(f"out/{kind}.npz")
    assert stored.config["longest"] == 100
    assert not set("qw") & set(stored.vocabulary) and "y" in stored.vocabulary
    assert stored.config["context"] == (3 if kind == "mlp" else 101)


def test_max_len_counts_characters_after_normalising(learn):
    write_words([*["ana", "bob"] * 4, unicodedata.normalize("NFD", "Zoë"), "🙂🙂🙂", "four"])
    result = learn("mlp", "--steps", 1, "--max-len", 3)
    assert "w.txt: 10 words, " in result.err and "longest 3," in result.err
    assert re.search(r"skipped 1 words .*3 characters", result.err)


def test_max_len_that_leaves_nothing_is_refused(refused):
    write_words(NAMES)
    text = refused(train, "--data", "w.txt", "--max-len", 2)
    assert "w.txt has no word of 1 to 2 characters" in text and "--max-len" in text


def test_a_context_of_the_gpt_skips_what_does_not_fit(learn):
    write_words([*NAMES, "wolfgang"])
    result = learn("gpt", "--steps", 1, "--context", 5)
    assert result.status == 0
    assert re.search(r"skipped 1 words .*4 characters", result.err)


def warned(err):
    return [line for line in err.splitlines() if "warning: each line" in line]


@pytest.mark.parametrize("row, what", [
    ("Anna,F,12", "a table"), ("Anna\tF", "a table"), ("a;b;c", "a table"), ('"anna",', "JSON"),
    ('{"name": "anna", "count": 3}', "JSON"), ('["anna", "bob"]', "JSON")])
def test_json_and_tables_draw_a_warning_and_are_learnt_as_they_are(learn, row, what):
    for ordinary, count in (2, 1), (3, 0):              # more than half of them are rows, or half
        write_words([row, "bob", row, "ned", row, "lea"][:3 + ordinary])
        result = learn("mlp", "--steps", 1)
        assert result.status == 0 and len(warned(result.err)) == count
        assert all(f"it looks like {what}" in line for line in warned(result.err))
        assert set(row) <= set(best_of("out/mlp.npz").vocabulary)


@pytest.mark.parametrize("text, what", [
    (json.dumps(NAMES[:5]), "JSON"), (json.dumps(NAMES, indent=2), "JSON"),
    (json.dumps(dict.fromkeys(NAMES, 1), indent=4), "JSON"),
    ("".join(json.dumps(dict(name=name, count=3)) + "\n" for name in NAMES), "JSON"),
    ("name,count\n" + "".join(f"{name},{i}\n" for i, name in enumerate(NAMES)), "a table"),
    ("\n".join([*NAMES, "2,4-d", "zxcvbnm,./"]), None),
    ("\n".join(["[a", '"b"', "{c", "d;e", *NAMES]), None)])
def test_whole_files_of_json_and_of_tables_are_recognised(learn, text, what):
    Path("w.txt").write_text(text)
    result = learn("mlp", "--steps", 1)
    assert result.status == 0 and len(warned(result.err)) == bool(what)
    assert not what or f"it looks like {what}" in warned(result.err)[0]
    assert set("".join(text.split("\n"))) <= {*best_of("out/mlp.npz").vocabulary, " "}


@pytest.mark.parametrize("text, what", [
    (json.dumps(NAMES), "JSON"), (json.dumps([dict(name=name) for name in NAMES]), "JSON"),
    (",".join(NAMES), "a table"), ("\t".join(NAMES * 2) + "\n", "a table"),
    ("a" * 101, None)])
def test_json_or_a_table_of_which_no_line_remains_is_named_in_the_refusal(refused, text, what):
    Path("w.txt").write_text(text)
    said = refused(train, "--data", "w.txt")
    assert "w.txt has no word of 1 to 100 characters" in said
    assert said.endswith(f"(it looks like {what})" if what else ": see --max-len")


def test_long_lines_count_for_what_a_file_looks_like(learn):
    """Of this table a few short lines remain."""
    write_words([*["x," * 60] * 9, "anna", "bob", "ida"])
    result = learn("mlp", "--steps", 1)
    assert "skipped 9 words" in result.err and len(warned(result.err)) == 1


@pytest.mark.parametrize("character, count", [
    ("\ufffd", 1), ("\x80", 1), ("\x92", 1), ("\x9f", 1), ("\x7f", 0), ("\xa0", 0), ("é", 0)])
def test_a_mark_of_a_wrong_encoding_draws_a_warning(learn, character, count):
    write_words([*NAMES, f"ren{character}"])
    result = learn("mlp", "--steps", 1)
    assert result.status == 0
    assert result.err.count("warning: some characters seem to come from a wrong encoding") == count
    assert character in best_of("out/mlp.npz").vocabulary


def test_a_mark_of_a_wrong_encoding_in_a_line_that_is_skipped_draws_none(learn):
    write_words([*NAMES, "\ufffd" * 101])
    result = learn("mlp", "--steps", 1)
    assert "skipped 1 words" in result.err and "wrong encoding" not in result.err


# ---- What is said at the start

def test_the_start_says_all_that_was_read(learn):
    words = NAMES + ["anna", "bob"] * 20 + ["x" * 200]
    Path("w.txt").write_bytes(("\n".join(words) + "\n\n\n").encode())
    used = words[:-1]
    known, dev, _ = split_of(used)
    share = sum(word in known for word in dev) / len(dev)
    assert 0 < share < 1
    result = learn("mlp", "--steps", 1)
    assert (f"w.txt: 64 words, 24 of them distinct, longest 4, {len(set(''.join(used)))} characters"
            in result.err)
    assert f"{share:.0%} of the dev words are in train too" in result.err
    assert "skipped 1 words" in result.err


def test_the_default_list_and_the_default_model(run):
    result = run(train, "--steps", 1, "--lr", 0)
    assert result.status == 0
    assert ("data/names.txt: 32178 words, 29619 of them distinct, longest 15, 26 characters"
            in result.err)
    assert result.out.startswith("4137 parameters, ")
    assert losses_of(result.out) == pytest.approx([np.log(27)] * 3, abs=0.05)


@pytest.mark.parametrize("hidden, low, high", [(64, 13, 17), (200, 24, 30)])
def test_naive_first_values_begin_far_from_uniform(run, hidden, low, high):
    write_words((ROOT / "data/names.txt").read_text().split()[::40])
    result = run(train, "--data", "w.txt", "--steps", 1, "--lr", 0, "--no-batchnorm",
                 "--init", "naive", "--hidden", hidden)
    assert low < losses_of(result.out)[0] < high


@both_models
@pytest.mark.parametrize("part", [1, 2], ids=["dev", "test"])
def test_characters_only_in_dev_or_test_never_raise(learn, run, kind, part):
    order = list(range(30))
    random.Random(42).shuffle(order)
    words = ["anna", "bob"] * 15
    words[order[24 if part == 1 else 27]] = "żółw"
    assert sum("ż" in word for word in split_of(words)[part]) == 1
    write_words(words)
    result = learn(kind, "--steps", 4, "--eval-every", 1)
    assert result.status == 0
    assert np.isfinite(losses_of(result.out)).all()
    sampled = run(sample, f"out/{kind}.npz", "--prefix", "żół", "-n", 2)
    assert sampled.status == 0
    assert all(name.startswith("żół") for name in sampled.out.splitlines())


# ---- Whatever the locale

@pytest.mark.parametrize("env, data, prefix", [
    (dict(LC_ALL="C"), "Zoë 李.txt", "É"), (dict(PYTHONIOENCODING="latin-1"), "Zoë 李.txt", "É"),
    (dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"), "w.txt", "")])
def test_the_locale_and_the_seed_of_hashes_change_nothing(run, monkeypatch, env, data, prefix):
    """Of the last environment only the output is UTF-8 all the same.

    The path of the data is stored: so the folders have the same name, one after the other.
    """
    training = [*SIZES["mlp"], "--data", data, "--steps", "3", "--out", f"{data[:3]}.npz"]
    sampling = [f"{data[:3]}.npz", "-n", "30", "--prefix", prefix, "--seed", "1"]
    results = []
    for way in "a process", "here":
        Path("folder").mkdir()
        monkeypatch.chdir("folder")
        write_words(["Zoë", "Élodie", "李小龙", "🙂"] * 6, data)
        texts = []
        for program, argv in (train, training), (sample, sampling):
            if way == "here":
                result = run(program, *argv)
                status, out, err = result.status, result.out, result.err
            else:
                argv = [part.encode() for part in argv]
                status, out, err = finish(process(program.__name__, *argv,
                                                  env={**env, "PYTHONHASHSEED": "1"}))
                out, err = out.decode(), err.decode()
            assert status == 0, err
            texts += [without_times(out), without_times(err)]
        results.append([*texts, Path(f"{data[:3]}.npz").read_bytes()])
        monkeypatch.chdir("..")
        os.rename("folder", way)
    assert results[0] == results[1]
    assert results[1][1].startswith(f"{Path('folder', data).absolute()}: 24 words")
    assert all(name.startswith(prefix) for name in results[1][2].splitlines())
    assert {"李", "É"} & set(results[1][2])


# ---- Fuzzing: success or one sentence, whatever the file holds

WORDLIKE = st.text(st.characters(codec="utf-8"), max_size=12)
FILES = st.one_of(
    st.binary(max_size=200),
    st.lists(WORDLIKE, max_size=12).map(lambda words: "\n".join(words).encode()),
    st.lists(st.sampled_from([
        b"a", b"b", b"\n", b"\r", b"\r\n", b"\0", b" ", b"\t", b",", b"\xff", b"\xef\xbb\xbf",
        b"\xe2\x80\xa8", b"e\xcc\x81", b"\xc3", b"\xf0\x9f\x99\x82", b"x" * 120, b"\xff\xfe",
        b"\x85", b"GIF8", b"PK\x03\x04", b"{", b'"']), max_size=24).map(b"".join))


def words_of(raw):
    """What a reader has to find in these bytes, or None."""
    try:
        text = unicodedata.normalize("NFC", raw.decode())
    except UnicodeDecodeError:
        return None
    if text.startswith(("GIF8", "PK\x03\x04")):
        return None
    words = [line.strip(" \t\ufeff") for line in re.split("[\r\n]", text)]
    return None if "\0" in text else [word for word in words if 0 < len(word) <= 100] or None


def train_on_any(raw):
    """Train on a file of these bytes, or get one sentence that names the file."""
    words, kind = words_of(raw), "gpt" if len(raw) % 2 else "mlp"
    Path("w.txt").write_bytes(raw)
    Path("x.npz").unlink(missing_ok=True)
    err = io.TextIOWrapper(io.BytesIO(), write_through=True)
    with contextlib.redirect_stderr(err):
        status = call(train.main, *SIZES[kind], "--data", "w.txt", "--steps", 1, "--batch", 2,
                      "--out", "x.npz")
    said = err.buffer.getvalue().decode()
    assert status == (0 if words else 2)
    assert Path("x.npz").exists() == bool(words)
    if words:
        assert train.load("x.npz").vocabulary == "\0" + "".join(sorted(set("".join(words))))
        assert f"w.txt: {len(words)} words, {len(set(words))} of them distinct, " in said
    else:
        assert "w.txt" in said and said.count("\n") == 1


@pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_bytes_train_or_are_refused(here, examples):
    settings(max_examples=examples, deadline=None, derandomize=True, database=None,
             phases=[Phase.generate], suppress_health_check=list(HealthCheck))(
                 given(raw=FILES)(train_on_any))()
