import functools
import json

import pytest

import bench


@pytest.mark.slow
def test_a_table_and_its_figures(tmp_path, capsys):
    bench.main(["--rounds", "1", "--only", "loop", "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())
    table, = figures["tables"]
    assert figures["machine"] and len(table["rows"]) == 3
    assert all(value > 0 for row in table["rows"] for value in row[1] + row[2] + row[3])
    assert capsys.readouterr().out.count("\n| ") == 5


def test_of_the_ways_to_add_only_the_line_that_looks_right_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "turn", functools.partial(bench.turn, seconds=1e-5))
    bench.main(["--rounds", "1", "--scatter", "--json", str(tmp_path / "figures.json")])
    adding, fetching, dense = json.loads((tmp_path / "figures.json").read_text())["tables"]
    assert {way: right for way, right, *_ in adding["rows"]} == {
        "the double loop in Python": "right",
        "np.add.at(dC, X, demb)": "right",
        "dC += onehot(X).T @ demb": "right",
        "embedding_backward(demb, X, dC)": "right",
        **({"dC.index_add_(0, X, demb), PyTorch": "right"} if bench.torch else {}),
        "dC[X] += demb": "wrong"}
    assert [right for _, right, *_ in fetching["rows"]] == ["right", "right"]
    assert len(dense["rows"]) == 5
    assert all(time[0] > 0 for table in (adding, fetching) for row in table["rows"]
               for time in row[2:])
