import re

import numpy as np
import pytest

import backward
import example
import model


def agreement(out):
    """How many numbers agree, and of how many, by the last line."""
    return map(int, re.search(r"\n(\d+) of (\d+) numbers agree with the document\n$", out).groups())


def test_every_number_agrees_and_the_key_ones_are_shown(capsys):
    assert example.main() == 0
    out = capsys.readouterr().out
    assert "WRONG" not in out and max(map(len, out.splitlines())) <= 100
    agree, of = agreement(out)
    assert 200 < agree == of < 300
    lines = [re.sub(" +", " ", line.strip()) for line in out.splitlines()]
    for begins in (
            "logits = x @ W 2 1 0", "probs 0.665 0.245 0.090", "loss -ln(0.245) = 1.4076",
            "dC[2] -0.090 -0.665", "dC[2,0] 0.665 * 1 + -0.755 * 1 = -0.090", "slope -0.090",
            "all parameters 1,883 + 2,254 = 4,137", "lookups of a row 96 / 27 = 3.6",
            "onehot.T @ demb 1 6 14", "dC[ix] = demb[k, j] 1 4 6", "np.add.at(dC, X, demb) 0 rows",
            "taken apart, float32 inf", "fused, float32 200.03"):
        assert any(line.startswith(begins) for line in lines), begins


def without_division(probs, Y):
    return probs - np.eye(probs.shape[1], dtype=probs.dtype)[Y]


def line_that_looks_right(demb, X, dC):
    dC[X] += demb.reshape(*X.shape, -1)


def first_copy_only(C, X):
    return C[X[:, [0, 0, 0]]].reshape(len(X), -1)


@pytest.mark.parametrize("module, name, wrong, at", [
    (backward, "cross_entropy_backward", without_division, "gradients by layers"),
    (backward, "embedding_backward", line_that_looks_right, "dC[2]"),
    (model, "embedding", first_copy_only, "emb")])
def test_a_wrong_function_is_told_where_it_shows(module, name, wrong, at, monkeypatch, capsys):
    monkeypatch.setattr(module, name, wrong)
    assert example.main() == 1
    out = capsys.readouterr().out
    first = next(line for line in out.splitlines() if line.endswith("WRONG"))
    assert first.startswith(f"  {at} ")
    agree, of = agreement(out)
    assert agree < of < 300
